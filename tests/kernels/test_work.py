"""Work partition for a GPU and backend selection, both computed on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, scenes

from hf_parallel.cache import Segment
from hf_parallel.kernels import (
    BACKEND_VARIABLE,
    AttentionPlan,
    backends,
    dense,
    select_backend,
    torch_attention,
)
from hf_parallel.kernels.work import ITEM_COST, ITEM_FIELDS, Partition, Work, make_work

QUICK = settings(max_examples=30)


# Work items


@st.composite
def partitions(draw: st.DrawFn) -> list[Partition]:
    sizes = draw(st.sampled_from([[1], [3], [16], [2, 5], [4, 64]]))
    return [Partition(n, draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 2, 7, 100]))) for n in sizes]


def keys_by_plan(plan: AttentionPlan, *limits: int | None) -> Counter[tuple[int, int, int]]:
    """Visible keys of each pair: (pair, slot of the extent, index in it)."""
    plan = plan.windowed(*limits)
    return Counter(
        (pair, int(plan.block_origin[block]), int(plan.block_first[block]) + key)
        for block in range(plan.num_blocks)
        for pair in range(plan.block_pairs[block], plan.block_pairs[block + 1])
        for key in range(plan.pair_lo[pair], plan.pair_hi[pair])
    )


def keys_by_items(work: Work, plan: AttentionPlan, *limits: int | None) -> Counter[tuple[int, int, int]]:
    """The same, as the programs of the kernel compute them."""
    plan, seen = plan.windowed(*limits), Counter[tuple[int, int, int]]()
    for item in work.items[[i for offsets in work.item_offsets for i in range(offsets[0], offsets[-1])]]:
        origin, _, block_first, start, stop, first_pair, num_pairs, *_ = item.tolist()
        for pair in work.pairs[first_pair : first_pair + num_pairs].tolist():
            lo, hi = max(start, int(plan.pair_lo[pair])), min(stop, int(plan.pair_hi[pair]))
            seen.update((pair, origin, block_first + key) for key in range(lo, hi))
    return seen


@QUICK
@given(scene=scenes(), partitions=partitions())
def test_items_cover_every_visible_key_exactly_once(scene: Scene, partitions: list[Partition]) -> None:
    plan, limits = scene.forward.plan, (scene.features.window, scene.features.chunk)
    work = make_work(plan, partitions, *limits)
    assert keys_by_items(work, plan, *limits) == keys_by_plan(plan, *limits)
    assert (work.items[:, ITEM_FIELDS.index("start")] < work.items[:, ITEM_FIELDS.index("stop")]).all()


@QUICK
@given(scene=scenes(), partitions=partitions())
def test_every_item_has_its_own_slots_which_its_queries_merge(scene: Scene, partitions: list[Partition]) -> None:
    plan = scene.forward.plan
    work = make_work(plan, partitions, scene.features.window)
    assert sorted(work.merge_slot.tolist()) == list(range(len(work.merge_slot)))
    query_of_slot = np.repeat(np.arange(plan.num_queries), np.diff(work.merge_start))[np.argsort(work.merge_slot)]
    for item in work.items:
        *_, first_pair, num_pairs, first_slot, rotated = item.tolist()
        pairs = work.pairs[first_pair : first_pair + num_pairs]
        assert query_of_slot[first_slot : first_slot + num_pairs].tolist() == plan.pair_query[pairs].tolist()
        step = plan.increments
        assert rotated == (plan.pair_delta[pairs].any() or (step is not None and step.delta[pairs].any()))


def rows(lengths: Sequence[int], common: int) -> Scene:
    """Decode step of rows over a common block, each with its own block of one of these lengths."""
    scene = Scene(Features())
    root, *own = scene.cache.pool.new_block(common), *(scene.cache.pool.new_block(n + 1, base=common) for n in lengths)
    scene.step([Segment([root], common)])
    scene.step([Segment([root, block], n) for block, n in zip(own, lengths, strict=True)])
    scene.step([Segment([root, block], 1) for block in own])
    return scene


@pytest.mark.parametrize("lengths", [[5] * 12, [400, 3, 3, 3], [1]], ids=str)
@pytest.mark.parametrize("max_programs", [1, 3, 8])
def test_programs_have_equal_numbers_of_keys_for_any_blocks(lengths: list[int], max_programs: int) -> None:
    """They differ by at most one step over keys and the start of one tile."""
    partition = Partition(16, 16, max_programs)
    work = make_work(rows(lengths, common=1000).forward.plan, [partition])
    (offsets,) = work.item_offsets
    start, stop = (work.items[:, ITEM_FIELDS.index(name)] for name in ("start", "stop"))
    items = [slice(*offsets[i : i + 2]) for i in range(max_programs)]
    steps = [int((-(-(stop - start) // partition.block_n))[part].sum()) for part in items]
    tiles = [len(np.unique(work.items[part, :3], axis=0)) for part in items]
    costs = [step + tile * ITEM_COST for step, tile in zip(steps, tiles, strict=True)]
    assert min(steps) > 0
    assert max(costs) - min(costs) <= 1 + ITEM_COST


# Backend selection


def test_selecting_triton_where_it_cannot_run_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="HF_PARALLEL_BACKEND=triton cannot be used on cpu: .*CUDA"):
        select_backend("cpu")


def test_flash_computes_prefills_alone_and_raises_where_it_cannot_run(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "flash")
    with pytest.raises(ValueError, match="HF_PARALLEL_BACKEND=flash cannot be used on cpu: .*CUDA"):
        select_backend("cpu")
    gpu((9, 0))
    monkeypatch.setenv(BACKEND_VARIABLE, "flash")
    with pytest.raises(ValueError, match="cannot be used on cuda:5: .*pip install flash-attn"):
        select_backend("cuda:5")
    for name in ("flash_attn", "flash_attn_interface"):  # versions 2 and 3
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        module.flash_attn_func = lambda name=name: name
        dense.flash_package.cache_clear()
        assert dense.flash_package()() == name
    dense.flash_package.cache_clear()
    assert select_backend("cuda:5") == "triton"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretends that the machine has a GPU of a compute capability, and Triton."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")

    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    return pretend


@pytest.mark.parametrize(("index", "capability"), [*enumerate([(7, 5), (8, 0), (9, 0)])])
def test_triton_serves_gpus_from_compute_capability_8(gpu: Callable[..., None], index: int, capability: Any) -> None:
    gpu(capability)
    available = capability >= (8, 0)
    assert select_backend(f"cuda:{100 + index}") == ("triton" if available else "torch")
    found = {backend.name: backend for backend in backends()}
    assert found["triton"].available == available
    assert ("some GPU has 7.5" in found["triton"].reason) == (not available)


# FlashAttention, with replacements for its kernels


def flash_without_argument(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Interface of the first builds of FlashAttention 3: `[N, M, heads, head_dim]`, log-sum-exp `[N, heads, M]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = dense.matmul_attention(q, k, v, None, causal, softmax_scale, None)
    return out.transpose(1, 2), lse


def flash_with_argument(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Interface of FlashAttention 2 and of later builds of 3."""
    out, lse = flash_without_argument(q, k, v, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out


def flash_of_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
) -> tuple[torch.Tensor | None, ...]:
    """Interface of PyTorch's operator: the output, its log-sum-exp, and seven more."""
    assert (dropout, debug) == (0.0, False)
    return (*dense.matmul_attention(q, k, v, None, causal, scale, None), *[None] * 7)


@pytest.mark.parametrize("installed", [flash_without_argument, flash_with_argument, None])
def test_prefill_is_the_same_with_and_without_flash_attn(monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    """In float64, which the compiled CPU kernel does not support."""
    calls = []

    def supports(q: torch.Tensor) -> bool:
        calls.append(q.shape)
        return True

    monkeypatch.setattr(dense, "flash_supports", supports)
    monkeypatch.setitem(sys.modules, "flash_attn", module := ModuleType("flash_attn"))
    module.flash_attn_func = installed
    package = dense.flash_package.__wrapped__ if installed else lambda: None
    monkeypatch.setattr(dense, "flash_package", package)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash_of_pytorch)
    monkeypatch.setattr(dense, "FLASH_CPU_DTYPES", ())  # as on a GPU
    scene = Scene(Features(kv_heads=2, groups=2))
    root, own = scene.cache.pool.new_block(), scene.cache.pool.new_block()
    scene.step([Segment([root], 40)])
    scene.step([Segment([root, own], 50)])
    torch.testing.assert_close(scene.attend(torch_attention.TorchBackend().attend, torch.float64), scene.truth())
    assert [shape[2] for shape in calls] == [50, 50]  # the keys before the run, and its own


@pytest.mark.parametrize("window", [None, 37])
def test_rows_of_masks_are_aligned_for_a_gpu(window: int | None) -> None:
    """Prefills under a window and rows of unequal lengths have any number of keys; loads are 16 bytes wide."""
    scene = Scene(Features(groups=2, window=window))
    blocks = scene.cache.pool.new_blocks(3, 75)
    scene.step([Segment([block], count) for block, count in zip(blocks, (75, 3, 12), strict=True)])
    torch.testing.assert_close(scene.attend(torch_attention.TorchBackend().attend, torch.float64), scene.truth())
    prepared = [getattr(value, "dense", []) for value in scene.forward.plan.windowed(window).derived.values()]
    masks = [call.mask for calls in prepared for call in calls if call.mask is not None]
    assert masks
    assert all(mask.shape[-1] == 1 or stride % 16 == 0 for mask in masks for stride in mask.stride()[:-1])

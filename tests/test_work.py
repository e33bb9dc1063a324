"""What is decided on the host before a GPU works: equal shares of keys, and which backend serves which pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, scenes

from hf_parallel.cache import Segment
from hf_parallel.kernels import BACKEND_VARIABLE, AttentionPlan, backends, dispatch, select_backend, torch_attention
from hf_parallel.kernels.work import ITEM_FIELDS, SHARE_COST, Cut, Work, longest_run, make_work

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


# Shares


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut]:
    heights = draw(st.sampled_from([[1], [3], [16], [2, 5], [4, 64]]))
    return [Cut(height, draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 2, 7, 100]))) for height in heights]


def keys_by_plan(plan: AttentionPlan, window: int | None) -> Counter[tuple[int, int, int]]:
    """What each pair sees: (pair, extent's slot, row of the extent)."""
    plan = plan.windowed(window)
    return Counter(
        (pair, int(plan.block_origin[block]), int(plan.block_first[block]) + key)
        for block in range(plan.num_blocks)
        for pair in range(plan.block_pairs[block], plan.block_pairs[block + 1])
        for key in range(plan.pair_lo[pair], plan.pair_hi[pair])
    )


def keys_by_shares(work: Work, plan: AttentionPlan, window: int | None) -> Counter[tuple[int, int, int]]:
    """The same, as a kernel goes through the shares of all lines."""
    plan, seen = plan.windowed(window), Counter[tuple[int, int, int]]()
    for item in work.items[[i for lines in work.lines for i in range(lines[0], lines[-1])]]:
        origin, _, block_first, start, stop, first_pair, num_pairs, *_ = item.tolist()
        for pair in work.pairs[first_pair : first_pair + num_pairs].tolist():
            lo, hi = max(start, int(plan.pair_lo[pair])), min(stop, int(plan.pair_hi[pair]))
            seen.update((pair, origin, block_first + key) for key in range(lo, hi))
    return seen


@QUICK
@given(scene=scenes(), cuts=cuts())
def test_shares_cover_every_visible_key_exactly_once(scene: Scene, cuts: list[Cut]) -> None:
    plan, window = scene.forward.plan, scene.features.window
    work = make_work(plan, cuts, window)
    assert keys_by_shares(work, plan, window) == keys_by_plan(plan, window)
    assert (work.items[:, ITEM_FIELDS.index("start")] < work.items[:, ITEM_FIELDS.index("stop")]).all()


@QUICK
@given(scene=scenes(), cuts=cuts(), horizon=st.integers(1, 9))
def test_shares_cover_the_steps_that_follow_too(scene: Scene, cuts: list[Cut], horizon: int) -> None:
    segments = [Segment(segment.view, 1) for segment in scene.forward.segments if segment.write]
    if not segments:
        return
    scene.cache.reserve([(segment.view[-1], segment.view[-1].length + horizon + 1) for segment in segments])
    scene.step(segments)
    window = scene.features.window
    work = make_work(scene.forward.plan, cuts, window, horizon)
    for _ in range(horizon + 1):
        plan = scene.forward.plan
        assert keys_by_shares(work, plan, window) == keys_by_plan(plan, window)
        scene.forward = replace(scene.forward, plan=plan.next_step())


@QUICK
@given(scene=scenes(), cuts=cuts())
def test_every_share_has_slots_of_its_own_which_its_queries_merge(scene: Scene, cuts: list[Cut]) -> None:
    plan = scene.forward.plan
    work = make_work(plan, cuts, scene.features.window)
    assert sorted(work.merge_slot.tolist()) == list(range(work.num_slots))
    query_of_slot = np.repeat(np.arange(plan.num_queries), np.diff(work.merge_start))[np.argsort(work.merge_slot)]
    for item in work.items:
        *_, first_pair, num_pairs, first_slot, turned = item.tolist()
        pairs = work.pairs[first_pair : first_pair + num_pairs]
        assert query_of_slot[first_slot : first_slot + num_pairs].tolist() == plan.pair_query[pairs].tolist()
        growth = plan.growth
        assert turned == (plan.pair_delta[pairs].any() or (growth is not None and growth.delta[pairs].any()))


def test_shares_that_will_turn_in_a_step_that_follows_are_marked() -> None:
    plan = rows([2, 2], common=5).forward.plan
    assert plan.growth is not None
    turned = ITEM_FIELDS.index("turned")
    assert not make_work(plan, [Cut(16, 16, 1)]).items[:, turned].any()
    growing = replace(plan, growth=replace(plan.growth, delta=np.ones_like(plan.pair_delta)), _memo={})
    assert make_work(growing, [Cut(16, 16, 1)]).items[:, turned].all()


def rows(lengths: Sequence[int], common: int) -> Scene:
    """Rows over a common block, with blocks of their own of these lengths, that bring one more token each."""
    scene = Scene(Features())
    root, *own = scene.cache.new_block(common), *(scene.cache.new_block(n + 1, base=common) for n in lengths)
    scene.step([Segment([root], common)])
    scene.step([Segment([root, block], n) for block, n in zip(own, lengths, strict=True)])
    scene.step([Segment([root, block], 1) for block in own])
    return scene


@pytest.mark.parametrize("lengths", [[5] * 12, [400, 3, 3, 3], [1]], ids=str)
@pytest.mark.parametrize("max_lines", [1, 3, 8])
def test_lines_have_equal_numbers_of_keys_whatever_the_blocks(lengths: list[int], max_lines: int) -> None:
    """One step over keys, and one beginning of a tile, are the most by which they differ."""
    cut = Cut(16, 16, max_lines)
    work = make_work(rows(lengths, common=1000).forward.plan, [cut])
    (lines,) = work.lines
    start, stop = (work.items[:, ITEM_FIELDS.index(name)] for name in ("start", "stop"))
    steps = [int((-(-(stop - start) // cut.block_n))[lines[i] : lines[i + 1]].sum()) for i in range(max_lines)]
    tiles = [len(np.unique(work.items[lines[i] : lines[i + 1], :3], axis=0)) for i in range(max_lines)]
    costs = [step + tile * SHARE_COST for step, tile in zip(steps, tiles, strict=True)]
    assert min(steps) > 0
    assert max(costs) - min(costs) <= 1 + SHARE_COST


@QUICK
@given(scene=scenes(), cuts=cuts())
def test_bounds_of_shares_and_slots_hold_for_blocks_of_any_length(scene: Scene, cuts: list[Cut]) -> None:
    """What is cut for rows that see this much is cut into as many parts, at most, when they see more."""
    work = make_work(scene.forward.plan, cuts)
    assert len(work.items) <= work.most_items
    assert work.num_slots <= work.most_slots
    plan = scene.forward.plan
    longer = make_work(replace(plan, pair_hi=plan.pair_hi + 300, _memo={}), cuts)
    assert len(longer.items) <= work.most_items
    assert longer.num_slots <= work.most_slots


def test_little_work_is_left_to_few_programs() -> None:
    """Eight steps over keys and the beginnings of two tiles make five lines of two."""
    (lines,) = make_work(rows([2], common=100).forward.plan, [Cut(16, 16, 50)]).lines
    assert np.count_nonzero(np.diff(lines)) == 5
    assert len(lines) == 51


def test_blocks_that_many_rows_see_go_to_the_wide_tiles() -> None:
    plan = rows([3] * 20, common=100).forward.plan
    narrow, wide = make_work(plan, [Cut(4, 16, 1), Cut(16, 16, 1)]).lines
    assert narrow.tolist() == [0, 20]  # the rows' own blocks
    assert wide.tolist() == [20, 22]  # 20 rows over the common one


def test_a_query_that_sees_no_key_is_refused() -> None:
    plan = rows([1, 1], common=4).forward.plan
    hi = np.where(plan.pair_query == 1, 0, plan.pair_hi)
    with pytest.raises(ValueError, match="query 1 .* no key"):
        make_work(replace(plan, pair_hi=hi, _memo={}), [Cut(16, 16, 1)])


# Which backend serves


def test_the_longest_run_is_that_of_the_row_with_most_new_tokens() -> None:
    scene = Scene(Features())
    root, first, second = (scene.cache.new_block() for _ in range(3))
    scene.step([Segment([root], 90)])
    assert longest_run(scene.forward.plan) == 90
    scene.step([Segment([root, first], 7), Segment([root, second], 12)])
    assert longest_run(scene.forward.plan) == 12
    scene.step([Segment([root, first], 1), Segment([root, second], 1)])
    assert longest_run(scene.forward.plan) == 1


def test_triton_is_refused_where_it_cannot_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="HF_PARALLEL_BACKEND=triton cannot be used on cpu: .*CUDA"):
        select_backend("cpu")


def test_backends_say_what_they_are_for_or_why_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    known = {backend.name: backend for backend in backends()}
    assert list(known) == ["triton", "flash", "torch", "reference"]
    assert known["torch"].available
    assert all(backend.reason for backend in known.values())
    if not torch.cuda.is_available():
        assert str(known["triton"]).startswith("triton: not available, Triton needs a CUDA device")
        assert not known["flash"].available


@pytest.mark.parametrize("found", [(7, 5), (8, 0), (9, 0)])
def test_triton_serves_gpus_from_compute_capability_8(monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda name: name)
    dispatch._select.cache_clear()
    assert select_backend("cuda:0") == ("triton" if found >= (8, 0) else "torch")
    assert ("some GPU has 7.5" in dispatch._why_not_flash(torch.device("cuda:0"))) == (found < (8, 0))
    dispatch._select.cache_clear()


def test_a_missing_triton_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch.importlib, "import_module", missing)
    assert "no triton" in dispatch._why_not_triton(torch.device("cuda:0"), interpreted=False)


@pytest.mark.parametrize(("length", "expected"), [(dispatch.SCHEDULED_RUN, False), (dispatch.SCHEDULED_RUN + 1, True)])
def test_long_prefills_on_a_gpu_go_to_the_schedule(
    length: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    scene = Scene(Features())
    scene.step([Segment([scene.cache.new_block()], length)])
    layer, plan = scene.cache.storage(0), scene.forward.plan
    assert not dispatch._is_prefill(layer.keys, layer.values, plan, None)  # on a CPU there is no choice
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert dispatch._is_prefill(layer.keys, layer.values, plan, None) == expected
    assert not dispatch._is_prefill(layer.keys, layer.values, plan, 2.0)
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    assert not dispatch._is_prefill(layer.keys, layer.values, plan, None)


# FlashAttention, where its kernels are stood in for


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool, return_attn_probs: bool
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """What the flash-attn package documents: `[N, M, heads, head_dim]`, and the log-sum-exp `[N, heads, M]`."""
    assert return_attn_probs
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch_attention._spelled_out(q, k, v, None, causal, softmax_scale, None)
    return out.transpose(1, 2), lse, None


def flash_of_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
) -> tuple[torch.Tensor | None, ...]:
    """What PyTorch's operator gives: the result and its log-sum-exp, and seven more."""
    assert (dropout, debug) == (0.0, False)
    return (*torch_attention._spelled_out(q, k, v, None, causal, scale, None), *[None] * 7)


@pytest.mark.parametrize("installed", [True, False])
def test_prefill_is_the_same_with_and_without_flash_attn(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    calls = []

    def serves(q: torch.Tensor) -> bool:
        calls.append(q.shape)
        return True

    monkeypatch.setattr(torch_attention.native, "serves", lambda *_: False)
    monkeypatch.setattr(torch_attention, "_flash_serves", serves)
    monkeypatch.setattr(torch_attention, "flash_package", lambda: flash_attn_func if installed else None)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash_of_pytorch)
    # PyTorch's primitive of a CPU is asked first; without its dtypes the order is that of a GPU.
    monkeypatch.setattr(torch_attention, "_FLASH_CPU_DTYPES", ())
    scene = Scene(Features(kv_heads=2, groups=2))
    root, own = scene.cache.new_block(), scene.cache.new_block()
    scene.step([Segment([root], 40)])
    scene.step([Segment([root, own], 50)])
    torch.testing.assert_close(scene.attend(torch_attention.block_attention, torch.float64), scene.truth())
    assert [shape[2] for shape in calls] == [50, 50]  # the keys before the run, and its own


@pytest.mark.parametrize("window", [None, 37])
def test_rows_of_masks_begin_where_a_gpus_attention_can_load_them(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Its vectors of 16 bytes: prefills under a window and rows of unequal lengths have any number of keys."""
    masks = []
    primitive = torch_attention._primitive

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *rest: Any) -> Any:
        masks.append(mask)
        return primitive(q, k, v, mask, *rest)

    monkeypatch.setattr(torch_attention.native, "serves", lambda *_: False)
    monkeypatch.setattr(torch_attention, "_primitive", noted)
    scene = Scene(Features(groups=2, window=window))
    blocks = scene.cache.new_blocks(3, 75)
    scene.step([Segment([block], count) for block, count in zip(blocks, (75, 3, 12), strict=True)])
    torch.testing.assert_close(scene.attend(torch_attention.block_attention, torch.float64), scene.truth())
    masked = [mask for mask in masks if mask is not None]
    assert masked
    assert all(mask.shape[-1] == 1 or stride % 16 == 0 for mask in masked for stride in mask.stride()[:-1])


def test_flash_attention_is_left_alone_on_a_cpu() -> None:
    assert not torch_attention._flash_serves(torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16))

"""Attention by parts, products and sums by Triton: a row has the same bits alone and with any others.

In Triton's interpreter: tests are collected if `TRITON_INTERPRET=1` was set before Python started;
`test_triton_compile.py` runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_oracle import exact_attention
from hypothesis import Phase, assume, given, settings
from random_trees import RandomTree
from scenes import Features, Scene, scenes
from test_attention_bits import Case, Workers, num_different
from test_triton import workers

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import AttentionParams, AttentionPlan, LayerStorage

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    import interpreter

    from hf_parallel.kernels.triton import attention
    from hf_parallel.kernels.triton.invariant import parts, products
    from hf_parallel.kernels.triton.launch import Tiling
    from hf_parallel.models.gpu.invariant_ops import InvariantOps

    PART_TILING = parts.part_tiling

PART = 16
LENGTHS = (1, 3, 15, 16, 17)
SEEDS = (9, 17)  # small trees with forks
CASES: dict[str, dict[str, Any]] = {
    "two heads": {},
    "half precision, heads of 24": {"dtype": torch.float16, "dim": 24, "softcap": 3.0},
    "window, sinks": {"window": 20, "has_sinks": True},
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small parts and tiles, and products whose rows do not depend on their places, as on a GPU."""
    monkeypatch.setattr(parts, "PART", PART)
    monkeypatch.setattr(attention, "MAX_RUN", 4)  # from which FlashAttention would compute other passes
    monkeypatch.setattr(parts, "part_tiling", lambda *_: Tiling(16, 16, 4, 2, 1))
    torch.use_deterministic_algorithms(True)  # fills memory with NaN
    with interpreter.products_row_by_row():
        yield
    torch.use_deterministic_algorithms(False)


def by_parts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    params: AttentionParams,
    quantized: Any = None,
) -> torch.Tensor:
    invariant = replace(params, batch_invariant=True)
    return attention.TritonBackend(is_chosen=False).attend(query, keys, values, plan, invariant, quantized)


# Attention


@settings(max_examples=8, phases=[Phase.generate])
@given(scene=scenes())
def test_attention_equals_the_oracle(scene: Scene) -> None:
    """With rotations, windows, chunks, sinks, soft-capping and latents, and NaN in unused memory."""
    assume(scene.features.cache_dtype is None)
    expected = scene.attend(exact_attention, torch.float32)
    torch.testing.assert_close(scene.attend(by_parts, torch.float32), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_long_rows_equal_the_oracle_with_parts_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(parts, "PART", 256)
    monkeypatch.setattr(parts, "part_tiling", PART_TILING)
    scene = workers(Features(kv_heads=2, groups=3, head_dim=80, value_dim=80), 2, 1, common=700)
    expected = scene.attend(exact_attention, dtype)
    torch.testing.assert_close(scene.attend(by_parts, dtype), expected, rtol=1e-3, atol=1e-3)


class PartsCase(Case):
    """A random tree of short blocks, whose attention is computed by parts."""

    def __init__(self, seed: int, **given: Any) -> None:
        sizes = {"heads": 2, "kv_heads": 1, "dim": 8, "tree": RandomTree(seed, 20, LENGTHS)}
        super().__init__(seed, **{**sizes, **given})

    def compute(self, query: torch.Tensor, layer: LayerStorage, plan: AttentionPlan) -> torch.Tensor:
        return by_parts(query, layer.keys, layer.values, plan, self.params)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_has_the_same_bits_in_any_schedule(seed: int) -> None:
    for name, case in CASES.items():
        assert num_different(PartsCase(seed, **case)) == 0, name


def test_this_would_find_parts_at_the_boundaries_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_parallel.kernels import tiles

    monkeypatch.setattr(tiles, "_first_of_runs", lambda plan, order: torch.arange(len(plan.pair_query)).numpy())
    assert num_different(PartsCase(17)) > 5


class WorkersByParts(Workers):
    """Workers whose attention is computed by parts."""

    def compute(self, query: torch.Tensor, layer: LayerStorage, plan: AttentionPlan) -> torch.Tensor:
        return by_parts(query, layer.keys, layer.values, plan, self.params)


def test_a_worker_has_the_same_bits_with_and_without_the_others() -> None:
    all_workers = WorkersByParts(2)
    together = all_workers.attend([0, 1, 2])
    for some in ([0], [1], [2, 0]):
        assert torch.equal(all_workers.attend(some), together[some]), f"workers {some}"


def test_following_decode_steps_have_the_same_bits_as_a_prefill() -> None:
    """Two rows over one prefix; what a plan derives is carried over from step to step."""
    case = PartsCase(0, tree=RandomTree(0))
    case.tree.parents, case.tree.lengths = [-1, 0, 0], [20, 18, 18]
    case.queries = [torch.randn(length, 2, 8) for length in case.tree.lengths]
    case.stored = [torch.randn(2, length, 8) for length in case.tree.lengths]
    cache = BlockCache()
    trunk = cache.pool.new_block(20)
    case.attend(cache, [Segment([trunk], 20)], [(0, 0, 20)])
    leaves = cache.pool.new_blocks(2, 18, base=20)
    segments = [Segment([trunk, leaf], 1) for leaf in leaves]
    steps = [case.attend(cache, segments, [(1, at, at + 1), (2, at, at + 1)]) for at in range(18)]
    for row in (0, 1):
        assert torch.equal(torch.stack(steps)[:, row], case.alone(1 + row)[20:])


def test_a_pass_in_ranges_of_queries_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where partial results do not fit into memory; queries after the plan's are zero."""
    scene = workers(Features(groups=2, sinks=True, window=50), 3, 4, common=70)
    expected = scene.attend(by_parts, torch.float32)
    monkeypatch.setattr(parts, "MAX_PARTIAL_BYTES", 1)
    assert torch.equal(scene.attend(lambda q, *args: by_parts(q, *args), torch.float32), expected)
    padded = scene.attend(lambda q, *args: by_parts(torch.cat((q, q)), *args), torch.float32)
    assert torch.equal(padded[: len(expected)], expected)
    assert not padded[len(expected) :].any()


def test_keys_in_8_bits_raise() -> None:
    scene = Scene(Features(cache_dtype="int8"))
    scene.step([Segment([scene.cache.pool.new_block()], 3)])
    with pytest.raises(ValueError, match="cache_dtype must be None"):
        scene.attend(by_parts, torch.float32)


# Products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "columns"), [(1, 5, 3), (37, 70, 65), (70, 64, 128)])
def test_rows_of_a_product_have_the_same_bits_alone(rows: int, inputs: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, inputs).to(dtype)
    weight = torch.randn(columns, inputs).to(dtype).T
    bias = torch.randn(columns).to(dtype)
    out = products.product(x, weight, bias)
    torch.testing.assert_close(out, (x.float() @ weight.float() + bias).to(dtype), rtol=1e-3, atol=1e-4)
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(products.product(x[row : row + 1], weight, bias)[0], out[row])
    shifted = products.product(torch.cat((x[rows // 2 :], x[: rows // 2])), weight.contiguous(), bias)
    assert torch.equal(shifted, torch.cat((out[rows // 2 :], out[: rows // 2])))
    column = columns // 2
    assert torch.equal(products.product(x, weight[:, column:], bias[column:]), out[:, column:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_of_groups_equal_those_of_each_row(dtype: torch.dtype) -> None:
    x = torch.randn(90, 40).to(dtype)
    weights = torch.randn(5, 24, 40).to(dtype).mT
    ends = torch.tensor([0, 70, 70, 71, 88])
    out = products.grouped_product(x, weights, ends)
    assert not out[88:].any()
    first = 0
    for end, weight in zip(ends.tolist(), weights, strict=True):
        assert torch.equal(out[first:end], products.product(x[first:end], weight))
        first = end


# Operations of PyTorch

X, W, V = torch.randn(2, 7, 37), torch.randn(19, 37), torch.randn(37)
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "linear": lambda x, dtype: F.linear(x, W.to(dtype), W[:, 0].to(dtype)),
    "matmul": lambda x, dtype: x @ W.to(dtype).T,
    "vector": lambda x, dtype: x @ V.to(dtype),
    "einsum": lambda x, dtype: torch.einsum("bth,eh->bet", x, W.to(dtype)),
    "bmm": lambda x, dtype: torch.bmm(x, x.mT),
    "baddbmm": lambda x, dtype: torch.baddbmm(x[:, :, :7], x, x.mT, beta=0.5, alpha=2),
    "sum": lambda x, dtype: x.sum(-1),
    "sum of a middle dimension": lambda x, dtype: x.sum(1, keepdim=True),
    "mean": lambda x, dtype: x.float().pow(2).mean(-1, keepdim=True),
    "mean of two dimensions": lambda x, dtype: x.mean((1, 2)),
    "variance": lambda x, dtype: torch.var_mean(x, -1)[0] + x.std(-1),
    "norm": lambda x, dtype: x.norm(dim=-1),
    "layer_norm": lambda x, dtype: F.layer_norm(x, (37,), V.to(dtype), V.to(dtype)),
    "rms_norm": lambda x, dtype: F.rms_norm(x, (37,), V.to(dtype)),
    "softmax": lambda x, dtype: x.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda x, dtype: x.log_softmax(1),
    "index_add": lambda x, dtype: torch.zeros_like(x).index_add_(1, torch.tensor([0, 3, 0, 2, 2, 6, 3]), x),
}


@pytest.mark.parametrize(
    ("dtype", "context"), [(torch.float32, torch.no_grad), (torch.float16, torch.inference_mode)], ids=str
)
def test_operations_equal_pytorchs_and_those_of_each_row(dtype: torch.dtype, context: Any) -> None:
    x = X.to(dtype)
    for name, operation in OPERATIONS.items():
        with context():
            expected = operation(x, dtype)
            with Launches() as launches, InvariantOps():
                out = operation(x, dtype)
                rows = torch.cat([operation(row[None], dtype) for row in x])
        assert launches.count or name == "index_add", name
        assert out.dtype == expected.dtype, name
        torch.testing.assert_close(out, expected, rtol=3e-3, atol=3e-3 if dtype == torch.float16 else 1e-5)
        assert torch.equal(rows, out), name


def test_other_dtypes_are_pytorchs() -> None:
    x = X.double()
    counts = torch.arange(12).view(3, 4)
    with Launches() as launches, InvariantOps():
        assert torch.equal(x @ W.double().T, torch.matmul(x, W.double().T))
        assert torch.equal(counts.sum(-1), torch.tensor([6, 22, 38]))
    assert not launches.count


class Launches:
    """Counts launches of kernels in its context."""

    def __enter__(self) -> Launches:
        from triton.runtime.interpreter import GridExecutor

        self.count = 0
        self._executor: Any = GridExecutor
        self._plain = GridExecutor.__call__

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._plain(executor, *args, **kwargs)

        self._executor.__call__ = call
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.__call__ = self._plain

"""Every backend equals a plain softmax over each row's view, for any layout of blocks.

Layouts result from random cache operations (`scenes.py`): prefix trees, workers that see each other, anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from block_oracle import exact_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, rotate_to, scenes

from hf_parallel.cache import Segment
from hf_parallel.kernels import (
    BACKEND_VARIABLE,
    AttentionParams,
    AttentionPlan,
    RotarySpec,
    block_attention,
    native,
    rotate,
    rotate_by,
    select_backend,
)
from hf_parallel.kernels import torch_attention as torch_backend
from hf_parallel.kernels.schedule import Schedule, make_schedule

EXACT = settings(max_examples=30)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}


# Attention


@EXACT
@given(scenes())
def test_oracle_equals_softmax_over_the_view_at_true_positions(scene: Scene) -> None:
    torch.testing.assert_close(scene.attend(exact_attention, torch.float64), scene.truth(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@EXACT
@given(scene=scenes())
def test_torch_backend_equals_oracle(dtype: torch.dtype, scene: Scene) -> None:
    expected = scene.attend(exact_attention, dtype)
    actual = scene.attend(torch_backend.TorchBackend().attend, dtype)
    assert actual.dtype == dtype
    # Both round the output to `dtype`, so a difference of one unit in the last place is allowed.
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=TOLERANCE[dtype])


@EXACT
@given(scene=scenes())
def test_torch_backend_equals_oracle_without_its_compiled_kernel(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    monkeypatch.setattr(native, "supports", lambda *_: False)
    expected = scene.attend(exact_attention, torch.float32)
    actual = scene.attend(torch_backend.TorchBackend().attend, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_a_query_without_visible_keys_raises() -> None:
    scene = _row(Features(), 4)
    plan = replace(scene.forward.plan, pair_hi=np.array([1, 2, 0, 4]))
    with pytest.raises(ValueError, match="query 2 .* no key"):
        make_schedule(plan)


# The schedule


def _row(features: Features, length: int) -> Scene:
    scene = Scene(features)
    scene.step([Segment([scene.cache.pool.new_block()], length)])
    return scene


def test_a_long_prefill_builds_no_mask() -> None:
    scene = _row(Features(), 300)
    again = Segment(scene.forward.segments[0].view, 200)
    for plan in (scene.forward.plan, scene.cache.prepare([again]).plan):
        calls = make_schedule(plan).calls
        assert all(call.lo is None and call.hi is None for call in calls)
        assert [call.causal for call in calls][-1:] == [True]


def test_a_sliding_window_touches_a_band_of_keys() -> None:
    plan = _row(Features(), 3000).forward.plan.windowed(64)
    assert sum(call.num_keys * call.num_queries for call in make_schedule(plan).calls) < 3000 * (64 + 256)


@st.composite
def plans(draw: st.DrawFn) -> AttentionPlan:
    """Queries with any bounds in each block; many see one key more than the query before, as new tokens of a row do."""
    num_queries, num_blocks, length = draw(st.integers(1, 60)), draw(st.integers(1, 4)), 100
    bounds = st.integers(0, length - 60)
    pairs: list[tuple[int, int, int]] = []  # query, lo, hi
    offsets = [0]
    for block in range(num_blocks):
        first, lo, hi = draw(bounds), draw(bounds), draw(bounds)
        queries = st.integers(0, num_queries - 1)
        absent = draw(st.sets(queries, max_size=3)) if block else set()
        starts, stops = (draw(st.dictionaries(queries, st.integers(1, length), max_size=3)) for _ in range(2))
        for query in range(first, num_queries) if block else range(num_queries):
            if query in absent:
                continue
            start, stop = starts.get(query, lo), stops.get(query, hi + query + 1)
            pairs.append((query, start if block else min(start, stop - 1), stop))
        offsets.append(len(pairs))
    query, lo_of_pairs, hi_of_pairs = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    none, origins = np.empty(0, np.int64), draw(st.permutations(range(2 * num_blocks)))[:num_blocks]
    return AttentionPlan(
        num_queries=num_queries,
        block_origin=np.array(origins, np.int64) * length,
        block_capacity=np.full(num_blocks, length),
        block_first=np.zeros(num_blocks, np.int64),
        block_pairs=np.array(offsets),
        pair_query=query,
        pair_delta=np.zeros_like(query),
        pair_position=hi_of_pairs - 1,
        pair_lo=lo_of_pairs,
        pair_hi=hi_of_pairs,
        write_query=none,
        write_origin=none,
        write_capacity=none,
        write_index=none,
    )


def keys_by_schedule(schedule: Schedule) -> Counter[tuple[int, int]]:
    """Keys that the calls compute: (pair, slot)."""
    seen = Counter[tuple[int, int]]()
    for call in schedule.calls:
        for number, pair in enumerate(call.pairs.tolist()):
            if pair < 0:
                continue
            block, query = divmod(number, call.num_queries)
            lo, hi = 0, query + 1 if call.causal else call.num_keys
            if call.lo is not None and call.hi is not None:
                lo, hi = int(call.lo[block, query]), int(call.hi[block, query])
            start = call.origin + block * call.spacing + call.first
            seen.update((pair, start + key) for key in range(lo, hi))
    return seen


@settings(max_examples=100)
@given(plan=plans())
def test_calls_cover_every_visible_key_exactly_once(plan: AttentionPlan) -> None:
    expected = Counter(
        (pair, int(plan.block_origin[block]) + key)
        for block in range(plan.num_blocks)
        for pair in range(plan.block_pairs[block], plan.block_pairs[block + 1])
        for key in range(plan.pair_lo[pair], plan.pair_hi[pair])
    )
    assert keys_by_schedule(make_schedule(plan)) == expected


# Rotations


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rotary_tables_are_precise_at_distant_positions(dtype: torch.dtype) -> None:
    spec = RotarySpec(tuple(10000.0 ** (-i / 8) for i in range(8)))
    delta = np.array([0, 1, -1, 8191, -100_003, 1_000_000])
    cos, sin = spec.tables(delta, dtype, torch.device("cpu"))
    angles = np.multiply.outer(delta.astype(np.longdouble), np.array(spec.inv_freq, np.longdouble))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-7
    for table, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert table.dtype == dtype
        np.testing.assert_allclose(table.double().numpy(), exact.astype(np.float64), rtol=0, atol=tolerance)


@EXACT
@given(
    pairs=st.integers(1, 5),
    interleaved=st.booleans(),
    deltas=st.tuples(st.integers(-5000, 5000), st.integers(-5000, 5000)),
    seed=st.integers(0, 99),
)
def test_rotations_add_up_and_leave_other_dimensions_unchanged(
    pairs: int, interleaved: bool, deltas: tuple[int, int], seed: int
) -> None:
    spec = RotarySpec(tuple(10000.0 ** (-i / pairs) for i in range(pairs)), interleaved)
    x = torch.randn(3, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    first, second = deltas
    rotated, close = rotate_by(x, first, spec), partial(torch.testing.assert_close, rtol=0, atol=1e-11)
    close(rotate_by(rotated, second, spec), rotate_by(x, first + second, spec))
    close(rotated, rotate_to(x, torch.full((4,), first), spec))
    assert torch.equal(rotated, rotate(x, *spec.tables(np.array([first]), torch.float64, x.device), spec))
    assert torch.equal(rotated[..., spec.rotary_dim :], x[..., spec.rotary_dim :])
    assert torch.equal(rotate_by(x, 0, spec), x)


# Dispatch


def test_backend_variable_selects_and_an_unknown_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    assert select_backend("cpu") == "torch"
    monkeypatch.setenv(BACKEND_VARIABLE, "")
    assert select_backend("cpu") == "torch"
    monkeypatch.setenv(BACKEND_VARIABLE, "cudnn")
    with pytest.raises(ValueError, match=r"HF_PARALLEL_BACKEND must be one of .*flash.*torch.*triton.*'cudnn'"):
        select_backend()


def test_layers_of_different_windows_share_one_plan() -> None:
    scene = _row(Features(), 40)
    layer, plan = scene.cache.pool.arena.layers[0], scene.forward.plan
    for window in (None, 3, 17, 3, None):  # as layers of both kinds alternate
        scene.features.window = window
        params = AttentionParams(1, 8**-0.5, window=window)
        out = block_attention(scene.queries, layer.keys, layer.values, plan, params)
        torch.testing.assert_close(out, scene.truth(), rtol=0, atol=1e-12)


def test_pytorchs_kernels_of_a_gpu_cannot_be_batch_invariant() -> None:
    keys = torch.zeros(8, 80)
    query = SimpleNamespace(device=torch.device("cuda"))  # asked for nothing else before the error
    params = AttentionParams(1, 1.0, batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant=True on a GPU .* heads of 80 and 80 in torch.float32"):
        torch_backend.TorchBackend().attend(query, keys, keys, _row(Features(), 1).forward.plan, params)

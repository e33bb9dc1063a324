"""The Triton kernels equal the oracle in Triton's interpreter, with NaN in all unwritten memory.

Triton selects the interpreter when it is imported, and torch imports it. These tests are collected only if
`TRITON_INTERPRET=1` was set before Python started; `test_triton_compile.py` runs them in such a process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from block_oracle import exact_attention
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, scenes

from hf_parallel.cache import Segment
from hf_parallel.kernels import (
    LayerStorage,
    RotarySpec,
    TokenRange,
)
from hf_parallel.kernels.torch_attention import TorchBackend

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    import interpreter  # noqa: F401

    from hf_parallel.kernels.triton import attend as triton_attend
    from hf_parallel.kernels.triton import attention as triton_backend
    from hf_parallel.kernels.triton import launch as launches
    from hf_parallel.kernels.triton.launch import AttendLaunch, Tiling

    TRITON = triton_backend.TritonBackend()

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]

TORCH = TorchBackend()
ROTARY = RotarySpec((1.0, 0.3, 0.1, 0.02))
STYLES = {
    "none": None,
    "half": ROTARY,
    "interleaved": RotarySpec(ROTARY.inv_freq, True),
    "partial": RotarySpec((1.0, 0.1)),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


def few(examples: int) -> settings:
    return settings(max_examples=examples)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not filled contains NaN: outputs, partial results, tables."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def attend(scene: Scene, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return scene.attend(TRITON.attend, dtype)


def check(scene: Scene, dtype: torch.dtype = torch.float32) -> None:
    expected = scene.attend(exact_attention, dtype)
    torch.testing.assert_close(attend(scene, dtype), expected, rtol=torch.finfo(dtype).eps, atol=TOLERANCE[dtype])


# Attention


@few(5)
@given(scene=scenes())
def test_kernels_equal_oracle(scene: Scene) -> None:
    check(scene)


@few(3)
@given(scene=scenes())
def test_kernels_equal_oracle_in_half_precision(scene: Scene) -> None:
    check(scene, torch.float16)


def workers(features: Features, count: int, own: int, common: int = 9) -> Scene:
    """Workers that see a common block and each other's blocks; each appends `own` tokens in the last pass."""
    scene = Scene(features)
    root, *mine = scene.cache.pool.new_block(common), *scene.cache.pool.new_blocks(count, own)
    scene.step([Segment([root], common)])
    scene.step([Segment([root, *(b for b in mine if b is not block), block], own) for block in mine])
    return scene


@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("widths", [(16, 32), (16, 64), (32,)], ids=str)
def test_tiles_of_any_height_equal_oracle(monkeypatch: pytest.MonkeyPatch, widths: Sequence[int], groups: int) -> None:
    tilings = tuple(Tiling(width, 16, 4, 2, 2) for width in widths)
    monkeypatch.setattr(launches, "select_tilings", lambda *_: tilings)
    check(workers(Features(groups=groups, rotary=ROTARY), 3, 5))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("head_dim", [8, 13, 64, 80])
def test_head_sizes_and_rotations_equal_oracle(head_dim: int, style: str) -> None:
    check(workers(Features(kv_heads=2, head_dim=head_dim, value_dim=head_dim, rotary=STYLES[style]), 2, 2))


@pytest.mark.parametrize(("heads", "sinks"), [(1, False), (8, True), (11, False), (11, True)])
def test_many_queries_are_merged_several_heads_per_program(
    monkeypatch: pytest.MonkeyPatch, heads: int, sinks: bool
) -> None:
    """With the same results, for more partial results than are loaded together, and zeros for padded queries."""
    tape: list[Callable[[], None]] = []
    merge = Captured(triton_attend.merge_heads_kernel, tape)
    monkeypatch.setattr(triton_attend, "merge_heads_kernel", merge)
    monkeypatch.setattr(triton_attend, "MERGED_BY_HEAD", 2 * heads)
    scene = workers(Features(groups=heads, value_dim=13, sinks=sinks), 3, 1)
    check(scene)
    assert len(tape) == 1
    assert merge.grids == [(3, -(-heads // 8))]
    padded = scene.attend(lambda q, *args: TRITON.attend(torch.cat((q, q)), *args), torch.float32)
    assert not padded[3:].any()
    check(workers(Features(groups=heads), 2, 1))
    assert len(tape) == 2, "few queries are merged one head per program"


# Following decode steps


def decoding(scene: Scene) -> list[Segment]:
    return [Segment(segment.view, 1) for segment in scene.forward.segments if segment.write]


@few(3)
@given(scene=scenes())
def test_following_steps_are_right_in_any_layout(scene: Scene) -> None:
    segments = decoding(scene)
    assume(segments)
    scene.cache.pool.reserve([(segment.view[-1], segment.view[-1].length + 8) for segment in segments])
    for _ in range(2):
        scene.step(segments)
        torch.testing.assert_close(attend(scene), scene.truth().float(), rtol=0, atol=1e-5)


# One launch for several plans


def attention(scene: Scene) -> AttendLaunch:
    return next(buffers for buffers in scene.forward.plan.device_buffers if isinstance(buffers, AttendLaunch))


class Captured:
    """Records the launches of a kernel with their tensors, as a CUDA graph does."""

    def __init__(self, kernel: Any, tape: list[Callable[[], None]]) -> None:
        self.kernel, self.tape = kernel, tape
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)

        def launch(*args: object, **kwargs: object) -> None:
            self.tape.append(lambda: self.kernel[grid](*args, **kwargs))
            self.tape[-1]()

        return launch


# Storing and moving


def storage(scene: Scene) -> LayerStorage:
    """Unwritten storage of the scene's size."""
    layer = scene.cache.pool.arena.layers[0]
    keys, values = (torch.full_like(x, math.nan, dtype=torch.float32) for x in (layer.keys, layer.values))
    return LayerStorage(keys, values, layer.num_kv_heads)


def assert_same_storage(actual: LayerStorage, expected: LayerStorage) -> None:
    torch.testing.assert_close(actual.keys, expected.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0, equal_nan=True)


def new_tokens(scene: Scene, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values, with the strides of a model's projections."""
    layer = scene.cache.pool.arena.layers[0]
    sizes = layer.keys.shape[1], layer.values.shape[1]
    drawn = [scene.draw(count, layer.num_kv_heads, dim).float().transpose(0, 1) for dim in sizes]
    return drawn[0], drawn[1]


@few(8)
@given(scene=scenes(), padding=st.integers(0, 3))
def test_append_stores_what_the_torch_backend_stores(scene: Scene, padding: int) -> None:
    plan, expected, actual = scene.forward.plan, storage(scene), storage(scene)
    keys, values = new_tokens(scene, plan.num_queries + padding)
    TORCH.append(expected.keys, expected.values, keys[:, : plan.num_queries], values[:, : plan.num_queries], plan)
    TRITON.append(actual.keys, actual.values, keys, values, plan)
    assert_same_storage(actual, expected)


def test_append_follows_decode_steps() -> None:
    scene = workers(Features(kv_heads=2), 3, 2)
    segments = [Segment(segment.view, 1) for segment in scene.forward.segments if segment.write]
    scene.cache.pool.reserve([(segment.view[-1], 40) for segment in segments])
    expected, actual = storage(scene), storage(scene)
    for _ in range(8):
        scene.step(segments)
        new = new_tokens(scene, 3)
        TORCH.append(expected.keys, expected.values, *new, scene.forward.plan)
        TRITON.append(actual.keys, actual.values, *new, scene.forward.plan)
    assert_same_storage(actual, expected)


def test_padded_queries_are_zero_and_change_no_other() -> None:
    scene = workers(Features(kv_heads=2, groups=2, sinks=True), 2, 1)
    expected = attend(scene)

    def padded(q: torch.Tensor, *args: Any) -> torch.Tensor:
        return TRITON.attend(torch.cat((q, q.new_full((5, *q.shape[1:]), math.nan))), *args)

    out = scene.attend(padded, torch.float32)
    assert torch.equal(out[:2], expected)
    assert torch.equal(out[2:], torch.zeros(5, 4, 8))


@pytest.mark.parametrize(("length", "delta"), [(1, 5), (16, 0), (37, -3000)])
@pytest.mark.parametrize("style", STYLES)
def test_move_does_what_the_torch_backend_does(style: str, delta: int, length: int) -> None:
    source, target = TokenRange(3, 60, 11, length), TokenRange(70, 45, 2, length)
    keys, values = torch.randn(240, 10), torch.randn(240, 6)
    expected, actual = (LayerStorage(keys.clone(), values.clone(), 2) for _ in range(2))
    TORCH.move(expected.keys, expected.values, 2, source, target, delta, STYLES[style])
    TRITON.move(actual.keys, actual.values, 2, source, target, delta, STYLES[style])
    torch.testing.assert_close(actual.keys, expected.keys, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.values, expected.values, rtol=0, atol=0)
    assert not torch.equal(actual.keys, keys)
    assert not torch.equal(actual.values, values)


# Dispatch


@pytest.mark.parametrize(("length", "by_torch"), [(64, False), (65, True)])
def test_the_torch_backend_serves_long_prefills_without_soft_capping(length: int, by_torch: bool) -> None:
    backend = triton_backend.TritonBackend(is_chosen=False)
    for softcap in (None, 2.0):
        scene = Scene(Features(softcap=softcap))
        scene.step([Segment([scene.cache.pool.new_block()], length)])
        out = scene.attend(backend.attend, torch.float32)
        torch.testing.assert_close(out, scene.truth().float(), rtol=0, atol=1e-5)
        assert bool(scene.forward.plan.device_buffers) != (by_torch and softcap is None)

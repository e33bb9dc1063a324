"""The Triton kernels, run by Triton's interpreter: they give what the oracle gives, from memory that was poisoned.

Triton decides when it is imported whether its kernels are interpreted, and torch imports it. These tests are collected
where `TRITON_INTERPRET=1` was set before Python began; `test_triton_compile.py` runs them so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, scenes, turn

from hf_parallel.cache import Block, Segment
from hf_parallel.kernels import BACKEND_VARIABLE, RotarySpec, backends, block_attention, reference, select_backend
from hf_parallel.kernels import torch_attention as torch_backend
from hf_parallel.kernels.work import Place

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    from hf_parallel.kernels.triton import attention as triton_backend
    from hf_parallel.kernels.triton import launch as launches
    from hf_parallel.kernels.triton.launch import AttendLaunch, Tiling, WriteLaunch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]

TURNS = RotarySpec((1.0, 0.3, 0.1, 0.02))
STYLES = {
    "none": None,
    "half": TURNS,
    "interleaved": RotarySpec(TURNS.inv_freq, True),
    "partial": RotarySpec((1.0, 0.1)),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Whatever is allocated and not filled is NaN: outputs, partial results, tables."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def attend(scene: Scene, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the kernels give for the last pass, the window left to them."""
    plan, window = scene.forward.plan, scene.features.window
    return scene.attend(
        lambda q, k, v, _, **rest: triton_backend.block_attention(q, k, v, plan, window=window, **rest), dtype
    )


def check(scene: Scene, dtype: torch.dtype = torch.float32) -> None:
    expected = scene.attend(reference.block_attention, dtype)
    torch.testing.assert_close(attend(scene, dtype), expected, rtol=torch.finfo(dtype).eps, atol=TOLERANCE[dtype])


# Attention


@few(12)
@given(scene=scenes())
def test_kernels_equal_oracle(scene: Scene) -> None:
    check(scene)


@few(4)
@given(scene=scenes())
def test_kernels_equal_oracle_in_half_precision(scene: Scene) -> None:
    check(scene, torch.float16)


def workers(features: Features, count: int, own: int, common: int = 9) -> Scene:
    """Workers that see a common block and each other's, `own` tokens each, which they all bring in the last pass."""
    scene = Scene(features)
    root, *mine = scene.cache.new_block(common), *scene.cache.new_blocks(count, own)
    scene.step([Segment([root], common)])
    scene.step([Segment([root, *(b for b in mine if b is not block), block], own) for block in mine])
    return scene


@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("widths", [(16, 32), (16, 64), (32,)], ids=str)
def test_tiles_of_any_height_equal_oracle(monkeypatch: pytest.MonkeyPatch, widths: Sequence[int], groups: int) -> None:
    tilings = tuple(Tiling(width, 16, 4, 2, 2) for width in widths)
    monkeypatch.setattr(launches, "select_tilings", lambda *_: tilings)
    check(workers(Features(groups=groups, rotary=TURNS), 3, 5))


@pytest.mark.parametrize("groups", [16, 17, 40])
def test_groups_larger_than_a_tile_equal_oracle(groups: int) -> None:
    check(workers(Features(groups=groups, rotary=TURNS), 2, 1))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("head_dim", [8, 13, 64, 80])
def test_head_sizes_and_rotations_equal_oracle(head_dim: int, style: str) -> None:
    check(workers(Features(kv_heads=2, head_dim=head_dim, value_dim=head_dim, rotary=STYLES[style]), 2, 2))


@pytest.mark.parametrize("window", [1, 12, 30, 100, None])
def test_long_blocks_under_a_window_equal_oracle(window: int | None) -> None:
    """Tiles that all rows see whole, tiles at either end of what some see, and shares of one block."""
    scene = Scene(Features(groups=2, window=window, softcap=2.0))
    root, own = scene.cache.new_block(), scene.cache.new_block()
    scene.step([Segment([root], 150)])
    scene.step([Segment([root, own], 21)])
    check(scene)


def test_each_block_is_shared_out_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take equal parts of 700 keys; their results are merged, and are more than one go merges."""
    monkeypatch.setattr(launches, "_processors", lambda device: 30)
    scene = Scene(Features(groups=8))
    root, own = scene.cache.new_block(), scene.cache.new_block()
    scene.step([Segment([root], 700)])
    scene.step([Segment([root, own], 1)])
    check(scene)
    (launch,) = scene.forward.plan.on_device
    parts = launch.buffers["merge_start"][1]
    assert parts > triton_backend._PARTS_AT_ONCE


def test_a_query_that_sees_no_key_is_refused() -> None:
    scene = workers(Features(), 2, 2)
    scene.forward.plan.pair_hi[:] = 0
    with pytest.raises(ValueError, match="query 0 .* no key"):
        attend(scene)


# Rows that pad a batch


def test_queries_behind_the_plans_own_get_zeros_and_disturb_nothing() -> None:
    scene = workers(Features(kv_heads=2, groups=2, sinks=True), 2, 1)
    expected = attend(scene)

    def padded(q: torch.Tensor, *args: object, **rest: object) -> torch.Tensor:
        return triton_backend.block_attention(torch.cat((q, q.new_full((5, *q.shape[1:]), math.nan))), *args, **rest)

    out = scene.attend(padded, torch.float32)
    assert torch.equal(out[:2], expected)
    assert torch.equal(out[2:], torch.zeros(5, 4, 8))


# Decode steps that follow


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launches that were loaded, in order; shares are cut for four following steps."""
    loaded: list[str] = []
    load = launches.Launch._load

    def noted(self: launches.Launch, *args: object) -> None:
        loaded.append(type(self).__name__)
        load(self, *args)

    monkeypatch.setattr(launches.Launch, "_load", noted)
    monkeypatch.setattr(AttendLaunch, "horizon", 4)
    return loaded


def decoding(scene: Scene) -> list[Segment]:
    return [Segment(segment.view, 1) for segment in scene.forward.segments if segment.write]


@pytest.mark.parametrize(
    ("style", "window", "common"),
    [("none", None, 9), ("half", None, 9), ("half", 3, 9), ("half", 90, 100), ("interleaved", 14, 9)],
)
def test_steps_that_follow_are_right_within_the_horizon_and_beyond(
    loads: list[str], style: str, window: int | None, common: int
) -> None:
    scene = workers(Features(rotary=STYLES[style], window=window), 2, 2, common)
    segments = decoding(scene)
    scene.cache.reserve([(segment.view[-1], 30) for segment in segments])
    for _ in range(12):
        scene.step(segments)
        torch.testing.assert_close(attend(scene), scene.truth().float(), rtol=0, atol=1e-5)
    assert loads == ["AttendLaunch"] * 3  # at steps 0, 5 and 10


@few(6)
@given(scene=scenes())
def test_steps_that_follow_in_any_layout_are_right(scene: Scene) -> None:
    segments = decoding(scene)
    if not segments:
        return
    scene.cache.reserve([(segment.view[-1], segment.view[-1].length + 8) for segment in segments])
    for _ in range(3):
        scene.step(segments)
        torch.testing.assert_close(attend(scene), scene.truth().float(), rtol=0, atol=1e-5)


def test_a_step_that_was_taken_back_is_taken_again_without_loading(loads: list[str]) -> None:
    scene = workers(Features(rotary=TURNS), 2, 2)
    segments = decoding(scene)
    scene.cache.reserve([(segment.view[-1], 30) for segment in segments])
    seen = []
    for _ in range(3):
        scene.step(segments)
        seen.append((scene.forward, scene.queries, attend(scene)))
    for scene.forward, scene.queries, expected in (seen[1], seen[2], seen[0]):
        torch.testing.assert_close(attend(scene), expected, rtol=0, atol=1e-6)
    assert loads == ["AttendLaunch"]


# One launch for one plan after another


def attention(scene: Scene) -> AttendLaunch:
    return next(known for known in scene.forward.plan.on_device if isinstance(known, AttendLaunch))


def test_a_launch_serves_another_plan_in_the_same_buffers() -> None:
    features = Features(groups=2, rotary=TURNS)
    before, after = workers(features, 3, 1), workers(features, 2, 1, common=40)
    attend(before)
    launch = attention(before)
    pointers = [launch.buffers["items"].data_ptr(), launch.part_out.data_ptr(), launch.cos.data_ptr()]
    assert launch.serve(after.forward.plan)
    assert launch.serve(after.forward.plan)
    after.forward.plan.memo((launch.shape, launch.num_tokens), lambda: launch)
    check(after)
    assert [launch.buffers["items"].data_ptr(), launch.part_out.data_ptr(), launch.cos.data_ptr()] == pointers
    check(before)  # takes its buffers back


class Captured:
    """A kernel whose launches are kept, with the tensors that they were given, as a CUDA graph keeps them."""

    def __init__(self, kernel: Any, tape: list[Callable[[], None]]) -> None:
        self.kernel, self.tape = kernel, tape

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            self.tape.append(lambda: self.kernel[grid](*args, **kwargs))
            self.tape[-1]()

        return launch


@pytest.mark.parametrize("window", [None, 6])
def test_captured_kernels_serve_following_steps_and_other_plans(
    monkeypatch: pytest.MonkeyPatch, loads: list[str], window: int | None
) -> None:
    """Three workers decode, one leaves, and a common block grows by a token; padded to five rows throughout."""
    scene = workers(Features(groups=2, rotary=TURNS, window=window), 3, 2)
    segments = decoding(scene)
    scene.cache.reserve([(block, 30) for block in segments[0].view])
    tape: list[Callable[[], None]] = []
    for name in ("attend_kernel", "merge_kernel"):
        monkeypatch.setattr(triton_backend, name, Captured(getattr(triton_backend, name), tape))
    arguments = {"num_kv_heads": 1, "scale": 8**-0.5, "rotary": TURNS, "window": window}
    query, (keys, values) = torch.empty(5, 2, 8), storage(scene)
    out: torch.Tensor | None = None
    launch: AttendLaunch | None = None
    for step in range(13):
        if step == 6:
            segments.pop(1)
        if step == 9:
            scene.step([Segment(segments[0].view[:1], 1)])
        scene.step(segments)
        layer, plan = scene.cache.storage(0), scene.forward.plan
        rows = plan.num_queries
        turned = turn(scene.queries.transpose(0, 1), scene.forward.position_ids, TURNS).transpose(0, 1)
        query[:rows], query[rows:] = turned, math.nan
        keys.copy_(layer.keys)
        values.copy_(layer.values)
        if out is None or launch is None:
            out, launch = triton_backend.block_attention(query, keys, values, plan, **arguments), attention(scene)
        else:
            assert launch.serve(plan)
            out.fill_(math.nan)
            for again in tape:
                again()
        torch.testing.assert_close(out[:rows], scene.truth().float(), rtol=0, atol=1e-5)
        assert not out[rows:].any()
    assert len(tape) == 2
    assert loads == ["AttendLaunch"] * 4  # at steps 0, 5, 6 and 9


def test_a_launch_refuses_a_plan_that_does_not_fit() -> None:
    few_rows, many_rows, many_blocks = workers(Features(), 2, 1), workers(Features(), 40, 1), Scene(Features())
    blocks = many_blocks.cache.new_blocks(40, 2)
    many_blocks.step([Segment([block], 1) for block in blocks])
    many_blocks.step([Segment(blocks, 1)])
    attend(few_rows)
    for other in (many_rows, many_blocks):
        assert not attention(few_rows).serve(other.forward.plan)
    check(few_rows)


def test_launches_of_layers_differ_by_their_window() -> None:
    scene = workers(Features(rotary=TURNS), 2, 12)
    for window in (None, 3, None):
        scene.features.window = window
        check(scene)
    assert [launch.shape.window for launch in scene.forward.plan.on_device] == [None, 3]


# Storing and moving


def storage(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as large as the scene's, of which nothing is written yet."""
    layer = scene.cache.storage(0)
    return tuple(torch.full_like(x, math.nan, dtype=torch.float32) for x in (layer.keys, layer.values))  # type: ignore[return-value]


def new_tokens(scene: Scene, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values, of which a model's projections give `[T, kv_heads, head_dim]`."""
    f = scene.features
    drawn = [scene.draw(count, f.kv_heads, dim).float().transpose(0, 1) for dim in (f.head_dim, f.value_dim)]
    return drawn[0], drawn[1]


@few(15)
@given(scene=scenes(), padding=st.integers(0, 3))
def test_append_stores_what_the_torch_backend_stores(scene: Scene, padding: int) -> None:
    plan, kv_heads = scene.forward.plan, scene.features.kv_heads
    expected, actual = storage(scene), storage(scene)
    keys, values = new_tokens(scene, plan.num_queries + padding)
    torch_backend.append(keys[:, : plan.num_queries], values[:, : plan.num_queries], *expected, plan, kv_heads)
    triton_backend.append(keys, values, *actual, plan, kv_heads)
    for mine, its in zip(actual, expected, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0))


def test_append_goes_on_from_step_to_step(loads: list[str]) -> None:
    scene = workers(Features(kv_heads=2), 3, 2)
    segments = decoding(scene)
    scene.cache.reserve([(segment.view[-1], 40) for segment in segments])
    expected, actual = storage(scene), storage(scene)
    for _ in range(8):
        scene.step(segments)
        new = new_tokens(scene, 3)
        torch_backend.append(*new, *expected, scene.forward.plan, 2)
        triton_backend.append(*new, *actual, scene.forward.plan, 2)
    for mine, its in zip(actual, expected, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0))
    assert loads == ["WriteLaunch"]


@pytest.mark.parametrize("length", [1, 16, 37])
@pytest.mark.parametrize("delta", [0, 5, -3000])
@pytest.mark.parametrize("style", STYLES)
def test_move_does_what_the_torch_backend_does(style: str, delta: int, length: int) -> None:
    kv_heads, source, target = 2, Place(3, 60, 11), Place(70, 45, 2)
    keys, values = torch.randn(120 * kv_heads, 10), torch.randn(120 * kv_heads, 6)
    expected, actual = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    torch_backend.move(*expected, source, target, length, kv_heads, delta, STYLES[style])
    triton_backend.move(*actual, source, target, length, kv_heads, delta, STYLES[style])
    for mine, its, old in zip(actual, expected, (keys, values), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)
        assert not torch.equal(mine, old)


# Through dispatch


def test_the_variable_chooses_the_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    assert select_backend("cpu") == "triton"
    assert backends()[0].available
    scene = workers(Features(rotary=TURNS, window=7), 2, 3)  # stored and attended by the kernels, float64 by torch
    layer, plan = SimpleNamespace(keys=None, values=None), scene.forward.plan
    layer.keys, layer.values = (x.float() for x in (scene.cache.storage(0).keys, scene.cache.storage(0).values))
    scene.cache.arena.layers[0].keys, scene.cache.arena.layers[0].values = layer.keys, layer.values
    scene.cache.arena.write(0, *new_tokens(scene, plan.num_queries), plan)
    query = scene.draw(plan.num_queries, 1, 8).float()
    arguments = {"num_kv_heads": 1, "scale": 0.3, "rotary": TURNS, "window": 7}
    out = block_attention(query, layer.keys, layer.values, plan, **arguments)
    assert {type(known) for known in plan.on_device} == {AttendLaunch, WriteLaunch}
    expected = reference.block_attention(query, layer.keys, layer.values, plan, **arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_what_the_kernels_do_not_serve_goes_to_torch_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    scene = workers(Features(), 2, 1)
    layer = scene.cache.storage(0)
    for _ in range(2):
        out = block_attention(
            scene.queries, layer.keys, layer.values, scene.forward.plan, num_kv_heads=1, scale=8**-0.5
        )
    torch.testing.assert_close(out, scene.truth(), rtol=0, atol=1e-12)
    assert sum("float64" in record.message for record in caplog.records) <= 1
    assert "float64" in triton_backend.why_not(layer.keys, layer.values)
    assert "bfloat16" in triton_backend.why_not(layer.keys.bfloat16(), layer.values.bfloat16())
    assert "256" in triton_backend.why_not(torch.zeros(1, 300), torch.zeros(1, 300))


def test_blocks_are_moved_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished step moves through the cache as it does with the torch backend."""
    stored = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
        scene = workers(Features(kv_heads=2, rotary=TURNS), 2, 4)
        layer = scene.cache.arena.layers[0]
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
        blocks: list[Block] = list(scene.forward.segments[0].view)
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        scene.cache.move(blocks[1], blocks[0])
        stored.append((layer.keys, layer.values))
    for mine, its in zip(*stored, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)

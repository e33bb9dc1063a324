"""The plan of the next decode step, derived by adding integers, equals one planned from scratch."""

from __future__ import annotations

import copy
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, scenes

from hf_parallel.cache import ForwardPass, Segment
from hf_parallel.kernels import AttentionPlan
from hf_parallel.kernels.torch_attention import TorchBackend

ARRAYS = [f.name for f in fields(AttentionPlan) if f.type == "np.ndarray"]
EXACT = settings(max_examples=30)


def one_token_each(scene: Scene) -> list[Segment]:
    """Decode step of the rows that appended in the scene's last pass."""
    return [Segment(segment.view, 1) for segment in scene.forward.segments if segment.write]


def planned_from_scratch(scene: Scene, segments: list[Segment]) -> ForwardPass:
    """Prepare the pass on a copy of the cache, which does not derive it from the last step."""
    cache, segments = copy.deepcopy((scene.cache, segments))
    return cache.prepare(segments)


@EXACT
@given(scene=scenes(), data=st.data())
def test_derived_steps_equal_steps_planned_from_scratch(scene: Scene, data: st.DataObject) -> None:
    segments = one_token_each(scene)
    assume(segments)
    scene.cache.pool.reserve([(segment.view[-1], segment.view[-1].length + 8) for segment in segments])
    for _ in range(data.draw(st.integers(2, 5))):
        planned = planned_from_scratch(scene, segments)
        scene.step(segments)
        for name in ARRAYS:
            assert np.array_equal(getattr(scene.forward.plan, name), getattr(planned.plan, name)), name
        assert torch.equal(scene.forward.position_ids, planned.position_ids)
        out = scene.attend(TorchBackend().attend, torch.float64)
        torch.testing.assert_close(out, scene.truth(), rtol=0, atol=1e-11)


@pytest.fixture
def scene() -> Scene:
    """Two rows over a shared block, two decode steps in."""
    scene = Scene(Features())
    root, *own = scene.cache.pool.new_block(8), *scene.cache.pool.new_blocks(2, 8)
    scene.step([Segment([root], 8)])
    for _ in range(2):
        scene.step([Segment([root, block], 1) for block in own])
    return scene


@pytest.mark.parametrize("change", ["truncate", "move", "another row", "order", "no room", "freed", "split"])
def test_a_step_after_a_change_is_planned_from_scratch(scene: Scene, change: str) -> None:
    segments = one_token_each(scene)
    root, own = segments[0].view
    if change == "truncate":
        scene.cache.pool.truncate(own, 1)
    elif change == "move":
        scene.cache.pool.move(segments[1].view[-1], own)
    elif change == "another row":
        segments.append(Segment([root, scene.cache.pool.new_block(8)], 1))
    elif change == "order":
        segments.reverse()
    elif change == "no room":
        own.extent.capacity = own.first + own.length
    elif change == "freed":
        scene.cache.pool.free(own)
        with pytest.raises(ValueError, match="no longer"):
            scene.cache.prepare(segments)
        return
    elif change == "split":
        scene.cache.pool.split(root, 3)
    planned = planned_from_scratch(scene, segments)
    forward = scene.cache.prepare(segments)
    for name in ARRAYS:
        assert np.array_equal(getattr(forward.plan, name), getattr(planned.plan, name)), name

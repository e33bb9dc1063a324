"""Consecutive passes computed as one forward pass have the logits of separate passes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from block_oracle import exact_attention
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import Features, Scene, rotate_to, scenes
from small_cache import append, assert_holds, new_cache

from hf_parallel.cache import Block, Segment
from hf_parallel.kernels import torch_attention

# Random layouts


def prepare_run(scene: Scene, passes: Sequence[Sequence[Segment]]) -> torch.Tensor:
    """Prepare passes as one, up to attention; returns the expected output of each."""
    f, held = scene.features, {block: block.length for block in scene.cache.pool.blocks}
    truths, queries, brought = [], [], []
    for segments in passes:
        total = sum(segment.num_tokens for segment in segments)
        scene.queries = scene.draw(total, f.kv_heads * f.groups, f.head_dim)
        new = scene.draw(f.kv_heads, total, f.head_dim + f.value_dim)
        mine = iter(new.split([segment.num_tokens for segment in segments], dim=1))
        for segment, tokens in zip(segments, mine, strict=True):
            if segment.write:
                block = segment.view[-1]
                scene.raw[block] = torch.cat((scene.content(block), tokens), dim=1)
                block.length += segment.num_tokens
        scene.forward = SimpleNamespace(segments=segments)  # type: ignore[assignment]
        truths.append(scene.truth())
        queries.append(scene.queries)
        brought.append(new)
    for block, length in held.items():
        block.length = length
    scene.forward = scene.cache.prepare_run(passes)
    everything, scene.queries = torch.cat(brought, dim=1), torch.cat(queries)
    keys = rotate_to(everything[..., : f.head_dim], scene.forward.position_ids, f.rotary)
    scene.cache.pool.arena.write(0, keys, everything[..., f.head_dim :].contiguous(), scene.forward.plan)
    scene.cache.commit()
    return torch.cat(truths)


@settings(max_examples=25)
@given(scene=scenes(), data=st.data())
def test_every_query_sees_the_blocks_of_its_own_pass(scene: Scene, data: st.DataObject) -> None:
    """Trees, workers and arbitrary views under windows, sinks and soft-capping; some tokens are recomputed."""
    assume(scene.features.rank is None)  # the new tokens of `prepare_run` are keys and values, no latents
    views = [segment.view for segment in scene.forward.segments]
    rows = st.lists(st.sampled_from(views), min_size=1, unique_by=lambda view: id(view[-1]))
    passes = [
        [
            Segment(view, 1, write=False)
            if view[-1].length and data.draw(st.integers(0, 4)) == 0
            else Segment(view, data.draw(st.one_of(st.just(1), st.integers(1, 20))))
            for view in data.draw(rows)
        ]
        for _ in range(data.draw(st.integers(2, 5)))
    ]
    expected = prepare_run(scene, passes)
    for backend in (torch_attention.TorchBackend().attend, exact_attention):
        torch.testing.assert_close(scene.attend(backend, torch.float64), expected, rtol=0, atol=1e-11)
    out = scene.attend(torch_attention.TorchBackend().attend, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("window", "chunk"), [(17, 19), (None, 19), (17, None), (20, 30)], ids=str)
def test_runs_of_two_rows_with_other_views_are_told_apart(window: int | None, chunk: int | None) -> None:
    """Tokens of two rows follow each other, each seeing one key more, and begin to see at different keys."""
    for count in (5, 13, 20):
        scene = Scene(Features(window=window, chunk=chunk))
        one = [scene.cache.pool.new_block() for _ in range(5)]
        for block, length in zip(one, (1, 31, 2, 10, 27), strict=True):
            scene.step([Segment([block], length)])
        other = [one[index] for index in (0, 1, 4, 3, 2)]
        both = [Segment(one, 1), Segment(other, 1)]
        passes = [[Segment(one, 1), Segment(other, 4)], [Segment(one, count)], [Segment(one, 1)], both]
        expected = prepare_run(scene, passes)
        for backend in (torch_attention.TorchBackend().attend, exact_attention):
            torch.testing.assert_close(scene.attend(backend, torch.float64), expected, rtol=0, atol=1e-11)


# Without a model


def passes_of(block: Block, other: Block) -> list[list[Segment]]:
    return [
        [Segment([block], 3)],
        [Segment([block, other], 2), Segment([block], 1)],
        [Segment([block], 2, write=False), Segment([other], 1)],
    ]


def test_rollback_restores_the_state_before_the_first_pass() -> None:
    cache = new_cache()
    block, other = cache.pool.new_block(), cache.pool.new_block()
    append(cache, ([block], [1, 2]))
    cache.prepare_run(passes_of(block, other))
    cache.rollback()
    assert (block.length, other.length) == (2, 0)
    append(cache, ([block], [3]), ([block, other], [4]))
    assert_holds(cache, block, [1, 2, 3])
    assert_holds(cache, other, [4])


def test_tokens_of_an_earlier_pass_may_be_recomputed() -> None:
    cache = new_cache()
    block = cache.pool.new_block()
    forward = cache.prepare_run([[Segment([block], 3)], [Segment([block], 3, write=False)]])
    assert forward.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="reread more tokens"):
        cache.prepare_run([[Segment([block], 1)], [Segment([block], 5, write=False)]])

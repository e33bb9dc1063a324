"""Consecutive passes computed as one forward pass have the logits of separate passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import dense
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenes import Scene, rotate_to, scenes
from small_cache import append, assert_holds, new_cache
from transformers import PreTrainedModel

from hf_parallel.cache import Block, Segment
from hf_parallel.cache.hogwild import LAYOUTS, HogwildCache
from hf_parallel.kernels import reference, torch_attention
from hf_parallel.models.attention import block_attention_enabled
from hf_parallel.models.capabilities import probe_capabilities

pytestmark = pytest.mark.usefixtures("one_thread")

PassInputs = list[tuple[Sequence[Block], list[int]]]
HEADERS = (5, 4, 3, 2)  # tokens of the history header, the others' header, the own header and the gap


class Problem:
    """A Hogwild! problem whose passes are computed immediately, or `later`, all at once."""

    def __init__(self, model: PreTrainedModel, layout: str, num_workers: int, later: bool = False) -> None:
        self.model, self.found, self.later = model, probe_capabilities(model), later
        self.cache = HogwildCache(self.found.rotary)
        self.space = self.cache.new_workspace(layout, [self.cache.pool.new_block()], num_workers, HEADERS)
        self.queued: list[PassInputs] = []
        self.logits: list[torch.Tensor] = []
        self.forward_passes = 0

    def add(self, new: PassInputs) -> None:
        self.queued.append(new)
        if not self.later:
            self.compute(1)

    def move_ended(self) -> None:
        if not self.queued:
            self.cache.move_ended(self.space)

    @torch.no_grad()
    def compute(self, at_a_time: int) -> None:
        while self.queued:
            run, self.queued = self.queued[:at_a_time], self.queued[at_a_time:]
            passes = [[Segment(view, len(tokens)) for view, tokens in new] for new in run]
            forward = self.cache.prepare(passes[0]) if at_a_time == 1 else self.cache.prepare_run(passes)
            with block_attention_enabled(self.model, self.cache):
                logits = self.model(
                    input_ids=torch.tensor([[t for new in run for _, tokens in new for t in tokens]]),
                    position_ids=forward.position_ids[None],
                    past_key_values=self.cache,
                    **({"block_cache": self.cache} if self.found.keyword else {}),
                ).logits[0]
            self.cache.commit()
            self.logits.append(logits)
            self.forward_passes += 1


class RandomPasses:
    """Random ragged passes in which steps end; the same for the same seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.pending: list[tuple[int, list[int]]] = []  # ended steps and their last tokens

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(tiny.EOS + 1, tiny.VOCAB_SIZE) for _ in range(n)]

    def start(self, *problems: Problem) -> None:
        prompt, headers = self.tokens(19), [self.tokens(n) for n in HEADERS]
        for problem in problems:
            space = problem.space
            problem.add([(space.prompt, prompt)])
            blocks = (space.history_header, space.others_header, space.own_header, space.gap)
            problem.add([([*space.prompt, b], tokens) for b, tokens in zip(blocks, headers, strict=True)])

    def continue_for(self, passes: int, *problems: Problem) -> None:
        workers = range(len(problems[0].space.workers))
        for _ in range(passes):
            own = [self.tokens(self.random.choice([1, 1, 1, 2, 6, 20])) for _ in workers]
            ending = [worker for worker in workers if self.random.random() < 0.4]
            last = [self.tokens(self.random.choice([1, 3])) for _ in ending]
            for problem in problems:
                space, cache = problem.space, problem.cache
                closing = space.pending_steps[len(space.pending_steps) - len(self.pending) :]
                late = [(space.view_of(b), tokens) for b, (_, tokens) in zip(closing, self.pending, strict=True)]
                problem.add([*late, *((space.view(worker), own[worker]) for worker in workers)])
                problem.move_ended()
                for worker in ending if space.layout != "contiguous" else ():
                    cache.end_step(space, worker)
            self.pending = list(zip(ending, last, strict=True)) if problems[0].space.layout != "contiguous" else []


def run_and_steps(model: PreTrainedModel, layout: str, num_workers: int, at_a_time: int = 10**6) -> None:
    """Compare the logits of all tokens of random passes, and of the passes that follow."""
    source = RandomPasses(f"{layout}{num_workers}")
    steps, run = Problem(model, layout, num_workers), Problem(model, layout, num_workers, later=True)
    source.start(steps, run)
    source.continue_for(9, steps, run)
    assert not run.logits
    run.compute(at_a_time)
    assert run.forward_passes == -(-11 // at_a_time)
    assert len(steps.space.step_workers) > 3 or layout == "contiguous", "too few steps ended"
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(steps.logits), rtol=0, atol=1e-9)
    run.later, known = False, len(steps.logits)
    run.logits.clear()
    source.continue_for(4, steps, run)
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(steps.logits[known:]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_passes_computed_as_one_equal_separate_passes(layout: str, num_workers: int) -> None:
    """Under a sliding window, with steps that end and move, and blocks that grow beyond their extents."""
    run_and_steps(dense.in_float64(tiny.build("starcoder2"), num_layers=2), layout, num_workers)


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


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(scene=scenes(), data=st.data())
def test_every_query_sees_the_blocks_of_its_own_pass(scene: Scene, data: st.DataObject) -> None:
    """Trees, workers and arbitrary views under windows, sinks and soft-capping; some tokens are recomputed."""
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
    for backend in (torch_attention.TorchBackend().attend, reference.ReferenceBackend().attend):
        torch.testing.assert_close(scene.attend(backend, torch.float64), expected, rtol=0, atol=1e-11)
    out = scene.attend(torch_attention.TorchBackend().attend, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


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


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_invalid_pass_leaves_the_cache_unchanged(number: int) -> None:
    cache = new_cache()
    block, other = cache.pool.new_block(), cache.pool.new_block()
    append(cache, ([block], [1, 2]))
    passes = passes_of(block, other)
    for wrong in ([Segment([block], 0)], [Segment([block], 9, write=False)], [Segment([other], 1)] * 2):
        with pytest.raises(ValueError, match="segment"):
            cache.prepare_run([*passes[:number], wrong, *passes[number:]])
        assert (block.length, other.length) == (2, 0)
    with pytest.raises(ValueError, match="at least one pass"):
        cache.prepare_run([])


def test_tokens_of_an_earlier_pass_may_be_recomputed() -> None:
    cache = new_cache()
    block = cache.pool.new_block()
    forward = cache.prepare_run([[Segment([block], 3)], [Segment([block], 3, write=False)]])
    assert forward.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="reread more tokens"):
        cache.prepare_run([[Segment([block], 1)], [Segment([block], 5, write=False)]])

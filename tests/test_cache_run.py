"""A run of passes that are known beforehand, laid out as one forward pass, gives what they give one by one."""

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
from scenes import Scene, scenes, turn
from small_cache import append, assert_holds, new_cache, unrotated
from transformers import PreTrainedModel

from hf_parallel.cache import Block, BlockCache, Segment
from hf_parallel.cache.hogwild import LAYOUTS, STEP_ROOM, HogwildCache
from hf_parallel.kernels import reference, torch_attention
from hf_parallel.models.attention import block_attention_enabled, capabilities

pytestmark = pytest.mark.usefixtures("one_thread")

PassInputs = list[tuple[Sequence[Block], list[int]]]
HEADERS = (5, 4, 3, 2)  # tokens of the history header, the others', the own one and the gap


class Problem:
    """A Hogwild! problem under a model, whose passes are computed when they come or `later`, all at once."""

    def __init__(self, model: PreTrainedModel, layout: str, num_workers: int, later: bool = False) -> None:
        self.model, self.found, self.later = model, capabilities(model), later
        self.cache = HogwildCache(self.found.rotary)
        self.space = self.cache.new_workspace(layout, [self.cache.new_block()], num_workers, HEADERS)
        self.waiting: list[PassInputs] = []
        self.logits: list[torch.Tensor] = []
        self.forward_passes = 0

    def bring(self, brought: PassInputs) -> None:
        self.waiting.append(brought)
        if not self.later:
            self.compute(1)

    def settle(self) -> None:
        if not self.waiting:
            self.cache.settle(self.space)

    @torch.no_grad()
    def compute(self, at_a_time: int) -> None:
        while self.waiting:
            run, self.waiting = self.waiting[:at_a_time], self.waiting[at_a_time:]
            passes = [[Segment(view, len(tokens)) for view, tokens in brought] for brought in run]
            forward = self.cache.prepare(passes[0]) if at_a_time == 1 else self.cache.prepare_run(passes)
            with block_attention_enabled(self.model, self.cache):
                logits = self.model(
                    input_ids=torch.tensor([[t for brought in run for _, tokens in brought for t in tokens]]),
                    position_ids=forward.position_ids[None],
                    past_key_values=self.cache,
                    **({"block_cache": self.cache} if self.found.keyword else {}),
                ).logits[0]
            self.cache.commit()
            self.logits.append(logits)
            self.forward_passes += 1


class Life:
    """What happens to a problem: random passes, ragged, in which steps end. The same for the same seed."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self.owed: list[tuple[int, list[int]]] = []  # steps that have ended, and the last tokens of each

    def some(self, n: int) -> list[int]:
        return [self.chance.randrange(tiny.EOS + 1, tiny.VOCAB_SIZE) for _ in range(n)]

    def begin(self, *problems: Problem) -> None:
        prompt, headers = self.some(19), [self.some(n) for n in HEADERS]
        for problem in problems:
            space = problem.space
            problem.bring([(space.prompt, prompt)])
            blocks = (space.history_header, space.others_header, space.own_header, space.gap)
            problem.bring([([*space.prompt, b], tokens) for b, tokens in zip(blocks, headers, strict=True)])

    def go_on(self, passes: int, *problems: Problem) -> None:
        workers = range(len(problems[0].space.workers))
        for _ in range(passes):
            own = [self.some(self.chance.choice([1, 1, 1, 2, 6, 20])) for _ in workers]
            ending = [worker for worker in workers if self.chance.random() < 0.4]
            last = [self.some(self.chance.choice([1, 3])) for _ in ending]
            for problem in problems:
                space, cache = problem.space, problem.cache
                closing = space.closing[len(space.closing) - len(self.owed) :]
                late = [(space.view_of(b), tokens) for b, (_, tokens) in zip(closing, self.owed, strict=True)]
                problem.bring([*late, *((space.view(worker), own[worker]) for worker in workers)])
                problem.settle()
                for worker in ending if space.layout != "contiguous" else ():
                    cache.end_step(space, worker)
            self.owed = list(zip(ending, last, strict=True)) if problems[0].space.layout != "contiguous" else []


def run_and_steps(model: PreTrainedModel, layout: str, num_workers: int, at_a_time: int = 10**6) -> None:
    """Compare logits of every token of a random life, and of what follows on it."""
    life = Life(f"{layout}{num_workers}")
    steps, run = Problem(model, layout, num_workers), Problem(model, layout, num_workers, later=True)
    life.begin(steps, run)
    life.go_on(9, steps, run)
    assert not run.logits
    run.compute(at_a_time)
    assert run.forward_passes == -(-11 // at_a_time)
    assert len(steps.space.ended) > 3 or layout == "contiguous", "too few steps ended"
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(steps.logits), rtol=0, atol=1e-9)
    run.later, known = False, len(steps.logits)
    run.logits.clear()
    life.go_on(4, steps, run)
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(steps.logits[known:]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_one_pass_equals_its_passes_one_by_one(layout: str, num_workers: int) -> None:
    """Under a sliding window, with steps that end and move, and with blocks that outgrow their extents."""
    run_and_steps(dense.in_float64(tiny.build("starcoder2")), layout, num_workers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_may_be_cut_between_passes(layout: str) -> None:
    run_and_steps(dense.in_float64(tiny.build("llama")), layout, 3, at_a_time=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_dense_oracle_gives_the_same_for_a_run(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("HF_PARALLEL_BACKEND", "reference")
    run_and_steps(dense.in_float64(tiny.build("llama")), layout, 2)


def test_blocks_may_outgrow_their_extents_in_a_run() -> None:
    """Their places are those at its end."""
    model = dense.in_float64(tiny.build("llama"))
    steps, run = Problem(model, "combined", 2), Problem(model, "combined", 2, later=True)
    life = Life("long")
    life.begin(steps, run)
    for _ in range(3):
        own = [life.some(STEP_ROOM // 2) for _ in range(2)]
        for problem in (steps, run):
            problem.bring([(problem.space.view(worker), own[worker]) for worker in range(2)])
    run.compute(10**6)
    assert run.space.workers[0].extent.capacity > STEP_ROOM
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(steps.logits), rtol=0, atol=1e-9)


def test_a_step_keeps_its_name_when_it_has_ended_and_when_others_have_moved() -> None:
    problem = Problem(tiny.build("llama"), "combined", 2)
    cache, space = problem.cache, problem.space
    blocks = [*space.headers, *space.workers, cache.new_block()]
    assert [space.name_of(block) for block in blocks] == [
        *(f"header {i}" for i in range(4)), "worker 0", "worker 1", "reader",
    ]  # fmt: skip
    for worker in (1, 0, 1):
        cache.end_step(space, worker)
    assert [space.name_of(block) for block in space.closing] == ["step 0", "step 1", "step 2"]
    cache.settle(space)
    cache.end_step(space, 0)
    assert [space.name_of(block) for block in (*space.closing, *space.workers)] == ["step 3", "worker 0", "worker 1"]
    assert space.ended == [1, 0, 1, 0]


# Any layout


def bring_as_run(scene: Scene, passes: Sequence[Sequence[Segment]]) -> torch.Tensor:
    """Lay passes out as one, up to the point where attention begins; returns what each of them must give."""
    f, held = scene.features, {block: block.length for block in scene.cache.blocks}
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
    keys = turn(everything[..., : f.head_dim], scene.forward.position_ids, f.rotary)
    scene.cache.arena.write(0, keys, everything[..., f.head_dim :].contiguous(), scene.forward.plan)
    scene.cache.commit()
    return torch.cat(truths)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(scene=scenes(), data=st.data())
def test_every_query_of_a_run_sees_what_its_own_pass_had(scene: Scene, data: st.DataObject) -> None:
    """Trees, workers and views of any kind, under windows, sinks and soft-capping; some tokens are asked again."""
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
    expected = bring_as_run(scene, passes)
    for backend in (torch_attention.block_attention, reference.block_attention):
        torch.testing.assert_close(scene.attend(backend, torch.float64), expected, rtol=0, atol=1e-11)
    out = scene.attend(torch_attention.block_attention, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


# The cache alone


def passes_of(block: Block, other: Block) -> list[list[Segment]]:
    return [
        [Segment([block], 3)],
        [Segment([block, other], 2), Segment([block], 1)],
        [Segment([block], 2, write=False), Segment([other], 1)],
    ]


def test_a_run_stores_what_its_passes_bring_and_packs_them_in_order() -> None:
    cache = new_cache()
    block, other = cache.new_block(), cache.new_block(base=10)
    append(cache, ([block], [1, 2]))
    forward = cache.prepare_run(passes_of(block, other))
    assert forward.num_passes == 3
    assert forward.position_ids.tolist() == [2, 3, 4, 10, 11, 5, 4, 5, 12]
    assert forward.last_tokens == [2, 4, 5, 7, 8]
    assert not forward.is_decode_step
    assert (block.length, other.length) == (6, 3)


def test_a_run_that_fails_is_taken_back_as_a_whole() -> None:
    cache = new_cache()
    block, other = cache.new_block(), cache.new_block()
    append(cache, ([block], [1, 2]))
    cache.prepare_run(passes_of(block, other))
    cache.rollback()
    assert (block.length, other.length) == (2, 0)
    append(cache, ([block], [3]), ([block, other], [4]))
    assert_holds(cache, block, [1, 2, 3])
    assert_holds(cache, other, [4])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_run_with_a_pass_without_sense_leaves_the_cache_as_it_was(number: int) -> None:
    cache = new_cache()
    block, other = cache.new_block(), cache.new_block()
    append(cache, ([block], [1, 2]))
    passes = passes_of(block, other)
    for wrong in ([Segment([block], 0)], [Segment([block], 9, write=False)], [Segment([other], 1)] * 2):
        with pytest.raises(ValueError, match="segment"):
            cache.prepare_run([*passes[:number], wrong, *passes[number:]])
        assert (block.length, other.length) == (2, 0)
    with pytest.raises(ValueError, match="at least one pass"):
        cache.prepare_run([])


def test_tokens_of_an_earlier_pass_of_the_run_may_be_asked_again() -> None:
    cache = new_cache()
    block = cache.new_block()
    forward = cache.prepare_run([[Segment([block], 3)], [Segment([block], 3, write=False)]])
    assert forward.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="ask more tokens"):
        cache.prepare_run([[Segment([block], 1)], [Segment([block], 5, write=False)]])


def test_stock_attention_cannot_compute_a_run() -> None:
    cache = BlockCache()
    block = cache.new_block()
    cache.prepare_run([[Segment([block], 1)], [Segment([block], 1)]])
    states = unrotated([1, 2])[None]
    with pytest.raises(ValueError, match="needs block attention"):
        cache.update(states, states, 0)
    cache.rollback()
    assert block.length == 0

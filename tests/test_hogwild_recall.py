"""Hogwild! over a LogitsCache: problems replay what their workers have been through, and go on as they would have."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from transformers import StoppingCriteria
from workers import SETTINGS, small_model

import hf_parallel
from hf_parallel import Hotspot, LogitsCache
from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.hogwild import LAYOUTS
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.rows import Group

pytestmark = pytest.mark.usefixtures("one_thread")

PASSES = 13
PROMPTS = tiny.make_prompts([23, 11], seed=3)
BATCH, MASK = tiny.left_pad(PROMPTS)
WORDY: dict[str, Any] = {
    "separator": "a",
    "sentence_ends": [chr(c) for c in range(33, 127)],
    "sequence_bias": [[[ord("a")], 6.0]],
    "redundancy_interval": 15,
    "redundancy_prompt": "Again? ",
}
"""Settings under which the tiny model, which writes letters at random, ends steps now and then."""


def write(ids: torch.Tensor = BATCH, model: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {"max_new_tokens": PASSES, "do_sample": True, "temperature": 0.4, "seed": 0}
    given |= {"num_workers": 2, "return_dict_in_generate": True, "finisher_tokens": 3, **SETTINGS, **WORDY}
    given |= {"attention_mask": MASK} if ids is BATCH else {}
    return (model or small_model()).generate(ids, generation_mode="hogwild", **(given | settings))


_written: dict[str, Any] = {}


def plain(ids: torch.Tensor = BATCH, **settings: Any) -> Any:
    """What is written without a cache; the same settings again give what they gave before."""
    key = f"{ids.tolist()} {sorted(settings.items())}"
    if key not in _written:
        _written[key] = write(ids, **settings)
    return _written[key]


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for name in ("history", "texts", "answers", "conclusions", "transcripts"):
        assert getattr(one, name) == getattr(other, name)
    assert one.stats.decoded_tokens == other.stats.decoded_tokens


# Replay


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_again_writes_the_same_without_a_forward_pass(layout: str, num_workers: int) -> None:
    cache, settings = LogitsCache(), {"layout": layout, "num_workers": num_workers}
    expected = plain(**settings)
    cold = write(logits_cache=cache, **settings)
    warm = write(logits_cache=cache, **settings)
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert cold.stats.replayed_tokens == 0
    assert (warm.stats.forward_passes, warm.stats.prefilled_tokens) == (0, 0)
    assert warm.stats.replayed_tokens == warm.stats.decoded_tokens
    assert len([step for history in expected.history for step in history if step.forward_pass]) > 4


@pytest.mark.parametrize(
    ("layout", "num_workers"), [("combined", 2), ("combined", 3), ("interleaved", 3), ("contiguous", 2)]
)
def test_another_seed_leaves_what_is_remembered_and_goes_on_exactly(layout: str, num_workers: int) -> None:
    cache, settings = LogitsCache(), {"layout": layout, "num_workers": num_workers}
    replayed = left = 0
    for seed in range(4):
        out, expected = write(logits_cache=cache, seed=seed, **settings), plain(seed=seed, **settings)
        assert_same(out, expected)
        assert out.stats.forward_passes <= expected.stats.forward_passes
        replayed += out.stats.replayed_tokens
        left += 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
    assert replayed > 0
    assert left > 0


def test_steps_that_end_in_what_is_replayed_are_moved_when_it_has_been_computed() -> None:
    cache = LogitsCache()
    short = write(logits_cache=cache, max_new_tokens=10, finisher_tokens=0)
    assert any(step.forward_pass for step in short.history[0])
    longer = write(logits_cache=cache, finisher_tokens=0)
    assert_same(longer, plain(finisher_tokens=0))
    assert longer.stats.replayed_tokens == short.stats.decoded_tokens
    assert longer.stats.forward_passes == 1 + PASSES - 10  # the prompts; all that was replayed goes into the first pass
    assert len(longer.past_key_values.blocks) == len(plain(finisher_tokens=0).past_key_values.blocks)


def test_what_was_replayed_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, runs = LogitsCache(), []
    short = write(logits_cache=cache, max_new_tokens=10, finisher_tokens=0)
    prepare_run = BlockCache.prepare_run

    def noted(self: BlockCache, passes: Any) -> Any:
        runs.append([sum(segment.num_tokens for segment in segments) for segments in passes])
        return prepare_run(self, passes)

    monkeypatch.setattr(BlockCache, "prepare_run", noted)
    out = write(logits_cache=cache, finisher_tokens=0, prefill_chunk_size=30)
    assert_same(out, plain(finisher_tokens=0))
    assert out.stats.replayed_tokens == short.stats.decoded_tokens
    assert len(runs) > 1
    assert all(sum(run) <= 30 for run in runs)


def test_each_problem_of_a_batch_replays_for_itself() -> None:
    cache = LogitsCache()
    write(PROMPTS[0][None], logits_cache=cache)
    both, expected = write(logits_cache=cache), plain()
    assert_same(both, expected)
    alone = plain(PROMPTS[0][None])
    assert both.stats.replayed_tokens == alone.stats.decoded_tokens
    assert both.stats.prefilled_tokens == expected.stats.prefilled_tokens - alone.stats.prefilled_tokens


def test_several_notebooks_of_one_problem_replay_side_by_side() -> None:
    cache, ids = LogitsCache(), PROMPTS[0][None]
    for seed in range(2):
        settings = {"num_return_sequences": 3, "seed": seed}
        assert_same(write(ids, logits_cache=cache, **settings), plain(ids, **settings))
    assert write(ids, logits_cache=cache, **settings).stats.forward_passes == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 12, "eos_token_id": [ord("e"), ord("t")]},
        {"eos_token_id": [ord("e"), ord("t"), ord("o")], "stop_on_answer": "all"},
        {"do_sample": False},
        {"prefill_chunk_size": 8},
        {"output_logits": True, "output_scores": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_whatever_decides_on_tokens_does_so_in_replays_too(settings: dict[str, Any]) -> None:
    cache, replayed = LogitsCache(), 0
    for seed in (0, 1, 0):
        out, expected = write(logits_cache=cache, seed=seed, **settings), plain(seed=seed, **settings)
        assert_same(out, expected)
        replayed += out.stats.replayed_tokens
        for name in ("logits", "scores"):
            for one, other in zip(getattr(out, name) or (), getattr(expected, name) or (), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert out.stats.forward_passes == 0
    assert replayed > 0


def test_calls_that_end_workers_differently_share_states_and_never_mistake_them() -> None:
    """A worker that has left brings nothing, so that other tokens take the places of its own."""
    cache = LogitsCache()
    ends: list[Any] = [None, [ord("e")], [ord("t"), ord("o")], [ord("s")]]
    for eos in ends:
        settings = {"eos_token_id": eos, "pad_token_id": tiny.PAD}
        assert_same(write(logits_cache=cache, **settings), plain(**settings))
    assert cache.hits > 0


class StopsAt(StoppingCriteria):
    """Ends the rows that are as long as it says."""

    keeps_rows = False

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] == self.length)


def test_a_worker_that_a_criterion_ends_is_not_taken_for_one_that_goes_on() -> None:
    cache = LogitsCache()
    lengths = [BATCH.shape[1] + extra for extra in (13, 15, 17, 10**6)]
    for length in lengths:
        given = {"finisher_tokens": 0, "num_workers": 3}
        stopped = write(logits_cache=cache, stopping_criteria=[StopsAt(length)], **given)
        assert_same(stopped, write(stopping_criteria=[StopsAt(length)], **given))
    assert cache.hits > 0


def test_hotspots_alone_are_drawn_where_the_policy_says_so() -> None:
    cache = LogitsCache()
    first = write(logits_cache=cache)
    kept = write(logits_cache=cache, seed=5, replay=Hotspot(threshold=1e9))
    assert_same(kept, first)
    assert kept.stats.forward_passes == 0
    drawn = write(logits_cache=cache, seed=5, replay=Hotspot(threshold=0.0))
    assert_same(drawn, plain(seed=5))
    some = [write(logits_cache=copy.copy(cache), seed=7, replay="hotspot") for _ in range(2)]
    assert_same(*some)


@pytest.mark.parametrize("policy", [Hotspot(threshold=3.0), Hotspot(top_k=1)], ids=["threshold", "top_k"])
def test_hotspots_replay_more_than_stepwise(policy: Hotspot) -> None:
    replayed = []
    for replay in ("stepwise", policy):
        cache = LogitsCache()
        stats = [write(logits_cache=cache, seed=seed, replay=replay, temperature=1.0).stats for seed in range(4)]
        replayed.append(sum(one.replayed_tokens for one in stats[1:]))
    assert replayed[1] > 1.5 * replayed[0]


# What answers, and what does not


@pytest.mark.parametrize(
    "other",
    [
        {"own_header": "[I]"},
        {"history_header": ""},
        {"layout": "contiguous"},
        {"layout": "interleaved"},
        {"num_workers": 3},
        {"worker_names": ["Ann", "Bob"]},
        {"step_prefix": "{name} {step}; "},
    ],
    ids=str,
)
def test_states_of_other_settings_never_answer(other: dict[str, Any]) -> None:
    cache = LogitsCache()
    write(logits_cache=cache)
    hits = cache.hits
    out = write(logits_cache=cache, **other)
    assert (cache.hits, out.stats.replayed_tokens) == (hits, 0)
    assert_same(out, plain(**other))


def test_states_of_another_model_or_prompt_never_answer() -> None:
    cache = LogitsCache()
    write(logits_cache=cache)
    hits = cache.hits
    other = hf_parallel.enable(copy.deepcopy(tiny.build("llama", seed=1)))
    assert_same(write(logits_cache=cache, model=other), write(model=other))
    prompt = tiny.make_prompts([11], seed=9)[0][None]
    assert_same(write(prompt, logits_cache=cache), plain(prompt))
    assert cache.hits == hits


def test_a_cache_serves_several_modes() -> None:
    cache = LogitsCache()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 0, "return_dict_in_generate": True}
    expected = small_model().generate(BATCH, attention_mask=MASK, generation_mode="shared_prefix", **settings)
    for _ in range(2):
        assert_same(write(logits_cache=cache), plain())
        out = small_model().generate(
            BATCH, attention_mask=MASK, generation_mode="resample", logits_cache=cache, **settings
        )
        assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.forward_passes == 0


def test_where_something_was_forgotten_it_is_computed_and_the_replay_goes_on() -> None:
    """Also where it is still known what follows for one of the workers."""
    cache = LogitsCache()
    write(logits_cache=cache)
    known = sorted((state for _, state in cache._states() if state.logits is not None), key=lambda state: state.used)
    for state in known[5::7]:
        state.logits = None
    out = write(logits_cache=cache)
    assert_same(out, plain())
    assert 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
    assert write(logits_cache=cache).stats.forward_passes == 0


@pytest.mark.parametrize("max_bytes", [1, 60_000])
def test_a_cache_without_room_changes_nothing(max_bytes: int) -> None:
    cache = LogitsCache(max_bytes)
    for seed in (0, 1, 0):
        assert_same(write(logits_cache=cache, seed=seed), plain(seed=seed))
    assert cache.num_bytes <= max_bytes


def test_a_cache_may_be_saved_and_loaded(tmp_path: Any) -> None:
    cache = LogitsCache()
    write(logits_cache=cache)
    cache.save(tmp_path / "logits.safetensors")
    out = write(logits_cache=LogitsCache.load(tmp_path / "logits.safetensors"))
    assert out.stats.forward_passes == 0


# Around it


def test_a_run_of_replayed_passes_that_fails_leaves_model_and_cache_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LogitsCache()
    write(logits_cache=cache, max_new_tokens=10)
    prepare_run = BlockCache.prepare_run

    def broken(self: BlockCache, passes: Any) -> Any:
        prepare_run(self, passes)
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(BlockCache, "prepare_run", broken)
        with pytest.raises(MemoryError):
            write(logits_cache=cache)
    assert small_model().config._attn_implementation != "hf_parallel"
    out = write(logits_cache=cache)
    assert out.stats.replayed_tokens > 0
    assert_same(out, plain())


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def write_row(self, row: int, text: str, event: str) -> None:
        self.heard.append((row, text, event))

    def end(self) -> None:
        self.heard.append("end")


def test_a_streamer_hears_the_same_of_what_is_replayed() -> None:
    cache, heard = LogitsCache(), []
    for settings in ({}, {"logits_cache": cache}, {"logits_cache": cache}):
        listener = Listener()
        write(streamer=listener, **settings)
        heard.append(listener.heard)
    assert heard[0] == heard[1] == heard[2]


def test_stats_say_what_was_computed() -> None:
    cache = LogitsCache()
    write(logits_cache=cache, max_new_tokens=10, finisher_tokens=0)
    expected, out = plain(finisher_tokens=0), write(logits_cache=cache, finisher_tokens=0)
    replayed = out.stats.replayed_tokens
    rows = out.sequences.shape[0]
    # What was replayed is prefilled, but for the last token of each row, which the next pass brings.
    assert out.stats.prefilled_tokens == expected.stats.prefilled_tokens + replayed - rows
    assert out.stats.kv_bytes == expected.stats.kv_bytes
    assert out.stats.prefill_seconds > 0
    assert out.stats.decode_seconds > 0


def test_no_second_is_counted_as_prefill_and_as_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, run = LogitsCache(), DecodeLoop.run
    write(logits_cache=cache, max_new_tokens=10)

    def slow(*given: Any) -> torch.Tensor:
        time.sleep(0.03)
        return run(*given)

    monkeypatch.setattr(DecodeLoop, "run", slow)
    began = time.perf_counter()
    stats = write(logits_cache=cache).stats
    assert stats.prefill_seconds >= 2 * 0.03  # the prompts, and what was replayed
    assert 0.03 * stats.forward_passes <= stats.prefill_seconds + stats.decode_seconds <= time.perf_counter() - began


def test_prefetch_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch must be None or False for hogwild"):
        write(prefetch=True)


# States of a group


class Pair(Group):
    """Two rows, of which the tests say where their tokens go and what has changed."""

    def __init__(self, beginning: object = 0) -> None:
        super().__init__(beginning)
        self.places, self.changed = ["left", "right"], 0

    def describe(self, brought: Any) -> tuple[list[str], object]:
        return self.places[: len(brought)], self.changed

    def bring(self, *runs: Sequence[int]) -> list[int]:
        brought = [(Segment([], len(tokens)), tokens) for tokens in runs]
        return self.visit(brought, range(len(brought)))


def test_a_state_is_all_that_was_brought_to_it_and_nothing_else() -> None:
    def visit(
        beginning: object = 0,
        before: Sequence[int] = (1,),
        tokens: Sequence[int] = (2, 3),
        places: tuple[str, ...] = ("left", "right"),
        changed: int = 0,
    ) -> list[int]:
        pair = Pair(beginning)
        pair.bring(before, (9,))
        pair.places, pair.changed = list(places), changed
        return pair.bring(tokens, (4,))

    states = [
        visit(),
        visit(beginning=1),
        visit(before=(1, 2), tokens=(3,)),
        visit(before=(5,)),
        visit(tokens=(2, 5)),
        visit(tokens=(23,)),
        visit(places=("left", "step")),
        visit(places=("right", "left")),
        visit(changed=1),
    ]
    assert visit() == states[0]
    names = [name for state in states for name in state]
    assert len(set(names)) == len(names), "each row of each group has a state of its own"
    assert all(-(2**63) <= name < 0 for name in names), "no token, and what a file can hold"

"""Prefetch: distributions of later replays are computed while the model decodes, and samples do not change."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.cache.logits_trie import CachedDistribution, TrieNode
from hf_parallel.generation.resampling.distributions import DistributionCache
from hf_parallel.generation.resampling.policies import uncertainty_of
from hf_parallel.generation.resampling.prefetch import Prefetcher
from hf_parallel.generation.sampling import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 12
INPUT_IDS, ATTENTION_MASK = tiny.left_pad(tiny.make_prompts([24, 20, 11], seed=8))
CUT = {"top_p": 0.7}


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model ran on a GPU: the decoding thread leaves nothing behind."""
    monkeypatch.setattr("hf_parallel.generation.resampling.distributions.HOST", ())


class Pause(BaseStreamer):
    """Gives the background time after every token, as a large model would, and looks who works there.

    It waits for what is said to happen `until` then, but not for ever.
    """

    def __init__(self, until: Callable[[], bool] = lambda: True) -> None:
        self.until, self.seen, self.patience = until, set[int](), 1000

    def put(self, value: torch.Tensor) -> None:
        self.seen |= {id(thread) for thread in workers()}
        time.sleep(0.003)
        while workers() and not self.until() and self.patience:
            self.patience -= 1
            time.sleep(0.003)

    def end(self) -> None:
        pass


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_parallel prefetch"]


def sample(model: PreTrainedModel, cache: LogitsCache | None, **settings: Any) -> torch.Tensor:
    defaults: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "max_new_tokens": NEW, "seed": 0, "top_k": 0}
    defaults |= {"attention_mask": ATTENTION_MASK, "pad_token_id": 0, "eos_token_id": 5}
    if cache is not None:
        defaults |= {"generation_mode": "resample", "logits_cache": cache}
    defaults.setdefault("generation_mode", "shared_prefix")
    return model.generate(**({"inputs": INPUT_IDS} | defaults | settings))  # type: ignore[operator]


def known(cache: LogitsCache) -> list[TrieNode]:
    return [state for _, state in cache.nodes() if state.logits is not None]


def prepared(cache: LogitsCache) -> list[TrieNode]:
    return [state for state in known(cache) if state.distribution is not None]


def count_weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows whose distributions the decoding thread computes from now on."""
    counts: list[int] = []
    warp = TopPLogitsWarper.__call__

    def counting(self: TopPLogitsWarper, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() not in workers():
            counts.append(len(scores))
        return warp(self, ids, scores)

    monkeypatch.setattr(TopPLogitsWarper, "__call__", counting)
    return counts


# What it is for


@pytest.mark.usefixtures("elsewhere")
def test_a_replay_costs_one_draw_where_the_background_was_ahead(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LogitsCache()
    first = sample(model, cache, prefetch=True, streamer=Pause(lambda: prepared(cache) == known(cache)), **CUT)
    assert prepared(cache) == known(cache)
    weighed = count_weighed(monkeypatch)
    assert torch.equal(sample(model, cache, **CUT), first)
    assert weighed == []


def test_what_was_drawn_from_on_the_host_is_kept_without_it(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LogitsCache()
    first = sample(model, cache, **CUT)
    assert prepared(cache) == known(cache) != []
    weighed = count_weighed(monkeypatch)
    assert torch.equal(sample(model, cache, **CUT), first)
    assert weighed == []


@pytest.mark.usefixtures("elsewhere")
def test_what_a_replay_had_to_work_out_is_kept_too(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LogitsCache()
    first = sample(model, cache, **CUT)
    assert prepared(cache) == []
    weighed = count_weighed(monkeypatch)
    assert torch.equal(sample(model, cache, **CUT), first)
    assert sum(weighed) == len(prepared(cache)) == len(known(cache))
    weighed.clear()
    assert torch.equal(sample(model, cache, **CUT), first)
    assert weighed == []


def test_uncertainty_is_known_before_a_route_asks_for_it(model: PreTrainedModel) -> None:
    cache = LogitsCache()
    pause = Pause(lambda: all(state.uncertainty is not None for state in known(cache)))
    sample(model, cache, replay="hotspot", prefetch=True, streamer=pause)
    assert len(known(cache)) > NEW
    assert all(state.uncertainty == uncertainty_of(state.logits.to_dense()) for state in known(cache) if state.logits)
    assert prepared(cache) == []


@pytest.mark.usefixtures("elsewhere")
def test_the_likeliest_states_come_first(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LogitsCache()
    for seed in range(8):
        sample(model, cache, seed=seed, temperature=1.0, top_k=8)
    visited: list[TrieNode] = []
    keep = DistributionCache.store

    def noting(
        self: DistributionCache, state: TrieNode, length: int, shares: torch.Tensor
    ) -> CachedDistribution | None:
        if threading.current_thread() in workers():
            visited.append(state)
        return keep(self, state, length, shares)

    monkeypatch.setattr(DistributionCache, "store", noting)
    before = set(known(cache))
    pause = Pause(lambda: len(visited) > 20)
    sample(model, cache, seed=99, temperature=1.0, top_k=7, prefetch=True, streamer=pause)
    shares = [likelihood(state) for state in visited if state in before]
    assert len(shares) > 10
    assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(shares))
    assert min(shares) > 0  # no work for what cannot be drawn any more


def likelihood(state: TrieNode) -> float:
    """Probability of the tokens that lead to a state from the last one without a distribution."""
    parent = state.parent
    if parent is None or parent.distribution is None:
        return 1.0
    return likelihood(parent) * parent.distribution.prob(state.token)


# It changes nothing


SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_k": 4, "min_new_tokens": NEW},
    {"min_p": 0.1, "seed": [3, 4, 5]},
    {"typical_p": 0.6},
    {"repetition_penalty": 1.3, "top_p": 0.8},
]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("replay", ["stepwise", "hotspot"])
def test_samples_are_the_same_with_and_without(model: PreTrainedModel, replay: str) -> None:
    """Settings change from call to call, and come back, on one cache."""
    ahead, behind = LogitsCache(), LogitsCache()
    for number in range(12):
        settings = {"seed": number // 6, "replay": replay} | SETTINGS[number % 6]
        ours = sample(model, ahead, prefetch=True, streamer=Pause(), **settings)
        assert torch.equal(ours, sample(model, behind, prefetch=False, **settings)), settings
        if replay == "stepwise":
            assert torch.equal(ours, sample(model, None, **settings)), settings
    assert len(prepared(ahead)) > 30


def test_what_is_kept_on_the_host_changes_no_sample(model: PreTrainedModel) -> None:
    cache = LogitsCache()
    for number in range(12):
        settings = {"seed": number // 6} | SETTINGS[number % 6]
        assert torch.equal(sample(model, cache, **settings), sample(model, None, **settings)), settings
    assert prepared(cache)


@pytest.mark.usefixtures("elsewhere")
def test_samples_of_the_global_generator_are_the_same_too(model: PreTrainedModel) -> None:
    caches, found = [LogitsCache(), LogitsCache(), None], []
    for cache in caches:
        torch.manual_seed(3)
        more = {} if cache is None else {"prefetch": cache is caches[0]}
        found.append([sample(model, cache, seed=None, streamer=Pause(), **CUT, **more) for _ in range(3)])
    for ahead, behind in zip(*found[:2], strict=True):
        assert torch.equal(ahead, behind)
    assert torch.equal(found[0][0], found[2][0])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("settings", SETTINGS[:4], ids=lambda settings: next(iter(settings)))
def test_what_is_worked_out_ahead_is_what_a_replay_works_out(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Bit for bit, whatever shares the batch."""
    ahead, behind = LogitsCache(), LogitsCache()
    sample(
        model, ahead, prefetch=True, streamer=Pause(lambda: len(prepared(ahead)) >= len(known(ahead)) // 2), **settings
    )
    for _ in range(2):
        sample(model, behind, **settings)
    pairs = [pair for pair in zip(known(ahead), known(behind), strict=True) if all(s.distribution for s in pair)]
    assert len(pairs) >= NEW
    for one, other in pairs:
        assert one.distribution is not None
        assert other.distribution is not None
        assert one.distribution.settings == other.distribution.settings
        assert torch.equal(one.distribution.ids, other.distribution.ids)
        assert torch.equal(one.distribution.probs, other.distribution.probs)


def test_a_prompt_that_was_padded_before_counts_its_own_length(model: PreTrainedModel) -> None:
    """The same states, under a minimum that counts padding too."""
    settings = {"top_k": 4, "min_length": INPUT_IDS.shape[1] + 4, "eos_token_id": list(range(3, 128, 2))}
    alone = {"inputs": INPUT_IDS[2:, -11:], "attention_mask": None, "seed": [2], "max_new_tokens": 2 * NEW}
    assert ATTENTION_MASK[2].sum() == 11
    cache, found = LogitsCache(), []
    for _ in range(2):
        sample(model, cache, seed=[0, 1, 2], prefetch=True, streamer=Pause(), **settings)
        found.append(sample(model, cache, **settings, **alone))
    plain = sample(model, None, **settings, **alone)
    assert plain.shape[1] > INPUT_IDS.shape[1] + 3  # ended no earlier than it may
    assert all(torch.equal(plain, ours) for ours in found)


class Bump(LogitsProcessor):
    """Somebody's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (input_ids[:, -1:] % 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"typical_p": 0.6},
        {"logits_processor": LogitsProcessorList([Bump()])},
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": False},
    ],
    ids=["repetition_penalty", "no_repeat_ngram_size", "typical_p", "own", "scores", "greedy"],
)
def test_nothing_is_kept_that_hangs_on_more_than_logits(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    cache = LogitsCache()
    for _ in range(2):
        sample(model, cache, prefetch=True, streamer=Pause(), **CUT, **settings)
    assert prepared(cache) == []


def test_a_softmax_over_everything_is_not_kept(model: PreTrainedModel) -> None:
    cache, pause = LogitsCache(), Pause()
    sample(model, cache, prefetch=True, streamer=pause)
    assert prepared(cache) == []
    assert not pause.seen  # nothing to do, no thread


# What it takes


def test_it_is_off_on_the_host_unless_asked_for(model: PreTrainedModel) -> None:
    for prefetch, runs in ((None, False), (False, False), (True, True)):
        pause = Pause()
        sample(model, LogitsCache(), prefetch=prefetch, streamer=pause, **CUT)
        assert bool(pause.seen) == runs
        assert workers() == []


@pytest.mark.parametrize("prefetch", ["yes", 1, []])
def test_another_setting_is_refused(model: PreTrainedModel, prefetch: Any) -> None:
    with pytest.raises(ValueError, match=r"prefetch must be True, False or None, got"):
        sample(model, LogitsCache(), prefetch=prefetch)


@pytest.mark.usefixtures("elsewhere")
def test_no_thread_outlives_a_call(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution_ahead = Sampler.distribution_ahead

    def slow(self: Sampler, logits: torch.Tensor, length: int) -> torch.Tensor:
        time.sleep(0.2)
        return distribution_ahead(self, logits, length)

    monkeypatch.setattr(Sampler, "distribution_ahead", slow)
    sample(model, LogitsCache(), prefetch=True, **CUT)
    assert workers() == []


def test_no_thread_outlives_a_call_that_fails(model: PreTrainedModel) -> None:
    cache, pause = LogitsCache(), Pause()

    def fail(value: torch.Tensor) -> None:
        Pause.put(pause, value)
        if pause.seen:
            raise KeyboardInterrupt

    interrupted = Pause()
    interrupted.put = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        sample(model, cache, prefetch=True, streamer=interrupted, **CUT)
    assert pause.seen
    assert workers() == []
    assert torch.equal(sample(model, cache, prefetch=True, **CUT), sample(model, None, **CUT))


@pytest.mark.usefixtures("elsewhere")
def test_an_error_in_the_background_is_told_once_and_costs_no_sample(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Sampler, logits: torch.Tensor, length: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Sampler, "distribution_ahead", fail)
    with caplog.at_level(logging.WARNING):
        pause = Pause(lambda: "out of memory" in caplog.text)
        ours = sample(model, LogitsCache(), prefetch=True, streamer=pause, **CUT)
    assert [record.message for record in caplog.records if "out of memory" in record.message] == [
        "prefetch has stopped; replays compute their distributions themselves: out of memory"
    ]
    assert torch.equal(ours, sample(model, None, **CUT))


@pytest.mark.usefixtures("elsewhere")
def test_its_bytes_are_counted_and_the_budget_is_held(model: PreTrainedModel) -> None:
    roomy = LogitsCache()
    sample(model, roomy, prefetch=True, streamer=Pause(lambda: bool(prepared(roomy))), **CUT)
    assert prepared(roomy)
    assert counted(roomy) == roomy.num_bytes
    small = LogitsCache(roomy.num_bytes // 2)
    for seed in range(4):
        sample(model, small, seed=seed, prefetch=True, streamer=Pause(), **CUT)
        assert counted(small) == small.num_bytes <= small.max_bytes
    assert prepared(small)


def counted(cache: LogitsCache) -> int:
    return sum(state.num_bytes for _, state in cache.nodes() if state.parent is not None)


@pytest.mark.usefixtures("elsewhere")
def test_work_is_bounded(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_parallel.generation.resampling.prefetch.MAX_NODES", 5)
    cache = LogitsCache()
    sample(
        model, cache, prefetch=True, streamer=Pause(lambda: len(prepared(cache)) >= min(5, len(known(cache)))), **CUT
    )
    assert len(prepared(cache)) == 5


def test_states_that_were_dropped_meanwhile_are_left_alone() -> None:
    cache = LogitsCache()
    with cache.cursors() as cursors:
        cursors.start(0, "model", [1, 2])
        cursors.store(0, torch.randn(50))
        state = cursors.node(0)
    cache.clear()
    kept = CachedDistribution.from_probs(torch.eye(50)[3], ())
    assert kept is not None
    assert not cache.store_distribution(state, kept)
    assert cache.num_bytes == 0


def test_a_thread_that_was_not_started_is_not_joined() -> None:
    distributions: Any = SimpleNamespace(enabled=False)
    prefetcher = Prefetcher(distributions, uncertainty=False)
    with prefetcher.open({}):
        prefetcher.start()
    assert workers() == []

"""Speculative decoding from cached logits: drafts change no token and are used only where they save time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from malformed_cases import TOKENIZER
from stateful import Alternate
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_parallel
from hf_parallel import LogitsCache, SharedPrefixCache
from hf_parallel.cache.logits import Cursors
from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.generation.resampling.drafts import (
    AGREED,
    CACHED,
    MAX_DRAFT_TOKENS,
    MAX_NODES,
    MAX_SAMPLING_ROWS,
    MAX_SETTINGS,
    MIN_GAIN,
    MIN_PROBABILITY,
    SAMPLED,
    NgramDrafter,
    acceptance_rates,
)
from hf_parallel.kernels.linear import LINEAR_VARIABLE, pass_cost

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 40
SHARED, *TAILS = tiny.make_prompts([20, 4, 4, 9], seed=8)
INPUT_IDS, ATTENTION_MASK = tiny.left_pad([torch.cat((SHARED, tail)) for tail in TAILS])
WIDTH = INPUT_IDS.shape[1]


class Round(LogitsProcessor):
    """Makes a row go round in a few words, most of the time, as models do that say like things again."""

    keeps_rows = False
    words = torch.tensor([10, 30, 50, 20, 60, 40, 70, 25, 35])

    def __init__(self, weight: float = 9.0) -> None:
        self.following = torch.arange(tiny.VOCAB_SIZE) % len(self.words)
        self.following[self.words] = (torch.arange(len(self.words)) + 1) % len(self.words)
        self.weight = weight

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        likely = self.words[self.following[input_ids[:, -1]]]
        return scores.scatter_add(1, likely[:, None], torch.full((len(scores), 1), self.weight))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreTrainedModel]:
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")  # costs of passes, and so drafts, are the same on all machines
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


def write(model: PreTrainedModel, rows: int = len(TAILS), mode: str = "resample", **settings: Any) -> Any:
    given: dict[str, Any] = {"attention_mask": ATTENTION_MASK[:rows], "max_new_tokens": NEW, "pad_token_id": 0}
    given |= {"logits_processor": LogitsProcessorList([Round()])}
    given |= {"do_sample": True, "temperature": 0.3, "return_dict_in_generate": True, "generation_mode": mode}
    return model.generate(INPUT_IDS[:rows], **(given | settings))  # type: ignore[operator]


@pytest.mark.parametrize(("rows", "kept"), [(1, True), (3, False), (3, True)], ids=["one row", "rows", "kept rows"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": False, "temperature": None},
        {"top_p": 0.8},
        {"repetition_penalty": 1.05},
        {"num_return_sequences": 2},
        {"eos_token_id": [3, 5, 9, 11]},
        {"replay": "hotspot"},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_drafts_change_no_token(model: PreTrainedModel, settings: dict[str, Any], rows: int, kept: bool) -> None:
    caches = [LogitsCache(), LogitsCache()]
    held = [SharedPrefixCache() if kept else None for _ in caches]
    accepted = 0
    for seed in range(3):
        with_drafts, without = (
            write(model, rows, logits_cache=cache, past_key_values=cells, seed=seed, draft_tokens=most, **settings)
            for cache, cells, most in zip(caches, held, (None, 0), strict=True)
        )
        assert torch.equal(with_drafts.sequences, without.sequences)
        assert without.stats.drafted_tokens == without.stats.accepted_tokens == 0
        assert with_drafts.stats.forward_passes <= without.stats.forward_passes
        assert with_drafts.stats.decoded_tokens == without.stats.decoded_tokens
        accepted += with_drafts.stats.accepted_tokens
    if "eos_token_id" not in settings:
        assert accepted > 0


def test_samples_are_those_of_plain_sampling(model: PreTrainedModel) -> None:
    cache = LogitsCache()
    for seed in range(3):
        out = write(model, logits_cache=cache, seed=seed)
        assert torch.equal(out.sequences, write(model, mode="shared_prefix", seed=seed).sequences)


def test_what_was_not_drawn_leaves_no_keys_and_values(model: PreTrainedModel) -> None:
    """A completion that drafts went through can be continued like another."""
    cells, cache = SharedPrefixCache(), LogitsCache()
    stats = []
    for seed in range(2):
        out = write(model, 1, logits_cache=cache, past_key_values=cells, seed=seed, temperature=0.4)
        stats.append(out.stats)
        assert out.stats.drafted_tokens > 0
    assert sum(of.drafted_tokens for of in stats) > sum(of.accepted_tokens for of in stats) > 0
    longer = torch.cat((out.sequences, INPUT_IDS[:1, :3]), dim=1)
    mask = torch.cat((ATTENTION_MASK[:1], torch.ones(1, NEW + 3, dtype=torch.long)), dim=1)
    settings: dict[str, Any] = {"generation_mode": "shared_prefix", "max_new_tokens": 12, "pad_token_id": 0}
    settings |= {"attention_mask": mask}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    again = model.generate(longer, past_key_values=cells, **settings)  # type: ignore[operator]
    fresh = model.generate(longer, **settings)  # type: ignore[operator]
    assert again.stats.prefilled_tokens <= 4
    assert torch.equal(again.sequences, fresh.sequences)
    for one, other in zip(again.logits, fresh.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_record_says_which_tokens_shared_a_pass(model: PreTrainedModel) -> None:
    out = write(model, 1, logits_cache=LogitsCache(), seed=0)
    origins = out.record.origins[0]
    assert len(origins) == NEW
    assert origins.count("d") == out.stats.accepted_tokens > 0
    assert origins.count("m") == out.record.passes
    (section,) = out.to_dict(TOKENIZER)["sections"]
    assert section["cards"][0]["end"] == out.record.passes


def test_the_first_pass_of_a_replayed_row_takes_a_draft_along(model: PreTrainedModel) -> None:
    cache, cells = LogitsCache(), SharedPrefixCache()
    along = 0
    for seed in range(12):
        out = write(model, 1, logits_cache=cache, past_key_values=cells, seed=seed)
        origins = out.record.origins[0]
        assert origins.count("m") == out.record.passes == out.stats.forward_passes
        along += re.match("r+md", origins) is not None
    assert along > 0


def test_calls_with_the_same_settings_learn_together(model: PreTrainedModel) -> None:
    cache = LogitsCache()
    for seed in range(3):  # the penalty knows each row's padding, so it is made anew for each call
        write(model, logits_cache=cache, seed=seed, repetition_penalty=1.05)
    assert len(acceptance_rates[cache]) == 1
    write(model, logits_cache=cache, seed=0, temperature=0.5)
    assert len(acceptance_rates[cache]) == 2


@pytest.mark.parametrize("length", [1, 2, 7])
def test_no_row_is_longer_than_asked(model: PreTrainedModel, length: int) -> None:
    cache = LogitsCache()
    for seed in range(4):
        out = write(model, logits_cache=cache, seed=seed, max_new_tokens=length)
        assert out.sequences.shape[1] == WIDTH + length


@pytest.mark.parametrize(
    ("settings", "drafted"),
    [
        ({}, True),
        ({"draft_tokens": 0}, False),
        ({"logits_processor": LogitsProcessorList([Alternate()])}, False),
        ({"seed": torch.Generator().manual_seed(3)}, False),
        ({"seed": None}, False),
        ({"seed": None, "do_sample": False, "temperature": None}, True),
    ],
    ids=["seed", "none", "a memory", "generator", "no seed", "greedy"],
)
def test_rows_draft_only_where_nothing_hangs_on_the_order_of_draws(
    model: PreTrainedModel, settings: dict[str, Any], drafted: bool
) -> None:
    out = write(model, logits_cache=LogitsCache(), **({"seed": 0} | settings))
    assert (out.stats.drafted_tokens > 0) == drafted


def test_a_draft_is_never_longer_than_allowed(model: PreTrainedModel) -> None:
    def longest_draft(**settings: Any) -> int:
        lengths: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        write(model, 1, logits_cache=LogitsCache(), seed=0, **settings)
        hook.remove()
        return max(lengths[1:]) - 1  # without the prefill, and without the pending token

    assert longest_draft(draft_tokens=2) == 2
    assert 2 < longest_draft() <= MAX_DRAFT_TOKENS


# The look-up


def standing(cache: LogitsCache, prompt: Sequence[int], *samples: Sequence[int]) -> Cursors:
    """A cache that holds what rows 1, 2, ... wrote behind a prompt; row 0 stands at its end."""
    cursors = Cursors(cache)
    cursors.start(0, "model", prompt)
    for row, sample in enumerate(samples, start=1):
        cursors.start(row, "model", prompt)
        for token in sample:
            cursors.advance(row, token)
    return cursors


def follow(drafts: NgramDrafter, cursors: Cursors, tokens: Sequence[int]) -> None:
    for token in tokens:
        drafts.draft(0, cursors.node(0), 2, 100)
        drafts.add(cursors.node(0))
        cursors.advance(0, token)
        drafts.observe(0, cursors.node(0))


def sure(drafts: NgramDrafter) -> NgramDrafter:
    """As if all that was looked up had been drawn so far."""
    for chance in drafts.rates.values():
        chance.proposed = chance.accepted = 1e6
    return drafts


def test_what_followed_the_same_tokens_follows_again() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3, 4, 50, 51, 52], [9, 8, 7, 6, 5], [20, 21, 22, 23])
    drafts = sure(NgramDrafter(cache))
    drafts.add_prompt(cursors.node(0))
    follow(drafts, cursors, [9, 20, 21, 22])
    assert drafts.draft(0, cursors.node(0), 2, 100) == [23], "another sample"
    follow(drafts, cursors, [1, 2, 3])
    assert drafts.draft(0, cursors.node(0), 2, 2) == [4, 50], "the prompt, as far as there is room"
    follow(drafts, cursors, [30, 31, 32, 33, 30, 31, 32])
    assert drafts.draft(0, cursors.node(0), 2, 1) == [33], "what it wrote itself"
    follow(drafts, cursors, [77, 78])
    assert drafts.draft(0, cursors.node(0), 2, 100) == [], "nothing of the kind"


def test_more_tokens_alike_go_before_fewer_and_later_ones_before_earlier() -> None:
    shared = [40, 41, 42, 43, 44]
    samples = [[10, *shared, 1], [11, *shared[-3:], 2], [12, 80, 81, 82, 3], [13, 80, 81, 82, 4]]
    cursors = standing(cache := LogitsCache(), [5, 6, 7], *samples)
    drafts = sure(NgramDrafter(cache))
    drafts.add_prompt(cursors.node(0))
    follow(drafts, cursors, [15, *shared])
    assert drafts.draft(0, cursors.node(0), 2, 1) == [1]
    follow(drafts, cursors, [14, 80, 81, 82])
    assert drafts.draft(0, cursors.node(0), 2, 1) == [4]


def test_drafts_are_given_up_where_they_are_not_drawn_and_taken_up_again() -> None:
    words = [30, 31, 32, 33, 34, 35, 36, 37]
    cursors = standing(cache := LogitsCache(), [1, 2, 3], words)
    drafts = NgramDrafter(cache)
    drafts.add_prompt(cursors.node(0))

    def offered(token: int) -> list[int]:
        """A draft behind words that it knows; then the row writes `token`."""
        follow(drafts, cursors, words[:3])
        found = drafts.draft(0, cursors.node(0), 1, 4)
        cursors.advance(0, token)
        drafts.observe(0, cursors.node(0))
        return found

    assert [bool(offered(33)) for _ in range(60)][-1], "drawn each time"
    assert not [offered(60 + i) for i in range(60)][-1], "never drawn"
    assert [offered(33) for _ in range(60)][-1], "and drawn again, which is seen without computing any"


def test_what_was_learned_is_known_to_the_next_call_with_the_same_settings() -> None:
    cache, other = LogitsCache(), LogitsCache()
    sure(NgramDrafter(cache, settings="cold"))

    def chances(of: LogitsCache, settings: str) -> set[float]:
        return {chance.value for chance in NgramDrafter(of, settings=settings).rates.values()}

    assert chances(cache, "cold") == {1.0}
    first = {0.25, 0.3, 0.5, 0.6, 0.7, 0.8}
    assert chances(cache, "hot") == chances(other, "cold") == first
    for number in range(MAX_SETTINGS - 2):
        NgramDrafter(cache, settings=number)
    assert chances(cache, "cold") == {1.0}, "what is used stays"
    for number in range(MAX_SETTINGS):
        NgramDrafter(cache, settings=-number)
    assert chances(cache, "cold") == first


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.55, 0.8, 0.99])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("linear_backend", ["native", "onednn", "torch"])
def test_the_length_of_a_draft_saves_most(chance: float, num_rows: int, linear_backend: str) -> None:
    words = list(range(30, 50))
    cursors = standing(cache := LogitsCache(), [1, 2, 3], words)
    drafts = NgramDrafter(cache, linear_backend=linear_backend)
    for of in drafts.rates.values():
        of.proposed, of.accepted = 1000.0, 1000.0 * chance
    drafts.add_prompt(cursors.node(0))
    cursors.advance(0, words[0])

    cost = partial(pass_cost, linear_backend=linear_backend)

    def saved(length: int) -> float:
        served = sum(chance**step for step in range(1, length + 1))
        return served * cost(num_rows) - (cost(num_rows * (1 + length)) - cost(num_rows))

    length = len(drafts.draft(0, cursors.node(0), num_rows, 100))
    most = max(saved(other) for other in range(MAX_DRAFT_TOKENS + 1) if chance ** (other - 1) >= MIN_PROBABILITY)
    assert saved(length) == pytest.approx(most) if length else most <= MIN_GAIN


@pytest.mark.parametrize("linear_backend", ["native", "onednn", "torch"])
def test_longer_passes_never_take_less_and_the_longest_grow_with_their_tokens(linear_backend: str) -> None:
    costs = [pass_cost(tokens, linear_backend) for tokens in range(1, 600)]
    assert costs[0] == 1.0
    assert costs == sorted(costs)
    assert pass_cost(512, linear_backend) == pytest.approx(2 * pass_cost(256, linear_backend))


def test_a_draft_goes_on_where_the_last_look_up_ends() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [40, 41, 42, 43], [50, 40, 41], [60, 42, 43, 44, 45])
    drafts = sure(NgramDrafter(cache))
    drafts.add_prompt(cursors.node(0))
    follow(drafts, cursors, [70, 50])
    assert drafts.draft(0, cursors.node(0), 1, 100) == [40, 41, 42, 43, 44, 45]
    assert drafts.draft(0, cursors.node(0), 1, 3) == [40, 41, 42]


def test_a_place_that_was_forgotten_does_not_hide_another() -> None:
    shared = [40, 41, 42]
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [10, *shared, 1], [11, *shared[1:], 2])
    drafts = sure(NgramDrafter(cache))
    drafts.add_prompt(cursors.node(0))
    follow(drafts, cursors, [15, *shared])
    assert drafts.draft(0, cursors.node(0), 1, 1) == [1]
    drafts.ngrams[tuple(shared)].children.clear()  # as when its continuation is dropped
    assert drafts.draft(0, cursors.node(0), 1, 1) == [2]


def test_a_draft_ends_where_its_text_ends() -> None:
    cursors = standing(cache := LogitsCache(), [1, 9, 30, 31, 32], [40, 41, 9], [60, 9, 50])
    drafts, endless = sure(NgramDrafter(cache, eos_token_ids=frozenset([9]))), sure(NgramDrafter(cache))
    for each in (drafts, endless):
        each.add_prompt(cursors.node(0))
    follow(drafts, cursors, [70, 40])
    assert drafts.draft(0, cursors.node(0), 1, 100) == [41, 9]
    assert len(endless.draft(0, cursors.node(0), 1, 100)) > 2


# Drawn ahead


class Said:
    """Guesses that are given."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, int, int]] = []  # row, token of the place, ahead

    def __call__(self, row: int, state: TrieNode, ahead: int) -> int | None:
        self.asked.append((row, state.token, ahead))
        return self.tokens[ahead] if ahead < len(self.tokens) else None


def test_what_would_be_drawn_is_offered_where_it_is_likelier_than_what_was_taken() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [30, 31, 32, 33], [40, 31, 50, 51], [31, 60])
    guess = Said(50, 51)
    drafts = sure(NgramDrafter(cache, predict=guess))
    drafts.add_prompt(cursors.node(0))
    follow(drafts, cursors, [70, 40, 31])
    guess.asked.clear()
    drafts.rates[2, CACHED].accepted = 0.0
    assert drafts.draft(0, cursors.node(0), 1, 2) == [50, 51], "both, by what was taken and by what would be drawn"
    drafts.rates[2, AGREED].accepted = 0.9e6
    guess.tokens = (32, 33)
    assert drafts.draft(0, cursors.node(0), 1, 2) == [32, 33], "another way on than the one that was taken"
    assert guess.asked == [(0, 31, 0), (0, 50, 1), (0, 31, 0), (0, 32, 1)]
    drafts.rates[2, CACHED].accepted, drafts.rates[2, SAMPLED].accepted = 1e6, 0.9e6
    assert drafts.draft(0, cursors.node(0), 1, 2)[0] == 50, "what was taken"


def test_both_ways_of_finding_are_learned_from_one_token() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [30, 31, 32])
    drafts = NgramDrafter(cache, predict=Said(77, 32))
    drafts.add_prompt(cursors.node(0))
    cursors.advance(0, 40)
    cursors.advance(0, 30)
    before = {key: chance.value for key, chance in drafts.rates.items()}
    drafts.draft(0, cursors.node(0), 1, 100)
    cursors.advance(0, 77)
    drafts.observe(0, cursors.node(0))
    changed = {key: chance.value - before[key] for key, chance in drafts.rates.items() if chance.value != before[key]}
    assert changed.keys() == {(1, CACHED), (1, SAMPLED)}
    assert changed[1, CACHED] < 0 < changed[1, SAMPLED]


def test_nothing_is_drawn_ahead_for_many_rows() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [30, 31, 32])
    guess = Said(31, 32)
    drafts = sure(NgramDrafter(cache, predict=guess))
    drafts.add_prompt(cursors.node(0))
    cursors.advance(0, 30)
    assert drafts.draft(0, cursors.node(0), MAX_SAMPLING_ROWS + 1, 2) == [31, 32]
    assert not guess.asked
    drafts.draft(0, cursors.node(0), MAX_SAMPLING_ROWS, 2)
    assert guess.asked


def test_the_number_of_indexed_nodes_is_bounded() -> None:
    samples = [[first, *range(10, 30)] for first in range(50, 300)]
    cursors = standing(cache := LogitsCache(), [1, 2, 3], *samples)
    drafts = sure(NgramDrafter(cache))
    drafts.add_prompt(cursors.node(0))
    indexed = {tokens[0] for tokens in drafts.ngrams if len(tokens) == 8 and tokens[0] >= 50}
    assert 299 in indexed, "the most recently used"
    assert len(indexed) <= MAX_NODES / len(samples[0]) + 2

"""Speculative decoding from cached logits: drafts change no token and are used only where they save time."""

from __future__ import annotations

import copy
import itertools
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
from hf_parallel.cache.logits import Cursors, TrieNode
from hf_parallel.generation.resampling import replay as recall
from hf_parallel.generation.resampling.drafts import (
    BOTH,
    GUESSED,
    LEAST_CHANCE,
    LEAST_GAIN,
    LONGEST,
    MOST_GUESSING,
    MOST_SETTINGS,
    TAKEN,
    NgramDrafter,
    _learned,
)
from hf_parallel.kernels import native
from hf_parallel.kernels.linear import LINEAR_VARIABLE, computed_by, pass_cost

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
    monkeypatch.setattr(recall, "computed_by", lambda model: "native")  # as long as drafts are there
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
    assert len(_learned[cache]) == 1
    write(model, logits_cache=cache, seed=0, temperature=0.5)
    assert len(_learned[cache]) == 2


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


def test_a_draft_is_never_longer_than_allowed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    find = NgramDrafter.find

    def noting(self: NgramDrafter, *args: Any) -> list[int]:
        lengths.append(len(found := find(self, *args)))
        return found

    monkeypatch.setattr(NgramDrafter, "find", noting)
    write(model, 1, logits_cache=LogitsCache(), draft_tokens=2, seed=0)
    assert max(lengths) == 2
    lengths.clear()
    write(model, 1, logits_cache=LogitsCache(), seed=0)
    assert 2 < max(lengths) <= LONGEST


# The look-up


def standing(cache: LogitsCache, prompt: Sequence[int], *samples: Sequence[int]) -> Cursors:
    """A cache that holds what rows 1, 2, ... wrote behind a prompt; row 0 stands at its end."""
    cursors = Cursors(cache)
    cursors.start(0, "model", prompt)
    for row, sample in enumerate(samples, start=1):
        cursors.start(row, "model", prompt)
        for token in sample:
            cursors.follow(row, token)
    return cursors


def follow(drafts: NgramDrafter, cursors: Cursors, tokens: Sequence[int]) -> None:
    for token in tokens:
        drafts.find(0, cursors.state(0), 2, 100)
        drafts.note(cursors.state(0))
        cursors.follow(0, token)
        drafts.see(0, cursors.state(0))


def sure(drafts: NgramDrafter) -> NgramDrafter:
    """As if all that was looked up had been drawn so far."""
    for chance in drafts._chances.values():
        chance.looked = chance.drawn = 1e6
    return drafts


def test_what_followed_the_same_tokens_follows_again() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3, 4, 50, 51, 52], [9, 8, 7, 6, 5], [20, 21, 22, 23])
    drafts = sure(NgramDrafter(cache))
    drafts.read(cursors.state(0))
    follow(drafts, cursors, [9, 20, 21, 22])
    assert drafts.find(0, cursors.state(0), 2, 100) == [23], "another sample"
    follow(drafts, cursors, [1, 2, 3])
    assert drafts.find(0, cursors.state(0), 2, 2) == [4, 50], "the prompt, as far as there is room"
    follow(drafts, cursors, [30, 31, 32, 33, 30, 31, 32])
    assert drafts.find(0, cursors.state(0), 2, 1) == [33], "what it wrote itself"
    follow(drafts, cursors, [77, 78])
    assert drafts.find(0, cursors.state(0), 2, 100) == [], "nothing of the kind"


def test_more_tokens_alike_go_before_fewer_and_later_ones_before_earlier() -> None:
    shared = [40, 41, 42, 43, 44]
    samples = [[10, *shared, 1], [11, *shared[-3:], 2], [12, 80, 81, 82, 3], [13, 80, 81, 82, 4]]
    cursors = standing(cache := LogitsCache(), [5, 6, 7], *samples)
    drafts = sure(NgramDrafter(cache))
    drafts.read(cursors.state(0))
    follow(drafts, cursors, [15, *shared])
    assert drafts.find(0, cursors.state(0), 2, 1) == [1]
    follow(drafts, cursors, [14, 80, 81, 82])
    assert drafts.find(0, cursors.state(0), 2, 1) == [4]


def test_drafts_are_given_up_where_they_are_not_drawn_and_taken_up_again() -> None:
    words = [30, 31, 32, 33, 34, 35, 36, 37]
    cursors = standing(cache := LogitsCache(), [1, 2, 3], words)
    drafts = NgramDrafter(cache)
    drafts.read(cursors.state(0))

    def offered(token: int) -> list[int]:
        """A draft behind words that it knows; then the row writes `token`."""
        follow(drafts, cursors, words[:3])
        found = drafts.find(0, cursors.state(0), 1, 4)
        cursors.follow(0, token)
        drafts.see(0, cursors.state(0))
        return found

    assert [bool(offered(33)) for _ in range(60)][-1], "drawn each time"
    assert not [offered(60 + i) for i in range(60)][-1], "never drawn"
    assert [offered(33) for _ in range(60)][-1], "and drawn again, which is seen without computing any"


def test_what_was_learned_is_known_to_the_next_call_with_the_same_settings() -> None:
    cache, other = LogitsCache(), LogitsCache()
    sure(NgramDrafter(cache, settings="cold"))

    def chances(of: LogitsCache, settings: str) -> set[float]:
        return {chance.value for chance in NgramDrafter(of, settings=settings)._chances.values()}

    assert chances(cache, "cold") == {1.0}
    first = {0.25, 0.3, 0.5, 0.6, 0.7, 0.8}
    assert chances(cache, "hot") == chances(other, "cold") == first
    for number in range(MOST_SETTINGS - 2):
        NgramDrafter(cache, settings=number)
    assert chances(cache, "cold") == {1.0}, "what is used stays"
    for number in range(MOST_SETTINGS):
        NgramDrafter(cache, settings=-number)
    assert chances(cache, "cold") == first


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.55, 0.8, 0.99])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("computed_by", ["native", "onednn", "torch"])
def test_the_length_of_a_draft_saves_most(chance: float, num_rows: int, computed_by: str) -> None:
    words = list(range(30, 50))
    cursors = standing(cache := LogitsCache(), [1, 2, 3], words)
    drafts = NgramDrafter(cache, computed_by=computed_by)
    for of in drafts._chances.values():
        of.looked, of.drawn = 1000.0, 1000.0 * chance
    drafts.read(cursors.state(0))
    cursors.follow(0, words[0])

    cost = partial(pass_cost, computed_by=computed_by)

    def saved(length: int) -> float:
        served = sum(chance**step for step in range(1, length + 1))
        return served * cost(num_rows) - (cost(num_rows * (1 + length)) - cost(num_rows))

    length = len(drafts.find(0, cursors.state(0), num_rows, 100))
    most = max(saved(other) for other in range(LONGEST + 1) if chance ** (other - 1) >= LEAST_CHANCE)
    assert saved(length) == pytest.approx(most) if length else most <= LEAST_GAIN


@pytest.mark.parametrize("computed_by", ["native", "onednn", "torch"])
def test_longer_passes_never_take_less_and_the_longest_grow_with_their_tokens(computed_by: str) -> None:
    costs = [pass_cost(tokens, computed_by) for tokens in range(1, 600)]
    assert costs[0] == 1.0
    assert costs == sorted(costs)
    assert pass_cost(512, computed_by) == pytest.approx(2 * pass_cost(256, computed_by))


def test_drafts_know_what_computes_their_passes(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    told, find = set(), NgramDrafter.find
    monkeypatch.setattr(recall, "computed_by", computed_by)
    monkeypatch.setattr(NgramDrafter, "find", lambda self, *given: told.add(self.computed_by) or find(self, *given))
    has = {"torch": True, "onednn": torch.backends.mkldnn.is_available()}
    for asked in (name for name, there in (has | {"native": has["onednn"] and not native.why_not()}).items() if there):
        monkeypatch.setenv(LINEAR_VARIABLE, asked)
        write(model, 1, logits_cache=LogitsCache())
        assert told == {asked}
        told.clear()
    assert computed_by(copy.deepcopy(model).bfloat16()) == "torch"


def test_a_draft_goes_on_where_the_last_look_up_ends() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [40, 41, 42, 43], [50, 40, 41], [60, 42, 43, 44, 45])
    drafts = sure(NgramDrafter(cache))
    drafts.read(cursors.state(0))
    follow(drafts, cursors, [70, 50])
    assert drafts.find(0, cursors.state(0), 1, 100) == [40, 41, 42, 43, 44, 45]
    assert drafts.find(0, cursors.state(0), 1, 3) == [40, 41, 42]


def test_a_place_that_was_forgotten_does_not_hide_another() -> None:
    shared = [40, 41, 42]
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [10, *shared, 1], [11, *shared[1:], 2])
    drafts = sure(NgramDrafter(cache))
    drafts.read(cursors.state(0))
    follow(drafts, cursors, [15, *shared])
    assert drafts.find(0, cursors.state(0), 1, 1) == [1]
    drafts._places[tuple(shared)].children.clear()  # as when its continuation is dropped
    assert drafts.find(0, cursors.state(0), 1, 1) == [2]


def test_a_draft_ends_where_its_text_ends() -> None:
    cursors = standing(cache := LogitsCache(), [1, 9, 30, 31, 32], [40, 41, 9], [60, 9, 50])
    drafts, endless = sure(NgramDrafter(cache, ends=frozenset([9]))), sure(NgramDrafter(cache))
    for each in (drafts, endless):
        each.read(cursors.state(0))
    follow(drafts, cursors, [70, 40])
    assert drafts.find(0, cursors.state(0), 1, 100) == [41, 9]
    assert len(endless.find(0, cursors.state(0), 1, 100)) > 2


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
    drafts = sure(NgramDrafter(cache, guess=guess))
    drafts.read(cursors.state(0))
    follow(drafts, cursors, [70, 40, 31])
    guess.asked.clear()
    drafts._chances[2, TAKEN].drawn = 0.0
    assert drafts.find(0, cursors.state(0), 1, 2) == [50, 51], "both, by what was taken and by what would be drawn"
    drafts._chances[2, BOTH].drawn = 0.9e6
    guess.tokens = (32, 33)
    assert drafts.find(0, cursors.state(0), 1, 2) == [32, 33], "another way on than the one that was taken"
    assert guess.asked == [(0, 31, 0), (0, 50, 1), (0, 31, 0), (0, 32, 1)]
    drafts._chances[2, TAKEN].drawn, drafts._chances[2, GUESSED].drawn = 1e6, 0.9e6
    assert drafts.find(0, cursors.state(0), 1, 2)[0] == 50, "what was taken"


def test_both_ways_of_finding_are_learned_from_one_token() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [30, 31, 32])
    drafts = NgramDrafter(cache, guess=Said(77, 32))
    drafts.read(cursors.state(0))
    cursors.follow(0, 40)
    cursors.follow(0, 30)
    before = {key: chance.value for key, chance in drafts._chances.items()}
    drafts.find(0, cursors.state(0), 1, 100)
    cursors.follow(0, 77)
    drafts.see(0, cursors.state(0))
    changed = {
        key: chance.value - before[key] for key, chance in drafts._chances.items() if chance.value != before[key]
    }
    assert changed.keys() == {(1, TAKEN), (1, GUESSED)}
    assert changed[1, TAKEN] < 0 < changed[1, GUESSED]


def test_nothing_is_drawn_ahead_for_many_rows() -> None:
    cursors = standing(cache := LogitsCache(), [1, 2, 3], [30, 31, 32])
    guess = Said(31, 32)
    drafts = sure(NgramDrafter(cache, guess=guess))
    drafts.read(cursors.state(0))
    cursors.follow(0, 30)
    assert drafts.find(0, cursors.state(0), MOST_GUESSING + 1, 2) == [31, 32]
    assert not guess.asked
    drafts.find(0, cursors.state(0), MOST_GUESSING, 2)
    assert guess.asked


def test_states_beyond_a_number_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_parallel.generation.resampling.drafts.MOST_STATES", 30)
    cursors = standing(cache := LogitsCache(), [1, 2, 3], *([first, *range(10, 30)] for first in range(50, 60)))
    drafts = sure(NgramDrafter(cache))
    drafts.read(cursors.state(0))
    read = {tokens[0] for tokens in itertools.chain(drafts._places) if len(tokens) == 8 and tokens[0] >= 50}
    assert 59 in read, "what was visited last"
    assert len(read) < 10

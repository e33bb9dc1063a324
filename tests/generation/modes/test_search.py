"""Search equals a naive replay that recomputes every candidate from its text, token by token, with dense attention."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForSequenceClassification
from workers import TOKENIZER, Listener

import hf_parallel
from hf_parallel import SharedPrefixCache
from hf_parallel.detokenizer import visible_text
from hf_parallel.generation.modes.final_answers import first_answer
from hf_parallel.generation.modes.search.selection import systematic
from hf_parallel.generation.sampling.rng import RowRNG, draw, mix

EVERY_SETTING: dict[str, Any] = {
    "seed": [1, 2, 3],
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "width": 3,
    "interval": 4,
    "boundary": "\n",
    "warmup": 2,
    "select": "tournament",
    "keep": 2,
    "selection_temperature": 0.5,
    "score": "confidence",
    "confidence_window": 8,
    "stop_on": "consensus",
    "consensus": 0.9,
    "probe_prompt": "So",
    "probe_tokens": 4,
    "choose": "vote",
    "answer_pattern": "[0-9]",
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {"width": 4, "interval": 3, "do_sample": True, "temperature": 0.9, "seed": 7}
"""Arguments of a short call with a tiny model."""

NEW = 14
SEED = 3
END = ord("e")
PROMPTS = tiny.make_prompts([23, 11])
BATCH, MASK = tiny.left_pad(PROMPTS)
MODELS = {name: hf_parallel.enable(copy.deepcopy(tiny.build(name))) for name in ("llama", "qwen3_5_text")}
TEMPERATURE = 0.8


def search(name: str = "llama", **arguments: Any) -> Any:
    """Return the output of a search with both prompts."""
    call = {
        "attention_mask": MASK,
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "max_new_tokens": NEW,
        "eos_token_id": END,
        "pad_token_id": tiny.PAD,
        "return_dict_in_generate": True,
        "tokenizer": TOKENIZER,
        "generation_mode": "search",
        "seed": SEED,
    }
    return MODELS[name].generate(BATCH, **call | arguments)


@dataclass(eq=False)
class Naive:
    """A candidate of the naive replay, whose every token is computed from all of its text."""

    number: int
    rng: RowRNG
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    mark: int = 0  # tokens at the last selection
    parent: int | None = None
    begin: int = 0
    places: int = 1
    outcome: str = "ended"

    @property
    def has_ended(self) -> bool:
        return len(self.tokens) == NEW or self.tokens[-1:] == [END]


class Replay:
    """The naive replay of a search of one prompt."""

    def __init__(self, plain: Any, prompt: int, config: Any) -> None:
        self.plain = plain
        self.prompt = prompt
        self.config = config
        self.rows = [Naive(k, RowRNG(mix(SEED, prompt * config.width + k))) for k in range(config.width)]
        self.racing = list(self.rows)
        self.selections = 0

    def step(self, row: Naive) -> None:
        ids = torch.cat((PROMPTS[self.prompt], torch.tensor(row.tokens, dtype=torch.int64)))
        logits = self.plain(ids[None]).logits[0, -1].float()
        token = int(draw((logits / TEMPERATURE).softmax(-1)[None], [row.rng]))
        log_probs = logits.log_softmax(-1)
        row.tokens.append(token)
        row.log_probs.append(log_probs[token].item())
        row.confidences.append(-log_probs.topk(20).values.mean().item())

    def is_paused(self, row: Naive) -> bool:
        config = self.config
        if len(row.tokens) <= config.warmup:
            return False
        begin = max(row.mark, config.warmup)
        interval = config.interval or (math.inf if config.boundary else 32)
        has_boundary = config.boundary is not None and config.boundary in TOKENIZER.decode(row.tokens[begin:])
        return len(row.tokens) - begin >= interval or has_boundary

    def score(self, row: Naive) -> float:
        if self.config.score == "log_prob":
            return fmean(row.log_probs)
        window = self.config.confidence_window
        starts = range(max(len(row.confidences) - window, 0) + 1)
        return min(fmean(row.confidences[start : start + window]) for start in starts)

    def select(self) -> None:
        config = self.config
        self.selections += 1
        racing = list(self.racing)
        scores = [self.score(row) for row in racing]
        if config.select == "systematic":
            offset = (mix(mix(SEED, self.prompt), -self.selections) % 2**53) / 2**53
            held = [row.places for row in racing]
            copies = systematic(scores, held, config.width, config.selection_temperature, offset)
        else:
            order = sorted(range(len(scores)), key=lambda k: -scores[k])[: config.num_kept]
            copies = [int(k in order) for k in range(len(scores))]
            forkable = [k for k in order if not racing[k].has_ended]
            for place in range(config.width - len(order) if forkable else 0):
                copies[forkable[place % len(forkable)]] += 1
        for row, count in zip(racing, copies, strict=True):
            if row.has_ended:
                row.places = count
            elif count:
                self.fork(row, count - 1)
            if not count:
                row.places = 0
                row.outcome = "dropped"
                self.racing.remove(row)
        for row in self.racing:
            row.mark = len(row.tokens)

    def fork(self, row: Naive, count: int) -> None:
        for rng in row.rng.fork(count):
            fork = replace(row, number=len(self.rows), rng=rng, parent=row.number, begin=len(row.tokens))
            fork.tokens = list(row.tokens)
            fork.log_probs = list(row.log_probs)
            fork.confidences = list(row.confidences)
            self.rows.append(fork)
            self.racing.append(fork)

    def run(self) -> None:
        while running := [row for row in self.racing if not row.has_ended]:
            generating = [row for row in running if not self.is_paused(row)]
            for row in generating:
                self.step(row)
            running = [row for row in running if not row.has_ended]
            if running and all(map(self.is_paused, running)):
                self.select()


def check(name: str, **arguments: Any) -> Any:
    """Compare a search with its replay; return the output."""
    cache = SharedPrefixCache()
    out = search(name, past_key_values=cache, **arguments)
    count = arguments.get("num_return_sequences", 1)
    config = hf_parallel.SearchConfig(**{key: arguments[key] for key in arguments if key != "num_return_sequences"})
    plain = tiny.build(name)
    own = 0
    held: set[tuple[int, int, int]] = set()  # prompt, candidate that has computed a token, and place of the token
    for prompt in range(2):
        replay = Replay(plain, prompt, config)
        with torch.no_grad():
            replay.run()
        tree = out.trees[prompt * count]
        assert [branch.parent for branch in tree] == [row.parent for row in replay.rows]
        assert [branch.begin for branch in tree] == [row.begin for row in replay.rows]
        hidden = out.record.hidden_tokens(TOKENIZER)
        texts = [visible_text(TOKENIZER, row.tokens[row.begin :], hidden) for row in replay.rows]
        assert [branch.text for branch in tree] == texts
        assert [branch.places for branch in tree] == [row.places for row in replay.rows]
        dropped = [branch.outcome == "dropped" for branch in tree]
        assert dropped == [row.outcome == "dropped" for row in replay.rows]
        assert out.num_selections[prompt * count] == replay.selections
        ranked = sorted(replay.racing, key=lambda row: (-replay.score(row), row.number))
        ranked += [row for row in ranked for _ in range(row.places - 1)]
        for place, row in enumerate(ranked[:count]):
            index = prompt * count + place
            new = out.sequences[index, BATCH.shape[1] : out.record.lengths[index]].tolist()
            assert new == row.tokens
            assert out.chosen[index] == row.number
            assert out.ratings[index] == pytest.approx(replay.score(row), abs=5e-5)
            assert tree[row.number].outcome == "returned"
            log_probs = out.log_probs[index, : len(new)].tolist()
            assert log_probs == pytest.approx(row.log_probs, abs=5e-5)
        own += sum(len(row.tokens) - row.begin for row in replay.rows)
        for row in replay.racing:
            for place in range(len(row.tokens) - 1):  # the last token of each is not computed
                owner = row
                while place < owner.begin - 1:
                    owner = replay.rows[owner.parent or 0]
                held.add((prompt, owner.number, place))
    assert out.stats.decoded_tokens == own
    assert out.stats.prefilled_tokens == sum(map(len, PROMPTS))  # forks cost no prefill
    kept = {node.block for node in cache.tree.nodes()}
    assert cache.pool.blocks == kept
    assert sum(node.num_cached for node in cache.tree.nodes()) == sum(map(len, PROMPTS)) + len(held)
    return out


@pytest.mark.parametrize("name", [*MODELS])
@pytest.mark.parametrize(
    "arguments",
    [
        {"width": 4, "interval": 4},
        {"width": 6, "interval": 3, "keep": 2, "num_return_sequences": 2, "warmup": 2},
        {"width": 8, "interval": 3, "select": "tournament", "score": "confidence", "confidence_window": 4},
        {"width": 5, "interval": 3, "select": "systematic", "selection_temperature": 0.5},
        {"width": 4, "boundary": "a", "interval": 6, "keep": 3},
    ],
)
def test_a_search_equals_its_naive_replay(name: str, arguments: dict[str, Any]) -> None:
    out = check(name, **arguments)
    assert any(branch.parent is not None for branch in out.trees[0])


@pytest.mark.slow
@given(
    width=st.integers(1, 7),
    interval=st.integers(1, NEW),
    boundary=st.sampled_from([None, "a", "th"]),
    warmup=st.integers(0, 5),
    select=st.sampled_from(["top", "systematic", "tournament"]),
    keep=st.integers(1, 7),
    score=st.sampled_from(["log_prob", "confidence"]),
    name=st.sampled_from([*MODELS]),
)
@settings(max_examples=25, deadline=None)
def test_random_searches_equal_their_naive_replay(
    width: int, interval: int, boundary: str | None, warmup: int, select: str, keep: int, score: str, name: str
) -> None:
    arguments = {"width": width, "interval": interval, "boundary": boundary, "warmup": warmup, "score": score}
    if select != "systematic":
        arguments["keep"] = min(keep, width)
    check(name, select=select, **arguments)


def random_search(rng: random.Random) -> dict[str, Any]:
    """Return random settings of a search."""
    width = rng.randint(1, 6)
    settings: dict[str, Any] = {
        "width": width,
        "interval": rng.randint(2, 6),
        "boundary": rng.choice([None, "a", "1"]),
        "warmup": rng.randint(0, 3),
        "select": rng.choice(["top", "systematic", "tournament"]),
        "score": rng.choice(["log_prob", "confidence"]),
        "confidence_window": rng.randint(1, 6),
        "choose": rng.choice(["best", "vote"]),
        "answer_pattern": "(?s:.)$",
    }
    if rng.random() < 0.5:
        settings |= {"stop_on": "consensus", "consensus": 0.51, "probe_prompt": "So", "probe_tokens": 2}
    return settings


def reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=MODELS["llama"].config.vocab_size,
        num_labels=1,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config).eval()


@torch.no_grad()
def test_rewards_are_those_of_the_classifier_and_shared_tokens_are_read_once() -> None:
    model = reward_model()
    reader = hf_parallel.RewardModel(model)
    text = PROMPTS[0].tolist()
    sequences = [[*text, 5, 6, 7], [*text, 5, 6, 8, 9], text, [*text, 5, 6, 7, 3]]
    for _ in range(2):
        expected = [model(torch.tensor([sequence])).logits[0, 0].item() for sequence in sequences]
        assert reader.rewards(sequences) == pytest.approx(expected, abs=1e-5)
        sequences = [[*sequence, 11] for sequence in sequences]
    with pytest.raises(ValueError, match="ForSequenceClassification of transformers, got LlamaForCausalLM"):
        hf_parallel.RewardModel(tiny.build("llama"))


@torch.no_grad()
def test_a_reward_model_ranks_the_candidates_of_a_search() -> None:
    model = reward_model()
    out = search(width=4, interval=4, select="systematic", scorer_model=model)
    for prompt, tree in enumerate(out.trees):
        new = out.sequences[prompt, BATCH.shape[1] : out.record.lengths[prompt]]
        expected = model(torch.cat((PROMPTS[prompt], new))[None]).logits[0, 0].item()
        assert out.ratings[prompt] == pytest.approx(expected, abs=1e-5)
        best = max(branch.scores[-1][1] for branch in tree if branch.outcome != "dropped")
        assert out.ratings[prompt] == best


def test_confidence_is_that_of_sampled_tokens_where_a_consensus_has_added_an_answer() -> None:
    probing = {"stop_on": "consensus", "consensus": 0.51, "probe_prompt": "So", "probe_tokens": 2}
    out = search(width=2, interval=4, keep=2, score="confidence", answer_pattern="So((?s:.))", **probing)
    plain = search(width=2, interval=4, keep=2, score="confidence")
    ended = [prompt for prompt in range(2) if "consensus" in out.record.end_reasons.values()]
    assert ended
    for prompt in ended:
        branch = out.trees[prompt][out.chosen[prompt]]
        assert branch.scores[0] == plain.trees[prompt][out.chosen[prompt]].scores[0]


@torch.no_grad()
def test_consensus_ends_a_search_with_the_greedy_answer_of_its_best_candidate() -> None:
    probing = {"stop_on": "consensus", "consensus": 0.51, "probe_prompt": "So", "probe_tokens": 2}
    pattern = "So((?s:.))"
    calls: list[int] = []

    def agree(candidate: Any) -> float:
        calls.append(len(candidate.tokens))
        return fmean(candidate.tokens)

    out = search(width=3, interval=4, keep=3, scorer=agree, answer_pattern=pattern, **probing)
    plain = tiny.build("llama")
    has_agreed = False
    for prompt in range(2):
        new = out.sequences[prompt, BATCH.shape[1] : out.record.lengths[prompt]].tolist()
        if out.record.end_reasons.get(out.record.returned[prompt] if out.record.returned else prompt) != "consensus":
            continue
        has_agreed = True
        begin = out.num_selections[prompt] * 4
        assert TOKENIZER.decode(new[begin : begin + 2]) == "So"
        ids = torch.cat((PROMPTS[prompt], torch.tensor(new[: begin + 2])))
        assert new[begin + 2] == plain(ids[None]).logits[0, -1].argmax().item()
        assert out.answers[prompt] is not None
        log_probs = out.log_probs[prompt, : len(new)]
        assert log_probs.isnan().tolist() == [False] * begin + [True] * (len(new) - begin)
    assert has_agreed
    alone = search(width=3, interval=4, keep=3, scorer=agree, answer_pattern=pattern)
    for with_probes, without in zip(out.trees, alone.trees, strict=True):
        length = len(with_probes[0].scores) - 1
        assert with_probes[0].scores[:length] == without[0].scores[:length]  # no candidate sees a probe


@given(
    candidates=st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=1, max_size=12),
    places=st.integers(1, 20),
    temperature=st.floats(0.1, 5),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_systematic_resampling_gives_each_candidate_its_share(
    candidates: list[tuple[float, int]], places: int, temperature: float, offset: float
) -> None:
    scores, held = map(list, zip(*candidates, strict=True))
    copies = systematic(scores, held, places, temperature, offset)
    weights = torch.tensor(scores, dtype=torch.float64).div(temperature).softmax(0) * torch.tensor(held)
    shares = weights / weights.sum() * places
    assert sum(copies) == places
    for count, share in zip(copies, shares.tolist(), strict=True):
        assert share - 1.0001 <= count <= share + 1.0001


def test_systematic_resampling_is_unbiased() -> None:
    """Over evenly spaced offsets, a candidate gets its share on average; one with k places is like k candidates."""
    scores = [0.3, -1.0, 2.0, 2.0, -4.0]
    held = [1, 3, 2, 1, 1]
    offsets = [(number + 0.5) / 4000 for number in range(4000)]
    copies = torch.tensor([systematic(scores, held, 8, 0.7, offset) for offset in offsets], dtype=torch.float64)
    weights = torch.tensor(scores, dtype=torch.float64).div(0.7).exp() * torch.tensor(held)
    torch.testing.assert_close(copies.mean(0), weights / weights.sum() * 8, atol=1e-3, rtol=0)


def test_infinite_scores_of_a_particle_filter_are_limits() -> None:
    inf = math.inf
    assert systematic([inf, 1.0, inf, -inf], [1, 1, 1, 1], 4, 1.0, 0.5) == [2, 0, 2, 0]
    assert systematic([-inf, -inf], [1, 1], 2, 1.0, 0.5) == [1, 1]
    assert systematic([-inf, 0.0], [1, 1], 2, 1.0, 0.5) == [0, 2]


def test_ended_candidates_of_a_particle_filter_keep_the_weight_of_all_their_places() -> None:
    """All scores are equal: with an offset of a half, every candidate keeps its places at every selection."""
    out = search(width=6, interval=2, select="systematic", scorer=lambda candidate: 0.0, eos_token_id=[*range(60)])
    for tree in out.trees:
        assert sum(branch.places for branch in tree) == 6
        assert [branch.places for branch in tree] == [1] * 6


def test_a_seed_repeats_the_searches_of_a_batch_one_by_one_and_whatever_is_returned() -> None:
    filters = {"width": 4, "interval": 3, "select": "systematic"}
    together = search(**filters, seed=[*range(8)], num_return_sequences=2)
    one_each = search(**filters, seed=[*range(8)])
    assert [tree[0] for tree in one_each.trees] == [tree[0] for tree in together.trees[::2]]
    for prompt, ids in enumerate(PROMPTS):
        seeds = [*range(4 * prompt, 4 * prompt + 4)]
        alone = MODELS["llama"].generate(
            ids[None],
            **{**filters, "generation_mode": "search", "tokenizer": TOKENIZER, "do_sample": True, "top_k": 0},
            temperature=TEMPERATURE,
            max_new_tokens=NEW,
            eos_token_id=END,
            pad_token_id=tiny.PAD,
            return_dict_in_generate=True,
            seed=seeds,
        )
        texts = [(branch.parent, branch.begin, branch.text) for branch in alone.trees[0]]
        assert texts == [(branch.parent, branch.begin, branch.text) for branch in one_each.trees[prompt]]


@pytest.mark.parametrize(
    ("pattern", "text", "begin", "expected"),
    [
        (r"(\d+)", "is 3", 0, ("3", True)),
        (r"(\d+)", "is 32.", 0, ("32", False)),
        (r"(\d+)", "2 is 3", 2, ("3", True)),
        (r"(\d+)", "2 is ", 5, None),
        (r"\\boxed\{([^}]*)\}", r"\boxed{4}", 7, ("4", False)),
        (r"\\boxed\{([^}]*)\}", r"\boxed{ }", 7, None),
        ("(yes|yes indeed)", "yes", 0, ("yes", True)),
        ("(?i)(no|yes)", "YES", 0, ("YES", False)),
        ("(?x) (yes) # no", "yes", 0, ("yes", True)),
    ],
)
def test_an_answer_may_change_until_its_pattern_can_match_no_more(
    pattern: str, text: str, begin: int, expected: tuple[str, bool] | None
) -> None:
    assert first_answer(pattern, text, begin) == expected


@torch.no_grad()
def test_a_probe_writes_its_answer_to_the_end() -> None:
    """The pattern matches one to four characters: the answer has four, or fewer if the row ends."""
    pattern = "So((?s:.){1,4})"
    probing = {"stop_on": "consensus", "probe_prompt": "So", "probe_tokens": 6}
    out = search(width=1, interval=4, answer_pattern=pattern, **probing)
    plain = tiny.build("llama")
    for prompt in range(2):
        assert out.num_selections[prompt] == 1
        new = out.sequences[prompt, BATCH.shape[1] : out.record.lengths[prompt]].tolist()
        ids = torch.cat((PROMPTS[prompt], torch.tensor([*new[:4], *map(ord, "So")])))
        written: list[int] = []
        while len(written) < 4 and written[-1:] != [END]:
            token = int(plain(ids[None]).logits[0, -1].argmax())
            ids = torch.cat((ids, torch.tensor([token])))
            written.append(token)
        assert new[6:] == [token for token in written if token != END]
        assert out.answers[prompt] == TOKENIZER.decode(new[6:])[:4]  # a token may have two characters


def test_streams_and_transcripts_show_the_tree() -> None:
    listener = Listener()
    out = search(width=4, interval=4, streamer=listener)
    assert listener.tokens[1:] == out.sequences[:, BATCH.shape[1] :].T.tolist()
    for prompt, section in enumerate(out.to_dict(TOKENIZER)["sections"]):
        tree = out.trees[prompt]
        assert len(section["columns"]) == len(tree)
        assert section["columns"][0] == f"Candidate {out.chosen[prompt] + 1}"
        drawn = {cell["id"]: cell for cell in section["tree"]["cells"]}
        assert len(drawn) == 1 + len(tree)
        column = {name: int(cell["place"].split(";")[0].split(":")[1]) for name, cell in drawn.items()}
        for index, branch in enumerate(tree):
            parent = "prompt" if branch.parent is None else f"candidate {branch.parent + 1}"
            name = f"candidate {index + 1}"
            assert column[name] == column[parent] + 1
            assert drawn[name]["outcome"] == {"returned": "selected", "dropped": "pruned"}.get(branch.outcome, "ended")
            assert drawn[name]["text"] == branch.text.strip()
    assert "dropped" in out.to_html(TOKENIZER)


def test_votes_count_the_places_of_candidates() -> None:
    out = search(width=6, interval=4, select="systematic", choose="vote", answer_pattern="(?s:.)$")
    for prompt in range(2):
        ended = [branch for branch in out.trees[prompt] if branch.outcome != "dropped"]
        assert sum(out.votes[prompt].values()) <= sum(branch.places for branch in ended) == 6
        if out.answers[prompt] is not None and out.votes[prompt]:
            assert out.votes[prompt][hf_parallel.normal_form(out.answers[prompt])] == max(out.votes[prompt].values())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"do_sample": False}, ValueError, "give do_sample=True"),
        ({"width": 2, "num_return_sequences": 3}, ValueError, "num_return_sequences must be at most width=2, got 3"),
        ({"num_return_sequences": 3}, ValueError, "num_return_sequences must be at most keep=2"),
        ({"keep": 9}, ValueError, "keep must be at most width=8, got 9"),
        ({"keep": 2, "select": "systematic"}, ValueError, "keep=2 needs select='top' or 'tournament'"),
        ({"boundary": ""}, ValueError, "boundary must be a non-empty text or None"),
        ({"consensus": 0.5}, ValueError, "consensus must be more than 0.5 and at most 1, got 0.5"),
        ({"selection_temperature": 0}, ValueError, "selection_temperature must be a positive number, got 0"),
        ({"stop_on": "consensus", "num_return_sequences": 2}, ValueError, "num_return_sequences must be 1"),
        ({"choose": "vote", "answer_pattern": ""}, ValueError, "answer_pattern must not be empty"),
        ({"scorer_model": 3}, ValueError, "a reward model must be .* got int"),
        ({"scorer": len, "scorer_model": 3}, ValueError, "scorer and scorer_model were both given"),
        ({"scorer": len, "score": "confidence"}, ValueError, "score='confidence' and scorer were both given"),
    ],
)
def test_invalid_settings_raise(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        search(**arguments)

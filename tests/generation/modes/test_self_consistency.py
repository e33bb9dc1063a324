"""Self-consistency: answers, votes, conclusions, outputs, streamers, invalid settings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from test_malformed import describe
from transformers import PreTrainedModel
from workers import TOKENIZER, Script, Scripted, encode, small_model

import hf_parallel
from hf_parallel import (
    BlockCache,
)
from hf_parallel.generation.modes import final_answers
from hf_parallel.generation.modes.final_answers import find_answer, majority, normal_form

EVERY_SETTING: dict[str, Any] = {
    "seed": [1, 2, 3],
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "replay": "hotspot",
    "prefetch": True,
    "num_answers": 3,
    "vote": "final",
    "answer_pattern": "= (\\d+)",
    "answer_header": "({number}) ",
    "conclusion_prompt": "So ",
    "conclusion_tokens": 5,
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {
    "num_answers": 3,
    "do_sample": True,
    "seed": 7,
    "answer_pattern": "[a-z]",
}
"""Arguments of a short call with a tiny model."""

EOS = tiny.EOS
PROMPTS = tiny.make_prompts([23, 11])
BATCH, MASK = tiny.left_pad(PROMPTS)
NEW = 12
TEXTS: dict[str, Any] = {"answer_header": "[{number}]", "conclusion_prompt": "So \\boxed{"}


def vote(*scripts: Script, prompts: Sequence[str] = ("P",), final: Script = "", **settings: Any) -> Any:
    """Generate with scripted answers, and `final` as the text of the conclusion."""
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {
        "num_answers": len(scripts) // len(prompts),
        "max_new_tokens": max(len(encode(script)) for script in scripts),
        "return_dict_in_generate": True,
        **TEXTS,
        **settings,
    }
    return answer(small_model(), ids, attention_mask=mask, logits_processor=[Scripted(scripts, final)], **given)


def answer(model: PreTrainedModel, ids: torch.Tensor, **settings: Any) -> Any:
    """Generate without scripts."""
    given = {"max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True, "tokenizer": TOKENIZER}
    return model.generate(ids, generation_mode="self_consistency", **{**given, **settings})  # type: ignore[operator]


def greedy(model: PreTrainedModel, ids: torch.Tensor, **settings: Any) -> Any:
    """Return the output of plain `generate` that samples with top_k=1."""
    given = {"max_new_tokens": NEW, "do_sample": True, "top_k": 1, **settings}
    return model.generate(ids, generation_mode=None, **given)  # type: ignore[operator]


# Votes


@pytest.mark.parametrize(
    ("texts", "found", "votes", "chosen"),
    [
        (["\\boxed{4}", "\\boxed{5}", "\\boxed{5}"], ["4", "5", "5"], {"4": 1, "5": 2}, 1),
        (["\\boxed{6}", "\\boxed{5}", "\\boxed{5}", "\\boxed{6}"], ["6", "5", "5", "6"], {"6": 2, "5": 2}, 0),
        (["none", "\\boxed{5}", "no"], [None, "5", None], {"5": 1}, 1),
        (["\\boxed{7}", "\\boxed{4.0}", "\\boxed{ 4}"], ["7", "4.0", " 4"], {"7": 1, "4": 2}, 1),
        (["\\boxed{1} or \\boxed{2}", "\\boxed{2}", "\\boxed{1}"], ["2", "2", "1"], {"2": 2, "1": 1}, 0),
    ],
)
def test_the_majority_wins_and_the_first_of_equals(
    texts: list[str], found: list[str | None], votes: dict[str, int], chosen: int
) -> None:
    out = vote(*([text, EOS] for text in texts))
    assert out.texts == [texts]
    assert out.found == [found]
    assert out.votes == [votes]
    assert list(out.votes[0]) == list(votes)
    assert out.chosen == [chosen]
    assert out.answers == [found[chosen]]
    assert out.conclusions == [""]
    assert out.sequences.tolist() == [[*encode("P"), *encode(texts[chosen]), EOS]]


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("42", "42"),
        ("$42$", "42"),
        ("1,234,567.50", "1234567.5"),
        ("007", "7"),
        ("-0.0", "0"),
        ("1,2,3", "1,2,3"),
        ("The  Red\nHouse.", "the red house"),
        ("\\text{Blue}", "blue"),
        ("**+42**", "42"),
        ("**a** and **b**", "**a** and **b**"),
    ],
)
def test_normal_form(answer: str, form: str) -> None:
    assert normal_form(answer) == form
    assert normal_form(form) == form


def test_a_catastrophic_pattern_is_stopped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(final_answers, "PATTERN_SECONDS", 0.05)
    assert find_answer(r"(a|aa)+$", "a" * 60 + "b") is None
    assert find_answer(r"7|(a|aa)+$", "7" + "a" * 60 + "b") is None  # the last of all matches is not known
    assert "was stopped after 0.05 s" in caplog.text


def test_weights_decide_against_the_number_of_votes() -> None:
    answers = ["1", "2", "1.0", None]
    answers = [answer and normal_form(answer) for answer in answers]
    assert majority(answers) == (0, {"1": 2, "2": 1})
    assert majority(answers, [0.25, 0.75, 0.25, 2.0]) == (1, {"1": 0.5, "2": 0.75})


# Sampling


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "lfm2"])
def test_answers_are_the_completions_of_shared_prefix(name: str) -> None:
    """With one RNG per row, as with `num_return_sequences`."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    out = answer(model, BATCH, attention_mask=MASK, num_answers=3, seed=5)
    rows = model.generate(
        BATCH,
        attention_mask=MASK,
        generation_mode="shared_prefix",
        num_return_sequences=3,
        do_sample=True,
        max_new_tokens=NEW,
        seed=5,
    )
    texts = [TOKENIZER.decode(row[BATCH.shape[1] :].tolist()) for row in rows]
    assert out.texts == [texts[:3], texts[3:]]
    assert len(set(texts)) > 2
    assert torch.equal(out.sequences, rows[[0, 3]])  # there are no final answers, so the first ones are chosen
    assert out.stats.prefilled_tokens == MASK.sum()
    assert out.stats.forward_passes == NEW


# Conclusions


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen3_5_text"])
def test_the_conclusion_equals_generate_on_the_same_text(name: str) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    wanted = {"vote": "final", "num_answers": 2, "top_k": 1, "conclusion_tokens": NEW, "output_logits": True, **TEXTS}
    out = answer(model, BATCH, attention_mask=MASK, max_new_tokens=6, **wanted)
    for row, (prompt, texts, conclusion) in enumerate(zip(PROMPTS, out.texts, out.conclusions, strict=True)):
        whole = out.sequences[row, BATCH.shape[1] - len(prompt) :]
        read, written = whole[:-NEW], whole[-NEW:]
        assert read[: len(prompt)].tolist() == prompt.tolist()
        assert TOKENIZER.decode(read[len(prompt) :].tolist()) == f"[1]{texts[0]}[2]{texts[1]}So \\boxed{{"
        plain = greedy(model, read[None], return_dict_in_generate=True, output_logits=True)
        assert torch.equal(plain.sequences[0], whole)
        assert conclusion == "So \\boxed{" + TOKENIZER.decode(written.tolist())
        ours = torch.stack([step[row] for step in out.logits])
        torch.testing.assert_close(ours, torch.stack(plain.logits)[:, 0], atol=1e-4, rtol=1e-4)


# Invalid settings


class Foreign(AsciiTokenizer):
    """Of a model with another vocabulary."""

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [tiny.VOCAB_SIZE] * len(text)}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"answer_pattern": "("}, "answer_pattern must be"),
        ({"answer_header": "{name}"}, "answer_header may hold {number}"),
        ({"do_sample": False}, "give do_sample=True"),
        ({"tokenizer": None}, "tokenizer"),
        ({"vote": "final", "min_new_tokens": 3}, "min_new_tokens=3"),
        ({"vote": "final", "tokenizer": Foreign()}, "vocabulary"),
        ({"past_key_values": BlockCache()}, "got BlockCache"),
    ],
)
def test_invalid_settings_raise_and_the_model_works_as_before(settings: dict[str, Any], says: str) -> None:
    model = small_model()
    before = describe(model)
    with pytest.raises(ValueError, match=says):
        answer(model, PROMPTS[0][None], **settings)
    assert describe(model) == before

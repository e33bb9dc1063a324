"""One rule for texts: tokens that end a row, and special tokens, are in none of them, whole or streamed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
import small_tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import LogitsProcessor, StoppingCriteria

import hf_parallel
from hf_parallel import ConsoleStreamer
from hf_parallel.detokenizer import IncrementalDetokenizer, hidden_tokens, visible_text
from hf_parallel.engine import Engine
from hf_parallel.generation.sampling.stop_texts import RowStops, StoppedText, StopTexts
from hf_parallel.generation.sampling.token_table import TokenTable

TURN = "<end_of_turn>"
"""A token that is special, but not in `all_special_ids`, such as that of Gemma 3."""
CALL = "<call>"
"""Another one."""


def with_turns(kind: str) -> Any:
    """Return a tokenizer with `TURN` and `CALL`."""
    tokenizer = copy.deepcopy(small_tokenizers.make(kind))
    added = [AddedToken(name, special=True, normalized=False) for name in (TURN, CALL)]
    tokenizer.backend_tokenizer.add_special_tokens(added)
    assert tokenizer.convert_tokens_to_ids(TURN) not in tokenizer.all_special_ids
    return tokenizer


TOKENIZERS = {kind: with_turns(kind) for kind in ("byte_level", "sentencepiece")}


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class Writes(LogitsProcessor):
    """Makes row `i` write `scripts[i]`. It receives all rows at every step."""

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        self.scripts, self.step = scripts, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row, script in enumerate(self.scripts):
            forced[row, script[min(self.step, len(script) - 1)]] = 0
        self.step += 1
        return forced


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(texts=st.lists(st.sampled_from(["😀", "東", "é", " to", "An", "byte", CALL]), max_size=12))
@example(texts=["😀", "😀", "byte"])
@example(texts=["byte", "😀", " to"])
def test_an_invalid_byte_hides_no_character_beside_it(kind: str, texts: list[str]) -> None:
    """Where an answer is cut inside a character, for example; whole and streamed text are the same."""
    tokenizer = TOKENIZERS[kind]
    byte = next(token for token in encode(tokenizer, "🦊") if "\ufffd" in tokenizer.decode([token]))  # a part of it
    tokens = [token for text in texts for token in ([byte] if text == "byte" else encode(tokenizer, text))]
    hidden = hidden_tokens(tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, hidden)
    streamed = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.flush()
    assert streamed == visible_text(tokenizer, tokens, hidden)
    for text in ("😀", "東", "é"):
        assert streamed.count(text) == texts.count(text)


@pytest.mark.parametrize("mode", ["shared_prefix", "best_of", "self_consistency", "hogwild"])
def test_no_text_of_a_call_has_its_end_token(mode: str) -> None:
    """Neither the text of the output, nor what is streamed or printed, nor the transcript."""
    tokenizer = TOKENIZERS["byte_level"]
    model = hf_parallel.enable(small_tokenizers.small_llama(tokenizer))
    prompt = tokenizer("Q: Oslo?", return_tensors="pt").input_ids
    end, plain = tokenizer.convert_tokens_to_ids(TURN), tokenizer.convert_tokens_to_ids("x")
    special = tokenizer.bos_token_id
    out = StringIO()
    rows = {"hogwild": {"num_workers": 1, "finisher_tokens": 0}, "best_of": {"num_candidates": 1}}
    rows["self_consistency"] = {"num_answers": 1}
    for ends, text in ((end, "Oslo, so"), (plain, "Oslo, so"), (end, "")):
        script = encode(tokenizer, text)
        script = [*script[:1], special, *script[1:], ends]
        output = model.generate(
            prompt,
            generation_mode=mode,
            tokenizer=tokenizer,
            eos_token_id=[tokenizer.eos_token_id, ends],
            max_new_tokens=40,
            do_sample=False,
            logits_processor=[Writes([script])],
            streamer=ConsoleStreamer(tokenizer, out),
            return_dict_in_generate=True,
            **rows.get(mode, {}),
        )
        pieces = [piece for card in output.to_dict(tokenizer)["sections"][0]["cards"] for piece in card["pieces"]]
        shown = {
            "answers": " ".join(output.answer_texts(tokenizer)),
            "transcript": "".join(text for _, text, _ in pieces),
            "printed": out.getvalue(),
        }
        for place, found in shown.items():
            assert text in found, place
        for place, found in {**shown, "records": str(output.to_records())}.items():
            assert not any(name in found for name in (TURN, "<s>", "Oslo, sox")), place
        out.truncate(0)


TEXTS = st.text("tAn 東😀.", min_size=1, max_size=12) | st.sampled_from(["😀😀😀😀😀😀", TURN, CALL, "</s>"])
STOPS = st.text("tAn 東😀.", min_size=1, max_size=3)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(texts=st.lists(TEXTS, max_size=8), stops=st.lists(STOPS, min_size=1, max_size=2))
@example(texts=["ab", TURN, "cd", TURN, "tAn"], stops=["dt"])
@example(texts=["😀" * 12, "tAn"], stops=["tAn"])
def test_a_stop_text_is_found_where_the_visible_text_has_it(kind: str, texts: list[str], stops: list[str]) -> None:
    """At the first token after which the whole visible text has one; what is shown ends before it."""
    tokenizer = TOKENIZERS[kind]
    tokens = [token for text in texts for token in encode(tokenizer, text)]
    hidden = hidden_tokens(tokenizer)
    text, shown, at = StopTexts(tokenizer, stops).new_text(), "", None
    for index, token in enumerate(tokens):
        shown += text.add(token)
        if text.stopped and at is None:
            at = index
    shown += text.flush()
    wholes = [visible_text(tokenizer, tokens[: i + 1], hidden) for i in range(len(tokens))]
    expected = next((i for i, whole in enumerate(wholes) if any(stop in whole for stop in stops)), None)
    assert at == expected
    whole = visible_text(tokenizer, tokens, hidden)
    first = min((whole.index(stop) for stop in stops if at is not None and stop in wholes[at]), default=len(whole))
    assert shown == whole[:first]
    assert whole == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_stop_text_may_name_a_special_token_and_never_spans_a_mark() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    turn, call = (tokenizer.convert_tokens_to_ids(name) for name in (TURN, CALL))
    text = StopTexts(tokenizer, [TURN]).new_text()
    assert "".join(text.add(token) for token in [*encode(tokenizer, "Oslo"), turn]) == "Oslo"
    assert text.stopped
    text = StoppedText(IncrementalDetokenizer(tokenizer, {turn}), ["ab", "<"], {call})
    tokens = [*encode(tokenizer, "xa"), call, *encode(tokenizer, "bc"), turn, *encode(tokenizer, " <x")]
    assert "".join(text.add(token) for token in tokens) == "xa<call>bc "
    assert text.stopped


def test_stop_texts_are_found_in_rows_with_inserted_and_replaced_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    table = TokenTable(torch.tensor([encode(tokenizer, "b")]), 0, 8)
    stops = RowStops(StopTexts(tokenizer, ["x7y"]), table)
    begin, (last,) = table.begin, encode(tokenizer, "y")
    table.extend(0, [*encode(tokenizer, "x7"), last])  # all but the last were inserted
    assert stops.has_stopped(0, last)
    table.truncate(0, begin)
    table.extend(0, [*encode(tokenizer, "x8x"), last])
    assert not stops.has_stopped(0, last)


class Never(StoppingCriteria):
    """A criterion that is not row-wise, and ends no row."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("others", [[], [Never()]], ids=["alone", "with another criterion"])
def test_each_row_ends_at_its_own_stop_text(others: list[Any]) -> None:
    """Rows of a batch, in a mode that forks rows and one that does not."""
    tokenizer = TOKENIZERS["sentencepiece"]
    model = hf_parallel.enable(small_tokenizers.small_llama(tokenizer))
    prompts = tokenizer(["a", "b", "c"], return_tensors="pt").input_ids
    scripts = [encode(tokenizer, text) for text in ("😀" * 5 + "An. no", "no, ten An.", "never")]
    lengths = [len(encode(tokenizer, "😀" * 5 + "An.")), len(encode(tokenizer, "no, ten An.")), 60]
    output = model.generate(
        prompts,
        generation_mode="shared_prefix",
        do_sample=False,
        max_new_tokens=60,
        logits_processor=[Writes(scripts)],
        stopping_criteria=[StopTexts(tokenizer, ["An."]), *others],
        return_dict_in_generate=True,
    )
    assert [length - prompts.shape[1] for length in output.record.lengths] == lengths


def test_texts_of_a_handle_are_those_of_its_output() -> None:
    """In an engine, with a token that ends the turn and a special token in the middle."""
    tokenizer = TOKENIZERS["byte_level"]
    end, call = (tokenizer.convert_tokens_to_ids(name) for name in (TURN, CALL))
    script = [*encode(tokenizer, "Oslo"), call, *encode(tokenizer, ", so"), end]
    settings = {"eos_token_id": [end], "max_new_tokens": 40, "do_sample": False, "logits_processor": [Writes([script])]}
    with Engine(small_tokenizers.small_llama(tokenizer), tokenizer) as engine:
        handle = engine.submit("Q: Oslo?", **settings)
        streamed = "".join(text for _, text, _ in handle.texts())
        assert streamed == "Oslo, so"
        assert handle.result().answer_texts(tokenizer) == [streamed]

"""Concurrent texts are printed one after another."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import tiny
import torch
from mode_cases import BUILT_IN, small_call
from workers import TOKENIZER, small_model

from hf_parallel import (
    ConsoleStreamer,
    SelfConsistencyConfig,
)
from hf_parallel.transcript.record import Record


def test_terminal_commands_in_generated_text_are_not_printed_to_a_terminal() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    printer = ConsoleStreamer(TOKENIZER, out, ["\x1b[1m"])
    printer.put(torch.zeros(1, 1))
    printer.begin_call(SimpleNamespace(record=Record(SelfConsistencyConfig()), eos_token_ids=()))
    printer.write_row(0, "", "begin")
    printer.write_row(0, "a\x1b[2Jb\tc\n\x9bd", "token")
    printer.end()
    assert out.getvalue() == "\ufffd[1m\n[Answer 1]\na\ufffd[2Jb\tc\n\ufffdd\n"


# In calls of `generate`

PROMPT = tiny.make_prompts([9], seed=4)[0][None]


@pytest.mark.parametrize("mode", BUILT_IN)
def test_a_console_streamer_prints_the_rows_of_any_mode(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = {**small_call(mode), "do_sample": True, "seed": 3, "tokenizer": TOKENIZER}
    streamer = ConsoleStreamer(TOKENIZER)
    shown = []
    for _ in range(2):  # the streamer serves one call after another
        out = small_model().generate(PROMPT, streamer=streamer, return_dict_in_generate=True, **call)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    answers = out.to_dict(TOKENIZER)["sections"][0]["cards"]
    texts = [card["given"] + "".join(text for _, text, _ in card["pieces"]) for card in answers]
    for text in [out.transcripts[0]] if mode == "pdos" else texts[:1] if len(texts) == 1 else texts:
        assert "".join(text.split()) in "".join(shown[0].split())


@pytest.mark.parametrize("mode", ["shared_prefix", None])
def test_sequences_that_headings_do_not_divide_raise_before_generation(mode: str | None) -> None:
    streamer, passes = ConsoleStreamer(TOKENIZER, io.StringIO(), ["== P", "== Q"]), []
    with (
        small_model().register_forward_hook(lambda *_: passes.append(1)),
        pytest.raises(ValueError, match="got 3 sequences and 2 headings"),
    ):
        small_model().generate(PROMPT.repeat(3, 1), generation_mode=mode, streamer=streamer, max_new_tokens=2)
    assert not passes

"""The live view shows the names and texts of the rows of every mode, as many as fit."""

from __future__ import annotations

import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from consoles import a_pipe, a_terminal, printed
from mode_cases import BUILT_IN, small_call
from workers import TOKENIZER, small_model

from hf_parallel import HogwildConfig, ParallelConfig, ParallelStreamer
from hf_parallel.cli.live import LiveView
from hf_parallel.generation import GenerationStats
from hf_parallel.transcript.record import Record

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tiny.make_prompts([9], seed=4)[0][None]


def drawn(view: LiveView, height: int | None = None) -> list[str]:
    """Return the lines of the picture, without colours."""
    lines = view.console.render_lines(view.picture(height), pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def texts(view: LiveView) -> dict[str, str]:
    return {view._name(row): "".join(step.text for step in steps) for row, steps in view.rows.items()}


def begin(view: LiveView, config: ParallelConfig) -> Record:
    """Begin a call in which the test writes the rows."""
    record = Record(config)
    view.put(torch.zeros(1, 1))
    view.begin_call(SimpleNamespace(record=record, stats=GenerationStats(), eos_token_ids=()))  # type: ignore[arg-type]
    return record


@pytest.mark.parametrize("mode", BUILT_IN)
def test_every_mode_has_a_view(mode: str) -> None:
    view = LiveView(TOKENIZER, a_terminal())
    assert isinstance(view, ParallelStreamer)
    assert drawn(view, 16) == ["reading the task ..."]
    call = {**small_call(mode), "do_sample": True, "seed": 3, "tokenizer": TOKENIZER}
    with view:
        out = small_model().generate(PROMPT, streamer=view, return_dict_in_generate=True, **call)
    shown = "".join("".join(drawn(view)).split())
    assert f"{out.record.passes}passes,{out.stats.decoded_tokens}tokens" in shown
    assert all("".join(view._name(row).split()) + ",done" in shown for row in view.rows)


@pytest.mark.parametrize("console", [a_terminal, a_pipe])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_last_picture_has_all_text_without_terminal_commands_and_the_cursor(
    console: Any, error: type[BaseException] | None
) -> None:
    with suppress(KeyboardInterrupt), LiveView(TOKENIZER, console()) as view:
        record = begin(view, HogwildConfig())
        for number in range(40):
            record.passes += 3
            for row, who in enumerate("ab"):
                view.write_row(row, "", "begin")
                view.write_row(row, f"{who}{number} moves\x1b[2J\x07.\x9b2J", "token")
                view.write_row(row, "", "step")
        if error is not None:
            raise error
    text = printed(view.console)
    assert not re.search("\x1b\\[2J|\x07|\x9b", text)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == (console is a_terminal)
    final = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text[text.rindex("Alice") :])
    assert all(f"{3 * number + 3} {who}{number} moves" in final for who in "ab" for number in range(40))

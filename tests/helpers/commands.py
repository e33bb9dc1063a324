"""`hf-parallel generate` on a tiny model whose rows generate scripted texts, and Ctrl-C in process or in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from ascii_tokenizer import SPECIAL, AsciiTokenizer
from forkserver import start
from transformers import BatchEncoding
from workers import SETTINGS, Scripted, small_model

from hf_parallel import ConsoleStreamer
from hf_parallel.cli import generate as cli_generate
from hf_parallel.cli.main import main

STEPS = ("Ann.\n\nTwo.", "Bo is slow.\n\nx")
"""Texts of two workers."""


class Tokenizer(AsciiTokenizer):
    """Tokenizer with the attributes that the command line uses."""

    all_special_ids, pad_token_id = list(SPECIAL), tiny.PAD
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> Any:
        tokens = super().__call__(text, add_special_tokens)["input_ids"]
        encoded = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        return BatchEncoding(encoded, tensor_type=return_tensors, prepend_batch_axis=return_tensors is not None)


def given(settings: dict[str, Any]) -> list[str]:
    """Return settings as options."""
    return [f"--set={name}={json.dumps(value)}" for name, value in settings.items() if name != "tokenizer"]


WORKERS = [
    "generate",
    "P",
    "--raw",
    "--greedy",
    "--no-preset",
    "--max-new-tokens",
    "14",
    *given(SETTINGS | {"finisher_tokens": 0}),
]


def loading(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let the command line load a tiny model.

    Returns a function that scripts the rows of the following calls; it returns the list of their arguments.
    """
    loaded: Any = small_model()

    def use(*scripts: Any, finisher: Any = "") -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def generate(**arguments: Any) -> Any:
            calls.append(arguments)
            processors = [Scripted(scripts, finisher)] if scripts else []
            return type(loaded).generate(loaded, **arguments, logits_processor=processors)

        monkeypatch.setitem(vars(loaded), "generate", generate)

        def load(name: Any, dtype: Any, device: Any, preset: bool) -> Any:
            mark = "embedded" if preset and name is None else None
            monkeypatch.setattr(loaded.generation_config, "parallel_preset", mark, raising=False)
            return loaded, Tokenizer()

        monkeypatch.setattr(cli_generate, "load_model", load)
        return calls

    return use


def at(
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    happens: Callable[[], Any],
    streamer: Any = ConsoleStreamer,
    method: str = "put",
) -> None:
    """Call a function when a method of a streamer has been called `after` times."""
    plain = getattr(streamer, method)
    calls = iter(range(10**6))

    def watched(self: Any, *arguments: Any) -> None:
        if next(calls) == after:
            happens()
        plain(self, *arguments)

    monkeypatch.setattr(streamer, method, watched)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, after: int, streamer: Any = ConsoleStreamer, method: str = "put"
) -> None:
    """Raise `KeyboardInterrupt` when a method of a streamer has been called `after` times."""

    def press() -> None:
        raise KeyboardInterrupt

    at(monkeypatch, after, press, streamer, method)


def in_a_terminal(*commands: tuple[list[str], str], timeout: float = 600) -> list[tuple[str, int]]:
    """Run commands one after another in a terminal; press Ctrl-C when the output of each matches its pattern.

    All run in one process, which imports torch once. Returns the output and exit status of each.
    """
    environment = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    ours, theirs = pty.openpty()
    arguments = [arguments for arguments, _ in commands]
    process = start(_run, arguments, environment=environment, files=dict.fromkeys(range(3), theirs))
    os.close(theirs)
    text, interrupts, end = "", 0, time.monotonic() + timeout
    while time.monotonic() < end:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                read = os.read(ours, 65536)
            except OSError:  # the process has closed its end
                break
            text += read.decode(errors="replace")
        outputs = text.split(_STATUS)
        if len(outputs) == interrupts + 1 <= len(commands) and re.search(commands[interrupts][1], outputs[-1]):
            interrupts += 1
            os.kill(process.pid or 0, signal.SIGINT)
    os.close(ours)
    process.join(600)
    assert process.exitcode == 0, text
    first, *others = text.split(_STATUS)
    statuses = [int(other[: other.index("\x00")]) for other in others]
    outputs = [first, *(other[other.index("\x00") + 1 :] for other in others)]
    return list(zip(outputs, statuses, strict=False))


_STATUS = "\x00status "


def _run(commands: list[list[str]]) -> None:
    """Run commands and print their exit statuses."""
    for name in ("NO_COLOR", "CI"):
        os.environ.pop(name, None)
    for arguments in commands:
        print(f"{_STATUS}{main(arguments)}\x00", end="", flush=True)

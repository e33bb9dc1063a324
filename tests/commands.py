"""`hf-parallel generate` on a tiny model whose rows write what a script says, and Ctrl-C: by itself, in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from ascii_tokenizer import SPECIAL, AsciiTokenizer
from transformers import BatchEncoding
from workers import SETTINGS, Scripted, small_model

from hf_parallel.cli import generate as cli_generate
from hf_parallel.cli.printing import StepPrinter

STEPS = ("Ann.\n\nTwo.", "Bo is slow.\n\nx")
"""What two workers write."""


class Tokenizer(AsciiTokenizer):
    """With what the command line asks of a tokenizer besides."""

    all_special_ids, pad_token_id = list(SPECIAL), tiny.PAD
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> Any:
        tokens = super().__call__(text, add_special_tokens)["input_ids"]
        encoded = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        return BatchEncoding(encoded, tensor_type=return_tensors, prepend_batch_axis=return_tensors is not None)


def given(settings: dict[str, Any]) -> list[str]:
    """Settings as options."""
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
    """What lets the command line load a tiny model whose rows write scripts; it returns the calls' arguments."""
    loaded: Any = small_model()

    def use(*scripts: Any, finisher: Any = "") -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def scripted(arguments: dict[str, Any]) -> dict[str, Any]:
            calls.append(arguments)
            return {**arguments, "logits_processor": [Scripted(scripts, finisher)] if scripts else []}

        def generate(**arguments: Any) -> Any:
            return type(loaded).generate(loaded, **scripted(arguments))

        def hand_over(config: Any, arguments: dict[str, Any], run: Any) -> Any:
            return type(loaded)._hand_over(loaded, config, scripted(arguments), run)

        monkeypatch.setitem(vars(loaded), "generate", generate)
        monkeypatch.setitem(vars(loaded), "_hand_over", hand_over)
        monkeypatch.setattr(cli_generate, "load", lambda options: (loaded, Tokenizer()))
        return calls

    return use


def at(
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    happens: Callable[[], Any],
    streamer: Any = StepPrinter,
    method: str = "put",
) -> None:
    """Let something happen when a method of a streamer has been called so often."""
    plain = getattr(streamer, method)
    calls = iter(range(10**6))

    def watched(self: Any, *arguments: Any) -> None:
        if next(calls) == after:
            happens()
        plain(self, *arguments)

    monkeypatch.setattr(streamer, method, watched)


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, streamer: Any = StepPrinter, method: str = "put") -> None:
    """Let Ctrl-C come when a method of a streamer has been called so often."""

    def press() -> None:
        raise KeyboardInterrupt

    at(monkeypatch, after, press, streamer, method)


def in_a_terminal(arguments: list[str], until: str, timeout: float = 120) -> tuple[str, int]:
    """Run a command in a terminal, and press Ctrl-C when it has shown something; what it wrote, and its status."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "CI")}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hf_parallel.cli.main", *arguments]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    os.close(theirs)
    text, pressed, end = "", False, time.monotonic() + timeout
    while time.monotonic() < end:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                read = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            text += read.decode(errors="replace")
        if not pressed and re.search(until, text):
            pressed = True
            process.send_signal(signal.SIGINT)
    os.close(ours)
    return text, process.wait(timeout=30)

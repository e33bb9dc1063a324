"""`hf-parallel generate` on a tiny model whose rows generate scripted texts, and Ctrl-C in process or in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from ascii_tokenizer import SPECIAL, AsciiTokenizer
from transformers import BatchEncoding
from workers import SETTINGS, Scripted, small_model

from hf_parallel import ConsoleStreamer
from hf_parallel.cli import generate as cli_generate

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
    "--mode",
    "hogwild",
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

        def load(name: Any, dtype: Any, device: Any, preset: bool, weights: Any) -> Any:
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

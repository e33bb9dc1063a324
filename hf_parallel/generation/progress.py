"""Progress: the bar of one call, `progress=True` of `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import check_bool

INTERVAL = 0.1
"""Seconds between two states of a bar."""


class Progress:
    """A tqdm bar over the decode passes of a call, with the numbers of active rows and of tokens.

    The budget is `max_new_tokens`. The bar opens after the first pass, which speeds do not count.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._bar: Any = None
        self._passes = self._tokens = self._rows = self._shown_passes = self._untimed_tokens = 0
        self._began = self._shown_at = 0.0

    def update(self, budget: int, rows: int, tokens: int, is_pass: bool) -> None:
        """Count new tokens of active rows, and the pass that computed them."""
        now = time.monotonic()
        if self._bar is None:
            settings = {"initial": int(is_pass), "unit": " passes", "mininterval": 0, "miniters": 0}
            self._bar = logging.tqdm(total=budget, desc=self._mode, **settings)
            self._began, self._untimed_tokens, self._shown_passes = now, tokens, int(is_pass)
        self._rows, self._tokens, self._passes = rows, self._tokens + tokens, self._passes + is_pass
        if now - self._shown_at >= INTERVAL:
            self._show(now)

    def close(self) -> None:
        """Show the last state, and close the bar. A bar that was not opened stays closed."""
        if self._bar is not None:
            self._show(time.monotonic())
            self._bar.close()
            self._bar = None

    def _show(self, now: float) -> None:
        state = f"{self._rows} rows, {self._tokens} tokens"
        if timed := self._tokens - self._untimed_tokens:
            state += f", {timed / max(now - self._began, 1e-9):.1f} tokens/s"
        self._bar.set_postfix_str(state, refresh=False)
        self._bar.update(self._passes - self._shown_passes)
        self._shown_passes, self._shown_at = self._passes, now


def take_progress(mode: str, kwargs: Arguments) -> Progress | None:
    """Remove `progress` from the arguments of `generate`. Raises `ValueError` unless it is a bool."""
    shown = kwargs.pop("progress", False)
    check_bool("progress", shown)
    return Progress(mode) if shown else None


@contextmanager
def closing_progress(call: Any) -> Iterator[Any]:
    """Close the bar of a call, if it has one, however the context ends."""
    try:
        yield call
    finally:
        if call.progress is not None:
            call.progress.close()

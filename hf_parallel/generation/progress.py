"""Progress: the bar of one call, `progress=True` of `generate`."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging


class Progress:
    """A tqdm bar over the decode passes of a call, with the numbers of active rows and of tokens.

    The budget is `max_new_tokens`. The bar opens after the first pass.
    """

    def __init__(self, mode: str) -> None:
        self._mode, self._tokens = mode, 0
        self._bar: Any = None

    def update(self, budget: int, rows: int, tokens: int, is_pass: bool) -> None:
        """Count new tokens of active rows, and the pass that computed them."""
        if self._bar is None:
            self._bar = logging.tqdm(total=budget, desc=self._mode, unit=" passes")
        self._tokens += tokens
        self._bar.set_postfix_str(f"{rows} rows, {self._tokens} tokens", refresh=False)
        self._bar.update(int(is_pass))

    def close(self) -> None:
        """Show the last state, and close the bar. A bar that was not opened stays closed."""
        if self._bar is not None:
            self._bar.close()

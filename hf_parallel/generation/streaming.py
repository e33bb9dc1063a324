"""Text of many rows as it is written. A streamer of transformers takes one row; this one takes them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class ParallelStreamer(Protocol):
    """Pass an object with these methods as `streamer=`.

    transformers' own streamers work too where a call has one row.
    """

    def put(self, value: Any) -> None:
        """Called with the prompts and then with each pass's new tokens `int64 [rows]`."""

    def write_row(self, row: int, text: str, event: str) -> None:
        """Called with what row `row` wrote.

        `event` is `begin` (a step's prefix), `token`, `step` (the step has ended) or `end` (the row has). In the pdos
        mode the k-th branch of prompt `p` is row `p + k * prompts`, from k = 1 on, and begins with its title; `join`
        tells a prompt's row the text of its joined branches, which takes the place of the skeleton that it wrote.
        """

    def end(self) -> None:
        """Called when all is written."""


class FinalTokens:
    """Hands tokens to a streamer when they are final, which for some rows may be later than for others.

    Parameters
    ----------
    streamer
        Of transformers or a `ParallelStreamer`; None: nobody listens.
    num_rows : int
        Rows of the batch.
    pad_token_id : int
        Stands for the rows that have no token when others have one.
    """

    def __init__(self, streamer: Any, num_rows: int, pad_token_id: int) -> None:
        self.streamer, self.pad_token_id = streamer, pad_token_id
        self._waiting: list[deque[int]] = [deque() for _ in range(num_rows)]

    def put(self, row: int, tokens: Iterable[int]) -> None:
        """Take tokens of a row that are final."""
        if self.streamer is not None:
            self._waiting[row].extend(tokens)

    def flush(self) -> None:
        """Give the streamer what has been taken, `int64 [rows]` at a time."""
        while any(self._waiting):
            tokens = [waiting.popleft() if waiting else self.pad_token_id for waiting in self._waiting]
            self.streamer.put(torch.tensor(tokens))

    def show(self, row: int, text: str, event: str) -> None:
        """Tell a streamer of parallel text what a row wrote, final or not."""
        write = getattr(self.streamer, "write_row", None)
        if write is not None:
            write(row, text, event)

"""Text of many rows as it is written. A streamer of transformers takes one row; this one takes them all."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ParallelStreamer(Protocol):
    """Pass an object with these methods as `streamer=`.

    transformers' own streamers work too where a call has one row.
    """

    def put(self, value: Any) -> None:
        """Called with the prompts and then with each pass's new tokens `int64 [rows]`."""

    def write_row(self, row: int, text: str, event: str) -> None:
        """Called with what row `row` wrote.

        `event` is `begin` (a step's prefix), `token`, `step` (the step has ended) or `end` (the row has).
        """

    def end(self) -> None:
        """Called when all is written."""

"""Streaming of many rows: a streamer of transformers receives one row, a `ParallelStreamer` all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from queue import Queue
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_parallel.generation.call import GenerationCall


@runtime_checkable
class ParallelStreamer(Protocol):
    """Interface of a streamer of many rows. Pass an object with these methods as `streamer=`.

    Streamers of transformers work where a call has one row. Two further methods are optional. `begin_call(call)`
    receives the prepared `GenerationCall` after the prompts: `call.record.config` is the mode's config. `fail(error)`
    receives the error that ends a call of `generate`, including errors about invalid arguments.
    """

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompts `int64 [rows, length]`, then new tokens `int64 [rows]`."""

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text of a row, if the call has a tokenizer, or the streamer one as its attribute `tokenizer`.

        Parameters
        ----------
        row : int
            Row of the output, see `ModeRows.place`. -1 is the history that hogwild workers share. In the pdos mode the
            k-th branch of prompt `p` is row `p + k * prompts`, counted from k = 1.
        text : str
            New text of the row.
        event : str
            `begin` (a row or a step begins; the text is its prefix, or the title of a branch), `token`, `step` (the
            step ended, or the thinking before an answer), `end` (the row ended), `inject` (text that the row did not
            generate) or `join` (the text of the joined branches, which replaces the skeleton that the row generated).
        """

    def end(self) -> None:
        """Receive the end of the call."""


class RowText(NamedTuple):
    """New text of a row; events as in `ParallelStreamer.write_row`."""

    row: int
    text: str
    event: str


class ParallelIteratorStreamer:
    """A `ParallelStreamer` that another thread iterates over, such as a server or a notebook.

    The counterpart of `transformers.TextIteratorStreamer` for many rows.

    Parameters
    ----------
    timeout : float, optional
        Seconds to wait for the next text before `queue.Empty` is raised. Default: no limit; the iteration then blocks
        forever if no thread calls `generate`.

    Raises
    ------
    ValueError
        If `timeout` is not a positive number.

    Notes
    -----
    The iteration raises any error that `generate` raises in its thread.

    Examples
    --------
    >>> streamer = hf_parallel.ParallelIteratorStreamer(timeout=60)
    >>> settings = dict(generation_mode="shared_prefix", tokenizer=tokenizer, streamer=streamer)
    >>> threading.Thread(target=model.generate, args=(ids,), kwargs=settings).start()
    >>> for row, text, event in streamer:
    ...     print(row, event, text)
    """

    def __init__(self, timeout: float | None = None) -> None:
        is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
        self.timeout = timeout
        self._has_call = False
        self._queue: Queue[RowText | BaseException | None] = Queue()

    def begin_call(self, call: GenerationCall) -> None:
        """Check that the call has a tokenizer. Raises `ValueError` if it has none."""
        if call.tokenizer is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} yields text: pass generate(..., tokenizer=tokenizer) or enable(model, tokenizer=...)"
            )
        self._has_call = True

    def put(self, value: torch.Tensor) -> None:
        """Ignore tokens: their text arrives in `write_row`. Raises `ValueError` in a call without a mode."""
        if value.ndim == 1 and not self._has_call:
            name = type(self).__name__
            raise ValueError(f"{name} yields the rows of a mode: pass generation_mode=, or a TextIteratorStreamer")

    def write_row(self, row: int, text: str, event: str) -> None:
        """See `ParallelStreamer.write_row`."""
        self._queue.put(RowText(row, text, event))

    def end(self) -> None:
        """End the iteration. The streamer can then serve another call."""
        self._has_call = False
        self._queue.put(None)

    def fail(self, error: BaseException) -> None:
        """Raise an error in the iteration. The streamer can then serve another call."""
        self._has_call = False
        self._queue.put(error)

    def __iter__(self) -> Iterator[RowText]:
        return self

    def __next__(self) -> RowText:
        item = self._queue.get(timeout=self.timeout)
        if isinstance(item, BaseException):
            raise item
        if item is None:
            raise StopIteration
        return item


def text_tokenizer(call: GenerationCall) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer with which a call decodes new tokens for its streamer.

    None: the streamer takes no text, or the mode writes text itself, or has no new tokens at every pass.
    """
    traits = call.record.config.traits
    if not hasattr(call.streamer, "write_row") or traits.streams_text or traits.streams_tokens != "every_pass":
        return None
    return call.tokenizer or getattr(call.streamer, "tokenizer", None)


def check_streamer(streamer: object, rows: int) -> None:
    """Raise `ValueError` for a streamer of transformers that prints the text of one row, if a call has several."""
    if isinstance(streamer, TextStreamer) and rows > 1:
        raise ValueError(
            f"streamer must be a ParallelStreamer for {rows} rows, such as hf_parallel.ConsoleStreamer(tokenizer) or "
            f"hf_parallel.ParallelIteratorStreamer(), got a {type(streamer).__name__}, which takes one row"
        )


@contextmanager
def report_errors(streamer: object) -> Iterator[None]:
    """Pass an error raised inside the context to the streamer's `fail`, if it has one, and re-raise it."""
    try:
        yield
    except BaseException as error:
        fail = getattr(streamer, "fail", None)
        if callable(fail):
            fail(error)
        raise


class FinalTokens:
    """Passes final tokens to a streamer, if there is one; rows without a queued token receive the padding token."""

    def __init__(self, streamer: Any, num_rows: int, pad_token_id: int) -> None:
        self.streamer = streamer
        self.pad_token_id = pad_token_id
        self._queues: list[deque[int]] = [deque() for _ in range(num_rows)]

    def put(self, row: int, tokens: Iterable[int]) -> None:
        """Append final tokens of a row."""
        if self.streamer is not None:
            self._queues[row].extend(tokens)

    def flush(self) -> None:
        """Stream all queued tokens, `int64 [rows]` at a time."""
        while any(self._queues):
            tokens = [queue.popleft() if queue else self.pad_token_id for queue in self._queues]
            self.streamer.put(torch.tensor(tokens))

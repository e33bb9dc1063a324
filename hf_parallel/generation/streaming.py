"""Text of many rows as it is written. A streamer of transformers takes one row; this one takes them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from queue import Queue
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@runtime_checkable
class ParallelStreamer(Protocol):
    """Pass an object with these methods as `streamer=`.

    transformers' own streamers work too where a call has one row. One that also has a method `fail(error)` is told the
    error with which a call of `generate` ends, be it that of a wrong argument.
    """

    def put(self, value: Any) -> None:
        """Called with the prompts and then with each pass's new tokens `int64 [rows]`."""

    def write_row(self, row: int, text: str, event: str) -> None:
        """Called with what row `row` wrote.

        `event` is `begin` (a step's prefix), `token`, `step` (the step has ended) or `end` (the row has). In a session
        `inject` is what somebody else told the row, and row -1 is the history that all workers see. In the pdos mode
        the k-th branch of prompt `p` is row `p + k * prompts`, from k = 1 on, and begins with its title; `join` tells a
        prompt's row the text of its joined branches, which takes the place of the skeleton that it wrote.
        """

    def end(self) -> None:
        """Called when all is written."""


class RowText(NamedTuple):
    """What a row wrote; events as in `ParallelStreamer`."""

    row: int
    text: str
    event: str


class ParallelIteratorStreamer:
    """A `ParallelStreamer` that another thread iterates over, such as a server or a notebook.

    It does for many rows what `transformers.TextIteratorStreamer` does for one.

    Parameters
    ----------
    timeout : float, optional
        Seconds to wait for the next text; then `queue.Empty` is raised. Default: as long as it takes, which is for ever
        if the other thread never calls `generate`.

    Raises
    ------
    ValueError
        If `timeout` is no positive number.

    Notes
    -----
    The iteration raises what `generate` raises in its thread, also before anything is written.

    Examples
    --------
    >>> streamer = hf_parallel.ParallelIteratorStreamer(timeout=60)
    >>> settings = dict(generation_mode="hogwild", tokenizer=tokenizer, streamer=streamer)
    >>> threading.Thread(target=model.generate, args=(ids,), kwargs=settings).start()
    >>> for row, text, event in streamer:
    ...     print(row, event, text)
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and (not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
        self.timeout = timeout
        self._texts: Queue[RowText | BaseException | None] = Queue()

    def put(self, value: Any) -> None:
        """Tokens are of no interest here, their texts come by `write_row`."""

    def write_row(self, row: int, text: str, event: str) -> None:
        """Called with what row `row` wrote."""
        self._texts.put(RowText(row, text, event))

    def end(self) -> None:
        """Called when all is written: the iteration ends. Another call may be streamed then."""
        self._texts.put(None)

    def fail(self, error: BaseException) -> None:
        """Called when the call has failed: the iteration raises the error. Another call may be streamed then."""
        self._texts.put(error)

    def __iter__(self) -> Iterator[RowText]:
        return self

    def __next__(self) -> RowText:
        text = self._texts.get(timeout=self.timeout)
        if isinstance(text, BaseException):
            raise text
        if text is None:
            raise StopIteration
        return text


@contextmanager
def report_errors(streamer: Any) -> Iterator[None]:
    """Tell a streamer that wants to know (see `ParallelStreamer`) if what happens inside fails."""
    try:
        yield
    except BaseException as error:
        fail = getattr(streamer, "fail", None)
        if callable(fail):
            fail(error)
        raise


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

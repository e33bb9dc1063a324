"""RequestHandle: tokens, text and result of a submitted request, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence, Sized
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.decoding.standing import TokenSink
from hf_parallel.generation.decoding.words import NotRunningError
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.streaming import RowText

T = TypeVar("T")
HAS_ENDED = "the request has ended: nobody reads the text"


class StreamedToken(int):
    """A generated token; `row` is its row, as `ParallelStreamer.write_row` numbers the rows."""

    row: int

    def __new__(cls, token: int, row: int) -> StreamedToken:
        """Return the token of a row."""
        self = super().__new__(cls, token)
        self.row = row
        return self


@dataclass
class RequestTimes:
    """Times of a request in seconds, as `time.perf_counter` counts them; None: it has not happened."""

    submitted: float
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None


class TokenDecoder:
    """Decodes the tokens of one iteration to text, except hidden ones; to none without a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, hidden: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.hidden = hidden
        self._rows: dict[int, IncrementalDetokenizer] = {}

    def add(self, token: StreamedToken) -> RowText:
        """Return the text that a token adds to its row."""
        text = ""
        if self.tokenizer is not None:
            if token.row not in self._rows:
                self._rows[token.row] = IncrementalDetokenizer(self.tokenizer, self.hidden)
            text = self._rows[token.row].add([int(token)])
        return RowText(token.row, text, "token")

    def flush(self) -> Iterator[RowText]:
        """Yield the text of incomplete characters at the ends of rows, as no tokens follow."""
        for row, detokenizer in self._rows.items():
            text = detokenizer.flush()
            if text:
                yield RowText(row, text, "token")


class RequestHandle:
    """A submitted request.

    Iterate over the handle for tokens (`for`, `async for`), or over `texts()` for text. Several threads may read one
    handle; each iteration starts with the first token. If the request fails, reading it raises the error. `stats` is
    its cost so far. Text is decoded by the reader, with a new `decoder` each time; without one, the mode writes it.
    """

    done = False
    """Whether the request has ended: finished, failed or canceled."""
    end_tokens: Collection[int] = ()
    """Tokens that end its rows, which are not part of their text."""
    error: BaseException | None = None
    """The error that ended the request, or None if it is running or has finished."""
    check_blocking: Callable[[], None] = staticmethod(lambda: None)
    """Raises an error where a thread that waits would wait for itself; set by the engine."""
    make_forks: Callable[..., list[RequestHandle]] | None = None
    """Submits forks, given the handle and the arguments of `fork`; set by the engine."""
    point: Callable[[int, int], Any] = staticmethod(lambda row, num_tokens: None)
    """Returns the `ForkPoint` after a number of new tokens of a row, while the request runs; set by the engine."""

    def __init__(
        self,
        on_cancel: Callable[[], None],
        check_wait: Callable[[], None] = lambda: None,
        decoder: Callable[[], TokenDecoder] | None = None,
        on_inject: Callable[[object, object], Future[int]] | None = None,
    ) -> None:
        self.times = RequestTimes(time.perf_counter())
        self.stats = GenerationStats()
        self._on_cancel = on_cancel
        self._check_wait = check_wait
        self._decoder = decoder
        self._on_inject = on_inject
        self._lock = threading.Lock()
        self.waiting: list[tuple[Callable[[], bool], Future[None]]] = []
        """Conditions, with the futures that end once they hold; see `notify`."""
        self.sink = TokenSink([], [])
        """Its tokens."""
        self.versions: list[tuple[int, int]] = []
        """Indices of tokens from which on others were sampled by another version of the weights, with the version."""
        self._texts: list[RowText] = []
        self._output: Any = None

    # Reading

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the mode's output.

        Raises `TimeoutError` after `timeout` seconds, `concurrent.futures.CancelledError` if the request was canceled,
        its original error if it failed, and `RuntimeError` if waiting would never end: in the code of another request
        of the engine, in the body of `Engine.updating_weights`, or in a fork of its process.
        """
        if not self.done and not self._wait(lambda: self.done, timeout):
            raise TimeoutError(f"the request has not ended after {timeout} seconds")
        return self._finished()

    async def result_async(self) -> Any:
        """Wait for the end in asyncio; see `result`."""
        if not self.done:
            await self._wait_async(lambda: self.done)
        return self._finished()

    def ended(self) -> Future[None]:
        """Return a future that ends with the request, for `concurrent.futures.wait`; it has no result and no error."""
        return self._future(lambda: self.done)

    def cancel(self) -> None:
        """End the request at the next step and free its memory. Does nothing if it has ended."""
        if not self.done:
            self._on_cancel()

    def fork(
        self,
        n: int | None = None,
        *,
        at: int | None = None,
        row: int = 0,
        suffix: Any = None,
        children: Sequence[Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> list[RequestHandle]:
        """Submit requests that continue a row of this request, and return their handles. This request keeps running.

        The prompt of a fork consists of the row's prompt, its new tokens and a suffix. While the row's keys and values
        are cached, only those of its last token are recomputed; see `Engine`.

        Parameters
        ----------
        n : int, optional
            Number of forks. Default: 1, or one for each of the `children`.
        at : int, optional
            How many new tokens of the row the forks keep. Default: all generated so far, without an end token.
        row : int
            Index of the row, as in `StreamedToken.row`.
        suffix : str, list of int, tensor or list of dict, optional
            Text, token ids or messages to append. Messages are appended as if the tokens before them were an answer.
        children : sequence of mapping, optional
            Suffix and settings of each fork. They override the common ones.
        **settings
            Other arguments of `Engine.submit`. Default: the arguments of this request, with one row and without its
            streamer. Several forks with the same seed get consecutive seeds, starting with this one. With another
            adapter or salt, forks recompute everything.

        Raises
        ------
        ValueError
            If the request does not have this row or these tokens, if its rows are not plain sequences of tokens (modes
            such as `hogwild`), or if its prompt has images or masked tokens. Also the errors of `Engine.submit`. In all
            cases, no fork is submitted.
        """
        if self.make_forks is None:
            raise ValueError("the request cannot be forked: no engine has submitted it")
        return self.make_forks(self, n, at, row, suffix, children, settings)

    def row_tokens(self, row: int) -> list[int]:
        """Return the tokens that a row has now."""
        tokens = self.sink.tokens[:]  # rows are appended before tokens
        return [token for token, owner in zip(tokens, self.sink.rows, strict=False) if owner == row]

    @property
    def token_versions(self) -> list[int]:
        """The version of the weights that sampled each token; see `Engine.updating_weights`."""
        count = len(self.sink.tokens)
        found: list[int] = []
        for index, (begin, version) in enumerate(self.versions):
            is_last = index + 1 == len(self.versions)
            end = count if is_last else self.versions[index + 1][0]
            found += [version] * (end - begin)
        return found

    def inject(self, text: str, to: str | int = "all") -> Future[int]:
        """Insert a text for workers that are generating. They read it in one of the next forward passes.

        Works in the modes `hogwild` and `async_reasoning`, from any thread. The same text after the same pass gives the
        same tokens, even if the request is preempted and recomputed.

        Parameters
        ----------
        text : str
            Text for all workers becomes a step of their common history, or in the layout `contiguous` a line in the
            text of each worker. Text for one worker continues its unfinished step on a new line.
        to : str or int
            "all", or the name or the number of a worker, counted from 0.

        Returns
        -------
        Future of int
            The number of decode steps after which the text is read. The future fails with a `NotRunningError` if the
            request or the worker ends before, and with a `ValueError` if the model has no positions left for the text.

        Raises
        ------
        ValueError
            If the text is empty or cannot be encoded, the worker is unknown, or the mode is another one.
        KVBudgetError
            If the request may need more memory with the text than the engine has.
        NotRunningError
            If the request has ended.
        """
        if self.done or self._on_inject is None:
            raise NotRunningError(HAS_ENDED)
        return self._on_inject(text, to)

    def __iter__(self) -> Iterator[StreamedToken]:
        """Yield tokens as they are generated, those of all rows."""
        return self._read(self.sink.tokens, self._token)

    def __aiter__(self) -> AsyncIterator[StreamedToken]:
        """Yield tokens in asyncio."""
        return self._read_async(self.sink.tokens, self._token)

    def texts(self) -> Iterator[RowText]:
        """Yield text as it is generated, with its row and event; see `ParallelStreamer.write_row`."""
        if self._decoder is None:
            return self._read(self._texts, self._texts.__getitem__)
        return self._decode(self._decoder())

    def texts_async(self) -> AsyncIterator[RowText]:
        """Yield text in asyncio; see `texts`."""
        if self._decoder is None:
            return self._read_async(self._texts, self._texts.__getitem__)
        return self._decode_async(self._decoder())

    def _decode(self, rows: TokenDecoder) -> Iterator[RowText]:
        for token in self:
            yield rows.add(token)
        yield from rows.flush()

    async def _decode_async(self, rows: TokenDecoder) -> AsyncIterator[RowText]:
        async for token in self:
            yield rows.add(token)
        for text in rows.flush():
            yield text

    def _token(self, index: int) -> StreamedToken:
        return StreamedToken(self.sink.tokens[index], self.sink.rows[index])

    def _read(self, items: Sized, item: Callable[[int], T]) -> Iterator[T]:
        for index in count():
            if not self._has(items, index):
                self._wait(partial(self._has, items, index))
            if index == len(items):
                self._finished()
                return
            yield item(index)

    async def _read_async(self, items: Sized, item: Callable[[int], T]) -> AsyncIterator[T]:
        for index in count():
            if not self._has(items, index):
                await self._wait_async(partial(self._has, items, index))
            if index == len(items):
                self._finished()
                return
            yield item(index)

    def _has(self, items: Sized, index: int) -> bool:
        """Return whether there is an item with this index, or will never be one."""
        return self.done or len(items) > index

    def _wait(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, which stays true from then on; return whether it was in time."""
        self.check_blocking()
        future = self._future(condition)
        try:
            return bool(wait([future], timeout).done)
        finally:
            future.cancel()

    async def _wait_async(self, condition: Callable[[], bool]) -> None:
        """Wait in asyncio; see `_wait`."""
        await asyncio.wrap_future(self._future(condition))

    def _future(self, condition: Callable[[], bool]) -> Future[None]:
        """Return a future that ends once a condition holds."""
        self._check_wait()
        future: Future[None] = Future()
        with self._lock:
            self.waiting.append((condition, future))
        self.notify()  # it may hold already
        return future

    def _finished(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._output

    # Writing, by the engine

    def add_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Append a token of each row."""
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
        self.sink.rows.extend(rows)
        self.sink.tokens.extend(tokens)

    def mark_version(self, version: int) -> None:
        """Record the version of the weights by which the next tokens are sampled."""
        self.versions.append((len(self.sink.tokens), version))

    def copy_row(self, row: int, forks: Sequence[int]) -> None:
        """Append the tokens of a row as those of the rows `forks`, which continue it."""
        tokens = self.row_tokens(row)
        for fork in forks:
            self.sink.rows.extend([fork] * len(tokens))
            self.sink.tokens.extend(tokens)

    def add_text(self, row: int, text: str, event: str) -> None:
        """Append text."""
        self._texts.append(RowText(row, text, event))

    def notify(self) -> None:
        """End the futures whose conditions hold."""
        if not self.waiting:
            return
        with self._lock:
            ready = [(holds, future) for holds, future in self.waiting if holds() or future.cancelled()]
            self.waiting = [waiting for waiting in self.waiting if waiting not in ready]
        for _, future in ready:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def end(self, output: object = None, error: BaseException | None = None) -> None:
        """End the request with its output or an error."""
        self.times.ended = time.perf_counter()
        self._output = output
        self.error = error
        self.done = True
        self._on_cancel = lambda: None  # it holds the request, and the features of its images
        self._on_inject = None
        self.notify()


class RequestCancelledError(CancelledError):
    """Raised by a handle whose request was canceled."""

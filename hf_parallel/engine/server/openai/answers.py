"""Answers: the choices of a response, read from a handle as its request runs or after it has ended.

A row that continues its prompt is a choice, whose text is streamed. Other modes combine rows into a choice: while they
run, the text of each row is streamed under its name, and the answer follows at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.engine import Lease, RequestHandle
from hf_parallel.engine.server.openai.replies import Parsed, ToolCall
from hf_parallel.engine.server.openai.submission import Submission
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.sampling.log_probs import TokenLogProbs
from hf_parallel.generation.sampling.stop_texts import StopFilter, StoppedText


@dataclass
class LoggedToken:
    """A generated token of a response with log-probabilities."""

    token: int
    begin: int  # number of characters before it in the text of its choice
    log_probs: TokenLogProbs | None  # None: the first token of a prompt has none
    is_first: bool  # whether the text begins with it, so that decoders drop its leading space


@dataclass
class Delta:
    """New text and tokens of a choice."""

    index: int
    text: str = ""
    row: str | None = None  # name of the row
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    row_text: str = ""  # text of a row that is not itself the choice
    row_event: str | None = None  # what its text is if it was not generated, or what ended; see `ParallelStreamer`
    logged: list[LoggedToken] = field(default_factory=list)
    has_log_probs: bool = False  # whether the whole choice has log-probabilities, be it of no token
    finish_reason: str | None = None
    error: str | None = None  # why the choice ended with an error
    record: dict[str, object] | None = None  # fields of the mode's output
    transcript: str | None = None  # of the run, as a page
    prompt: list[tuple[int, TokenLogProbs]] | None = None  # tokens of the prompt after the first

    def show(self, parsed: Parsed) -> None:
        """Replace the text by the parts of a reply that it has completed."""
        self.text = parsed.content
        self.reasoning = parsed.reasoning
        self.calls = parsed.calls

    def append(self, delta: Delta) -> None:
        """Append a later delta of the same choice."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.calls += delta.calls
        self.logged += delta.logged
        self.row = delta.row or self.row
        self.finish_reason = delta.finish_reason
        self.record = delta.record
        self.error = delta.error
        self.prompt = delta.prompt
        self.transcript = delta.transcript


class Answers:
    """Reads the choices of one submission. `first` is the index of its first choice in the response."""

    def __init__(
        self, submission: Submission, handle: RequestHandle, first: int = 0, lease: Lease | None = None
    ) -> None:
        self.lease = lease
        self.submission = submission
        self.handle = handle
        self.first = first
        self._texts = [_ChoiceText(submission, row, handle.end_tokens) for row in range(submission.choices)]
        self.shown: dict[int, Delta] = {}
        """What was returned of each choice, by its number in this submission, without log-probabilities."""
        self._replies = [submission.make_reply(index) for index in range(submission.choices)]

    def abandon(self) -> None:
        """Cancel the request. Even if it has ended already, its prefix is not kept."""
        self.handle.cancel()
        if self.lease is not None:
            self.submission.engine.release(self.lease)

    @property
    def is_shown(self) -> bool:
        """Whether every choice was returned up to its end."""
        ended = [delta for delta in self.shown.values() if delta.finish_reason is not None]
        return len(ended) == self.submission.choices

    def _record(self, delta: Delta) -> Delta:
        index = delta.index - self.first
        shown = self.shown.setdefault(index, Delta(index))
        shown.text += delta.text
        shown.reasoning += delta.reasoning
        shown.calls = [*shown.calls, *delta.calls]
        shown.finish_reason = delta.finish_reason
        return delta

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield new text and tokens as they are generated, and finally the end of every choice."""
        async for delta in self._deltas():
            yield self._record(delta)

    async def _deltas(self) -> AsyncIterator[Delta]:
        if self.submission.config.traits.rows_continue_prompts:
            async for token in self.handle:
                if self._texts[token.row].begins_with_prompt:  # of many tokens
                    delta = await asyncio.to_thread(self._token_delta, token.row, int(token))
                else:
                    delta = self._token_delta(token.row, int(token))
                if delta is not None:
                    yield delta
        elif self.submission.config.traits.streams_text:
            async for row, text, event in self.handle.texts_async():
                row_event = None if event == "token" else event
                if text or row_event:
                    index = self.first + self.submission.choice(row)
                    name = self.submission.row_name(row)
                    yield Delta(index, row=name, row_text=text, row_event=row_event)
        output = await self.handle.result_async()
        for delta in await asyncio.to_thread(lambda: list(self._ends(output))):  # decodes the text of merged rows
            yield delta

    def final(self, output: ParallelOutput) -> list[Delta]:
        """Return the whole choices of a request that has ended. Decoding many tokens takes seconds."""
        has_log_probs = self.submission.log_probs is not None
        choices = []
        for index in range(self.submission.choices):
            choices.append(Delta(self.first + index, has_log_probs=has_log_probs))
        for delta in self._all(output):
            choices[delta.index - self.first].append(self._record(delta))
        return choices

    def _all(self, output: ParallelOutput) -> Iterator[Delta]:
        if self.submission.config.traits.rows_continue_prompts:
            for token in self.handle:
                delta = self._token_delta(token.row, int(token))
                if delta is not None:
                    yield delta
        yield from self._ends(output)

    def _token_delta(self, row: int, token: int) -> Delta | None:
        """Return what a new token adds to the answer of its row, or None."""
        text, logged = self._texts[row].add(token)
        name = self.submission.row_name(row) if self.submission.has_mode else None
        delta = Delta(self.first + row, text, name, logged=logged)
        reply = self._replies[row]
        if reply is not None:
            delta.show(reply.add(text))
        has_news = delta.text or delta.reasoning or delta.calls or logged
        return delta if has_news else None

    def _ends(self, output: ParallelOutput) -> Iterator[Delta]:
        """Yield the last delta of each choice."""
        submission = self.submission
        continues = submission.config.traits.rows_continue_prompts
        record = output.record
        truncated = set(record.answers_of(record.truncated, submission.choice).values())
        failed_rows = record.answers_of(record.errors, submission.choice)
        errors = {answer: record.errors[row] for row, answer in failed_rows.items()}
        texts = [] if continues else output.answer_texts(submission.engine.tokenizer)
        records = self._mode_records(output)
        for index in range(submission.choices):
            delta = Delta(self.first + index)
            reason = "length" if index in truncated or submission.is_empty else "stop"
            if continues:
                delta.text, delta.logged = self._texts[index].flush()
                if self._texts[index].stopped:
                    reason = "stop"
                if submission.has_mode:
                    delta.row = submission.row_name(index)
            else:
                stops = StopFilter(submission.stops)
                delta.text = stops.add(texts[index])
                delta.text += stops.flush()
            reply = self._replies[index]
            if reply is not None:
                delta.show(reply.add(delta.text, ends=True))
                if reply.calls and reason == "stop":
                    reason = "tool_calls"
            delta.error = errors.get(index)
            delta.finish_reason = reason if delta.error is None else "error"
            delta.record = records[index]
            is_last = index + 1 == submission.choices
            if submission.has_transcript and is_last:
                delta.transcript = output.to_html(submission.engine.tokenizer)
            if submission.prompt_log_probs is not None:
                log_probs = submission.prompt_log_probs.prompts[index]
                delta.prompt = list(zip(submission.prompt_of(index)[1:], log_probs, strict=True))
            yield delta

    def _mode_records(self, output: ParallelOutput) -> list[dict[str, object] | None]:
        """Return the fields of the mode's output for each choice, if the request names a mode."""
        if not self.submission.has_mode:
            return [None] * self.submission.choices
        records: list[dict[str, object] | None] = []
        for record in output.to_records():
            records.append({name: value for name, value in record.items() if name != "stats"})
        return records


class _ChoiceText:
    """Text of a row that grows token by token, without hidden tokens and up to the first stop text."""

    def __init__(self, submission: Submission, row: int, end_tokens: Collection[int]) -> None:
        self._submission = submission
        self._log_probs = submission.log_probs
        self._row = row
        prompt = submission.prompt_of(row) if submission.echo or submission.continues else []
        self._prompt = prompt if submission.echo else []  # tokens whose text has not been returned
        context = [] if submission.echo else prompt
        hidden = submission.hidden.union(end_tokens) - submission.marks
        self._detokenizer = IncrementalDetokenizer(submission.engine.tokenizer, hidden, context)
        self._text = StoppedText(self._detokenizer, submission.stops, submission.marks)
        self._count = 0  # number of tokens
        self._shown = 0  # number of characters
        self._waiting: list[LoggedToken] = []

    @property
    def stopped(self) -> bool:
        """Whether the text holds a stop text."""
        return self._text.stopped

    @property
    def begins_with_prompt(self) -> bool:
        """Whether the next token follows the prompt, which is a part of the text."""
        return bool(self._prompt)

    def add(self, token: int) -> tuple[str, list[LoggedToken]]:
        """Append a token. Return the text, and the tokens with log-probabilities, that can be shown now."""
        echo = ""
        echoed: list[LoggedToken] = []
        if self._prompt:
            echo, echoed = self._echo()
        if self._submission.is_empty:
            return echo, echoed
        is_first = not self._detokenizer.visible
        if self._log_probs is not None and not self.stopped:
            log_probs = self._log_probs.get(self._row, self._count)
            self._waiting.append(LoggedToken(token, self._text.length, log_probs, is_first))
        self._count += 1
        text, logged = self._show(self._text.add(token))
        return echo + text, echoed + logged

    def _echo(self) -> tuple[str, list[LoggedToken]]:
        """Return the text of the prompt, and its tokens if their log-probabilities are wanted."""
        collector = self._submission.prompt_log_probs
        scores: list[TokenLogProbs | None] = []
        if collector is not None and self._log_probs is not None:
            scores = [None, *collector.prompts[self._row]]
        text = ""
        for index, token in enumerate(self._prompt):
            if scores:
                self._waiting.append(LoggedToken(token, len(text), scores[index], is_first=index == 0))
            text += self._detokenizer.add([token])
        self._prompt = []
        self._text.length = len(text)
        return self._show(text, everything=True)

    def flush(self) -> tuple[str, list[LoggedToken]]:
        """Return what was held back, as the row has ended."""
        return self._show(self._text.flush(), everything=not self.stopped)

    def _show(self, text: str, everything: bool = False) -> tuple[str, list[LoggedToken]]:
        """Return a text with the waiting tokens that begin in it, or with all of them."""
        self._shown += len(text)
        ready = [logged for logged in self._waiting if logged.begin < self._shown or everything]
        self._waiting = self._waiting[len(ready) :]
        return text, ready

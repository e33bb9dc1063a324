"""ConsoleStreamer: prints the rows of a call one after another, for pipes, files and plain terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import IncrementalDetokenizer, check_tokenizer, hidden_tokens
from hf_parallel.generation.call import GenerationCall
from hf_parallel.transcript.record import Record


def printable(text: str) -> str:
    """Replace each character that a terminal could interpret as a command."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


@dataclass(eq=False)
class PrintedText:
    """A text of a row: a step of a worker, or all that a row writes."""

    group: int
    heading: str
    text: str = ""
    printed: int = 0
    ended: bool = False


class ConsoleStreamer:
    """Streamer that prints the rows of a call in any mode, one after another, using only `print`.

    A row is printed as it grows; the next ones follow when it has ended. Rows of one answer, such as the workers of
    hogwild, are printed step by step in the order in which steps end. Texts that a token budget ended are followed by
    `[truncated]`. Rows are named in modes that stream text or draw several rows per prompt. In plain `generate`, the
    rows have no names and marks.

    Parameters
    ----------
    tokenizer
        Decodes the tokens of modes that stream no text.
    file : text file, optional
        Default: `sys.stdout`.
    headings : sequence of str
        A heading for each prompt. Default: none.

    Raises
    ------
    ValueError
        If `tokenizer` cannot decode tokens; in a call, before anything is generated, if the number of sequences is not
        a multiple of the number of headings.

    Examples
    --------
    >>> streamer = hf_parallel.ConsoleStreamer(tokenizer)
    >>> model.generate(ids, generation_mode="hogwild", tokenizer=tokenizer, streamer=streamer)
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, file: TextIO | None = None, headings: Sequence[str] = ()
    ) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.out = sys.stdout if file is None else file
        self.headings = headings or [""]
        self._clean: Callable[[str], str] = printable if self.out.isatty() else str
        self._group: int | None = None  # group of the line that is not ended yet
        self._reset(len(self.headings))

    def _reset(self, num_sequences: int) -> None:
        """Forget the last call, which may have been cut off."""
        self.print_line("")
        self._num_sequences = num_sequences
        self._record: Record | None = None  # of a call in a mode
        self._ends: frozenset[int] = frozenset()
        self._prints_text = False
        self._by_end = False
        self._decoders: dict[int, IncrementalDetokenizer] = {}  # by row, in the order of `put`, if tokens are printed
        self.rows: dict[int, list[PrintedText]] = {}
        self._waiting: list[PrintedText] = []  # not printed: in the order of their beginnings, or ends if `_by_end`
        self._current: PrintedText | None = None

    def begin_call(self, call: GenerationCall) -> None:
        """Receive the prepared call of a mode; see `ParallelStreamer`."""
        self._record = call.record
        self._ends = frozenset(call.record.end_tokens)
        traits = call.record.config.traits
        self._by_end = traits.merges_rows
        self._prints_text = traits.streams_tokens == "every_pass"
        self._prints_text |= traits.streams_text and traits.streams_tokens == "at_end"

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompts `int64 [rows, length]`, then new tokens `int64 [rows]`."""
        if value.ndim > 1:
            if len(value) % len(self.headings):
                counts = f"{len(value)} sequences and {len(self.headings)} headings"
                raise ValueError(f"the number of sequences must be a multiple of the number of headings, got {counts}")
            self._reset(len(value))
        elif not self._prints_text:
            self._put_tokens(value.tolist())

    def _put_tokens(self, tokens: Sequence[int]) -> None:
        if not self._decoders:
            rows: Sequence[int] = range(self._num_sequences)
            hidden = hidden_tokens(self.tokenizer)
            if self._record is not None:
                num_returned = self._num_sequences * self._record.config.rows_per_prompt
                rows = self._record.returned or range(num_returned)
                hidden = self._record.hidden_tokens(self.tokenizer)
            self._decoders = {row: IncrementalDetokenizer(self.tokenizer, hidden) for row in rows}
            for row in rows:
                self._begin(row, "")
        for (row, decoder), token in zip(self._decoders.items(), tokens, strict=False):
            (text,) = self.rows[row]
            if not text.ended:
                self._write(text, decoder.add([token]))
            if token in self._ends:
                self._close(text)

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text of a row; see `ParallelStreamer.write_row`."""
        if self._record is None or not self._prints_text:
            return
        is_closed = row not in self.rows or self.rows[row][-1].ended
        if event == "begin" or (text and is_closed):
            self._begin(row, text if event == "begin" else "")
        if row not in self.rows:
            return
        last = self.rows[row][-1]
        self._write(last, text)
        if event in ("step", "end"):
            if event == "end":
                self._mark_end(row, last)
            self._close(last)

    def end(self) -> None:
        """Print all texts that wait and end the line. The streamer can then serve another call."""
        for row in self._decoders:
            self._mark_end(row, self.rows[row][-1])
        for texts in self.rows.values():
            for text in texts:
                self._close(text)
        self.print_line("")
        self._record = None  # its config may hold a large cache

    def print_line(self, text: str) -> None:
        """Print a separate line. Empty: only end the current line."""
        if self._group is not None:
            self.out.write("\n")
        if text:
            self.out.write(f"{self._clean(text)}\n")
        self.out.flush()
        self._group = None

    def _begin(self, row: int, text: str) -> None:
        """Begin a text of a row; `text` is its beginning."""
        texts = self.rows.setdefault(row, [])
        step = len(texts) + 1
        answers = self._num_sequences // len(self.headings)
        sequence = row
        name = ""
        if self._record is not None:
            rows = self._record.config.rows
            sequence, index, _ = rows.place(row, self._num_sequences)
            named = rows.step_text(index, step, text) != text  # the text itself begins with the name
            if not named and (self._record.config.traits.streams_text or rows.drawn_per_prompt > 1):
                name = rows.step_name(index, step, text)
        number = f"{sequence % answers + 1} of {answers}" if answers > 1 else ""
        heading = ", ".join(filter(None, (number, name)))
        texts.append(PrintedText(sequence // answers, f"[{heading}]" if heading else ""))
        self._waiting.append(texts[-1])
        self._print_next()

    def _write(self, text: PrintedText, added: str) -> None:
        if not text.ended:
            text.text += added
        if text is self._current:
            self._print_new(text)

    def _mark_end(self, row: int, text: PrintedText) -> None:
        """Append why a text ended, if its budget or the mode ended it."""
        if text.ended or self._record is None:
            return
        reason = self._record.end_reasons.get(row, "truncated" if row in self._record.truncated else "")
        if reason:
            text.text = text.text.rstrip()
            self._write(text, f" [{reason}]")

    def _close(self, text: PrintedText) -> None:
        if text.ended:
            return
        text.ended = True
        if text is self._current:
            self._current = None
            self._print_next()
        elif self._by_end:
            self._waiting.remove(text)
            self._waiting.append(text)

    def _print_next(self) -> None:
        """Print waiting texts up to the first that is unfinished, which becomes the current one."""
        while self._waiting and self._current is None:
            text = min(self._waiting, key=lambda text: (text.group, self._by_end and not text.ended))
            self._waiting.remove(text)
            if self._group is not None:
                self.out.write("\n\n")
            of_group = self.headings[text.group] if text.group != self._group else ""
            self._group = text.group
            for heading in (of_group, text.heading):
                if heading:
                    self.out.write(f"{self._clean(heading)}\n")
            self._print_new(text)
            self._current = None if text.ended else text

    def _print_new(self, text: PrintedText) -> None:
        """Print the new part of a text, left-stripped; trailing whitespace is held back until more text follows."""
        if not text.printed:
            text.text = text.text.lstrip()
        end = len(text.text.rstrip())
        if end > text.printed:
            self.out.write(self._clean(text.text[text.printed : end]))
            self.out.flush()
            text.printed = end

"""Streamers that print concurrent texts one after another, for pipes, files and plain terminals.

One text is printed as it grows. The others are buffered until it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import IncrementalDetokenizer, check_tokenizer
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ParallelConfig

TRUNCATED = "[truncated]"
"""Follows a text that its token budget ended."""
INTERRUPTED = "[interrupted]"
"""Follows a text that was not finished when the call was interrupted."""


def printable(text: str, kept: str = "\n\t", replacement: str = "\ufffd") -> str:
    """Replace each character, but those in `kept`, that a terminal could interpret as a command."""
    return "".join(char if char.isprintable() or char in kept else replacement for char in text)


@dataclass(eq=False)
class _Text:
    group: int
    heading: str
    text: str = ""
    ended: bool = False
    printed: int = 0


class SequentialPrinter:
    """Prints texts that grow concurrently, one after another.

    Texts form groups, each with a heading, which may be empty. A group is printed completely before the next one. In a
    group, texts are printed in the order of `begin`, or finished ones first if `by_end` is True.
    """

    def __init__(self, out: TextIO, headings: Sequence[str], by_end: bool = False) -> None:
        self.out, self.headings, self.by_end = out, headings, by_end
        self._clean: Callable[[str], str] = printable if out.isatty() else str
        self._group: int | None = None  # group of the line that is not ended yet
        self._drop_texts()

    def _drop_texts(self) -> None:
        self._texts: dict[Hashable, _Text] = {}
        self._buffered: list[_Text] = []  # unfinished ones in the order of begin(), ended ones of close()
        self._current: _Text | None = None

    def begin(self, key: Hashable, group: int, heading: str = "") -> None:
        """Begin a text of a group. Printing it raises `IndexError` if there is no heading for the group."""
        text = self._texts[key] = _Text(group, heading)
        self._buffered.append(text)
        self._print_next()

    def write(self, key: Hashable, text: str) -> None:
        """Append to a text, unless it has ended. Raises `KeyError` if it has not begun."""
        of_key = self._texts[key]
        if not of_key.ended:
            of_key.text += text
        if of_key is self._current:
            self._print_new(of_key)

    def write_mark(self, key: Hashable, mark: str) -> None:
        """Append a mark to a text, after its last character that is not whitespace; otherwise as `write`."""
        text = self._texts[key]
        if not text.ended:
            text.text = text.text.rstrip()
            self.write(key, f" {mark}")

    def close(self, key: Hashable) -> None:
        """End a text, unless it has ended. Raises `KeyError` if it has not begun."""
        text = self._texts[key]
        if text is self._current:
            self._current = None
            self._print_next()
        elif self.by_end and not text.ended and text in self._buffered:  # Ctrl-C may come while a text is being printed
            self._buffered.remove(text)
            self._buffered.append(text)
        text.ended = True

    def mark_unfinished(self, mark: str) -> None:
        """Append a mark to every unfinished text. If all have ended, print it as a separate line."""
        unfinished = [key for key, text in self._texts.items() if not text.ended]
        for key in unfinished:
            self.write_mark(key, mark)
        if not unfinished:
            self.print_line(mark)

    def end(self) -> None:
        """Print all buffered texts and end the line."""
        for key in self._texts:
            self.close(key)
        self.print_line("")

    def print_line(self, text: str) -> None:
        """Print a separate line. Empty: only end the current line."""
        self.out.write("\n" * (self._group is not None) + (f"{self._clean(text)}\n" if text else ""))
        self.out.flush()
        self._group = None

    def _print_next(self) -> None:
        """Print buffered texts up to the first that is unfinished, which becomes the current one."""
        while self._buffered and self._current is None:
            text = min(self._buffered, key=lambda text: (text.group, self.by_end and not text.ended))
            self._buffered.remove(text)
            if self._group is not None:
                self.out.write("\n\n")
            of_group = self.headings[text.group] if text.group != self._group else ""
            self._group = text.group
            self.out.write("".join(f"{self._clean(heading)}\n" for heading in (of_group, text.heading) if heading))
            self._print_new(text)
            self._current = None if text.ended else text

    def _print_new(self, text: _Text) -> None:
        """Print the new part of a text, left-stripped; trailing whitespace is held back until more text follows."""
        if not text.printed:
            text.text = text.text.lstrip()
        end = len(text.text.rstrip())
        if end > text.printed:
            self.out.write(self._clean(text.text[text.printed : end]))
            self.out.flush()
            text.printed = end


class ConsoleStreamer(SequentialPrinter):
    """Streamer that prints the rows of a call in any mode, one after another, with nothing but `print`.

    A row is printed as it grows; the next ones follow when it has ended. Rows of one answer, such as the workers of
    hogwild, are printed step by step in the order in which steps end. Texts that a token budget ended are followed by
    `[truncated]`. Modes that stream text name the rows.

    Parameters
    ----------
    tokenizer
        Decodes the tokens of modes that stream no text.
    file : text file, optional
        Default: `sys.stdout`.
    headings : sequence of str
        A heading for each prompt. Default: none.
    eos_token_ids : collection of int
        Tokens that end a row in calls without a mode. In a mode, those of the call are used.
    max_new_tokens : int, optional
        Token budget of a row in calls without a mode, whose texts are marked only if it is given.

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
        self,
        tokenizer: PreTrainedTokenizerBase,
        file: TextIO | None = None,
        headings: Sequence[str] = (),
        *,
        eos_token_ids: Collection[int] = (),
        max_new_tokens: int | None = None,
    ) -> None:
        check_tokenizer(tokenizer)
        super().__init__(sys.stdout if file is None else file, headings or [""])
        self.tokenizer = tokenizer
        self._eos_token_ids, self._max_new_tokens = set(eos_token_ids), max_new_tokens
        self._skipped = set(getattr(tokenizer, "all_special_ids", ()))
        self._reset(len(self.headings))

    def _reset(self, num_sequences: int) -> None:
        """Set the state before a call, until `begin_call` a call without a mode; the last one may have been cut off."""
        self.print_line("")
        self._drop_texts()
        self.completions: list[IncrementalDetokenizer] = []
        """Tokens of each row, if tokens are printed."""
        self.truncated: set[int] = set()
        """Rows that a token budget ended; in a mode, those of the call's record."""
        self._end_reasons: dict[int, str] = {}
        self.by_end = self._prints_text = False
        self._ends = self._eos_token_ids
        self._config: ParallelConfig | None = None
        self._num_sequences, self._num_puts = num_sequences, 0
        self._steps: dict[int, int] = {}

    def begin_call(self, call: GenerationCall) -> None:
        """Receive the prepared call of a mode; see `ParallelStreamer`."""
        config: ParallelConfig = call.record.config
        self._config, self._ends, self.truncated = config, set(call.eos_token_ids), call.record.truncated
        self._end_reasons = call.record.end_reasons
        self.by_end = config.traits.merges_rows
        self._prints_text = config.traits.streams_text and config.traits.streams_tokens != "when_final"

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
        if not self.completions:
            rows = self._num_sequences * (1 if self._config is None else self._config.rows_per_prompt)
            self.completions = [IncrementalDetokenizer(self.tokenizer) for _ in range(rows)]
            for row in range(rows):
                self._begin_step(row, "")
        self._num_puts += 1
        for row, token in enumerate(tokens[: len(self.completions)]):
            if self._texts[row, 1].ended:
                continue
            if token not in self._skipped:
                self.write((row, 1), self.completions[row].add([token]))
            if token in self._ends:
                self.close((row, 1))
            elif self._config is None and self._num_puts == self._max_new_tokens:
                self.truncated.add(row)

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text of a row; see `ParallelStreamer.write_row`."""
        if self._config is None or not self._prints_text:
            return
        if event == "begin" or (event == "inject" and self._has_ended(row)):
            self._begin_step(row, text if event == "begin" else "")
        if row not in self._steps:
            return
        key = row, self._steps[row]
        self.write(key, text)
        if event in ("step", "end"):
            reason = self._end_reasons.get(row)
            if event == "end" and not self._has_ended(row) and (reason or row in self.truncated):
                self.write_mark(key, f"[{reason}]" if reason else TRUNCATED)
            self.close(key)

    def end(self) -> None:
        """Print all buffered texts and end the line. The streamer can then serve another call."""
        for row in self.truncated.intersection(range(len(self.completions))):
            self.write_mark((row, 1), TRUNCATED)
        super().end()
        self._config = None  # which may hold a large cache

    def _has_ended(self, row: int) -> bool:
        return row not in self._steps or self._texts[row, self._steps[row]].ended

    def _begin_step(self, row: int, text: str) -> None:
        step = self._steps[row] = self._steps.get(row, 0) + 1
        answers = self._num_sequences // len(self.headings)
        sequence, name = row, ""
        if self._config is not None:
            sequence, index, _ = self._config.rows.place(row, self._num_sequences)
            named = self._config.rows.step_text(index, step, text) != text  # the text itself begins with the name
            if not named and (self._prints_text or self._config.rows_per_prompt > 1):
                name = self._config.rows.step_name(index, step, text)
        number = f"{sequence % answers + 1} of {answers}" if answers > 1 else ""
        heading = ", ".join(filter(None, (number, name)))
        self.begin((row, step), sequence // answers, f"[{heading}]" if heading else "")

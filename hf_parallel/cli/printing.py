"""Streamers that print concurrent texts one after another, for pipes, files and plain terminals.

One text is printed as it grows. The others are buffered; finished texts are printed before unfinished ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation import ParallelConfig


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

    Texts form groups, each with a heading, which may be empty. A group is printed completely before the next one.
    """

    def __init__(self, out: TextIO, headings: Sequence[str]) -> None:
        self.out, self.headings = out, headings
        self._texts: dict[Hashable, _Text] = {}
        self._buffered: list[_Text] = []  # unfinished ones in the order of begin(), ended ones of close()
        self._current: _Text | None = None
        self._group: int | None = None  # group of the line that is not ended yet
        self._clean: Callable[[str], str] = printable if out.isatty() else str

    def begin(self, key: Hashable, group: int, heading: str = "") -> None:
        """Begin a text of a group."""
        text = self._texts[key] = _Text(group, heading)
        self._buffered.append(text)
        self._print_next()

    def write(self, key: Hashable, text: str) -> None:
        """Append to a text."""
        self._texts[key].text += text
        if self._texts[key] is self._current:
            self._print_new(self._current)

    def close(self, key: Hashable) -> None:
        """End a text. Has no effect on a text that has ended."""
        text = self._texts[key]
        if text is self._current:
            self._current = None
            self._print_next()
        elif not text.ended and text in self._buffered:  # Ctrl-C may come while a text is being printed
            self._buffered.remove(text)
            self._buffered.append(text)
        text.ended = True

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
            text = min(self._buffered, key=lambda text: (text.group, not text.ended))
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


class RowPrinter(SequentialPrinter):
    """Prints the rows of a call, one group per prompt: the text that the mode streams, or else the tokens of each row.

    If the mode's `streams_tokens` is `when_final`, tokens are printed even if it streams text. `config` is None without
    a mode, `answers` the number of sequences per prompt. `completions` has each row's tokens, unless text is printed.
    """

    def __init__(
        self,
        out: TextIO,
        headings: Sequence[str],
        tokenizer: Any,
        config: ParallelConfig | None = None,
        answers: int = 1,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        super().__init__(out, headings)
        self.config, self.answers, self.eos_token_ids = config, answers, set(eos_token_ids)
        self._skipped = set(getattr(tokenizer, "all_special_ids", ()))
        self._prints_text = config is not None and config.streams_text and config.streams_tokens != "when_final"
        rows = 0 if self._prints_text else len(headings) * answers * (1 if config is None else config.rows_per_prompt)
        self.completions = [IncrementalDetokenizer(tokenizer) for _ in range(rows)]
        self._steps: dict[int, int] = {}

    def put(self, value: Any) -> None:
        """Receive the prompts `int64 [rows, length]`, then new tokens `int64 [rows]`."""
        if value.ndim > 1:
            for row in range(len(self.completions)):
                self._begin_step(row, "")
            return
        for row, token in enumerate(value.tolist()[: len(self.completions)]):
            if self._texts[row, 1].ended:
                continue
            if token not in self._skipped:
                self.write((row, 1), self.completions[row].add([token]))
            if token in self.eos_token_ids:
                self.close((row, 1))

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text of a row; see `ParallelStreamer`."""
        if not self._prints_text:
            return
        if event == "begin":
            self._begin_step(row, text)
        self.write((row, self._steps[row]), text)
        if event in ("step", "end"):
            self.close((row, self._steps[row]))

    def _begin_step(self, row: int, text: str) -> None:
        step = self._steps[row] = self._steps.get(row, 0) + 1
        sequence, name = row, ""
        if self.config is not None:
            sequence, index, _ = self.config.place(row, len(self.headings) * self.answers)
            named = self.config.step_text(index, step, text) != text  # the text itself begins with the name
            if not named and (self._prints_text or self.config.rows_per_prompt > 1):
                name = self.config.step_name(index, step, text)
        number = f"{sequence % self.answers + 1} of {self.answers}" if self.answers > 1 else ""
        heading = ", ".join(filter(None, (number, name)))
        self.begin((row, step), sequence // self.answers, f"[{heading}]" if heading else "")

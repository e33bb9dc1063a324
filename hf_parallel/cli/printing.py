"""What many rows write, printed as if one spoke after the other: for pipes, files and plain terminals.

One text has the floor and is printed as it grows; the others wait, finished ones first. Streamers for `generate`. What
rows are called, and what of a text a terminal may be shown, is said here for the live view too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation import ParallelConfig
from hf_parallel.generation.modes.hogwild.config import HogwildConfig


def printable(text: str, kept: str = "\n\t", instead: str = "\ufffd") -> str:
    """A text without what a terminal would take for commands.

    Parameters
    ----------
    text : str
    kept : str
        Characters that stay though they are no printable ones.
    instead : str
        Takes the place of each of the others.
    """
    return "".join(char if char.isprintable() or char in kept else instead for char in text)


@dataclass(eq=False)
class _Speech:
    """A text that is printed in one go, whole or while it grows."""

    group: int
    heading: str
    text: str = ""
    shown: int = 0
    closed: bool = False


class Floor:
    """Prints texts that grow at the same time, each in one go.

    Parameters
    ----------
    out : text file
    headings : sequence of str
        One per group of texts, printed before it; a group is printed before the next one. Empty: no heading.

    Attributes
    ----------
    written : sequence of IncrementalDetokenizer
        What each row wrote, where rows come as tokens.
    """

    written: Sequence[IncrementalDetokenizer] = ()

    def __init__(self, out: TextIO, headings: Sequence[str]) -> None:
        self.out, self.headings = out, headings
        self._speeches: dict[Hashable, _Speech] = {}
        self._waiting: list[_Speech] = []  # those that have not begun to be printed, finished ones first
        self._speaker: _Speech | None = None
        self._group: int | None = None
        self._clean: Callable[[str], str] = printable if out.isatty() else str

    def begin(self, name: Hashable, group: int, heading: str = "") -> None:
        """Begin the text `name` of a group."""
        speech = self._speeches[name] = _Speech(group, heading)
        self._waiting.append(speech)
        if self._speaker is None:
            self._pass_on()

    def write(self, name: Hashable, text: str) -> None:
        """Append to a text."""
        speech = self._speeches[name]
        speech.text += text
        if speech is self._speaker:
            self._say(speech)

    def close(self, name: Hashable) -> None:
        """End a text; the next one is printed, if it was this one's turn."""
        speech = self._speeches[name]
        speech.closed = True
        if speech is self._speaker:
            self._pass_on()
        elif speech in self._waiting:  # behind those that had ended before
            self._waiting.remove(speech)
            self._waiting.insert(sum(other.closed for other in self._waiting), speech)

    def finish(self) -> None:
        """Print all that is still waiting, and end the line."""
        for name, speech in self._speeches.items():
            if not speech.closed:
                self.close(name)
        self.line("")

    def line(self, text: str) -> None:
        """Print a line of its own, or end one that is not ended."""
        if self._group is not None:
            self.out.write("\n")
        self._group = None
        if text:
            self.out.write(self._clean(text) + "\n")
        self.out.flush()

    def _pass_on(self) -> None:
        """Print what has ended, and give the floor to a text that has not; a group is left when all of it has."""
        self._speaker = None
        while self._waiting and self._speaker is None:
            group = min(speech.group for speech in self._waiting)
            speech = next(speech for speech in self._waiting if speech.group == group)
            self._waiting.remove(speech)
            self._introduce(speech)
            self._say(speech)
            if not speech.closed:
                self._speaker = speech

    def _introduce(self, speech: _Speech) -> None:
        headings = [speech.heading]
        if self._group is not None:
            self.out.write("\n\n")
        if speech.group != self._group:
            headings.insert(0, self.headings[speech.group])
        self._group = speech.group
        self.out.write("".join(f"{self._clean(heading)}\n" for heading in headings if heading))

    def _say(self, speech: _Speech) -> None:
        """Print what is new of a text; space around it is not, and space inside it when more has come."""
        if not speech.shown:
            speech.text = speech.text.lstrip()
        ready = len(speech.text.rstrip())
        if ready > speech.shown:
            self.out.write(self._clean(speech.text[speech.shown : ready]))
            self.out.flush()
            speech.shown = ready


class RowPrinter(Floor):
    """Prints the tokens of each row: what `generate` gives any streamer.

    Parameters
    ----------
    out, headings
        See `Floor`; there is a group per prompt.
    tokenizer
    rows : int
        Rows per prompt.
    ends : collection of int
        Tokens that end a row.
    """

    def __init__(
        self, out: TextIO, headings: Sequence[str], tokenizer: Any, rows: int = 1, ends: Collection[int] = ()
    ) -> None:
        super().__init__(out, headings)
        self.ends, self.skipped = set(ends), set(getattr(tokenizer, "all_special_ids", ()))
        self.rows = rows
        self.written = [IncrementalDetokenizer(tokenizer) for _ in range(len(headings) * rows)]
        self._ended: set[int] = set()

    def put(self, value: Any) -> None:
        """Take the prompts `[rows, length]`, then each pass's tokens `[rows]`."""
        if value.ndim > 1:
            for row in range(len(self.written)):
                self.begin(row, row // self.rows, f"[{row % self.rows + 1} of {self.rows}]" if self.rows > 1 else "")
            return
        for row, token in enumerate(value.tolist()):
            if row in self._ended:
                continue
            if token not in self.skipped:
                self.write(row, self.written[row].add([token]))
            if token in self.ends:
                self._ended.add(row)
                self.close(row)

    def end(self) -> None:
        """Print the rest."""
        self.finish()


class StepPrinter(Floor):
    """Prints what rows write where a mode tells it as text: steps of workers, answers, points of an outline.

    Parameters
    ----------
    out, headings
        See `Floor`; there is a group per prompt.
    config : ParallelConfig
        That of the call.
    answers : int
        Sequences per prompt (`num_return_sequences`).
    """

    def __init__(self, out: TextIO, headings: Sequence[str], config: ParallelConfig, answers: int = 1) -> None:
        super().__init__(out, headings)
        self.config, self.answers = config, answers
        self._steps: dict[int, int] = {}

    def put(self, value: Any) -> None:
        """Tokens are of no interest here."""

    def write_row(self, row: int, text: str, event: str) -> None:
        """Take what a row wrote; events as in `ParallelStreamer`."""
        if event == "begin":
            self._steps[row] = self._steps.get(row, 0) + 1
            sequence, number, _ = self.config.place(row, len(self.headings) * self.answers)
            self.begin((row, self._steps[row]), sequence // self.answers, self._heading(row, sequence, number, text))
        self.write((row, self._steps[row]), text)
        if event in ("step", "end") and not self._speeches[row, self._steps[row]].closed:
            self.close((row, self._steps[row]))

    def _heading(self, row: int, sequence: int, number: int, text: str) -> str:
        """What a text is called, and which answer it is of; steps of workers begin with their author's name."""
        which = f"{sequence % self.answers + 1} of {self.answers}" if self.answers > 1 else ""
        if isinstance(self.config, HogwildConfig):
            return f"[{which}]" if which else ""
        name = self.config.row_name(number)
        if self._steps[row] > 1:  # the row of an outline goes on behind its points, or answers without any
            name = "Conclusion" if text else "Answer"
        return f"[{which}, {name}]" if which else f"[{name}]"

    def end(self) -> None:
        """Print the rest."""
        self.finish()

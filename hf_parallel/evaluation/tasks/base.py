"""A problem of an evaluation task: a prompt, its answer, and the score of a generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_parallel.generation.modes import find_answer


@dataclass(frozen=True)
class Problem:
    """A prompt with its answer. `score` rates a generated text.

    A problem of your own is a frozen dataclass that derives from this class. It must define `score`; all else has a
    default. A generated task has a class method `make(seed, ...)`, which returns equal problems for equal seeds. A
    loaded task has `source`, `id:config:split` of its data on the Hub, and class methods `from_row(row)` and
    `from_rows(rows)`. If the dataset has a loading script, which `datasets` no longer runs, `hub_file` is the URL of
    its `.jsonl` file with the fields `{name}`, `{config}` and `{split}`.

    Parameters
    ----------
    prompt : str
        Text for the model, without chat template.
    answer : str
        Correct answer, for `score`.

    Attributes
    ----------
    name : str
        Name of the task in results and tables. Empty: the name of the class.
    answer_pattern : str
        Regular expression for the final answer, a setting of several modes. Empty: there is no final answer.
    finisher_prompt : str
        Text after which a model should give its final answer at once, if the budget has ended without one. Empty: a
        text that fits `answer_pattern`.
    finisher_tokens : int
        Maximum number of tokens of that answer.
    """

    name: ClassVar[str] = ""
    answer_pattern: ClassVar[str] = ""
    finisher_prompt: ClassVar[str] = ""
    finisher_tokens: ClassVar[int] = 32
    source: ClassVar[str] = ""
    hub_file: ClassVar[str] = ""
    rows_per_problem: ClassVar[int] = 1

    prompt: str
    answer: str

    @property
    def task(self) -> str:
        """Name of its task in results: `name`, or the name of the class."""
        return self.name or type(self).__name__

    @property
    def levels(self) -> tuple[str, ...]:
        """Parts of the prompt, from the part shared by all problems to the problem's own; empty if it has one level."""
        return ()

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> Problem:
        """Make a problem of a row of the dataset. Raises `ValueError` if a column is missing or malformed."""
        raise NotImplementedError(f"{cls.__name__} must define from_row(row), which makes a problem of a row")

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, object]]) -> Problem:
        """Make a problem of `rows_per_problem` rows of the dataset."""
        return cls.from_row(rows[0])

    def has_answer(self, text: str) -> bool:
        """Return whether a generated text holds a final answer; without an `answer_pattern`, any text does.

        If none is held within a budget, the early finisher asks for one.
        """
        return not self.answer_pattern or find_answer(self.answer_pattern, text) is not None

    def score(self, text: str) -> float:
        """Return the score of a generated text, without its prompt: from 0.0 (wrong) to 1.0 (correct)."""
        raise NotImplementedError(f"{type(self).__name__} must define score(text), which returns 0.0 to 1.0")


def column(row: Mapping[str, object], name: str) -> Any:
    """Return a value of a row. Raises `ValueError` if the column is missing."""
    if name not in row:
        raise ValueError(f"no column {name!r}; there are {sorted(row)}")
    return row[name]


def text_column(row: Mapping[str, object], name: str) -> str:
    """Return a text of a row; numbers become texts. Raises `ValueError` for other types, and for blank texts."""
    value = column(row, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(int(value) if value == int(value) else value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {name!r} must be a non-blank text, got {value!r:.80}")
    return value.strip()

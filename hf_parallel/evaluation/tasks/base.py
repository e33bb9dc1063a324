"""Problem of an evaluation task: a prompt, its answer, and the score of a generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_parallel.generation.modes import find_answer


@dataclass(frozen=True)
class Problem:
    """A prompt with its answer. `score` rates a generated text.

    Your own problem is a frozen dataclass that derives from this class. Only `score` has no default. A generated task
    has a class method `make(seed, ...)`, which returns equal problems for equal seeds. A loaded task has `source`, the
    `id:config:split` of its data on the Hub, and class methods `from_row(row)` and `from_rows(rows)`. If its dataset
    has a loading script, which `datasets` no longer runs, `hub_file` is the URL of a `.jsonl` file with the fields
    `{name}`, `{config}` and `{split}`.

    Parameters
    ----------
    prompt : str
        Text for the model, without a chat template.
    answer : str
        Correct answer, for `score`.

    Attributes
    ----------
    name : str
        Name of the task in results and tables. Empty: the class name.
    answer_pattern : str
        Regular expression of the final answer, which is a setting of several modes. Empty: no final answer.
    finisher_prompt : str
        Text that makes a model give its final answer at once, when the budget ends without one. Empty: a text for
        `answer_pattern`.
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
        """Name of the task in results: `name`, or the class name."""
        return self.name or type(self).__name__

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> Problem:
        """Make a problem from a row of the dataset. Raises `ValueError` if a column is missing or malformed."""
        raise NotImplementedError(f"{cls.__name__} must define from_row(row), which makes a problem from a row")

    @classmethod
    def selects(cls, row: Mapping[str, object]) -> bool:
        """Return whether a row is a problem of the task; further parameters are options of `load_problems`."""
        return True

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, object]]) -> Problem:
        """Make a problem from `rows_per_problem` rows of the dataset."""
        return cls.from_row(rows[0])

    def has_answer(self, text: str) -> bool:
        """Return whether a generated text has a final answer, which any text has without an `answer_pattern`.

        The early finisher asks for an answer if a text within the budget has none.
        """
        return not self.answer_pattern or find_answer(self.answer_pattern, text) is not None

    def score(self, text: str) -> float:
        """Return the score of a generated text (without the prompt), from 0.0 (wrong) to 1.0 (correct)."""
        raise NotImplementedError(f"{type(self).__name__} must define score(text), which returns 0.0 to 1.0")


def column(row: Mapping[str, object], name: str) -> Any:
    """Return a value of a row. Raises `ValueError` if the column is missing."""
    if name not in row:
        raise ValueError(f"no column {name!r}; there are {sorted(row)}")
    return row[name]


def text_column(row: Mapping[str, object], name: str) -> str:
    """Return a text of a row; numbers become texts. Raises `ValueError` for other types and blank texts."""
    value = column(row, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_whole = value == int(value)
        value = str(int(value) if is_whole else value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {name!r} must be a non-blank text, got {value!r:.80}")
    return value.strip()

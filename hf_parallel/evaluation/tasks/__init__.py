"""Tasks of the papers: generated from a seed, or loaded from a file or the Hub by `datasets`."""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.evaluation.tasks.code import APPSProblem, CodeProblem, LiveCodeBenchProblem, Test
from hf_parallel.evaluation.tasks.game24 import Game24Problem
from hf_parallel.evaluation.tasks.generated import ArithmeticProblem, PlanningProblem, RetrievalProblem, Student
from hf_parallel.evaluation.tasks.math import (
    AIME25Problem,
    FormulaProblem,
    GSM8KProblem,
    GSM8Kx5Problem,
    LIMOProblem,
    MATH500Problem,
    OlympiadBenchProblem,
)
from hf_parallel.evaluation.tasks.reading import DocumentsProblem, NeedleProblem
from hf_parallel.generation.caller import warn_caller
from hf_parallel.generation.validation import check_int, names_hint, suggestion

__all__ = [
    "APPSProblem",
    "AIME25Problem",
    "ArithmeticProblem",
    "CodeProblem",
    "DocumentsProblem",
    "FormulaProblem",
    "GENERATED",
    "GSM8KProblem",
    "GSM8Kx5Problem",
    "Game24Problem",
    "LIMOProblem",
    "LiveCodeBenchProblem",
    "MATH500Problem",
    "NeedleProblem",
    "OlympiadBenchProblem",
    "PlanningProblem",
    "Problem",
    "RetrievalProblem",
    "Student",
    "TASKS",
    "Test",
    "check_task",
    "load_problems",
]

GENERATED: dict[str, type[RetrievalProblem] | type[ArithmeticProblem] | type[PlanningProblem]] = {
    cls.name: cls for cls in (RetrievalProblem, ArithmeticProblem, PlanningProblem)
}
"""Generated tasks by name; each has `make(seed, ...)`."""
LOADED: tuple[type[Problem], ...] = (
    *(GSM8KProblem, GSM8Kx5Problem, LIMOProblem, MATH500Problem, AIME25Problem, OlympiadBenchProblem),
    *(LiveCodeBenchProblem, APPSProblem, Game24Problem, DocumentsProblem),
)
_ALL: tuple[type[Problem], ...] = (*GENERATED.values(), *LOADED, NeedleProblem)
TASKS: dict[str, type[Problem]] = {cls.name: cls for cls in _ALL}
"""All tasks by name."""
FORMATS = {".jsonl": None, ".json": "json", ".csv": "csv", ".parquet": "parquet"}
GENERATED_COUNT = 100


def load_problems(
    task: str, source: str | os.PathLike[str] | None = None, count: int | None = None, seed: int = 0, **options: Any
) -> list[Problem]:
    """Return problems of a task.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    source : str or path, optional
        A file (.jsonl, .json, .csv or .parquet; of `needles`: a text), or a dataset on the Hub: `id`, or
        `id:config:split`. Default: the source of the task. Generated tasks have none.
    count : int, optional
        Number of problems: the first ones. Default: all; 100 of generated tasks and of `needles`.
        A source that has fewer gives a warning.
    seed : int
        Seed of generated tasks: problem i has the seed `seed + i`. Loaded tasks keep their order.
    **options
        Arguments of `make` (`num_students`, `num_questions`, `num_aspects`) or `from_text` (`characters`, `num_facts`).

    Raises
    ------
    ValueError
        If the task or an option is unknown, the file is missing or has another format, or a row lacks a column.
    ImportError
        If the source is not a .jsonl file and `datasets` is not installed.
    """
    check_task(task, options)
    if count is not None:
        check_int("count", count, at_least=1)
    if source is not None and not isinstance(source, str | os.PathLike):
        hint = f"; TASKS[{task!r}].from_rows makes a problem of rows"
        raise ValueError(f"source must be a file or the id of a dataset, got {source!r:.80}{hint}")
    if task in GENERATED:
        if source is not None:
            raise ValueError(f"{task} is generated and has no source, got {os.fspath(source)!r}")
        make = GENERATED[task].make
        return [make(seed + index, **options) for index in range(count or GENERATED_COUNT)]
    cls = TASKS[task]
    if cls is NeedleProblem:
        if source is None:
            raise ValueError("needles needs a source: a text file, such as a book of Project Gutenberg")
        text = _existing(Path(source)).read_text(encoding="utf-8", errors="replace")
        return [*NeedleProblem.from_text(text, count or GENERATED_COUNT, seed, **options)]
    rows, size = _rows(os.fspath(source or cls.source), cls), cls.rows_per_problem
    groups = iter(lambda: list(itertools.islice(rows, size)), [])
    problems: list[Problem] = []
    for number, group in enumerate(itertools.islice(groups, count)):
        if len(group) < size and problems:
            break
        try:
            problems.append(cls.from_rows(group))
        except ValueError as error:
            raise ValueError(f"row {number * size} of {source or cls.source}, task {task}: {error}") from error
    if not problems:
        raise ValueError(f"{source or cls.source} has no rows")
    if count is not None and len(problems) < count:
        warn_caller(f"number of problems in {source or cls.source}: {len(problems)}, fewer than count={count}")
    return problems


def check_task(task: str, options: Mapping[str, object]) -> None:
    """Raise `ValueError` for an unknown task, and for a name that is no option of it; `count` and `seed` are none."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}, got {task!r}{suggestion(task, TASKS)}")
    names: list[str] = []
    if task in GENERATED:
        names = [*inspect.signature(GENERATED[task].make).parameters]
    elif TASKS[task] is NeedleProblem:
        names = [*inspect.signature(NeedleProblem.from_text).parameters]
    names = [name for name in names if name not in ("text", "count", "seed")]
    if options and not names:
        raise ValueError(f"{task} has no options, got {sorted(options)}")
    for name, value in options.items():
        if name not in names:
            raise ValueError(f"{task} has no option {name!r} (got {value!r}){names_hint(name, names)}")


def _rows(source: str, cls: type[Problem]) -> Iterator[Mapping[str, object]]:
    """Read the rows of a file or of a dataset on the Hub, one after another."""
    suffix = Path(source).suffix.lower()
    if suffix in FORMATS:
        return _rows_of_file(_existing(Path(source)), FORMATS[suffix])
    if Path(source).exists() or source.startswith((".", "/", "~")):
        raise ValueError(f"the format of {source!r} must be one of {list(FORMATS)}")
    name, config, split = (source.split(":") + ["", ""])[:3]
    default = cls.source.split(":")
    config = config or (default[1] if name == default[0] else "")
    split = split or default[2]
    if cls.hub_file and name == default[0]:
        return _rows_of_hub_file(cls.hub_file.format(name=name, config=config, split=split))
    return iter(_load_dataset()(name, config or None, split=split, streaming=True))


def _rows_of_hub_file(url: str) -> Iterator[Mapping[str, object]]:
    """Read JSON objects, one per line, as far as they are asked for."""
    import fsspec

    try:
        with fsspec.open(url, "rb") as file:
            yield from _json_lines(file, url)
    except FileNotFoundError as error:
        raise ValueError(f"no file {url!r}: {error}") from error


def _rows_of_file(path: Path, builder: str | None) -> Iterator[Mapping[str, object]]:
    """Read the rows of a file by a builder of `datasets`; without one: JSON objects, one per line."""
    if builder is None:
        with path.open("rb") as file:
            yield from _json_lines(file, path)
    elif path.stat().st_size:
        load_dataset = _load_dataset()
        try:
            yield from load_dataset(builder, data_files=str(path), split="train", streaming=True)
        except Exception as error:  # of pyarrow, pandas or json, without the name of the file
            raise ValueError(f"{path} cannot be read: {error}") from error


def _json_lines(file: BinaryIO, name: str | Path) -> Iterator[Mapping[str, object]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            text = line.decode(errors="replace").strip()
            raise ValueError(f"line {number} of {name} must be a JSON object, got {text!r:.80}")
        yield row


def _load_dataset() -> Callable[..., Iterable[Mapping[str, object]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("loading problems needs datasets: pip install 'hf_parallel[eval]'") from error
    return load_dataset


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}")
    return path

"""Tasks of the papers, generated from a seed or loaded from a file or the Hub."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.evaluation.tasks.code import APPSProblem, LiveCodeBenchProblem
from hf_parallel.evaluation.tasks.game24 import Game24Problem
from hf_parallel.evaluation.tasks.generated import ArithmeticProblem, PlanningProblem, RetrievalProblem
from hf_parallel.evaluation.tasks.math import (
    AIME25Problem,
    GSM8KProblem,
    GSM8Kx5Problem,
    LIMOProblem,
    MATH500Problem,
    OlympiadBenchProblem,
)
from hf_parallel.evaluation.tasks.reading import DocumentsProblem, NeedleProblem
from hf_parallel.files import parse_json
from hf_parallel.generation.caller import warn_caller
from hf_parallel.generation.validation import check_int, names_hint, suggestion

GENERATED: dict[str, Any] = {cls.name: cls for cls in (RetrievalProblem, ArithmeticProblem, PlanningProblem)}
"""Generated tasks by name; each has `make(seed, ...)`."""
LOADED = (
    *(GSM8KProblem, GSM8Kx5Problem, LIMOProblem, MATH500Problem, AIME25Problem, OlympiadBenchProblem),
    *(LiveCodeBenchProblem, APPSProblem, Game24Problem, DocumentsProblem, NeedleProblem),
)
TASKS: dict[str, type[Problem]] = {**GENERATED, **{cls.name: cls for cls in LOADED}}
"""All tasks by name."""
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
        A .jsonl file (of `needles`: a text), or a dataset on the Hub: `id`, or `id:config:split`. Default: the source
        of the task. Generated tasks have none.
    count : int, optional
        Number of problems, from the first. Default: all; 100 of generated tasks and of `needles`. Warns if the source
        has fewer.
    seed : int
        Seed of generated tasks: problem i has the seed `seed + i`. Loaded tasks keep the order of their source.
    **options
        Arguments of `make` (`num_students`, `num_questions`, `num_aspects`), of `from_text` (`characters`, `num_facts`,
        `shots`) or of `selects`: `since` and `until` of `livecodebench`, `difficulty` and `starter_code` of `apps`.
        `apps` also has `examples`, the source of two solved problems: "codeparrot/apps::train".

    Raises
    ------
    ValueError
        If the task or an option is unknown, if the file is missing or has another format, or if a row lacks a column.
    """
    check_task(task, options)
    if count is not None:
        check_int("count", count, at_least=1)
    if task in GENERATED:
        if source is not None:
            raise ValueError(f"{task} is generated and has no source, got {os.fspath(source)!r}")
        make = GENERATED[task].make
        return [make(seed + index, **options) for index in range(count or GENERATED_COUNT)]
    if TASKS[task] is NeedleProblem:
        if source is None:
            raise ValueError("needles needs a source: a text file, such as a book of Project Gutenberg")
        text = Path(source).read_text(encoding="utf-8", errors="replace")
        return [*NeedleProblem.from_text(text, count or GENERATED_COUNT, seed, **options)]
    return _read_problems(task, source, count, options)


def _read_problems(
    task: str, source: str | os.PathLike[str] | None, count: int | None, options: dict[str, Any]
) -> list[Problem]:
    """Return problems of a task whose source has rows; see `load_problems`."""
    cls = TASKS[task]
    source = os.fspath(source or cls.source)
    examples = options.pop("examples", None)
    selects = partial(cls.selects, **options)
    size = cls.rows_per_problem
    rows = filter(selects, _rows(source, cls))
    problems: list[Problem] = []
    while len(problems) != count:
        group = list(islice(rows, size))
        if not group or (len(group) < size and problems):
            break
        try:
            problems.append(cls.from_rows(group))
        except ValueError as error:
            raise ValueError(f"row {len(problems) * size} of {source}, task {task}: {error}") from error
    if not problems:
        condition = f" with {options}" if options else ""
        raise ValueError(f"{source} has no rows{condition}")
    if count is not None and len(problems) < count:
        warn_caller(f"number of problems in {source}: {len(problems)}, fewer than count={count}")
    if examples is not None:
        example_rows = filter(selects, _rows(os.fspath(examples), cls))
        return APPSProblem.with_examples(problems, example_rows)
    return problems


def check_task(task: str, options: Mapping[str, object]) -> None:
    """Raise `ValueError` for an unknown task or option; `count` and `seed` are not options."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}, got {task!r}{suggestion(task, TASKS)}")
    cls: Any = TASKS[task]
    if cls is NeedleProblem:
        make = cls.from_text
    else:
        make = getattr(cls, "make", cls.selects)
    names = [name for name in inspect.signature(make).parameters if name not in ("text", "count", "seed", "row")]
    if cls is APPSProblem:
        names.append("examples")
    for name, value in options.items():
        if name not in names:
            raise ValueError(f"{task} has no option {name!r} (got {value!r}){names_hint(name, names)}")


def _rows(source: str, cls: type[Problem]) -> Iterable[Mapping[str, object]]:
    """Yield the rows of a file or of a dataset on the Hub."""
    if source.endswith(".jsonl"):
        return _json_lines(source)
    if Path(source).exists() or source.startswith((".", "/", "~")):
        raise ValueError(f"{source!r} must be a .jsonl file: `datasets` converts others by `Dataset.to_json`")
    from datasets import load_dataset

    name, config, split = (source.split(":") + ["", ""])[:3]
    default_name, default_config, default_split, *_ = cls.source.split(":")
    split = split or default_split
    if name == default_name:
        config = config or default_config
    if cls.hub_file and name == default_name:
        return _json_lines(cls.hub_file.format(name=name, config=config, split=split))
    return load_dataset(name, config or None, split=split, streaming=True)


def _json_lines(source: str) -> Iterator[Mapping[str, object]]:
    """Yield JSON objects, one per line, from a file or URL."""
    import fsspec

    try:
        with fsspec.open(source, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = parse_json(line, f"line {number} of {source}")
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} of {source} must be a JSON object, got {row!r:.80}")
                    yield row
    except OSError as error:
        raise ValueError(f"no file {source!r}: {error}") from error

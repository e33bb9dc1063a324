"""Results of a sweep: JSON lines in a folder, from which a killed sweep resumes, and the table of accuracies."""

from __future__ import annotations

import json
import math
import os
import reprlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hf_parallel.files import MAX_NUMBER, parse_json, read_json, read_lines, write_atomically

_KEY = {"task": str, "index": int, "problem": str, "mode": str, "settings": dict, "budget": int, "seed": int}
_KEY |= {"sample": int}
_MEASURED = dict.fromkeys(("passes", "tokens", "answered", "score"), float)
KEY = tuple(_KEY)
"""Fields that identify a result."""
MEASURED = tuple(_MEASURED)
COLUMNS = (
    *("task", "mode", "settings", "budget", "problems", "generations"),
    *("score", "error", "answered", "passes", "two_worker_passes", "tokens", "seconds", "tokens_per_second"),
    *("kv_bytes", "duplicated", "mentions", "reused", "rating"),
)
"""Columns of a table."""
COSTS = ("seconds", "kv_bytes")
"""Costs of a generation: the time up to the budget, and bytes of keys and values at the largest budget alone."""
OF_SEVERAL_ROWS = ("two_worker_passes", "duplicated", "mentions", "reused")
"""Fields of modes with several rows: see `Written` and `hf_parallel.evaluation.collaboration`."""
OPTIONAL = (*COSTS, *OF_SEVERAL_ROWS, "rating")
"""Fields that results may lack; `rating` if no judge was asked."""

Result: TypeAlias = dict[str, Any]
"""Line of a file (the fields of `KEY`, `MEASURED` and the text), or row of a table (the fields of `COLUMNS`)."""


def key_of(result: Result) -> str:
    """Return the identifying fields of a result as text."""
    return json.dumps([result[name] for name in KEY], sort_keys=True)


class ResultStore:
    """Results of a sweep in a folder: each process appends to its own `results.rankN.jsonl`, and reads all.

    `header` describes the sweep, and is kept in `sweep.json`. A broken last line of a killed process is cut off.

    Raises
    ------
    ValueError
        If a file of the folder does not hold results, or if they belong to another sweep.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, object], rank: int = 0) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"results.rank{rank}.jsonl"
        self._results = {key_of(result): result for result in _read(folder)}
        header = json.loads(json.dumps(header))
        if self._results:
            stored = read_json(folder / "sweep.json")
            for name, value in header.items():
                if not isinstance(stored, dict) or stored.get(name) != value:
                    raise ValueError(f"{folder} has results of another {name} than {value!r}: give another folder")
        else:
            write_atomically(folder / "sweep.json", json.dumps(header, indent=1) + "\n")
        if self.path.exists():
            complete_lines, _ = read_lines(self.path)
            os.truncate(self.path, len(complete_lines.encode()))

    def get(self, result: Result) -> Result | None:
        """Return the stored result with the same key, or None."""
        return self._results.get(key_of(result))

    def add(self, results: Sequence[Result]) -> None:
        """Append results."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


def read_results(folder: str | Path) -> list[Result]:
    """Return all results of a folder, by task, mode, settings, budget, problem and sample.

    Raises `ValueError` if the folder holds no results, or a file is damaged.
    """
    results = {key_of(result): result for result in _read(Path(folder))}
    if not results:
        raise ValueError(f"{folder} holds no results (results.rank*.jsonl)")
    return sorted(results.values(), key=lambda result: (*group_of(result), result["index"], result["sample"]))


def _read(folder: Path) -> Iterator[Result]:
    """Yield the results of all processes, without unfinished last lines, which a process may be writing."""
    for path in sorted(folder.glob("results.rank*.jsonl")):
        complete_lines, _ = read_lines(path)
        for number, line in enumerate(complete_lines.split("\n")[:-1], start=1):
            where = f"{path}, line {number}"
            yield _checked(parse_json(line, where), where)


def _checked(result: Any, where: str) -> Result:
    """Return a result that was read; raise `ValueError` that names the first field that is missing or invalid."""
    fields: dict[str, type] = _KEY | _MEASURED | {"text": str} | dict.fromkeys(OPTIONAL, float)
    for name, kind in fields.items():
        value = result.get(name) if isinstance(result, dict) else None
        if value is None and name in OPTIONAL:
            continue
        if kind is float:
            is_valid = isinstance(value, int | float) and abs(value) <= MAX_NUMBER
        else:
            is_valid = isinstance(value, kind)
        if not is_valid:
            raise ValueError(f"{where}: {name!r} must be a {kind.__name__}, got {reprlib.repr(value)}")
    return result


# The table


def group_of(result: Result) -> tuple[str, str, str, int]:
    """Return the group of a result, a row of the table: task, mode, settings and budget."""
    return result["task"], result["mode"], json.dumps(result["settings"], sort_keys=True), result["budget"]


def table(results: Iterable[Result]) -> list[Result]:
    """Return mean results: one row per task, mode, settings and budget, in order of appearance.

    `score` is the mean over problems of their mean scores, and `error` its standard error, None for a single problem.
    Samples of a problem are not independent, so the units are problems (clustered standard errors: Miller, Adding Error
    Bars to Evals, 2024, section 2.2). `rating` is the mean of a judge's ratings, None if no reply has a score.
    `tokens_per_second` is the ratio of all tokens and all seconds.
    """
    groups: dict[tuple[str, str, str, int], list[Result]] = {}
    for result in results:
        groups.setdefault(group_of(result), []).append(result)
    rows = []
    for (task, mode, settings, budget), of_group in groups.items():
        row: Result = {"task": task, "mode": mode, "settings": json.loads(settings), "budget": budget}
        row |= _scores(of_group)
        ratings = [result["rating"] for result in of_group if "rating" in result]
        if ratings:
            rated = [rating for rating in ratings if rating is not None]
            row["rating"] = statistics.fmean(rated) if rated else None
        for name in MEASURED:
            if name != "score":
                row[name] = statistics.fmean(result[name] for result in of_group)
        rows.append(row | _optional(of_group))
    return rows


def _scores(results: Sequence[Result]) -> Result:
    """Return the number of problems and generations, and the mean score with its standard error."""
    scores: dict[tuple[object, ...], list[float]] = {}  # by problem
    for result in results:
        problem = (result["index"], result["problem"])
        scores.setdefault(problem, []).append(result["score"])
    means = [statistics.fmean(of_problem) for of_problem in scores.values()]
    error = None
    if len(means) > 1:
        error = statistics.stdev(means) / math.sqrt(len(means))
    return {
        "problems": len(means),
        "generations": len(results),
        "score": statistics.fmean(means),
        "error": error,
    }


def _optional(results: Sequence[Result]) -> Result:
    """Return the means of fields that only some results have, and tokens per second."""
    means: Result = {}
    for name in (*COSTS, *OF_SEVERAL_ROWS):
        values = [result[name] for result in results if result.get(name) is not None]
        if values:
            means[name] = statistics.fmean(values)
    timed = [result for result in results if result.get("seconds")]
    if timed:
        tokens = sum(result["tokens"] for result in timed)
        means["tokens_per_second"] = tokens / sum(result["seconds"] for result in timed)
    return means


def settings_text(settings: Mapping[str, object]) -> str:
    """Return settings in the form of the command line."""
    parts = []
    for name, value in sorted(settings.items()):
        text = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"{name}={text}")
    return " ".join(parts)


def format_table(rows: Sequence[Result]) -> str:
    """Return the rows of `table` as plain text."""
    optional = {*OPTIONAL, "tokens_per_second"}
    columns = []
    for name in COLUMNS:
        if name in optional and not any(name in row for row in rows):
            continue
        cells = ["+-" if name == "error" else name]
        cells += [_cell(name, row.get(name)) for row in rows]
        width = max(map(len, cells))
        alignment = "<" if name in ("task", "mode", "settings") else ">"
        columns.append([f"{cell:{alignment}{width}}" for cell in cells])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "".join(f"{line}\n" for line in lines)


def _cell(name: str, value: Any) -> str:
    if name == "settings":
        return settings_text(value)
    if value is None:
        return ""
    digits = {"score": 3, "error": 3, "answered": 2, "seconds": 2, "kv_bytes": 0, "rating": 2}
    digits |= {"duplicated": 3, "mentions": 2, "reused": 2}
    return f"{value:.{digits.get(name, 1)}f}" if isinstance(value, float) else str(value)

"""Tables and numbers of the pages from the reports in benchmarks/results/; `generated.py` puts them into the pages.

A table names a report and, optionally, the path in it where its other paths begin. It has the heading of the labels, a
line per column (heading = path, format), an empty line, and a line per row (label = selector):

    <!-- figures 2026-11-21-cpu-2-cores shared_prefix
    method
    prefill = *.prefill_seconds, 0.0 s
    decode step = *.step_seconds, 0 ms

    prompt copied to every row = prefilled_cache
    `shared_prefix` = shared_prefix
    -->

The selector of a row, by default its label, replaces `*` in the paths. A path consists of keys, list indices, and
`[field=value,...]`, which selects the item of a list; `a / b` is a ratio. A format shows the number of decimals and the
unit. What the report does not have stays empty.

A figure in running text may also summarize the items of a list, as in `most of cases.[*]: flash.seconds / seconds`:
their least, median, most or sum. Conditions such as `[bound=memory,kv_bytes>=256]` select items. Items without the
value are skipped. `1 - ` before a path, or ` - 1` after it, shows by how much a ratio is less or more than 1.
"""

from __future__ import annotations

import datetime
import functools
import json
import operator
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
UNITS = {
    "": 1.0,
    " s": 1.0,
    " ms": 1e3,
    " us": 1e6,
    " MB": 1e-6,
    " GB": 1e-9,
    " TB/s": 1e-12,
    " TFLOP/s": 1e-12,
    "%": 100.0,
    " times": 1.0,
}
"""Factors from seconds, bytes, operations and ratios, which reports hold."""
SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "least": min,
    "median": statistics.median,
    "most": max,
    "sum": sum,
}
"""Functions that make one figure of those of several items."""
IN_TEXT = re.compile(r"(1 - )?(?:(least|median|most|sum) of (.*)\.\[([^\]]*)\](?:: |$))?(.*?)( - 1)?")
"""What a figure in running text shows: see above."""


def table_of(source: str) -> str:
    """Return the Markdown table of the lines of a comment."""
    head, _, lines = source.partition("\n")
    report, _, start = head.partition(" ")
    columns, _, rows = lines.partition("\n\n")
    return f"{table(report, start, columns, rows)}\n\n{caption(report)}"


def caption(report: str) -> str:
    """Return a line that says which machine measured a report, and when."""
    content = _content(report)
    machine = content.get("machine", content)
    date = datetime.date.fromisoformat(machine["date"][:10])
    parts = []
    if "NVIDIA" in str(machine.get("device")):
        parts.append(machine["device"])
    elif machine.get("cpu"):
        parts.append(machine["cpu"].replace("(R)", "").replace(" Processor", ""))
    if not parts or "NVIDIA" not in parts[0]:
        threads = machine["threads"]
        cores = f"{machine['cores']} cores, " if machine.get("cores") else ""
        parts.append(f"{cores}{threads} thread{'s' * (threads > 1)}")
    return f"*{', '.join(parts)}; {date:%B} {date.day}, {date.year} (`{report}`).*"


def table(report: str, start: str, columns: str, rows: str) -> str:
    """Return the Markdown table of a block.

    Raises
    ------
    LookupError
        If the report has none of the figures of a row or of a column.
    """
    labels, *headed = columns.splitlines()
    headings, paths = zip(*(line.split(" = ", 1) for line in headed), strict=True)
    named = [(label, selector or label) for label, _, selector in (row.partition(" = ") for row in rows.splitlines())]
    cells = [[figure(report, path.replace("*", selector), start) for path in paths] for _, selector in named]
    columns_of = zip(headed, zip(*cells, strict=True), strict=True)
    for name, line in (*zip(rows.splitlines(), cells, strict=True), *columns_of):
        if not any(line):
            raise LookupError(f"{report}.json has no figures for {name!r}")
    lines = [[labels, *headings], ["---"] * (labels.count("|") + 1 + len(headings))]
    lines += [[label, *line] for (label, _), line in zip(named, cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(report: str, path: str, start: str = "") -> str:
    """Return the formatted value at `path, format`, or why it was not measured; nothing if the report lacks it."""
    names, form = path.rsplit(", ", 1)
    digits, unit = re.fullmatch(r"([\d.]+)(.*)", form).groups()  # type: ignore[union-attr]
    content = _content(report)
    try:
        values = [follow(content, f"{start}.{name}") for name in names.split(" / ")]
    except LookupError:
        return ""
    if None in values:
        return ""
    for reason in values:
        if isinstance(reason, str):
            return "" if reason == "out of time" else reason
    value = functools.reduce(operator.truediv, values)
    return _formatted(value, digits, unit)


def figure_in_text(report: str, path: str) -> str:
    """Return the formatted figure of running text at `path, format`; nothing if the report lacks it."""
    expression, form = path.rsplit(", ", 1)
    digits, unit = re.fullmatch(r"([\d.]+)(.*)", form).groups()  # type: ignore[union-attr]
    less, summary, items, conditions, ratio, more = IN_TEXT.fullmatch(expression).groups()  # type: ignore[union-attr]
    content = _content(report)
    chosen = _selected(follow(content, items), conditions) if summary else [content]
    values = [value for item in chosen if (value := _ratio(item, ratio)) is not None]
    if not values:
        return ""
    value = SUMMARIES[summary or "sum"](values)
    return _formatted(1 - value if less else value - 1 if more else value, digits, unit)


def _selected(items: list[Any], conditions: str) -> list[Any]:
    """Return the items that meet `field=value,field>=number,...`, or all for `*`."""
    for condition in () if conditions == "*" else conditions.split(","):
        field, least, value = re.fullmatch(r"(\w+)(>)?=(.*)", condition).groups()  # type: ignore[union-attr]
        if least:
            items = [item for item in items if item.get(field, 0) >= float(value)]
        else:
            items = [item for item in items if str(item.get(field)) == value]
    return items


def _ratio(node: Any, names: str) -> float | None:
    """Return the value at a path, or the ratio of those at several; None if one of them was not measured."""
    try:
        values = [follow(node, name) for name in names.split(" / ")]
    except LookupError:
        return None
    if not all(isinstance(value, int | float) for value in values):
        return None
    return functools.reduce(operator.truediv, values)


def _formatted(value: float, digits: str, unit: str) -> str:
    return f"{value * UNITS[unit]:,.{len(digits.partition('.')[2])}f}{unit}"


def draw_report(draw: Callable[[dict[str, Any], Path], None], report: Path, picture: Path) -> int:
    """Draw the report, and at the path, of the command line, or by default these. Return the exit status."""
    report = Path(sys.argv[1]) if len(sys.argv) > 1 else report
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else picture
    draw(json.loads(report.read_text()), picture)
    print(picture)
    return 0


@functools.cache
def _content(report: str) -> Any:
    return json.loads((RESULTS / f"{report}.json").read_text())


def follow(node: Any, path: str) -> Any:
    """Return the value at a path, or the reason if its case was not measured."""
    for name in re.findall(r"\[[^\]]+\]|[^.\[\]]+", path):
        if name[0] == "[":
            wanted = [pair.split("=") for pair in name[1:-1].split(",")]
            found = [item for item in node if all(str(item.get(key)) == text for key, text in wanted)]
            if not found:
                raise LookupError(name)
            (node,) = found
        elif isinstance(node, dict) and name not in node and "not_measured" in node:
            return node["not_measured"]
        else:
            node = node[int(name)] if isinstance(node, list) else node[name]
    return node

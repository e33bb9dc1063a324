"""Fills the figures of the pages in from the results of benchmarks: `python docs/figures.py`.

A figure is a number, perhaps with a unit, right before a comment that says where it comes from:
`86 ms<!-- cpu: shared_prefix.shared_prefix.step_seconds -->`. It keeps its decimals. A path names the keys (and places
in lists) that lead to the value; `a / b` is the ratio of two. A test runs this with `--check`.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
SOURCES = {
    "cpu": "2026-11-21-cpu-2-cores.json",
    "earlier": "2026-11-20-cpu-2-cores.json",
    "answers": "2026-11-21-cpu-2-cores-parallel-answers.json",
    "linear": "2026-11-22-cpu-2-cores-linear.json",
    "linear_intel": "2026-11-22-intel-2-cores-linear.json",
    "resample": "2026-11-22-cpu-2-cores-resample.json",
}
"""The reports that pages take figures from, by the name that they have there."""
UNITS = {"": 1.0, " s": 1.0, " ms": 1e3, " MB": 1e-6, "%": 100.0, " times": 1.0}
"""Seconds, bytes and shares are what reports hold."""
FIGURE = re.compile(r"(\d+(?:\.(\d+))?)( s| ms| MB|%| times|)<!-- (\w+): ([\w. /]+?) -->")


@cache
def report(source: str) -> Any:
    """One of the reports."""
    return json.loads((RESULTS / SOURCES[source]).read_text())


def value(source: str, path: str) -> float:
    """What a path leads to."""
    top, *below = (follow(report(source), name.strip()) for name in path.split(" / "))
    for other in below:
        top /= other
    return top


def follow(node: Any, path: str) -> float:
    """Go down by keys and places."""
    for name in path.split("."):
        node = node[int(name)] if isinstance(node, list) else node[name]
    return float(node)


def filled(text: str) -> str:
    """A page with the figures that its comments ask for."""

    def fill(match: re.Match[str]) -> str:
        _, decimals, unit, source, path = match.groups()
        number = format(value(source, path) * UNITS[unit], f".{len(decimals or '')}f")
        return f"{number}{unit}<!-- {source}: {path} -->"

    return FIGURE.sub(fill, text)


def main() -> int:
    """Fill in all pages, or say which are not up to date."""
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        new = filled(text)
        if new != text:
            stale.append(str(page.relative_to(DOCS)))
            if "--check" not in sys.argv:
                page.write_text(new)
    print(*stale or ["all figures are up to date"], sep="\n")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

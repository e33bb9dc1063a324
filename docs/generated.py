"""Writes the parts of the pages that come from elsewhere: `python docs/generated.py`, or `make docs`.

A part stands between two comments, so that a page also reads well where no site is built:

    <!-- figures 2026-11-21-cpu-2-cores shared_prefix
    ... -->
    (a table from a report in benchmarks/results/, see figures.py)
    <!-- end of figures -->

    <!-- status hydragen -->
    (the status of a paper's parts, see status.py)
    <!-- end of status -->

    <!-- reference hf_parallel.Engine: submit, close -->
    (docstrings, see reference.py)
    <!-- end of reference -->

A figure in running text is followed by a comment with its report and path, and must equal what the report says:

    3.9 times<!-- 2026-11-26-h200-steps a.b / a.c, 0.0 times -->
    up to 22<!-- 2026-11-22-h200-attention most of a.[*]: b / c, 0 --> times
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import figures
import reference
import status

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PART = re.compile(
    r"^<!-- (?P<kind>figures|status|reference)(?P<source>.*?)(?P<end> ?-->)\n.*?^<!-- end of (?P=kind) -->$",
    re.MULTILINE | re.DOTALL,
)
IN_TEXT = re.compile(r"(?P<shown>[^\s|(]+(?: [a-zA-Z/]+)?)<!-- (?P<report>20\d\d-[\w-]+) (?P<path>[^\n]+?) -->")


def text_of(page: str) -> str:
    """Return the text of a page with all its parts written again.

    Raises
    ------
    ValueError
        If a figure in running text is not that of its report.
    """
    for found in IN_TEXT.finditer(page):
        value = figures.figure_in_text(found["report"], found["path"])
        if not value or not re.search(rf"(?<![\d.,]){re.escape(value)}$", found["shown"]):
            raise ValueError(f"{found['report']} has {value!r} at {found['path']!r}, the page {found['shown']!r}")
    return PART.sub(_part, page)


def _part(found: re.Match[str]) -> str:
    kind, source = found["kind"], found["source"]
    written = "\n\n".join(_contents(kind, source.strip()))
    return f"<!-- {kind}{source}{found['end']}\n\n{written}\n\n<!-- end of {kind} -->"


def _contents(kind: str, source: str) -> Iterator[str]:
    if kind == "figures":
        yield figures.table_of(source)
    elif kind == "status":
        yield status.rows_of(source) if source else status.counts()
    else:
        name, _, members = source.partition(":")
        yield reference.render(name, tuple(members.replace(",", " ").split()))


def main() -> None:
    """Write all pages, or tell which one has changed."""
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = text_of(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()

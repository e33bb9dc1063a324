"""Tables of the status of the four papers' parts; `generated.py` puts them into the pages.

`benchmarks/papers_status.json` has a row for each mechanism, experiment, table and figure.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS: dict[str, list[dict[str, str]]] = json.loads(
    (ROOT / "benchmarks" / "papers_status.json").read_text(encoding="utf-8")
)
"""Rows of each paper: name, section of the paper, what it is, status, evidence."""
STATUSES = ("works", "in part", "never run", "missing")
HEADINGS = {"row": "row", "where": "in the paper", "what": "what", "status": "status", "evidence": "here"}


def rows_of(paper: str) -> str:
    """Return the Markdown table of a paper's rows."""
    lines = [list(HEADINGS.values()), ["---"] * len(HEADINGS)]
    lines += [[row[field] for field in HEADINGS] for row in ROWS[paper]]
    return _table(lines)


def counts() -> str:
    """Return the Markdown table of the number of rows by paper and status."""
    lines = [["paper", *STATUSES], ["---"] * (1 + len(STATUSES))]
    total: Counter[str] = Counter()
    for paper, rows in ROWS.items():
        found = Counter(row["status"] for row in rows)
        total += found
        lines.append([f"`{paper}`", *(str(found[status]) for status in STATUSES)])
    lines.append([f"all {total.total()}", *(str(total[status]) for status in STATUSES)])
    return _table(lines)


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""Replaces the blocks of status in the pages by tables: a hook of mkdocs, named in mkdocs.yml.

`benchmarks/papers_status.json` has a row for each mechanism, experiment, table and figure of the four papers. A block
with a paper's name becomes the table of its rows, and a block without one the number of rows by status:

    ```status hydragen
    ```
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROWS: dict[str, list[dict[str, str]]] = json.loads(
    (ROOT / "benchmarks" / "papers_status.json").read_text(encoding="utf-8")
)
"""Rows of each paper: name, section of the paper, what it is, status, evidence."""
STATUSES = ("works", "in part", "never run", "missing")
HEADINGS = {"row": "row", "where": "in the paper", "what": "what", "status": "status", "evidence": "here"}
BLOCK = re.compile(r"^```status(?: (\w+))?\n```$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the blocks of a page."""
    return BLOCK.sub(lambda block: rows_of(block[1]) if block[1] else counts(), markdown)


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

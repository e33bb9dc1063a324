"""Status of the papers' parts: the page shows every row, and what a row names exists."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
from pages import ROOT


@pytest.fixture(scope="module")
def status() -> ModuleType:
    spec = importlib.util.spec_from_file_location("status", ROOT / "docs" / "status.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_papers_has_a_status_for_every_row(status: ModuleType) -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    names = [row["row"] for rows in status.ROWS.values() for row in rows]
    assert len(names) == len(set(names)) == 143
    for paper, rows in status.ROWS.items():
        for row in rows:
            assert row["status"] in status.STATUSES, row
            assert row["evidence"] or row["status"] == "missing", row
            line = f"| {row['row']} | {row['where']} | {row['what']} | {row['status']} | {row['evidence']} |"
            assert page.count(line) == 1, (paper, row)
    assert "| all 143 |" in page


def test_what_the_rows_of_the_status_name_exists(status: ModuleType) -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for rows in status.ROWS.values():
        for row in rows:
            for name in re.findall(r"`([^`]+)`", row["evidence"]):
                if re.fullmatch(r"test_\w+", name):
                    assert f"def {name}(" in tests, (row["row"], name)
                elif re.fullmatch(r"(tests|benchmarks|examples)/\S*", name):
                    assert (ROOT / name).exists(), (row["row"], name)
                elif re.fullmatch(r"20\d\d-\S+", name):
                    assert (ROOT / "benchmarks" / "results" / f"{name}.json").exists(), (row["row"], name)
            for page in re.findall(r"\]\(([^)#]+)", row["evidence"]):
                assert (ROOT / "docs" / page).exists(), (row["row"], page)

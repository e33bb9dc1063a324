"""The table of architectures in the docs equals the capabilities that probing finds."""

from __future__ import annotations

from architecture_table import PAGE, make_page
from tiny import ARCHITECTURES, REFUSED


def table() -> dict[str, list[str]]:
    """Return the cells of each row of the page by architecture."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): rest for name, *rest in cells}


def test_page_equals_the_probed_capabilities() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run: python tests/helpers/architecture_table.py"


def test_page_holds_every_architecture_with_its_reason() -> None:
    rows = table()
    assert set(rows) == set(ARCHITECTURES) | set(REFUSED)
    for name, (shared_prefix, hogwild, _, _, reason) in rows.items():
        assert shared_prefix == ("yes" if name in ARCHITECTURES else "no")
        assert bool(reason) == (hogwild == "no"), name


def test_thirty_architectures_at_least() -> None:
    assert len({name.split("-")[0] for name in ARCHITECTURES}) >= 30

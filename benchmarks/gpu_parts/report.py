"""Tables of the report in plain columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HIDDEN = ("error", "not_measured", "traceback", "stats", "tolerance", "ok", "flops", "limit_seconds")
"""Entries of a case that its table does not show."""
WIDTH = 140
"""Characters of a reason that are printed."""


def print_stage(name: str, stage: dict[str, Any]) -> None:
    """Print the figures of a stage, and the reasons of the cases without figures."""
    cases = stage["cases"]
    measured = [case for case in cases if not {"error", "not_measured"} & set(case)]
    print(f"\n{name}: {len(measured)} of {len(cases)} measured in {stage['seconds']:.0f} s")
    rows = [_cells(case) for case in measured]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    if measured:
        print_columns([headings, *([row.get(heading, "") for heading in headings] for row in rows)])
    reasons: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if case not in measured:
            reason = case.get("error") or case["not_measured"]
            reasons.setdefault(reason.strip().partition("\n")[0][:WIDTH], []).append(case)
    for reason, missing in reasons.items():
        settings = ", ".join(f"{key} {value}" for key, value in missing[0].items() if key not in HIDDEN)
        print(f"not measured ({reason}): {len(missing)} configurations, the first being {settings}")


def print_acceptance(lines: Sequence[dict[str, Any]]) -> None:
    """Print the targets."""
    print("\nacceptance")
    rows = [["", "worst", "limit", "measured", ""]]
    for line in lines:
        worst = "" if line["worst"] is None else f"{line['worst']:.3g}"
        limit = f"{'at least' if line['at_least'] else 'at most'} {line['limit']:.3g}"
        status = line["status"].upper() if line["status"] == "missed" else line["status"]
        rows.append([line["what"], worst, limit, f"{line['measured']} of {line['of']}", status])
    print_columns(rows)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = map(str.rjust, row, widths)
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def _cells(case: dict[str, Any]) -> dict[str, str]:
    """Return the headings and cells of a case; a baseline is shown by its seconds, or the reason if it has none."""
    cells = {} if case.get("ok", True) else {"wrong": "WRONG"}
    for name, value in case.items():
        if isinstance(value, dict) and name not in HIDDEN:
            reason = str(value.get("error") or value.get("not_measured", ""))[:16]
            name, value = f"{name} seconds", value.get("seconds", reason)
        if name in HIDDEN or value == "":
            continue
        if not isinstance(value, float):
            cells[name] = f"{value * 1e-6:.0f} MB" if name.endswith("_bytes") else str(value)
        elif name.endswith("seconds"):
            cells[name] = f"{value * 1e6:.1f} us" if value < 1e-3 else f"{value * 1e3:.2f} ms"
        else:
            cells[name] = f"{value:.4g}"
    return cells

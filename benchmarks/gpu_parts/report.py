"""Tables of the report, with rich if it is installed, else in plain columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

Figures = dict[str, Any]
"""Settings and figures of a case."""
Column = tuple[str, Callable[[Figures], str]]
"""Heading of a column, and function from a case to its cell."""

WIDTH = 140
"""Width of lines outside a terminal."""


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; all columns but the first are right-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(title, headings, rows), flush=True)
        return
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH).print(table)


def plain(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as columns of text."""
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in (headings, *rows))
    ]
    return "\n".join([title, *lines])


def print_stage(name: str, stage: dict[str, Any]) -> None:
    """Print the figures of a stage, and the cases without figures."""
    columns, cases = COLUMNS[name], stage["cases"]
    shown = [case for case in cases if not {"error", "not_measured"} & set(case)]
    title = f"{name}: {len(shown)} of {len(cases)} measured in {stage['seconds']:.0f} s"
    print_table(title, [heading for heading, _ in columns], [[cell(case) for _, cell in columns] for case in shown])
    reasons: dict[str, list[Figures]] = {}
    for case in cases:
        if case not in shown:
            reason = case.get("error") or case["not_measured"]
            reasons.setdefault(reason.strip().partition("\n")[0][:WIDTH], []).append(case)
    for reason, lacking in reasons.items():
        print(f"not measured ({reason}): {len(lacking)} configurations, the first being {_settings(lacking[0])}")


def print_acceptance(lines: Sequence[dict[str, Any]]) -> None:
    """Print the targets."""
    rows = [
        [
            line["what"],
            "" if line["worst"] is None else f"{line['worst']:.3g}",
            f"{'at least' if line['at_least'] else 'at most'} {line['limit']:.3g}",
            f"{line['measured']} of {line['of']}",
            line["status"].upper() if line["status"] == "missed" else line["status"],
        ]
        for line in lines
    ]
    print_table("acceptance", ["", "worst", "limit", "measured", ""], rows)


def _settings(case: Figures) -> str:
    hidden = ("error", "not_measured", "traceback")
    return ", ".join(f"{name} {value}" for name, value in case.items() if name not in hidden)


def _text(*names: str) -> Callable[[Figures], str]:
    return lambda case: " ".join(str(case[name]) for name in names)


def _number(name: str, factor: float = 1.0, form: str = ".2f") -> Callable[[Figures], str]:
    """Format a figure; empty if the case has none."""
    return lambda case: format(case[name] * factor, form) if name in case else ""


def _other(name: str) -> Callable[[Figures], str]:
    """Format the microseconds of a baseline, or the reason why there are none."""

    def cell(case: Figures) -> str:
        way = case[name]
        return f"{way['seconds'] * 1e6:.1f}" if "seconds" in way else (way.get("error") or way["not_measured"])[:16]

    return cell


def _graph_megabytes(case: Figures) -> str:
    """Format the memory of captured decode steps; 0 if none was captured."""
    return format(case["stats"]["graph_bytes"] * 1e-6, ".0f") if "stats" in case else ""


def _error_status(case: Figures) -> str:
    return "" if case["ok"] else "WRONG"


COLUMNS: dict[str, Sequence[Column]] = {
    "correctness": (
        ("", _text("problem")),
        ("head dim", _text("head_dim")),
        ("type", _text("dtype")),
        ("largest error", _number("max_error", form=".2e")),
        ("FlashAttention's", _number("flash_error", form=".2e")),
        ("by it", _number("error_by_flash")),
        ("", _error_status),
    ),
    "graphs": (
        ("model", _text("model")),
        ("way", _text("way")),
        ("rows", _text("rows")),
        ("steps", _text("steps")),
        ("largest error", _number("max_error", form=".2e")),
        ("logits compared", _text("compared")),
        ("graphs, MB", _number("graph_bytes", 1e-6, ".0f")),
        ("", _error_status),
    ),
    "attention": (
        ("heads", _text("heads")),
        ("rows", _text("rows")),
        ("prefix", _text("prefix")),
        ("suffix", _text("suffix")),
        ("KV, MB", _number("kv_bytes", 1e-6, ".0f")),
        ("us", _number("seconds", 1e6, ".1f")),
        ("of limit", _number("of_limit")),
        ("bound", _text("bound")),
        ("FlashAttention, us", _other("flash")),
        ("FlashInfer, us", _other("flashinfer")),
    ),
    "hogwild": (
        ("workers", _text("workers")),
        ("tokens", _text("tokens")),
        ("us", _number("seconds", 1e6, ".1f")),
        ("FlashAttention, us", _number("flash_seconds", 1e6, ".1f")),
        ("by it", _number("by_flash")),
        ("of limit", _number("of_limit")),
        ("set-up, us", _number("set_up_seconds", 1e6, ".1f")),
        ("mean", _number("set_up_mean_seconds", 1e6, ".1f")),
        ("on the device", _number("set_up_device_seconds", 1e6, ".1f")),
    ),
    "model": (
        ("model", _text("model")),
        ("way", _text("way")),
        ("rows", _text("rows")),
        ("prefix", _text("prefix")),
        ("step, ms", _number("step_seconds", 1e3)),
        ("tokens/s", _number("tokens_per_second", form=".0f")),
        ("by floor", _number("by_floor")),
        ("first token, ms", _number("first_token_seconds", 1e3, ".0f")),
        ("warm-up, s", _number("warm_up_seconds")),
        ("peak, MB", _number("peak_bytes", 1e-6, ".0f")),
        ("steps", _text("steps")),
        ("graphs, MB", _graph_megabytes),
    ),
    "prefill": (
        ("model", _text("model")),
        ("length", _text("length")),
        ("ms", _number("seconds", 1e3, ".1f")),
        ("forward pass, ms", _number("plain_seconds", 1e3, ".1f")),
        ("by it", _number("by_plain", form=".3f")),
        ("peak, MB", _number("peak_bytes", 1e-6, ".0f")),
        ("forward pass, MB", _number("plain_peak_bytes", 1e-6, ".0f")),
    ),
    "sampling": (
        ("way", _text("way")),
        ("rows", _text("rows")),
        ("spread", _text("spread")),
        ("us", _number("seconds", 1e6, ".1f")),
        ("PyTorch, us", _number("torch_seconds", 1e6, ".1f")),
        ("by it", _number("by_torch")),
        ("over greedy, ms", _number("ms_over_greedy")),
        ("same tokens", _number("same_tokens", form=".3f")),
    ),
    "start": (
        ("model", _text("model")),
        ("process", _text("process")),
        ("rows", _text("rows")),
        ("first call, s", _number("first_seconds")),
        ("next call, s", _number("again_seconds")),
        ("start, s", _number("start_seconds")),
        ("step, ms", _number("step_seconds", 1e3)),
    ),
}
"""Columns of the table of each stage."""

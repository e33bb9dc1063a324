"""`generate` over one long prompt: completions (`shared_prefix`) and workers (`hogwild`), beside other methods."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_parallel.cli.measure import long_prompt

from .hogwild import HogwildBenchmark
from .report import about, add_model_options, finish, new_path, number, set_up, table_of
from .rounds import Bar
from .shared_prefix import SharedPrefixBenchmark

TARGETS = (
    ("shared_prefix", "prefill_by_one_row", 1.1, "prefill relative to one row"),
    ("shared_prefix", "step_by_bound", 1.25, "decode step relative to the bound"),
    ("shared_prefix", "kv_bytes_by_unique_tokens", 1.0, "KV bytes relative to those of the unique tokens"),
    ("hogwild", "step_by_generate", 1.25, "step relative to generate with 2 rows"),
    ("hogwild", "set_up_by_step", 0.02, "set-up relative to the step"),
)
"""Benchmark, ratio, upper limit, and description of the ratio."""


def main() -> int:
    """Run the benchmarks; return the exit status."""
    options = _parse()
    console = Console(highlight=False)
    model, tokenizer = set_up(options)
    report = about(model, options) | {"quick": options.quick}
    parts = benchmarks(options)
    calls = sum(part.calls for part in parts.values())
    with Bar(console, calls) as bar:
        for name, part in parts.items():
            ids = long_prompt(tokenizer, part.prompt).to(model.device)
            given = (model, tokenizer, ids, bar) if name == "hogwild" else (model, ids, bar)
            report[name] = {"settings": asdict(part)} | part.run(*given)
    report["targets"] = targets(report)
    path = options.output or new_path(options.device.replace(":", ""), options.quick)
    finish(console, report, path, show)
    return 0


def benchmarks(options: argparse.Namespace) -> dict[str, Any]:
    """Return the selected benchmarks by name."""
    shared, hogwild = SharedPrefixBenchmark(), HogwildBenchmark()
    if options.quick:
        shared = SharedPrefixBenchmark(prompt=48, rows=3, new_tokens=4, rounds=1)
        hogwild = HogwildBenchmark(prompt=48, passes=4, rounds=1, workers=(1, 3))
    common = {name: getattr(options, name) for name in ("prompt", "rounds") if getattr(options, name)}
    own = {name: getattr(options, name) for name in ("rows", "new_tokens") if getattr(options, name)}
    shared = replace(
        shared, generate=not options.skip_generate, generate_batch=not options.skip_generate_batch, **common, **own
    )
    parts = {"shared_prefix": shared, "hogwild": replace(hogwild, **common)}
    return {name: part for name, part in parts.items() if options.only in (None, name)}


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the ratios with their limits."""
    found = []
    for part, name, limit, words in TARGETS:
        if part in report:
            value = report[part]["ratios"][name]
            found.append({"part": part, "what": words, "value": value, "at_most": limit, "met": value <= limit})
    return found


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    of = report["machine"]
    console.print(
        f"{report['model']}, {of['dtype']}, {of['device']}: {of['cpu']}, {of['threads']} threads, torch {of['torch']}, "
        f"transformers {of['transformers']}, load average {of['load_average_before']} to {of['load_average_after']}\n",
        soft_wrap=True,
    )
    if "shared_prefix" in report:
        console.print(shared_prefix_table(report["shared_prefix"]))
    if "hogwild" in report:
        console.print(hogwild_table(report["hogwild"]))
    table = table_of("ratios", "ratio", "at most", "")
    for target in report["targets"]:
        words, met = f"{target['part']}: {target['what']}", "met" if target["met"] else "MISSED"
        table.add_row(words, f"{target['value']:.3f}", f"{target['at_most']:.2f}", met)
    console.print(table)
    if report["quick"]:
        console.print("(--quick: the figures are meaningless)")


def shared_prefix_table(result: dict[str, Any]) -> Table:
    """Return a table with one line per method."""
    of = result["settings"]
    title = f"shared prefix: {of['prompt']} tokens x {of['rows']} rows"
    table = table_of(title, "prefill, s", "step, ms", "tokens/s", "KV, MB", "same tokens")
    for name in ("generate", "prefilled_cache", "generate_batch", "shared_prefix", "bound", "one_row"):
        way = result.get(name, {})
        if "error" in way:
            table.add_row(name, way["error"])
        elif way:
            same = {True: "yes", False: "NO", None: ""}[way.get("same_tokens")]
            table.add_row(
                name,
                number(way, "prefill_seconds", 1, ".2f"),
                number(way, "step_seconds", 1e3, ".1f"),
                number(way, "tokens_per_second", 1, ".1f"),
                number(way, "kv_bytes", 1e-6, ".1f"),
                same,
            )
    return table


def hogwild_table(result: dict[str, Any]) -> Table:
    """Return a table with one line per number of workers."""
    of = result["settings"]
    table = table_of(f"hogwild: {of['prompt']} tokens of the prompt, {of['layout']}", "step, ms", "tokens/s", "KV, MB")
    plain = result["generate"]
    table.add_row("generate, 2 rows", number(plain, "step_seconds", 1e3, ".1f"), f"{2 / plain['step_seconds']:.1f}", "")
    for workers, way in result["workers"].items():
        cells = (("step_seconds", 1e3, ".1f"), ("tokens_per_second", 1, ".1f"), ("kv_bytes", 1e-6, ".1f"))
        table.add_row(f"{workers} worker{'s' * (workers > 1)}", *(number(way, *cell) for cell in cells))
    return table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks generate", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    parser.add_argument("--only", choices=("shared_prefix", "hogwild"), help="run one benchmark only")
    add_model_options(parser)
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of the prompt (2048)")
    parser.add_argument("--rows", type=int, metavar="N", help="completions of the shared prefix (16)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens per completion (16)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds, each of which runs every method once (5)")
    parser.add_argument("--skip-generate", action="store_true", help="skip plain generate, which prefills every row")
    parser.add_argument("--skip-generate-batch", action="store_true", help="skip continuous batching")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

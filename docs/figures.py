"""Fills in the figures of README and the pages from the reports of the benchmarks: `python docs/figures.py`.

A figure is a number, optionally with a unit, directly before a comment that names its source:
`86 ms<!-- cpu: shared_prefix.shared_prefix.step_seconds -->`. It keeps its number of decimals. A path names the keys
and list indices that lead to the value; `[a=b,c=d]` selects the item of a list by its fields; `a / b` is a ratio.
With `--check` the script changes nothing and returns 1 if a figure is out of date.
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
    "training": "2026-11-23-cpu-2-cores-training.json",
    "workers": "2026-11-23-cpu-2-cores-train-workers.json",
    "train_pdos": "2026-11-23-cpu-2-cores-train-pdos.json",
    "engine": "2026-11-23-cpu-2-cores-engine.json",
    "agents_tot": "2026-11-23-cpu-2-cores-agents-tot.json",
    "engine_load": "2026-11-23-cpu-2-cores-engine-load.json",
    "lm_eval": "2026-11-23-cpu-2-cores-lm-eval.json",
    "agents_cache": "2026-11-24-cpu-2-cores-agents-cache.json",
    "gpu_checks": "2026-11-22-h200-correctness.json",
    "gpu_attention": "2026-11-22-h200-attention.json",
    "gpu": "2026-11-22-h200-models.json",
}
"""Reports by the name that pages use for them."""
UNITS = {"": 1.0, " s": 1.0, " ms": 1e3, " MB": 1e-6, " GB": 1e-9, "%": 100.0, " times": 1.0}
"""Factors from seconds, bytes and ratios, which reports hold."""
FIGURE = re.compile(r"(\d+(?:\.(\d+))?)( s| ms| MB| GB|%| times|)<!-- (\w+): ([\w. /\[\]=,-]+?) -->")


@cache
def report(source: str) -> Any:
    """Return a report by its name in `SOURCES`."""
    return json.loads((RESULTS / SOURCES[source]).read_text())


def value(source: str, path: str) -> float:
    """Return the value at a path, or the ratio of several."""
    top, *below = (follow(report(source), name.strip()) for name in path.split(" / "))
    for other in below:
        top /= other
    return top


def follow(node: Any, path: str) -> float:
    """Return the value at a path of keys, indices and `[field=value,...]`."""
    for name in re.findall(r"\[[^\]]+\]|[^.\[\]]+", path):
        if name[0] == "[":
            wanted = [pair.split("=") for pair in name[1:-1].split(",")]
            (node,) = (item for item in node if all(str(item.get(key)) == text for key, text in wanted))
        else:
            node = node[int(name)] if isinstance(node, list) else node[name]
    return float(node)


def filled(text: str) -> str:
    """Return the text of a page with its figures filled in."""

    def fill(match: re.Match[str]) -> str:
        _, decimals, unit, source, path = match.groups()
        number = format(value(source, path) * UNITS[unit], f".{len(decimals or '')}f")
        return f"{number}{unit}<!-- {source}: {path} -->"

    return FIGURE.sub(fill, text)


def main() -> int:
    """Fill in all pages, or list those that are out of date; return the exit status."""
    stale = []
    for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text()
        new = filled(text)
        if new != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new)
    print(*stale or ["all figures are up to date"], sep="\n")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

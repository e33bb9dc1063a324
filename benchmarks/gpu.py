"""Measures everything on a GPU: whole models, prefill, start, sampling, workers, attention, training, other shapes.

The first cases of each stage matter most. The report is written during the run, so an interrupted one keeps its
results.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STAGES = ("model", "prefill", "start", "sampling", "hogwild", "attention", "grpo", "shapes")
RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str]) -> int:
    """Run the stages; return the exit status."""
    began = time.perf_counter()
    options = _parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models have random weights
    if options.toy:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from .gpu_parts import run  # imports Triton and transformers, which read the variables

    seconds = options.budget_seconds - (time.perf_counter() - began)
    return run.start(options.only, options.toy, seconds, options.seed, options.out)


def _stages(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"stages are {', '.join(STAGES)}; got {unknown[0]!r}")
    return [name for name in STAGES if name in names]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    words = f"some of {','.join(STAGES)}"
    parser.add_argument("--only", type=_stages, default=list(STAGES), metavar="STAGES", help=words)
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU with the Triton interpreter")
    words = "time limit; cases beyond it are reported as not measured (540)"
    parser.add_argument("--budget-seconds", type=float, default=540, metavar="S", help=words)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of all numbers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

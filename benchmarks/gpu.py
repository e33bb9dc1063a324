"""Checks and measures everything on a GPU: `python -m benchmarks.gpu --help`.

Stages: whole models, prefill, the start of a process, sampling, Hogwild! attention and its set-up, attention alone,
correctness of replayed CUDA graphs and of kernels, and a comparison with the targets. The first ones matter most if
time runs out. The report is written after each case, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

STAGES = ("model", "prefill", "start", "sampling", "hogwild", "attention", "graphs", "correctness")
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the stages; return the exit status."""
    began = time.perf_counter()
    options = _parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models have random weights
    if options.toy:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from .gpu_parts import run  # imports Triton and transformers, which read the variables

    kind = "toy" if options.toy else "quick" if options.quick else "full"
    seconds = options.budget_seconds - (time.perf_counter() - began)
    return run.start(options.only, kind, seconds, options.seed, options.out)


def _stages(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"stages are {', '.join(STAGES)}; got {unknown[0]!r}")
    return [name for name in STAGES if name in names]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument(
        "--only", type=_stages, default=list(STAGES), metavar="STAGES", help=f"some of {','.join(STAGES)}"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, to check that everything runs")
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU with the Triton interpreter")
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=540,
        metavar="S",
        help="time limit; cases beyond it are reported as not measured (540)",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of all numbers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

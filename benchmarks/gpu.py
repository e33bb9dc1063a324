"""Checks and measures everything on a machine with a GPU, in one run: `python -m benchmarks.gpu --help`.

Correctness of every kernel and of replayed decode steps, attention alone, Hogwild! attention and its set-up, whole
models; then what was to be reached beside what was measured. The report is written as it grows, so that a run that is
ended leaves what it has.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

STAGES = ("correctness", "graphs", "attention", "hogwild", "model")
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the stages; returns the exit status."""
    began = time.perf_counter()
    options = _parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here
    if options.toy:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from .gpu_parts import run  # Triton and transformers read these variables when they are imported

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
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="of the JSON (benchmarks/results)")
    parser.add_argument(
        "--only", type=_stages, default=list(STAGES), metavar="STAGES", help=f"some of {','.join(STAGES)}"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes: shows that everything runs")
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU, Triton interpreted")
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=540,
        metavar="S",
        help="from start to end; what there is no time for is reported as not measured (540)",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of all numbers drawn")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

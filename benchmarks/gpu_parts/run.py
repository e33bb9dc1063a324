"""Runs the stages within a time limit, writes the report during the run, and prints it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report import machine, show, write
from hf_parallel.kernels import BACKEND_VARIABLE, select_backend
from hf_parallel.models.decode import compiled

from .attention import AttentionStage
from .cases import Bench, Stage, run_cases
from .grpo import GRPOStage
from .hogwild import HogwildStage
from .models import Models
from .sampling import SamplingStage
from .timing import Deadline, Timer, measure_ceilings
from .whole import ModelStage, PrefillStage, ShapesStage, StartStage

FULL: dict[str, Any] = {
    "model": ModelStage(),
    "prefill": PrefillStage(),
    "start": StartStage(),
    "sampling": SamplingStage(),
    "hogwild": HogwildStage(),
    "attention": AttentionStage(),
    "grpo": GRPOStage(),
    "shapes": ShapesStage(),
}
TOY: dict[str, Any] = {
    "model": ModelStage(("toy",), (2,), (8, 16), (1,), (2,), (1, 2), (8,), (2,), ((2, 8),), (), (), steps=4),
    "prefill": PrefillStage(("toy",), lengths=(16,), repeats=1),
    "start": StartStage("toy", prefix=8, steps=4),
    "sampling": SamplingStage((2,), vocabulary=300, spreads=(4.0,), dtype="float32"),
    "hogwild": HogwildStage((1, 2), tokens=(32,), heads=(2, 1, 16), dtype="float32", layers=2, steps=1),
    "attention": AttentionStage(((2, 1, 16),), rows=(1, 3), prefixes=(64,), suffixes=(16,), dtype="float32"),
    "grpo": GRPOStage("toy", prompt=16, completions=2, new_tokens=4, rows=1),
    "shapes": ShapesStage(("toy hybrid", "toy latents", "toy images"), rows=(2,), prefix=8, steps=2),
}
"""Toy sizes on a CPU, in dtypes that the Triton interpreter supports. The figures are meaningless."""
WRITTEN_EVERY = 5.0
"""Seconds between two writes of the report during a stage."""


def start(names: Sequence[str], toy: bool, seconds: float, seed: int, folder: Path) -> int:
    """Run the stages within `seconds` and print the report; return the exit status, 1 if a case failed.

    The report is rewritten during the run, so that an interruption loses nothing. Unused time goes to later stages.
    """
    whole = Deadline(seconds)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    if not toy and not torch.cuda.is_available():
        print("PyTorch finds no GPU. --toy runs everything at toy sizes on the CPU.")
        return 2
    models = Models(torch.device("cpu" if toy else "cuda"), torch.float32 if toy else torch.bfloat16)
    if toy:
        os.environ[BACKEND_VARIABLE] = toy_backend()
        compiled.COMPILER = "eager"  # Inductor takes longer than all stages
    path = folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-gpu{'-toy' * toy}.json"
    timer, stages = Timer(models.device, *((1, 1) if toy else (5, 50))), TOY if toy else FULL
    ceilings = measure_ceilings(timer, *((1 << 20, 128) if toy else (4 << 30, 8192)), models.dtype)
    report: dict[str, Any] = {"machine": machine(models.device, models.dtype), "kind": "toy" if toy else "full"}
    report |= {"seed": seed, "seconds": seconds, "ceilings": asdict(ceilings), "stages": {}}
    print(f"{report['machine']['device']}, torch {torch.__version__}, seed {seed}", flush=True)
    for number, name in enumerate(names):
        shares = sum(stages[later].share for later in names[number:])
        deadline = Deadline(whole.left * stages[name].share / shares)
        run_stage(name, stages[name], Bench(models, timer, ceilings, deadline), report, path)
    targets = [(target, report["stages"][name]["cases"]) for name in names for target in stages[name].targets()]
    report["acceptance"] = [target.judge(cases) for target, cases in targets]
    write(report, path)
    for judged in report["acceptance"]:
        show_target(judged)
    print("(--toy: the figures are meaningless)\n" * toy + f"Written to {path}")
    return 1 if any("error" in case for stage in report["stages"].values() for case in stage["cases"]) else 0


def run_stage(name: str, stage: Stage, bench: Bench, report: dict[str, Any], path: Path) -> None:
    """Run one stage, add it to the report, and print its table."""
    began = written = time.perf_counter()
    found: dict[str, Any] = {"settings": asdict(stage), "seconds": 0.0, "cases": []}  # type: ignore[call-overload]
    report["stages"][name] = found
    for case in run_cases(stage.cases(bench), bench.deadline):
        found["cases"].append(case)
        now = time.perf_counter()
        found["seconds"] = now - began
        if now - written > WRITTEN_EVERY:
            write(report, path)
            written = now
    write(report, path)
    show_stage(name, found)


def toy_backend() -> str:
    """Return `triton` if its interpreter can run on the CPU, else `torch`."""
    os.environ[BACKEND_VARIABLE] = "triton"
    try:
        return select_backend("cpu")
    except ValueError as error:
        print(error)
        return "torch"


def show_stage(name: str, stage: dict[str, Any]) -> None:
    """Print the figures of a stage, and the reasons of the cases without figures."""
    cases = stage["cases"]
    measured = [case for case in cases if not {"error", "not_measured"} & set(case)]
    show(f"{name}: {len(measured)} of {len(cases)} measured in {stage['seconds']:.0f} s", measured)
    missing = [case for case in cases if case not in measured]
    for reason, count in Counter(case.get("error") or case["not_measured"] for case in missing).items():
        print(f"not measured: {count} of {name}: {reason.strip()[:140]}")


def show_target(target: dict[str, Any]) -> None:
    """Print a result of `Target.judge`."""
    limit = f"{'at least' if target['at_least'] else 'at most'} {target['limit']:.3g}"
    worst = "" if target["worst"] is None else f"{target['worst']:.3g}, "
    print(f"  {target['what']}: {worst}{limit}, {target['measured']} of {target['of']} measured: {target['status']}")

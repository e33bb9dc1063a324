"""Runs the stages within a time limit, writes the report during the run, and prints it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report import Table, cells, machine, show
from hf_parallel.kernels import BACKEND_VARIABLE, select_backend
from hf_parallel.models import compiled

from .attention import AttentionStage
from .cases import Bench, Stage, run_cases
from .hogwild import HogwildStage
from .hybrids import HybridsStage
from .model import ModelStage
from .models import Models
from .prefill import PrefillStage
from .sampling import SamplingStage
from .start import StartStage
from .timing import Deadline, Timer, measure_ceilings

FULL: dict[str, Any] = {
    "model": ModelStage(),
    "prefill": PrefillStage(),
    "hybrids": HybridsStage(),
    "start": StartStage(),
    "sampling": SamplingStage(),
    "hogwild": HogwildStage(),
    "attention": AttentionStage(),
}
TOY: dict[str, Any] = {
    "model": ModelStage(
        ("toy",),
        (2,),
        prefixes=(8, 16),
        few_rows=(1,),
        compared_rows=(2,),
        workers=(1, 2),
        hogwild_prefixes=(8,),
        unshared=((2, 8),),
        steps=4,
    ),
    "prefill": PrefillStage(("toy",), lengths=(16,), repeats=1),
    "hybrids": HybridsStage("toy hybrid", rows=(2,), prefix=8, steps=4),
    "start": StartStage("toy", prefix=8, steps=4),
    "sampling": SamplingStage((2,), vocabulary=300, spreads=(4.0,), dtype="float32"),
    "hogwild": HogwildStage((1, 2), tokens=(32,), heads=(2, 1, 16), dtype="float32", layers=2, steps=1),
    "attention": AttentionStage(((2, 1, 16),), rows=(1, 3), prefixes=(64,), suffixes=(16,), dtype="float32"),
}
"""Toy sizes on a CPU, in dtypes that the Triton interpreter supports. The figures are meaningless."""
WRITTEN_EVERY = 5.0
"""Seconds between two writes of the report during a stage."""


class Run:
    """One run. `path` is a JSON file, rewritten during the run, so that an interruption loses nothing."""

    def __init__(self, stages: Mapping[str, Stage], models: Models, path: Path, about: dict[str, Any]) -> None:
        self.stages, self.models, self.path = stages, models, path
        toy = about["kind"] == "toy"
        self.timer = Timer(models.device, *((1, 1) if toy else (5, 50)))
        self.ceilings = measure_ceilings(self.timer, *((1 << 20, 128) if toy else (4 << 30, 8192)), models.dtype)
        self.report: dict[str, Any] = {
            "machine": machine(models.device, models.dtype),
            **about,
            "ceilings": asdict(self.ceilings),
            "stages": {},
        }
        self._written = 0.0

    def all(self, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """Run the named stages within `seconds`; return the report. Unused time goes to the following stages."""
        whole = Deadline(seconds)
        for number, name in enumerate(names):
            shares = sum(self.stages[later].share for later in names[number:])
            self.stage(name, whole.left * self.stages[name].share / shares)
        self.report["acceptance"] = [
            target.judge(self.report["stages"][name]["cases"])
            for name in names
            for target in self.stages[name].targets()
        ]
        self.write()
        print(_acceptance(self.report["acceptance"]))
        return self.report

    def stage(self, name: str, seconds: float) -> None:
        """Run one stage and print its table."""
        began, deadline, stage = time.perf_counter(), Deadline(seconds), self.stages[name]
        found: dict[str, Any] = {"settings": asdict(stage), "seconds": 0.0, "cases": []}  # type: ignore[call-overload]
        self.report["stages"][name] = found

        def done(case: dict[str, Any]) -> None:
            found["cases"].append(case)
            found["seconds"] = time.perf_counter() - began
            if time.perf_counter() - self._written > WRITTEN_EVERY:
                self.write()

        run_cases(stage.cases(Bench(self.models, self.timer, self.ceilings, deadline)), deadline, done)
        self.write()
        show_stage(name, found)

    def write(self) -> None:
        """Write the current report."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")
        self._written = time.perf_counter()


def start(names: Sequence[str], toy: bool, seconds: float, seed: int, folder: Path) -> int:
    """Run the stages and print the report; return the exit status, 1 if a case failed."""
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    if not toy and not torch.cuda.is_available():
        print("PyTorch finds no GPU. --toy runs everything at toy sizes on the CPU.")
        return 2
    kind, device, dtype = ("toy", "cpu", torch.float32) if toy else ("full", "cuda", torch.bfloat16)
    if toy:
        os.environ[BACKEND_VARIABLE] = toy_backend()
        compiled.COMPILER = "eager"  # Inductor takes longer than all stages
    path = folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-gpu{'-toy' * toy}.json"
    about = {"kind": kind, "seed": seed, "seconds": seconds}
    run = Run(TOY if toy else FULL, Models(torch.device(device), dtype), path, about)
    print(f"{run.report['machine']['device']}, torch {torch.__version__}, seed {seed}", flush=True)
    result = run.all(names, seconds - (time.perf_counter() - began))
    if toy:
        print("(--toy: the figures are meaningless)")
    print(f"Written to {path}")
    return 1 if any("error" in case for stage in result["stages"].values() for case in stage["cases"]) else 0


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
    reasons: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if case not in measured:
            reason = case.get("error") or case["not_measured"]
            reasons.setdefault(reason.strip().partition("\n")[0][:140], []).append(case)
    for reason, missing in reasons.items():
        settings = ", ".join(f"{key} {value}" for key, value in cells(missing[0]).items())
        print(f"not measured ({reason}): {len(missing)} configurations, the first being {settings}")


def _acceptance(targets: Sequence[dict[str, Any]]) -> Table:
    table = Table("targets", "worst", "limit", "measured", "")
    for target in targets:
        worst = "" if target["worst"] is None else f"{target['worst']:.3g}"
        limit = f"{'at least' if target['at_least'] else 'at most'} {target['limit']:.3g}"
        status = target["status"].upper() if target["status"] == "missed" else target["status"]
        table.add_row(target["what"], worst, limit, f"{target['measured']} of {target['of']}", status)
    return table

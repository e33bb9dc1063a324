"""Runs the stages within a time limit and writes the report after each case."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_parallel.kernels import BACKEND_VARIABLE, select_backend
from hf_parallel.models import compiled

from . import report
from .acceptance import DIFFERENCE, Target, differences, targets
from .attention import AttentionStage
from .cases import Case, run_cases
from .correctness import CorrectnessStage
from .graphs import GraphStage
from .hogwild import HogwildStage
from .machine import describe
from .model import ModelStage
from .models import Models
from .prefill import PrefillStage
from .sampling import SamplingStage
from .start import StartStage
from .timing import Deadline, Timer, measure_ceilings

SHARES = {
    "model": 0.38,
    "prefill": 0.06,
    "start": 0.13,
    "sampling": 0.04,
    "hogwild": 0.03,
    "attention": 0.14,
    "graphs": 0.06,
    "correctness": 0.16,
}
"""Fraction of the time per stage; unused time goes to the following stages."""
WRITTEN_EVERY = 5.0
"""Seconds between two writes of the report during a stage."""


@dataclass(frozen=True)
class Sizes:
    """Settings of all stages."""

    correctness: CorrectnessStage = CorrectnessStage()
    graphs: GraphStage = GraphStage()
    attention: AttentionStage = AttentionStage()
    hogwild: HogwildStage = HogwildStage()
    model: ModelStage = ModelStage()
    prefill: PrefillStage = PrefillStage()
    start: StartStage = StartStage()
    sampling: SamplingStage = SamplingStage()
    copied_bytes: int = 4 << 30
    matrix_size: int = 8192
    dtype: str = "bfloat16"
    repeats: int = 50
    large_kv_bytes: int = 256_000_000
    long_tokens: int = 16384
    workers: int = 4

    @property
    def targets(self) -> list[Target]:
        """Targets for these sizes."""
        return targets(self.model, self.large_kv_bytes, self.long_tokens, self.workers)


QUICK = Sizes(
    CorrectnessStage(head_dims=(128,), dtypes=("bfloat16",)),
    GraphStage(models=("small",), steps=80),
    AttentionStage(heads=((32, 8, 128),), rows=(1, 64, 1024), prefixes=(1024, 16384), suffixes=(128,)),
    HogwildStage(workers=(1, 4), tokens=(1024, 16384), steps=10),
    ModelStage(
        models=("Qwen3-8B",),
        rows=(128, 32),
        prefixes=(1024, 4096),
        workers=(1, 4),
        hogwild_prefixes=(4096,),
        unshared=((128, 1024),),
    ),
    PrefillStage(lengths=(4096, 32768)),
    sampling=SamplingStage(rows=(1, 1024), spreads=(1.3,)),
    repeats=10,
)
"""Few sizes, for a check and a first impression within two minutes."""

_TOY_TYPE = "float32"
_TOY_PROBLEMS = ("hogwild", "append", "move")
TOY = Sizes(
    CorrectnessStage((16,), ("float32", "float16"), heads=2, unit=1, problems=_TOY_PROBLEMS),
    GraphStage(("toy",), rows=2, workers=2, prefix=4, steps=4),
    AttentionStage(heads=((2, 1, 16),), rows=(1, 3), prefixes=(64,), suffixes=(16,), dtype=_TOY_TYPE),
    HogwildStage(workers=(1, 2), tokens=(32,), heads=(2, 1, 16), dtype=_TOY_TYPE, layers=2, steps=1),
    ModelStage(
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
    PrefillStage(("toy",), lengths=(16,), repeats=1),
    StartStage("toy", prefix=8, steps=4),
    SamplingStage((2,), vocabulary=300, spreads=(4.0,), dtype=_TOY_TYPE),
    copied_bytes=1 << 20,
    matrix_size=128,
    dtype=_TOY_TYPE,
    repeats=1,
    large_kv_bytes=0,
    long_tokens=32,
    workers=2,
)
"""Toy sizes on a CPU, in dtypes that the Triton interpreter supports. The figures are meaningless."""


class Run:
    """One run of the stages.

    Parameters
    ----------
    sizes : Sizes
    device : torch.device
    path : Path
        JSON file, rewritten during the run, so that an interruption loses nothing.
    about : dict
        Further entries of the report.
    """

    def __init__(self, sizes: Sizes, device: torch.device, path: Path, about: dict[str, Any]) -> None:
        self.sizes, self.device, self.path = sizes, device, path
        self.timer = Timer(device, at_least=min(5, sizes.repeats), at_most=sizes.repeats)
        self.models = Models(device, getattr(torch, sizes.dtype))
        self.exact_models = Models(device, torch.float32)
        self.ceilings = measure_ceilings(self.timer, sizes.copied_bytes, sizes.matrix_size, self.models.dtype)
        self.report: dict[str, Any] = {
            "machine": describe(device),
            **about,
            "ceilings": asdict(self.ceilings),
            "stages": {},
        }
        self._written = 0.0

    def all(self, names: list[str], seconds: float) -> dict[str, Any]:
        """Run the named stages within `seconds`; return the report."""
        whole = Deadline(seconds)
        for number, name in enumerate(names):
            self.stage(name, whole.left * SHARES[name] / sum(SHARES[later] for later in names[number:]))
        self.report["acceptance"] = [target.judge(self.report["stages"]) for target in self.sizes.targets]
        report.print_acceptance(self.report["acceptance"])
        self.write()
        return self.report

    def stage(self, name: str, seconds: float) -> None:
        """Run one stage and print its table."""
        began, deadline = time.perf_counter(), Deadline(seconds)
        cases: list[dict[str, Any]] = []
        stage = {"settings": asdict(getattr(self.sizes, name)), "seconds": 0.0, "cases": cases}
        self.report["stages"][name] = stage

        def done(case: dict[str, Any]) -> None:
            cases.append(case)
            stage["seconds"] = time.perf_counter() - began
            if time.perf_counter() - self._written > WRITTEN_EVERY:
                self.write()

        run_cases(self._cases(name, deadline), deadline, done)
        self.write()
        report.print_stage(name, stage)

    def write(self) -> None:
        """Write the current report."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")
        self._written = time.perf_counter()

    def _cases(self, name: str, deadline: Deadline) -> Iterator[Case]:
        sizes, ceilings = self.sizes, self.ceilings
        makers: dict[str, Callable[[], Iterator[Case]]] = {
            "correctness": lambda: sizes.correctness.cases(self.device),
            "graphs": lambda: sizes.graphs.cases(self.exact_models),
            "attention": lambda: sizes.attention.cases(self.timer, ceilings),
            "hogwild": lambda: sizes.hogwild.cases(self.timer, ceilings),
            "model": lambda: sizes.model.cases(self.models, ceilings, deadline),
            "prefill": lambda: sizes.prefill.cases(self.models, deadline),
            "start": lambda: sizes.start.cases(self.device, self.models.dtype, deadline),
            "sampling": lambda: sizes.sampling.cases(self.timer),
        }
        return makers[name]()


def start(names: list[str], kind: str, seconds: float, seed: int, folder: Path) -> int:
    """Run the stages and print the report; return the exit status, 1 if a kernel is wrong."""
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    toy = kind == "toy"
    if not toy and not torch.cuda.is_available():
        print("PyTorch finds no GPU. --toy runs everything at toy sizes on the CPU.")
        return 2
    device = torch.device("cpu" if toy else "cuda")
    if toy:
        os.environ[BACKEND_VARIABLE] = toy_backend()
        compiled.BACKEND = "eager"  # Inductor takes longer than all stages
    sizes = {"full": Sizes(), "quick": QUICK, "toy": TOY}[kind]
    suffix = "" if kind == "full" else f"-{kind}"
    path = folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-gpu{suffix}.json"
    run = Run(sizes, device, path, {"kind": kind, "seed": seed, "seconds": seconds})
    machine = run.report["machine"]
    print(
        f"{machine['device']}, torch {machine['torch']}, triton {machine['packages']['triton']}, seed {seed}",
        flush=True,
    )
    result = run.all(names, seconds - (time.perf_counter() - began))
    if kind != "full":
        print(f"(--{kind}: the figures are meaningless)" if toy else "(--quick: few sizes, few repeats)")
    print(f"Written to {path}")
    return 1 if wrong(result) else 0


def wrong(result: dict[str, Any]) -> bool:
    """Return whether a kernel or graph failed or was wrong, in a check or at a timed size."""
    stages = result["stages"]
    checked = [case for name in ("correctness", "graphs") for case in stages.get(name, {}).get("cases", [])]
    timed = stages.get("attention", {}).get("cases", [])
    return any("error" in case for case in [*checked, *timed]) or not (
        all(case.get("ok", True) for case in checked)
        and all(difference <= DIFFERENCE for case in timed for difference in differences(case))
    )


def toy_backend() -> str:
    """Return `triton` if its interpreter can run on the CPU, else `torch`."""
    os.environ[BACKEND_VARIABLE] = "triton"
    try:
        return select_backend("cpu")
    except ValueError as error:
        print(error)
        return "torch"

"""Stages of whole models with random weights (Hydragen, section 4.1; Hogwild!, table 1).

Steps after the prefill are timed when their tokens reach the CPU, and therefore include all costs.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from .cases import Bench, Case, Figures, Target, figure
from .models import PAD, Models, draw_prompt, kv_bytes_per_token, weight_bytes
from .timing import Deadline, OutOfTimeError, PeakMemory
from .ways import WAYS, shared_prefix

Size = tuple[str, int, int]
"""Way, number of rows, length of the prefix."""
BOUND_PROMPT = 4
ROOT = Path(__file__).parents[2]
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name the folders of compiled code."""


def speed(cases: list[Figures], name: str, ours: Size, theirs: Size) -> Iterator[float | None]:
    """Yield the tokens per second of a model with a way and size, relative to another."""
    known = {(case["model"], case["way"], case["rows"], case["prefix"]): case.get("step_seconds") for case in cases}
    own, other = known.get((name, *ours)), known.get((name, *theirs))
    yield None if own is None or other is None else other / own * ours[1] / theirs[1]


@dataclass(frozen=True)
class ModelStage:
    """Decode steps by way, rows and prefix: first the sizes of the targets, last the slowest baselines."""

    share: ClassVar[float] = 0.38

    models: tuple[str, ...] = ("Qwen3-8B", "Llama-2-7B")
    rows: tuple[int, ...] = (1024, 32, 128, 512)
    prefixes: tuple[int, ...] = (1024, 16384, 4096)
    few_rows: tuple[int, ...] = (1, 2, 4, 8)  # reading the weights dominates a step
    compared_rows: tuple[int, ...] = (128,)  # with and without compilation
    workers: tuple[int, ...] = (1, 4, 2, 8)
    hogwild_prefixes: tuple[int, ...] = (4096, 16384)
    branches: tuple[int, ...] = (10, 4)
    unshared: tuple[tuple[int, int], ...] = ((128, 1024), (32, 4096), (16, 16384), (32, 16384))
    more_rows: tuple[int, ...] = (4096, 2048)  # as in Hydragen's tables, after all others
    more_prefixes: tuple[int, ...] = (2048, 8192)  # the same
    steps: int = 48

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations. The first model is measured before the others, whose baselines are left out."""
        most, *fewer = self.rows
        short, ours = self.prefixes[:1], ("shared_prefix", "no_attention")
        targets = [
            *itertools.product(["shared_prefix"], self.few_rows, short),
            *itertools.product(ours, [most], self.prefixes),
            *itertools.product(["shared_prefix"], self.compared_rows, short),
            *itertools.product(["hogwild"], self.workers, self.hogwild_prefixes),
            *itertools.product(["pdos"], self.branches, short),
        ]
        others = [("shared_prefix", *size) for size in self.unshared] + [*itertools.product(ours, fewer, self.prefixes)]
        uncompiled = itertools.product(["uncompiled"], [*self.few_rows, *self.compared_rows, most], short)
        compared = [("unshared", *size) for size in self.unshared] + [*uncompiled]
        baselines = [
            *itertools.product(["static_cache"], self.few_rows[:1], short),
            *itertools.product(["generate"], self.few_rows[:1], sorted({*short, *self.hogwild_prefixes})),
            *itertools.product(["generate"], sorted(self.rows), self.prefixes),
        ]
        slowest = [*itertools.product(["generate_batch"], sorted(self.rows), self.prefixes)]
        first, *rest = self.models
        order = [
            *itertools.product([first], targets + baselines[:1] + compared + others + baselines[1:]),
            *itertools.product(rest, targets),
            *itertools.product(rest, others),
            *itertools.product([first], [*itertools.product(ours, self.more_rows, self.prefixes)]),
            *itertools.product([first], [*itertools.product(ours, self.rows, self.more_prefixes)]),
            *itertools.product([first], slowest),
        ]
        for name, (way, rows, prefix) in dict.fromkeys(order):
            run = partial(self._measure, bench, name, way, rows, prefix)
            yield Case({"model": name, "way": way, "rows": rows, "prefix": prefix}, run)

    def _measure(self, bench: Bench, name: str, way: str, rows: int, prefix: int) -> Figures:
        """Measure one method; the floor of a step is the time to read weights, keys and values once."""
        model = bench.models.get(name)
        figures = WAYS[way](model, rows, prefix, self.steps, bench.deadline)
        if way in ("shared_prefix", "uncompiled") and "step_seconds" in figures:
            tokens = prefix + rows * self.steps // 2
            floor = bench.ceilings.limit(weight_bytes(model) + tokens * kv_bytes_per_token(model))
            figures |= {"floor_seconds": floor, "by_floor": figures["step_seconds"] / floor}
        return figures

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        name, rows, few, compared = self.models[0], max(self.rows), self.few_rows, max(self.compared_rows)
        short, middle, long = min(self.prefixes), sorted(self.prefixes)[len(self.prefixes) // 2], max(self.prefixes)
        most = max(self.workers, key=lambda workers: (workers <= 4, workers))
        way = "shared_prefix"

        def faster(what: str, ours: Size, theirs: Size, limit: float) -> Target:
            what = f"{name}, {ours[0]}, {ours[1]} rows over {ours[2]}: speed relative to {what}"
            return Target(what, partial(speed, name=name, ours=ours, theirs=theirs), limit, at_least=True)

        def step(many: int, limit: float) -> Target:
            def wanted(case: Figures) -> bool:
                return (case["model"], case["way"], case["rows"], case["prefix"]) == (name, way, many, short)

            return Target(f"{name}, {many} rows over {short}: step, s", figure("step_seconds", wanted), limit)

        by_floor, one = f"{min(few)} to {max(few)} rows: step relative to weight reads", (few[0], short)
        copies = max(self.unshared, key=math.prod)
        return [
            faster(f"{short}", (way, rows, long), (way, rows, short), 0.85),
            faster("no attention", (way, rows, middle), ("no_attention", rows, middle), 0.85),
            *(
                faster("1 row", ("hogwild", most, prefix), ("hogwild", 1, prefix), 0.95 * most)
                for prefix in self.hogwild_prefixes
            ),
            Target(by_floor, figure("by_floor", lambda case: case["way"] == way and case["rows"] in few), 1.4),
            step(compared, 7e-3),
            step(rows, rows / 32_000),
            faster("generate with a compiled static cache", (way, *one), ("static_cache", *one), 1.5),
            faster("a copy of the prompt per row", (way, *copies), ("unshared", *copies), 4.0),
        ]


@dataclass(frozen=True)
class ShapesStage:
    """Completions of one prompt on models of other shapes, beside `generate` over a prompt of 4 tokens.

    Hybrid layers keep states; DeepSeek-V2's keep latents. Prompts have no images.
    """

    share: ClassVar[float] = 0.16

    models: tuple[str, ...] = ("Qwen3.5-9B", "DeepSeek-V2-Lite", "Qwen3-VL-8B")
    rows: tuple[int, ...] = (64, 1)
    prefix: int = 8192
    steps: int = 32

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield the prefill of one row by `generate`, then each number of rows over the prompt and over 4 tokens."""
        sizes = [("prefilled", 1, self.prefix)]
        for rows in self.rows:
            sizes += [("shared_prefix", rows, self.prefix), ("prefilled", rows, BOUND_PROMPT)]
        sizes.append(("unshared", max(self.rows), self.prefix))
        for name, (way, rows, prefix) in itertools.product(self.models, sizes):
            run = partial(self._measure, bench, name, way, rows, prefix)
            yield Case({"model": name, "way": way, "rows": rows, "prefix": prefix}, run)

    def _measure(self, bench: Bench, name: str, way: str, rows: int, prefix: int) -> Figures:
        return WAYS[way](bench.models.alone(name), rows, prefix, self.steps, bench.deadline)

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""

        def ratios(name: str, bound_of: Any, cases: list[Figures]) -> Iterable[float | None]:
            known = {(case["model"], case["way"], case["rows"], case["prefix"]): case.get(name) for case in cases}
            for model, rows in itertools.product(self.models, self.rows):
                ours, bound = (
                    known.get((model, "shared_prefix", rows, self.prefix)),
                    known.get((model, *bound_of(rows))),
                )
                yield None if ours is None or bound is None else ours / bound

        step = partial(ratios, "step_seconds", lambda rows: ("prefilled", rows, BOUND_PROMPT))
        prefill = partial(ratios, "first_token_seconds", lambda rows: ("prefilled", 1, self.prefix))
        return [
            Target(f"other shapes: decode step relative to generate's over {BOUND_PROMPT} tokens", step, 1.25),
            Target("other shapes: time to the first token relative to generate's of one row", prefill, 1.1),
        ]


@dataclass(frozen=True)
class PrefillStage:
    """Prefill of a prompt, compared with one forward pass of the plain model over the same tokens."""

    share: ClassVar[float] = 0.06

    models: tuple[str, ...] = ("Qwen3-8B",)
    lengths: tuple[int, ...] = (32768, 4096, 16384, 1024)
    repeats: int = 3

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield all combinations."""
        for name, length in itertools.product(self.models, self.lengths):
            yield Case({"model": name, "length": length}, partial(self._measure, bench, name, length))

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        return [Target("prefill: time relative to one forward pass", figure("by_plain"), 1.02)]

    def _measure(self, bench: Bench, name: str, length: int) -> Figures:
        """Measure `generate` with one new token and a forward pass, in turn, after one call of each."""
        model = bench.models.get(name)
        prompt = draw_prompt(model, 1, length)
        settings = {"generation_mode": "shared_prefix", "do_sample": False, "pad_token_id": PAD}

        @torch.no_grad()
        def forward() -> None:
            model(prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

        ways: dict[str, Callable[[], object]] = {
            "": partial(model.generate, prompt, max_new_tokens=1, **settings),
            "plain_": forward,
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        figures: Figures = {}
        for _ in range(1 + self.repeats):
            for way, run in ways.items():
                bench.deadline.check()
                memory = PeakMemory(model.device)
                times[way].append(bench.timer.once(run))
                figures |= {f"{way}{key}": size for key, size in memory.figures().items()}
        seconds, plain = (statistics.median(times[way][1:]) for way in ("", "plain_"))
        return figures | {"seconds": seconds, "plain_seconds": plain, "by_plain": seconds / plain}


@dataclass(frozen=True)
class StartStage:
    """Start of a process: the time by which its first call is longer than a later one.

    It compiles and loads kernels, captures CUDA graphs, and compiles the model where the package does so. Each case is
    a process: the first with an empty folder of compiled code, the second with what the first one has written.
    """

    share: ClassVar[float] = 0.13

    model: str = "Qwen3-8B"
    rows: int = 1
    prefix: int = 1024
    steps: int = 48

    def cases(self, bench: Bench) -> Iterator[Case]:
        """Yield the first and the second process, which share a folder of compiled code."""
        with tempfile.TemporaryDirectory() as folder:
            for process in ("first", "second"):
                settings = {"model": self.model, "rows": self.rows, "prefix": self.prefix, "process": process}
                yield Case(settings, partial(self._measure, bench, Path(folder)))

    def targets(self) -> list[Target]:
        """See `Stage.targets`."""
        second = figure("start_seconds", lambda case: case["process"] == "second" and case.get("compile") is not False)
        return [Target("compiled decode: start of a second process, s", second, 5.0)]

    def _measure(self, bench: Bench, folder: Path) -> Figures:
        device, dtype = bench.models.device, bench.models.dtype
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the process needs memory of its own
        settings = asdict(self) | {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
        env = os.environ | {variable: str(folder / variable) for variable in FOLDERS}
        given: dict[str, Any] = {"cwd": ROOT, "env": env, "capture_output": True, "text": True}
        given["timeout"] = max(bench.deadline.left, 0.1)
        try:
            done = subprocess.run([sys.executable, "-m", __name__, json.dumps(settings)], **given)
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        if done.returncode:
            raise RuntimeError(done.stderr[-1000:] or f"the process ended with status {done.returncode}")
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures


def main() -> None:
    """Measure calls in this process, with the settings of the argument, and print the figures as JSON."""
    from hf_parallel.models.decode import compiled

    settings = json.loads(sys.argv[1])
    if settings["device"] == "cpu":  # toy sizes
        compiled.COMPILER = "eager"
    began = time.perf_counter()
    model = Models(torch.device(settings["device"]), getattr(torch, settings["dtype"])).get(settings["model"])
    built = time.perf_counter() - began
    rows, prefix, steps = (settings[name] for name in ("rows", "prefix", "steps"))
    first, again = (shared_prefix(model, rows, prefix, steps, Deadline(3600)) for _ in range(2))
    figures = {
        "compile": first["stats"]["compiled_passes"] > 0,
        "build_seconds": built,
        "first_seconds": first["call_seconds"],
        "again_seconds": again["call_seconds"],
        "first_token_seconds": first["first_token_seconds"],
        "start_seconds": first["call_seconds"] - again["call_seconds"],
        "step_seconds": again["step_seconds"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

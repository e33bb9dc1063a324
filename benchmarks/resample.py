"""Repeated samples of one state, with and without a LogitsCache (Hive, section 8.2).

`python -m benchmarks.resample --help`. The protocol is the paper's: a Game of 24 puzzle is decoded once and then
sampled repeatedly from the same state at a fixed length. Fully replayed samples are excluded. All methods keep keys and
values in a SharedPrefixCache; they differ in the logits that they keep:

- `none`: no logits;
- `single path`: logits of the last decoded sequence, as in the paper;
- `stepwise`, `hotspot`: logits of every sequence so far, which also provide draft tokens.

The overhead of a cache without hits is measured for a new one (`cold`) and for one full of other states (`no hits`).
With `--stress`, eight threads read and write one cache. The report is rewritten after each puzzle.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hf_parallel
from hf_parallel.cache.logits import LogitsCache

from .__main__ import about, add_model_options, finish, new_path, set_up, write
from .cache_stress import Stress

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
NUCLEUS = 0.9
"""Value of `top_p` in the runs that use it."""
WAYS = ("none", "single path", "stepwise", "hotspot")
MORE: dict[str, dict[str, Any]] = {"single path": {"draft_tokens": 0}, "hotspot": {"replay": "hotspot"}}
"""Settings per method. The cache of the paper provides no draft tokens."""
TARGETS = {"stepwise": 1.8, "hotspot": 2.5}
"""Targets: speed-up over no cache, averaged over the temperatures."""
OVERHEAD = ("cold", "no hits")
OVERHEAD_TARGET = 1.05
"""Target: seconds with a cache without hits, relative to no cache."""
PROMPT = (
    "Use each of the numbers {numbers} exactly once, with + - * / and brackets, to get 24. "
    "Think step by step and write down every step."
)


@dataclass
class Measured:
    """Samples of one method at one setting, without fully replayed ones."""

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by puzzle and sample."""
    replayed: list[int] = field(default_factory=list)
    whole: int = 0


@dataclass(frozen=True)
class ResampleBenchmark:
    """Settings and run.

    The report holds, per method, means and medians of tokens per second and of the speed-up over no cache.
    `over_single_path` is the speed-up over the single path, between samples with the same seed, with its standard
    error.

    Parameters
    ----------
    puzzles, samples, length : int
        Number of puzzles, of samples per state (including the first decode), and of tokens per sample.
    temperatures : tuple of float
    baseline_samples : int
        Number of timed samples of `none` and `single path`, without the first decode. Fewer than `samples`, to save
        time.
    overhead_rounds : int
        Number of calls per median of the overhead.
    """

    puzzles: int = 2
    samples: int = 16
    length: int = 100
    temperatures: tuple[float, ...] = TEMPERATURES
    baseline_samples: int = 4
    overhead_rounds: int = 7

    def run(self, model: Any, tokenizer: Any, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Measure all methods; yield the entries of the report after each puzzle."""
        log("overhead of a cache without hits")
        overhead = self._overhead(model, tokenizer)
        settings = [(top_p, temperature) for top_p in (1.0, NUCLEUS) for temperature in self.temperatures]
        measured: list[dict[str, Measured]] = [{way: Measured() for way in WAYS} for _ in settings]
        for number, numbers in enumerate(itertools.islice(solvable(), self.puzzles)):
            ids = encode(tokenizer, numbers).to(model.device)
            for (top_p, temperature), into in zip(settings, measured, strict=True):
                log(f"puzzle {number + 1} of {self.puzzles}, top_p {top_p}, temperature {temperature}")
                self._sample(model, ids, number, {"temperature": temperature, "top_p": top_p}, into)
            results = [
                {"top_p": top_p, "temperature": temperature} | self._summary(of)
                for (top_p, temperature), of in zip(settings, measured, strict=True)
            ]
            yield {
                "settings": asdict(replace(self, puzzles=number + 1)),
                "results": results,
                "speed_up": mean_speed_ups(results),
                "below_single_path": below_single_path(results),
                "overhead": overhead,
            }

    def _sample(
        self, model: Any, ids: torch.Tensor, puzzle: int, settings: dict[str, float], into: dict[str, Measured]
    ) -> None:
        """Sample one state by all methods. Their order rotates, so that machine noise affects them equally."""
        caches = {way: LogitsCache(1 << 32) for way in WAYS if way != "none"}
        held = {way: hf_parallel.SharedPrefixCache(device=model.device) for way in WAYS}
        # Few samples of the baselines are timed, spread evenly over those after the first decode.
        timed = {1 + part * (self.samples - 1) // self.baseline_samples for part in range(self.baseline_samples)}
        for seed in range(self.samples):
            turn = sum(earlier < seed for earlier in timed) % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                if way not in TARGETS and seed > 0 and seed not in timed:
                    continue
                cache = caches.get(way)
                more: dict[str, Any] = MORE.get(way, {})
                seconds, output = self._time(
                    model, ids, cache, past_key_values=held[way], seed=seed, **settings, **more
                )
                if way == "single path":
                    caches[way].keep_last_path()
                if seed and output.stats.replayed_tokens == self.length:
                    into[way].whole += 1
                elif seed:
                    into[way].seconds[puzzle, seed] = seconds
                    into[way].replayed.append(output.stats.replayed_tokens)

    def _time(self, model: Any, ids: torch.Tensor, cache: LogitsCache | None, **settings: Any) -> tuple[float, Any]:
        """Call `generate`; return the seconds and the output."""
        began = time.perf_counter()
        output = model.generate(
            ids,
            generation_mode="shared_prefix" if cache is None else "resample",
            logits_cache=cache,
            do_sample=True,
            top_k=0,
            max_new_tokens=self.length,
            min_new_tokens=self.length,
            pad_token_id=0,
            return_dict_in_generate=True,
            **settings,
        )
        return time.perf_counter() - began, output

    def _overhead(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Measure the seconds with a cache without hits relative to no cache, at temperature 1."""
        full = LogitsCache(1 << 32)
        seconds: dict[str, list[float]] = {way: [] for way in ("none", *OVERHEAD)}
        for number, numbers in enumerate(itertools.islice(solvable(), self.overhead_rounds + 1)):
            ids = encode(tokenizer, numbers).to(model.device)
            for way, times in seconds.items():
                cache = {"none": None, "cold": LogitsCache(1 << 32), "no hits": full}[way]
                took, output = self._time(model, ids, cache, seed=number)
                assert output.stats.replayed_tokens == 0, "no state may be cached"
                if number:  # the first round is a warm-up
                    times.append(took)
        ratios = {
            way: statistics.median(ours / plain for ours, plain in zip(seconds[way], seconds["none"], strict=True))
            for way in OVERHEAD
        }
        return {"ratios": ratios, "seconds": seconds}

    def _summary(self, measured: dict[str, Measured]) -> dict[str, Any]:
        none, single = measured["none"].seconds, measured["single path"].seconds
        # Each puzzle is compared with its own samples: the speed of a machine changes between puzzles.
        puzzles = {puzzle for puzzle, _ in none}
        plain = {
            puzzle: statistics.median(took for (of, _), took in none.items() if of == puzzle) for puzzle in puzzles
        }
        summary: dict[str, Any] = {}
        for way, of in measured.items():
            rates = [self.length / took for took in of.seconds.values()]
            speed_ups = [plain[puzzle] / took for (puzzle, _), took in of.seconds.items()]
            pairs = [single[sample] / took for sample, took in of.seconds.items() if sample in single]
            summary[way] = {
                "samples": len(rates),
                "replayed_whole": of.whole,
                "mean_tokens_per_second": statistics.mean(rates) if rates else None,
                "median_tokens_per_second": statistics.median(rates) if rates else None,
                "speed_up": statistics.mean(speed_ups) if rates else None,
                "median_speed_up": statistics.median(speed_ups) if rates else None,
                "over_single_path": statistics.mean(pairs) if pairs else None,
                "standard_error": statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else None,
                "hit_ratio": statistics.mean(of.replayed) / self.length if rates else None,
            }
        return summary


def mean_speed_ups(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean speed-up of each method over all settings."""
    found = {}
    for way in WAYS[1:]:
        values = [result[way]["speed_up"] for result in results if result[way]["speed_up"] is not None]
        found[way] = statistics.mean(values) if values else None
    return found


def below_single_path(results: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """List (method, top_p, temperature) for methods that are not faster than the single path."""
    return [
        (way, result["top_p"], result["temperature"])
        for result in results
        for way in TARGETS
        if (result[way]["speed_up"] or float("inf")) <= (result["single path"]["speed_up"] or 0.0)
    ]


def solvable() -> Iterator[tuple[int, ...]]:
    """Yield solvable Game of 24 puzzles, four numbers from 1 to 13, in an order that mixes easy and hard ones."""
    everything = list(itertools.combinations_with_replacement(range(1, 14), 4))
    for index in range(len(everything)):
        numbers = everything[(index * 577 + 301) % len(everything)]
        if makes(tuple(sorted(map(Fraction, numbers)))):
            yield numbers


@cache
def makes(numbers: tuple[Fraction, ...], goal: int = 24) -> bool:
    """Return whether an arithmetic expression of the numbers equals `goal`."""
    if len(numbers) == 1:
        return numbers[0] == goal
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for made in (a + b, a - b, a * b, a / b if b else None):
            if made is not None and makes(tuple(sorted((*rest, made)))):
                return True
    return False


def encode(tokenizer: Any, numbers: tuple[int, ...]) -> torch.Tensor:
    """Return the puzzle as a prompt, `int64 [1, length]`."""
    message = {"role": "user", "content": PROMPT.format(numbers=", ".join(map(str, numbers)))}
    encoded = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the table."""
    of = report["settings"]
    table = Table(
        title=f"{of['puzzles']} puzzles x {of['samples']} samples x {of['length']} tokens", title_justify="left"
    )
    for heading in ("top_p", "temperature", "way", "mean tokens/s", "median", "speed-up", "median", "hits", "whole"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for result in report["results"]:
        for way in WAYS:
            row = result[way]
            figures = ("mean_tokens_per_second", "median_tokens_per_second", "speed_up", "median_speed_up", "hit_ratio")
            cells = ["" if row[name] is None else f"{row[name]:.2f}" for name in figures]
            first = (f"{result['top_p']}", f"{result['temperature']}") if way == WAYS[0] else ("", "")
            table.add_row(*first, way, *cells, str(row["replayed_whole"]))
    console.print(table)
    for way, value in report["speed_up"].items():
        target = f", target: at least {TARGETS[way]}" if way in TARGETS else ""
        console.print(f"{way}: mean speed-up {'-' if value is None else format(value, '.2f')}{target}")
    for way, top_p, temperature in report["below_single_path"]:
        row = next(r for r in report["results"] if (r["top_p"], r["temperature"]) == (top_p, temperature))[way]
        console.print(
            f"{way}: not faster than the single path at top_p {top_p} and temperature {temperature} (per seed "
            f"{row['over_single_path']} times, standard error {row['standard_error']})"
        )
    for way, ratio in report["overhead"]["ratios"].items():
        console.print(
            f"seconds relative to no cache, without hits ({way}): {ratio:.3f}, target: at most {OVERHEAD_TARGET}"
        )
    for stress in report.get("stress", []):
        console.print(
            f"{stress['threads']} threads in {stress['max_bytes']} bytes: {stress['reads']} reads, {stress['writes']} "
            f"writes, {stress['wrong']} wrong answers, {stress['lost']} states lost"
        )


SPEED_UPS = (1, 1.5, 2, 3, 5, 8, 13, 20)
"""Axis ticks of the plot."""


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot mean and median (dotted) speed-ups over the temperatures (needs matplotlib, extra `eval`)."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for panel, top_p in zip(panels, (1.0, NUCLEUS), strict=True):
        of = [result for result in report["results"] if result["top_p"] == top_p]
        for way, marker in zip(WAYS[1:], "os^", strict=True):
            known = [r for r in of if r[way]["speed_up"] is not None]
            temperatures = [r["temperature"] for r in known]
            (line,) = panel.plot(temperatures, [r[way]["speed_up"] for r in known], marker=marker, label=way)
            panel.plot(temperatures, [r[way]["median_speed_up"] for r in known], ":", color=line.get_color())
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(title=f"top_p = {top_p}", xlabel="temperature", xticks=TEMPERATURES, yscale="log")
        panel.set_yticks(SPEED_UPS, [f"{speed_up}x" for speed_up in SPEED_UPS])
        panel.minorticks_off()
    panels[0].set_ylabel("speed-up over no cache")
    panels[0].legend()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resample", description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--puzzles", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--overhead-rounds", type=int, default=7)
    parser.add_argument("--stress", type=float, metavar="SECONDS", help="stress two caches with eight threads each")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also plot the speed-ups")
    options = parser.parse_args()
    console = Console(highlight=False)
    model, tokenizer = set_up(options)
    sizes = options.puzzles, options.samples, options.length, tuple(options.temperatures)
    benchmark = ResampleBenchmark(*sizes, overhead_rounds=options.overhead_rounds)
    report, path = about(model, options), options.output or new_path("resample")
    if options.stress:
        console.print("stress")
        report["stress"] = [Stress(options.stress, max_bytes).run() for max_bytes in (1 << 30, 1 << 18)]
    for found in benchmark.run(model, tokenizer, partial(console.print, markup=False)):
        report |= found
        write(report, path)
    finish(console, report, path, show)
    if options.plot:
        plot(report, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

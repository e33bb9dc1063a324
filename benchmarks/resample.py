"""Samples from a state that was visited before: with a LogitsCache and without (Hive, section 8.2).

`python -m benchmarks.resample --help`. The protocol is the paper's: a Game of 24 puzzle is decoded once, then sampled
again and again from the same state at a fixed length; samples that were replayed whole are left out. All ways hold the
prompt's keys and values in the same SharedPrefixCache; they differ in what they remember of the logits:

- `none`: nothing;
- `single path`: the sequence that was decoded last, as in the paper;
- `stepwise`, `hotspot`: every continuation that was ever taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import hf_parallel
from hf_parallel.cache.logits import LogitsCache, State

from .__main__ import DTYPES, RESULTS, load, machine

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
NUCLEUS = 0.9
"""`top_p` where it is on."""
WAYS = ("none", "single path", "stepwise", "hotspot")
TARGETS = {"stepwise": 1.8, "hotspot": 2.5}
"""Mean speed-up over no cache, averaged over the temperatures, that is asked for."""
PROMPT = (
    "Use each of the numbers {numbers} exactly once, with + - * / and brackets, to get 24. "
    "Think step by step and write down every step."
)


@dataclass
class Measured:
    """Samples of one way at one setting, those replayed whole left out."""

    seconds: list[float] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    whole: int = 0


@dataclass(frozen=True)
class ResampleBenchmark:
    """Settings and run.

    Parameters
    ----------
    puzzles, samples, length : int
        Samples are those of one state, the first decode included; `length` are the tokens of each.
    temperatures : tuple of float
    plain_samples : int
        Samples that are timed without a cache, where all cost the same.
    """

    puzzles: int = 2
    samples: int = 16
    length: int = 100
    temperatures: tuple[float, ...] = TEMPERATURES
    plain_samples: int = 4

    def run(self, model: Any, tokenizer: Any, tell: Callable[[str], None]) -> dict[str, Any]:
        """Measure all ways in turns; returns what goes into the JSON."""
        results = []
        for top_p in (1.0, NUCLEUS):
            for temperature in self.temperatures:
                measured = {way: Measured() for way in WAYS}
                for number, numbers in enumerate(itertools.islice(solvable(), self.puzzles)):
                    tell(f"top_p {top_p}, temperature {temperature}, puzzle {number + 1} of {self.puzzles}")
                    ids = encode(tokenizer, numbers).to(model.device)
                    self._sample(model, ids, {"temperature": temperature, "top_p": top_p}, measured)
                results.append({"top_p": top_p, "temperature": temperature} | self._summary(measured))
        return {"settings": asdict(self), "results": results, "speed_up": mean_speed_ups(results)}

    def _sample(self, model: Any, ids: torch.Tensor, settings: dict[str, float], into: dict[str, Measured]) -> None:
        """Sample one state in all ways, which take turns so that a machine's noise hits all alike."""
        caches = {way: LogitsCache(1 << 32) for way in WAYS if way != "none"}
        held = {way: hf_parallel.SharedPrefixCache(device=model.device) for way in WAYS}
        for seed in range(self.samples):
            for way in WAYS:
                if way == "none" and seed > self.plain_samples:
                    continue
                cache = caches.get(way)
                replay = "hotspot" if way == "hotspot" else "stepwise"
                more = {} if cache is None else {"logits_cache": cache, "replay": replay}
                began = time.perf_counter()
                output = model.generate(
                    ids,
                    generation_mode="shared_prefix" if cache is None else "resample",
                    past_key_values=held[way],
                    keep_completions=False,
                    seed=seed,
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=self.length,
                    min_new_tokens=self.length,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    **settings,
                    **more,
                )
                seconds = time.perf_counter() - began
                if way == "single path":
                    keep_last_path(caches[way])
                if seed and output.stats.replayed_tokens == self.length:
                    into[way].whole += 1
                elif seed:
                    into[way].seconds.append(seconds)
                    into[way].replayed.append(output.stats.replayed_tokens)

    def _summary(self, measured: dict[str, Measured]) -> dict[str, Any]:
        plain = statistics.mean(measured["none"].seconds)
        summary: dict[str, Any] = {}
        for way, of in measured.items():
            rates = [self.length / seconds for seconds in of.seconds]
            summary[way] = {
                "samples": len(of.seconds),
                "replayed_whole": of.whole,
                "mean_tokens_per_second": statistics.mean(rates) if rates else None,
                "median_tokens_per_second": statistics.median(rates) if rates else None,
                "speed_up": statistics.mean(plain / seconds for seconds in of.seconds) if rates else None,
                "hit_ratio": statistics.mean(of.replayed) / self.length if rates else None,
            }
        return summary


def mean_speed_ups(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Per way the mean over temperatures and settings."""
    found = {}
    for way in WAYS[1:]:
        values = [result[way]["speed_up"] for result in results if result[way]["speed_up"] is not None]
        found[way] = statistics.mean(values) if values else None
    return found


def keep_last_path(cache: LogitsCache) -> None:
    """Forget all but the continuation that was taken last: what a cache of one path holds."""
    with cache._lock:
        for root in cache._roots.values():
            state = root
            while state.children:
                last = max(state.children.values(), key=lambda child: child.used)
                for token, child in list(state.children.items()):
                    if child is not last:
                        _drop(cache, child)
                        del state.children[token]
                state = last


def _drop(cache: LogitsCache, state: State) -> None:
    stack = [state]
    while stack:
        state = stack.pop()
        state.alive = False
        cache.num_bytes -= state.num_bytes
        stack.extend(state.children.values())


def solvable() -> Iterator[tuple[int, ...]]:
    """Game of 24: four numbers from 1 to 13 that can make 24, in an order that mixes easy and hard ones."""
    everything = list(itertools.combinations_with_replacement(range(1, 14), 4))
    for index in range(len(everything)):
        numbers = everything[(index * 577 + 301) % len(everything)]
        if makes(tuple(sorted(map(Fraction, numbers)))):
            yield numbers


@cache
def makes(numbers: tuple[Fraction, ...], goal: int = 24) -> bool:
    """Whether numbers can be combined to the goal."""
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
    """The puzzle as a prompt, `int64 [1, length]`."""
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
    for heading in ("top_p", "temperature", "way", "mean tokens/s", "median", "speed-up", "hits", "replayed whole"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for result in report["results"]:
        for way in WAYS:
            row = result[way]
            figures = ("mean_tokens_per_second", "median_tokens_per_second", "speed_up", "hit_ratio")
            cells = ["" if row[name] is None else f"{row[name]:.2f}" for name in figures]
            first = (f"{result['top_p']}", f"{result['temperature']}") if way == WAYS[0] else ("", "")
            table.add_row(*first, way, *cells, str(row["replayed_whole"]))
    console.print(table)
    for way, value in report["speed_up"].items():
        asked = f", asked for at least {TARGETS[way]}" if way in TARGETS else ""
        console.print(f"{way}: mean speed-up {'-' if value is None else format(value, '.2f')}{asked}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw speed-ups over temperatures (needs matplotlib, of the extra `eval`)."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for panel, top_p in zip(panels, (1.0, NUCLEUS), strict=True):
        of = [result for result in report["results"] if result["top_p"] == top_p]
        for way, marker in zip(WAYS[1:], "os^", strict=True):
            known = [(r["temperature"], r[way]["speed_up"]) for r in of if r[way]["speed_up"] is not None]
            panel.plot(*zip(*known, strict=True), marker=marker, label=way)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(title=f"top_p = {top_p}", xlabel="temperature", yscale="log")
    panels[0].set_ylabel("speed-up over no cache")
    panels[0].legend()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resample", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="ID_OR_PATH", help="default: the embedded model")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="default: float32")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--puzzles", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--output", type=Path, metavar="FILE", help="of the JSON (default: one in benchmarks/results)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speed-ups too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(highlight=False)
    model, tokenizer = load(options)
    hf_parallel.enable(model)
    benchmark = ResampleBenchmark(options.puzzles, options.samples, options.length)
    report = {"machine": machine(model)} | benchmark.run(
        model, tokenizer, lambda what: console.print(what, markup=False)
    )
    path = options.output or RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}-resample.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    show(console, report)
    if options.plot:
        plot(report, options.plot)
    console.print(f"\nWritten to {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

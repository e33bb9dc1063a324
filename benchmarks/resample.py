"""Repeated samples of one state, with and without a LogitsCache (Hive, section 8.2).

The protocol is the paper's: a Game of 24 puzzle is decoded once and then sampled repeatedly from the same state at a
fixed length. Fully replayed samples are excluded. All methods keep keys and values in a SharedPrefixCache; they differ
in the logits that they keep:

- `none`: no logits;
- `single path`: logits of the last decoded sequence, as in the paper;
- `stepwise`, `hotspot`: logits of every sequence so far, which also provide draft tokens.

The overhead of a cache without hits is measured for a new one (`cold`) and for one full of other states (`no hits`).
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import torch

import hf_parallel
from hf_parallel.cache.logits import LogitsCache

from .report import run_benchmark

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
NUCLEUS = 0.9
"""Value of `top_p` in the runs that use it."""
WAYS = ("none", "single path", "stepwise", "hotspot")
MORE: dict[str, dict[str, Any]] = {"single path": {"draft_tokens": 0}, "hotspot": {"replay": "hotspot"}}
"""Settings per method. The cache of the paper provides no draft tokens."""
LIMITS = (
    ("stepwise", "at least", 1.8, "stepwise: mean speed-up over no cache"),
    ("hotspot", "at least", 2.5, "hotspot: mean speed-up over no cache"),
    *((name, "at most", 1.05, f"{name}: seconds with a cache without hits") for name in ("cold", "no hits")),
)
TIMED = ("stepwise", "hotspot")
"""Methods whose samples are timed one by one."""
PROMPT = (
    "Use each of the numbers {numbers} exactly once, with + - * / and brackets, to get 24. "
    "Think step by step and write down every step."
)


@dataclass
class Measured:
    """Samples of one method at one setting, without fully replayed ones."""

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)  # by puzzle and sample
    replayed: list[int] = field(default_factory=list)
    whole: int = 0


@dataclass(frozen=True)
class ResampleBenchmark:
    """Settings and run.

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

    def run(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Measure all methods; return the entries of the report."""
        print("overhead of a cache without hits")
        overhead = self._overhead(model, tokenizer)
        settings = [(top_p, temperature) for top_p in (1.0, NUCLEUS) for temperature in self.temperatures]
        measured: list[dict[str, Measured]] = [{way: Measured() for way in WAYS} for _ in settings]
        for number, numbers in enumerate(itertools.islice(solvable(), self.puzzles)):
            ids = encode(tokenizer, numbers).to(model.device)
            for (top_p, temperature), into in zip(settings, measured, strict=True):
                print(f"puzzle {number + 1} of {self.puzzles}, top_p {top_p}, temperature {temperature}")
                self._sample(model, ids, number, {"temperature": temperature, "top_p": top_p}, into)
        results = [
            {"top_p": top_p, "temperature": temperature} | self._summary(of)
            for (top_p, temperature), of in zip(settings, measured, strict=True)
        ]
        speed_ups = {way: [r[way]["speed_up"] for r in results if r[way]["speed_up"]] for way in WAYS[1:]}
        means = {way: statistics.mean(values) for way, values in speed_ups.items() if values}
        found = {"settings": asdict(self), "results": results, "speed_up": means, "overhead": overhead}
        return found | {"ratios": means | overhead["ratios"]}

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
                if way not in TIMED and seed > 0 and seed not in timed:
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
        ratios: dict[str, list[float]] = {"cold": [], "no hits": []}
        for number, numbers in enumerate(itertools.islice(solvable(), self.overhead_rounds + 1)):
            ids = encode(tokenizer, numbers).to(model.device)
            plain, _ = self._time(model, ids, None, seed=number)
            for way, logits_cache in (("cold", LogitsCache(1 << 32)), ("no hits", full)):
                took, output = self._time(model, ids, logits_cache, seed=number)
                assert output.stats.replayed_tokens == 0, "no state may be cached"
                if number:  # the first round is a warm-up
                    ratios[way].append(took / plain)
        return {"ratios": {way: statistics.median(values) for way, values in ratios.items()}}

    def _summary(self, measured: dict[str, Measured]) -> dict[str, Any]:
        none = measured["none"].seconds
        # Each puzzle is compared with its own samples: the speed of a machine changes between puzzles.
        plain = {p: statistics.median(took for (of, _), took in none.items() if of == p) for p in {p for p, _ in none}}
        summary: dict[str, Any] = {}
        for way, of in measured.items():
            speed_ups = [plain[puzzle] / took for (puzzle, _), took in of.seconds.items()]
            summary[way] = {"samples": len(speed_ups), "replayed_whole": of.whole, "speed_up": None, "hit_ratio": None}
            if speed_ups:
                rates = [self.length / took for took in of.seconds.values()]
                summary[way] |= {
                    "mean_tokens_per_second": statistics.mean(rates),
                    "speed_up": statistics.mean(speed_ups),
                    "median_speed_up": statistics.median(speed_ups),
                    "hit_ratio": statistics.mean(of.replayed) / self.length,
                }
        return summary


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


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        benchmark = ResampleBenchmark(options.puzzles, options.samples, options.length)
        if options.quick:
            benchmark = ResampleBenchmark(1, 6, 6, (0.2, 0.8), overhead_rounds=2)
        return benchmark.run(model, tokenizer)

    return run_benchmark("resample", __doc__, measure, LIMITS, puzzles=2, samples=16, length=100)


if __name__ == "__main__":
    sys.exit(main())

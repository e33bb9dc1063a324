"""Repeated samples of one state, with and without a LogitsCache (Hive, section 8.2).

The protocol is the paper's: a Game of 24 puzzle is decoded once and then sampled repeatedly from the same state at a
fixed length. Fully replayed samples are excluded. All methods keep keys and values in a SharedPrefixCache; they differ
in the logits that they keep:

- `none`: no logits;
- `single path`, `single path hotspot`: logits of the last decoded sequence, replayed as in the paper's two settings;
- `stepwise`, `hotspot`: logits of every sequence so far, which also provide draft tokens.

The overhead of a cache without hits is measured for a new one (`cold`) and for one full of other states (`no hits`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, partial
from typing import Any

import torch

import hf_parallel
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.logits_trie import TrieNode
from hf_parallel.evaluation import load_problems
from hf_parallel.evaluation.tasks.game24 import Game24Problem
from hf_parallel.progress import progress_bar

from .measure import timed

SIZES: dict[str, Any] = {"puzzles": 2, "samples": 16, "length": 100, "temperatures": (0.2, 0.4, 0.6, 0.8, 1.0)}
SIZES |= {"baseline_samples": 4, "overhead_rounds": 7, "minutes": 0.0, "source": ""}
"""Samples per state include the first decode; the baselines are `none` and the ways of a single path.

After `minutes`, if not 0, no further puzzle is begun; one puzzle is always finished. `source` is a data set of puzzles,
such as nlile/24-game; by default, they are generated.
"""
QUICK: dict[str, Any] = {"puzzles": 1, "samples": 6, "length": 6, "temperatures": (0.2, 0.8), "overhead_rounds": 2}
NUCLEUS = 0.9
"""Value of `top_p` in the runs that use it."""
SINGLE = ("single path", "single path hotspot")
WAYS = ("none", *SINGLE, "stepwise", "hotspot")
MORE: dict[str, dict[str, Any]] = {"single path": {"draft_tokens": 0}, "hotspot": {"replay": "hotspot"}}
MORE["single path hotspot"] = MORE["single path"] | MORE["hotspot"]
"""Settings per method. The cache of the paper provides no draft tokens."""
TARGETS = (
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


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    print("overhead of a cache without hits")
    overhead = overhead_of(model, tokenizer, sizes)
    settings = [(top_p, temperature) for top_p in (1.0, NUCLEUS) for temperature in sizes.temperatures]
    measured: list[dict[str, Measured]] = [{way: Measured() for way in WAYS} for _ in settings]
    began = time.perf_counter()
    number = 0
    bar = progress_bar(total=sizes.puzzles * len(settings), what="Sampling", unit="settings of puzzles")
    for number, numbers in enumerate(itertools.islice(puzzles(sizes.source), sizes.puzzles), start=1):
        ids = encode(tokenizer, numbers).to(model.device)
        for (top_p, temperature), into in zip(settings, measured, strict=True):
            sample(model, ids, number, {"temperature": temperature, "top_p": top_p}, into, sizes)
            bar.update()
        minutes = (time.perf_counter() - began) / 60
        if sizes.minutes and minutes * (number + 1) / number > sizes.minutes:  # the next one would end too late
            print(f"stops after {number} of {sizes.puzzles} puzzles and {minutes:.0f} minutes")
            break
    bar.close()
    results = [
        {"top_p": top_p, "temperature": temperature} | summary(of, sizes.length)
        for (top_p, temperature), of in zip(settings, measured, strict=True)
    ]
    speed_ups = {way: [r[way]["speed_up"] for r in results if r[way]["speed_up"]] for way in WAYS[1:]}
    means = {way: statistics.mean(values) for way, values in speed_ups.items() if values}
    hits = {way: statistics.mean(r[way]["hit_ratio"] for r in results if r[way]["samples"]) for way in means}
    found = {
        "puzzles_measured": number,
        "results": results,
        "speed_up": means,
        "hit_ratio": hits,
        "overhead": {"ratios": overhead},
    }
    return found | {"ratios": means | overhead}


def sample(
    model: Any, ids: torch.Tensor, puzzle: int, settings: dict[str, float], into: dict[str, Measured], sizes: Any
) -> None:
    """Sample one state by all methods. Their order rotates, so that machine noise affects them equally."""
    caches = {way: LogitsCache(1 << 32) for way in WAYS if way != "none"}
    held = {way: hf_parallel.SharedPrefixCache(device=model.device) for way in WAYS}
    # Few samples of the baselines are timed, spread evenly over those after the first decode.
    baselines = {1 + part * (sizes.samples - 1) // sizes.baseline_samples for part in range(sizes.baseline_samples)}
    for seed in range(sizes.samples):
        turn = sum(earlier < seed for earlier in baselines) % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            if way not in TIMED and seed > 0 and seed not in baselines:
                continue
            given = {"past_key_values": held[way], "seed": seed, **settings, **MORE.get(way, {})}
            seconds, output = call(model, ids, sizes.length, caches.get(way), **given)
            if way in SINGLE:
                keep_last_path(caches[way])
            if seed and output.stats.replayed_tokens == sizes.length:
                into[way].whole += 1
            elif seed:
                into[way].seconds[puzzle, seed] = seconds
                into[way].replayed.append(output.stats.replayed_tokens)


def keep_last_path(logits: LogitsCache) -> None:
    """Keep only the most recently used sequence of each model, as Hive's own cache does, and delete the rest."""
    nodes = list(logits.nodes())
    last: dict[str, TrieNode] = {}
    for key, node in nodes:
        if key not in last or node.last_used > last[key].last_used:
            last[key] = node
    kept = set(last.values())
    for _, node in reversed(nodes):  # children before their parents
        node.children = {token: child for token, child in node.children.items() if child in kept}
        if node.children:
            kept.add(node)
        elif node not in kept:
            logits.num_bytes -= node.num_bytes
            node.delete()


def call(model: Any, ids: torch.Tensor, length: int, logits: LogitsCache | None, **settings: Any) -> tuple[float, Any]:
    """Call `generate`; return the seconds and the output."""
    settings |= {"generation_mode": "shared_prefix" if logits is None else "resample", "logits_cache": logits}
    settings |= {"do_sample": True, "top_k": 0, "pad_token_id": 0, "return_dict_in_generate": True}
    return timed(partial(model.generate, ids, max_new_tokens=length, min_new_tokens=length, **settings))


def overhead_of(model: Any, tokenizer: Any, sizes: Any) -> dict[str, float]:
    """Return the seconds with a cache without hits relative to no cache, at temperature 1."""
    full = LogitsCache(1 << 32)
    ratios: dict[str, list[float]] = {"cold": [], "no hits": []}
    for number, numbers in enumerate(itertools.islice(solvable(), sizes.overhead_rounds + 1)):
        ids = encode(tokenizer, numbers).to(model.device)
        plain, _ = call(model, ids, sizes.length, None, seed=number)
        for way, logits_cache in (("cold", LogitsCache(1 << 32)), ("no hits", full)):
            took, output = call(model, ids, sizes.length, logits_cache, seed=number)
            assert output.stats.replayed_tokens == 0, "no state may be cached"
            if number:  # the first round is a warm-up
                ratios[way].append(took / plain)
    return {way: statistics.median(values) for way, values in ratios.items()}


def summary(measured: dict[str, Measured], length: int) -> dict[str, Any]:
    """Return the figures of each method at one setting."""
    none = measured["none"].seconds
    # Each puzzle is compared with its own samples: the speed of a machine changes between puzzles.
    plain = {p: statistics.median(took for (of, _), took in none.items() if of == p) for p in {p for p, _ in none}}
    found: dict[str, Any] = {}
    for way, of in measured.items():
        speed_ups = [plain[puzzle] / took for (puzzle, _), took in of.seconds.items()]
        found[way] = {"samples": len(speed_ups), "replayed_whole": of.whole, "speed_up": None, "hit_ratio": None}
        if speed_ups:
            found[way] |= {
                "mean_tokens_per_second": statistics.mean(length / took for took in of.seconds.values()),
                "median_tokens_per_second": length / statistics.median(of.seconds.values()),
                "speed_up": statistics.mean(speed_ups),
                "median_speed_up": statistics.median(speed_ups),
                "hit_ratio": statistics.mean(of.replayed) / length,
            }
    return found


def puzzles(source: str) -> Iterator[tuple[int, ...]]:
    """Yield the solvable puzzles of a data set; without one, generated puzzles."""
    if not source:
        yield from solvable()
        return
    for problem in load_problems("game24", source):
        assert isinstance(problem, Game24Problem)
        if makes(tuple(sorted(map(Fraction, problem.numbers)))):
            yield problem.numbers


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
    given = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template([message], **given)["input_ids"]

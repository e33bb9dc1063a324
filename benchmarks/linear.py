"""Compares implementations of linear layers for passes of few tokens: `python -m benchmarks.linear --help`.

Each pass appends tokens of one row to a prompt, as a pass with draft tokens does. The linear layers of the model are
also timed alone, on random inputs. Every round runs all implementations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cli.measure import long_prompt
from hf_parallel.kernels import native
from hf_parallel.models.attention import block_attention_enabled
from hf_parallel.models.linear import LINEAR_VARIABLE, linear_layers

from .__main__ import about, finish, new_path, set_up

LIBRARIES = ("torch", "onednn", "native")


@dataclass(frozen=True)
class LinearBenchmark:
    """Settings and run.

    Parameters
    ----------
    prompt : int
        Number of tokens before the timed ones.
    lengths : tuple of int
        Numbers of tokens in a pass.
    rounds : int
        Measurements per median.
    """

    prompt: int = 128
    lengths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 128, 512)
    rounds: int = 15

    def run(self, model: Any, ids: torch.Tensor, log: Callable[[str], None]) -> dict[str, Any]:
        """Measure with `ids`, `int64 [1, at least prompt]`; return the entries of the report, in seconds."""
        libraries = [library for library in LIBRARIES if library != "native" or not native.unavailable_reason()]
        cache = BlockCache()
        prompt, own = cache.new_block(self.prompt), cache.new_block(max(self.lengths), base=self.prompt)
        forward(model, cache, Segment([prompt], self.prompt), ids)
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        times: dict[str, dict[tuple[str, int], list[float]]] = {"passes": {}, "layers": {}}
        for number in range(self.rounds + 1):
            log(f"round {number} of {self.rounds}")
            for length in self.lengths:
                for library in libraries:
                    with patch.dict(os.environ, {LINEAR_VARIABLE: library}), linear_layers(model):
                        took = forward(model, cache, Segment([prompt, own], length), ids)
                        cache.truncate(own, 0)
                        alone = through(layers, length)
                    if number:  # the first round is a warm-up
                        times["passes"].setdefault((library, length), []).append(took)
                        times["layers"].setdefault((library, length), []).append(alone)
        seconds = {
            what: {
                library: {str(length): statistics.median(of[library, length]) for length in self.lengths}
                for library in libraries
            }
            for what, of in times.items()
        }
        first = str(self.lengths[0])
        by_first = {
            library: {length: took / of[first] for length, took in of.items()}
            for library, of in seconds["passes"].items()
        }
        return {"settings": asdict(self), "seconds": seconds, "passes_by_the_shortest": by_first}


@torch.no_grad()
def forward(model: Any, cache: BlockCache, segment: Segment, ids: torch.Tensor) -> float:
    """Return the seconds of a pass with the first `segment.num_tokens` of `ids`."""
    with block_attention_enabled(model, cache):
        began = time.perf_counter()
        plan = cache.prepare([segment])
        tokens = ids[:, : segment.num_tokens]
        model(input_ids=tokens, position_ids=plan.position_ids[None], past_key_values=cache, use_cache=True)
        cache.commit()
        return time.perf_counter() - began


@torch.no_grad()
def through(layers: list[nn.Linear], length: int) -> float:
    """Return the seconds of all layers, one after the other."""
    given = {layer.in_features: torch.randn(1, length, layer.in_features) for layer in layers}
    began = time.perf_counter()
    for layer in layers:
        layer(given[layer.in_features])
    return time.perf_counter() - began


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="milliseconds", title_justify="left")
    seconds = report["seconds"]
    libraries = list(seconds["passes"])
    for heading in ("tokens", *(f"{what}, {library}" for what in ("pass", "layers") for library in libraries)):
        table.add_column(heading, justify="right")
    for length in seconds["passes"]["torch"]:
        cells = [1e3 * seconds[what][library][length] for what in ("passes", "layers") for library in libraries]
        table.add_row(length, *(f"{cell:.1f}" for cell in cells))
    console.print(table)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="ID_OR_PATH", help="default: the embedded model")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.set_defaults(device="cpu", dtype="float32")
    parser.add_argument("--rounds", type=int, default=LinearBenchmark.rounds)
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    options = parser.parse_args()
    console = Console(highlight=False)
    model, tokenizer = set_up(options)
    benchmark = LinearBenchmark(rounds=options.rounds)
    ids = long_prompt(tokenizer, max(benchmark.prompt, *benchmark.lengths))
    report = about(model, options) | benchmark.run(model, ids, console.print)
    finish(console, report, options.output or new_path("linear"), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

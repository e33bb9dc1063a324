"""Tree of Thoughts for the Game of 24 on the embedded model (Yao et al., 2023; Hive, section 8).

`python -m benchmarks.agents_tot --help`. One agent spawns a search for each puzzle, all of which run at the same time.
The agents and prompts are those of `examples/agents_game24.py`. There are three ways, with the same seeds:

- `cached`: agents on an engine, with the logits cache of the runtime (stepwise replay).
- `uncached`: the same without a logits cache.
- `sequential`: the same searches, but each completion is a `generate` call by itself: no batch, nothing is shared.

Completions are sampled with the seeds of the run, so that all ways should build the same trees. `generate_by_single`
compares a call of `sequential` with plain `generate`, which has no such seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_parallel.agents import Completion, Runtime, TreeOfThoughts, agent, gather, next, spawn
from hf_parallel.engine import Engine
from hf_parallel.generation.rng import mix

from .report import about, add_model_options, finish, new_path, set_up, table_of
from .resample import solvable
from .rounds import compare, targets_table

EXAMPLE = Path(__file__).parent.parent / "examples" / "agents_game24.py"
WAYS = ("cached", "uncached", "sequential")
TARGETS = (
    ("sequential_by_cached", "at least", 3.0, "seconds: sequential generate calls relative to the runtime"),
    ("uncached_by_cached", "at least", 1.5, "seconds: without relative to with the logits cache"),
    ("same_tree", "at least", 1.0, "searches that build the same tree with and without the logits cache"),
)
"""Ratio, direction, limit, and description of the ratio."""
SINGLES = 5
"""Calls that are compared with plain `generate`."""

Tree = list[tuple[str, str, str]]
"""Agent, state and text of each completion, sorted."""


class Sequential:
    """A model that generates one completion after another, by `generate` calls that share nothing."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.passes = 0

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int, hints: Any
    ) -> Completion:
        """See `hf_parallel.agents.Model`."""
        prompt = encode(self.tokenizer, messages).to(self.model.device)
        given = dict(settings)
        count = given.pop("num_return_sequences", 1)
        texts, tokens = [], 0
        for row in range(count):
            output = self.model.generate(
                prompt,
                generation_mode="shared_prefix",
                seed=[mix(seed, row)],  # of the row in a call for all
                tokenizer=self.tokenizer,
                return_dict_in_generate=True,
                **given,
            )
            self.passes += output.stats.forward_passes
            tokens += output.stats.decoded_tokens
            texts += output.answer_texts(self.tokenizer)
        return Completion(tuple(texts), tokens, count * prompt.shape[1])


def encode(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return the ids `[1, length]` of a prompt."""
    given = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(list(messages), **given)["input_ids"]


@dataclass(frozen=True)
class TreeBenchmark:
    """Settings and run.

    Parameters
    ----------
    puzzles : tuple of str
    breadth, expand : int
        States that are kept, and completions of each.
    seed : int
    ways : tuple of str
    """

    puzzles: tuple[str, ...]
    breadth: int = 5
    expand: int = 5
    seed: int = 0
    ways: tuple[str, ...] = WAYS

    def run(self, model: Any, tokenizer: Any, log: Callable[[str], None]) -> dict[str, Any]:
        """Run all ways; return the entries of the report."""
        game24 = load_example()
        measured: dict[str, Any] = {}
        trees: dict[str, dict[str, Tree]] = {}
        for way in self.ways:
            log(f"{len(self.puzzles)} puzzles, {way}")
            measured[way], trees[way] = self._run_way(game24, way, model, tokenizer)
        first, *others = self.ways
        report: dict[str, Any] = {"settings": asdict(self), "ways": measured, "ratios": {}}
        for other in others:
            report["ratios"][f"{other}_by_{first}"] = measured[other]["seconds"] / measured[first]["seconds"]
        same = {other: same_trees(trees[first], trees[other]) for other in others}
        report["same_trees"] = same
        if "uncached" in same:
            report["ratios"]["same_tree"] = same["uncached"]
        if "sequential" in self.ways:
            report["generate_by_single"] = plain_by_single(model, tokenizer, game24, self.puzzles)
        return report

    def _run_way(self, game24: Any, way: str, model: Any, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Tree]]:
        supervisor = TreeOfThoughts(self.breadth, self.expand, value=game24.judge, goal=game24.SOLVED)
        solve = game24.solve.under(supervisor)

        @agent
        async def solve_all(puzzles: Sequence[str]) -> list[Any]:
            searches = [spawn(solve, puzzle) for puzzle in puzzles]
            return await gather(*(next(search) for search in searches))

        is_sequential = way == "sequential"
        with nullcontext() if is_sequential else Engine(model, tokenizer) as engine:
            runtime = Runtime(Sequential(model, tokenizer) if engine is None else engine, seed=self.seed)
            if way == "uncached":
                runtime = Runtime(engine, seed=self.seed, logits_cache=False)
            began, cpu = time.perf_counter(), time.process_time()
            result = runtime.run(solve_all, list(self.puzzles))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            work: dict[str, Any] = {} if engine is None else {"prefilled_tokens": engine.stats.prefilled_tokens}
        solved = sum(map(game24.is_solution, result.value))
        measured = result.stats.to_dict() | work | {"seconds": seconds, "cpu_seconds": cpu, "solved": solved}
        trees: dict[str, Tree] = {}
        for event in result.trace.events:
            if event.kind == "gen":
                trees.setdefault(event.agent, []).append((event.agent, event.state, event.data["text"]))
        return measured, {name: sorted(tree) for name, tree in trees.items()}


def same_trees(trees: Mapping[str, Tree], others: Mapping[str, Tree]) -> float:
    """Return the proportion of searches that have built the same tree."""
    return statistics.mean(float(tree == others.get(name)) for name, tree in trees.items())


def plain_by_single(model: Any, tokenizer: Any, game24: Any, puzzles: Sequence[str]) -> float:
    """Return the median seconds of plain `generate` relative to those of a call of `Sequential`, at equal lengths."""
    ratios = []
    for number, puzzle in enumerate(puzzles[:SINGLES]):
        prompt = encode(tokenizer, game24.ask(game24.PROPOSE, game24.PROPOSED, puzzle).messages).to(model.device)
        given: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
        given["attention_mask"] = torch.ones_like(prompt)
        seconds = []
        more: dict[str, Any]
        for more in ({"generation_mode": None}, {"generation_mode": "shared_prefix", "seed": number}):
            began = time.perf_counter()
            model.generate(prompt, **given, **more)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def load_example() -> Any:
    """Return the module of the example."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the tables."""
    title = f"Tree of Thoughts, {len(report['settings']['puzzles'])} puzzles"
    table = table_of(title, "seconds", "CPU s", "completions", "tokens", "replayed", "passes", "solved")
    for way, of in report["ways"].items():
        counts = (of[name] for name in ("completions", "tokens", "replayed_tokens", "passes", "solved"))
        table.add_row(way, f"{of['seconds']:.1f}", f"{of['cpu_seconds']:.1f}", *map(str, counts))
    console.print(table)
    console.print(targets_table(report["targets"]))
    if report["quick"]:
        console.print("(--quick: the figures are meaningless)")


def main() -> int:
    """Run the benchmark; return the exit status."""
    options = _parse()
    console = Console(highlight=False)
    model, tokenizer = set_up(options)
    report = about(model, options) | {"quick": options.quick}
    puzzles = options.puzzles and load_example().read_puzzles(options.puzzles, options.count)
    if not puzzles:
        puzzles = [" ".join(map(str, numbers)) for numbers, _ in zip(solvable(), range(options.count), strict=False)]
    benchmark = TreeBenchmark(tuple(puzzles), seed=options.seed, ways=tuple(options.ways))
    if options.quick:
        benchmark = TreeBenchmark(tuple(puzzles[:2]), breadth=2, expand=2, seed=options.seed, ways=tuple(options.ways))
    report |= benchmark.run(model, tokenizer, console.print)
    report["targets"] = compare(report["ratios"], TARGETS)
    finish(console, report, options.output or new_path("agents-tot", options.quick), show)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents_tot", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    add_model_options(parser)
    parser.add_argument("--count", type=int, default=20, metavar="N", help="puzzles (20)")
    parser.add_argument("--puzzles", type=Path, metavar="FILE", help="CSV with a column Puzzles; default: in order")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all completions (0)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="default: all; ratios to the first")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

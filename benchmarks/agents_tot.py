"""Tree of Thoughts for the Game of 24 on the demo model (Yao et al., 2023; Hive, section 8).

One agent spawns a search for each puzzle, and all searches run at the same
time. Agents and prompts come from `examples/agents_game24.py`. There are three ways, with the same seeds:

- `cached`: agents on an engine, with the logits cache of the runtime (stepwise replay).
- `uncached`: the same without a logits cache.
- `sequential`: the same searches, but each completion is a separate `generate` call, without batches or sharing.

Completions are sampled with the seeds of the run, so all ways should build the same trees.
"""

from __future__ import annotations

import itertools
import runpy
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_parallel.agents import Completion, Runtime, TreeOfThoughts, agent, gather, next, spawn
from hf_parallel.engine import Engine
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.progress import progress_bar

from .resample import solvable

SIZES, QUICK = {"count": 20, "size": 5, "seed": 0}, {"count": 2, "size": 2}
EXAMPLE = Path(__file__).parent.parent / "examples" / "agents_game24.py"
WAYS = ("cached", "uncached", "sequential")
TARGETS = (
    ("sequential_by_cached", "at least", 3.0, "seconds: sequential generate calls relative to the runtime"),
    ("uncached_by_cached", "at least", 1.5, "seconds: without relative to with the logits cache"),
    ("same_tree", "at least", 1.0, "searches that build the same tree with and without the logits cache"),
)


class Sequential:
    """A model that generates one completion after another, in `generate` calls that share nothing."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.passes = 0

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int, hints: Any
    ) -> Completion:
        """See `hf_parallel.agents.Model`."""
        template = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        prompt = self.tokenizer.apply_chat_template(list(messages), **template)["input_ids"].to(self.model.device)
        given = {"generation_mode": "shared_prefix", "tokenizer": self.tokenizer, "return_dict_in_generate": True}
        given |= settings
        count = given.pop("num_return_sequences", 1)
        # seeds of the rows in one call for all
        outputs = [self.model.generate(prompt, seed=[mix(seed, row)], **given) for row in range(count)]
        self.passes += sum(output.stats.forward_passes for output in outputs)
        tokens = sum(output.stats.decoded_tokens for output in outputs)
        texts = [text for output in outputs for text in output.answer_texts(self.tokenizer)]
        return Completion(tuple(texts), tokens, count * prompt.shape[1])


def run_way(
    way: str, game24: Any, supervisor: TreeOfThoughts, puzzles: Sequence[str], model: Any, tokenizer: Any, seed: int
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Run all searches; return the figures, and the sorted states and texts of each search."""
    solve = game24.solve.under(supervisor)

    @agent
    async def solve_all(puzzles: Sequence[str]) -> list[Any]:
        searches = [spawn(solve, puzzle) for puzzle in puzzles]
        return await gather(*(next(search) for search in searches))

    with nullcontext() if way == "sequential" else Engine(model, tokenizer) as engine:
        source = Sequential(model, tokenizer) if engine is None else engine
        runtime = Runtime(source, seed=seed, logits_cache=way != "uncached")
        began, cpu = time.perf_counter(), time.process_time()
        result = runtime.run(solve_all, list(puzzles))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        work = {} if engine is None else {"prefilled_tokens": engine.stats.prefilled_tokens}
    solved = sum(map(game24.is_solution, result.value))
    trees: dict[str, list[Any]] = {}
    for event in result.trace.events:
        if event.kind == "gen":
            trees.setdefault(event.agent, []).append((event.state, event.data["text"]))
    figures = result.stats.to_dict() | work | {"seconds": seconds, "cpu_seconds": cpu, "solved": solved}
    return figures, {name: sorted(tree) for name, tree in trees.items()}


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Run all ways with `size` states to keep, and completions of each; return the entries of the report."""
    puzzles = [" ".join(map(str, numbers)) for numbers in itertools.islice(solvable(), sizes.count)]
    game24 = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    supervisor = TreeOfThoughts(sizes.size, sizes.size, value=game24.judge, goal=game24.SOLVED)
    runs = {
        way: run_way(way, game24, supervisor, puzzles, model, tokenizer, sizes.seed)
        for way in progress_bar(WAYS, what=f"{len(puzzles)} puzzles", unit="ways")
    }
    ways, trees = {way: figures for way, (figures, _) in runs.items()}, runs["cached"][1]
    same = {way: statistics.mean(tree == runs[way][1].get(name) for name, tree in trees.items()) for way in WAYS[1:]}
    ratios = {f"{way}_by_cached": ways[way]["seconds"] / ways["cached"]["seconds"] for way in same}
    return {"ways": ways, "same_trees": same, "ratios": ratios | {"same_tree": same["uncached"]}}

"""Paths of a fork against sequential decoding of as many tokens, and what a join costs, for each rule of positions.

The demo model does not fork by itself, so `opening` gives the plan. All paths have the same length. `join` is the
time from the last tokens of the paths to the next token of the answer, less a step of one row. `join_host` is its part
before the model is called, beyond that of a step of the paths: ending the paths and joining their blocks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers import LogitsProcessor

from hf_parallel.generation.dialects import DIALECTS
from hf_parallel.progress import progress_bar

from .measure import StepClock, long_prompt

SIZES: dict[str, Any] = {"prompt": 1024, "paths": 8, "length": 64, "last": 24, "rounds": 3}
SIZES["positions"] = ("depth", "overlap", "reencode")
QUICK: dict[str, Any] = {"prompt": 48, "paths": 2, "length": 4, "last": 3, "rounds": 1}
TARGETS = (
    ("path_stage", "at least", 5.0, "tokens per second of the paths, relative to generate"),
    ("join_by_step", "at most", 1.0, "join without moving keys, relative to a step of the paths"),
    ("wall_by_steps", "at most", 1.1, "the whole answer, relative to its critical path times step time"),
)
RATIOS = {
    "path_stage": ("generate_seconds", "path_stage_seconds"),
    "join_by_step": ("join_seconds", "path_step_seconds"),
    "join_host_by_step": ("join_host_seconds", "path_step_seconds"),
    "wall_by_steps": ("wall_seconds", "critical_path_seconds"),
}


class PassClock(LogitsProcessor):
    """Records when each pass begins, by a hook of the model, and when it has its logits.

    Ends the paths by tokens `closing` after `length` passes in all, and the answer after `last` more.
    """

    def __init__(self, length: int, last: int, closing: list[int], eos_token_id: int) -> None:
        self.length, self.last, self.closing, self.eos_token_id = length, last, closing, eos_token_id
        self.times: list[float] = []
        self.begun: list[float] = []

    def begin(self, *_: Any) -> None:
        """Record the time, before a forward pass of the model."""
        self.begun.append(time.perf_counter())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, `[rows, vocabulary]`."""
        self.times.append(time.perf_counter())
        written, begin = len(self.times) - 1, self.length - len(self.closing)
        forced = self.closing[written - begin] if begin <= written < self.length else self.eos_token_id
        if begin <= written < self.length or written >= self.length + self.last:
            scores = torch.full_like(scores, -100.0).index_fill(1, torch.tensor([forced]), 0.0)
        return scores

    def figures(self) -> dict[str, float]:
        """Return the seconds of the path stage, of steps, of the join and of the answer after its prefill."""
        seconds = [after - before for before, after in pairwise(self.times)]
        paths, (first, *others) = seconds[: self.length - 1], seconds[self.length - 1 :]
        steps = statistics.median(paths), statistics.median(others)
        pairs = list(zip(self.times, self.begun[1 - len(self.times) :], strict=False))[: self.length]
        *hosts, joining = [begun - before for before, begun in pairs]  # between passes
        return {
            **{"path_stage_seconds": sum(paths), "path_step_seconds": steps[0], "last_step_seconds": steps[1]},
            **{"join_seconds": first - steps[1], "wall_seconds": sum(seconds)},
            "join_host_seconds": joining - statistics.median(hosts),
            "critical_path_seconds": len(paths) * steps[0] + (1 + len(others)) * steps[1],
        }


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    ids, eos = long_prompt(tokenizer, sizes.prompt).to(model.device), tokenizer.eos_token_id
    outlines = "".join(f"<Outline>\n{number}: Part\n</Outline>\n" for number in range(1, sizes.paths + 1))
    tags = [token for token in range(len(tokenizer)) if "<" in tokenizer.decode([token])]  # no path ends by itself
    settings: dict[str, Any] = {"do_sample": False, "suppress_tokens": [eos, *tags]}
    own = {"tokenizer": tokenizer, "return_dict_in_generate": True}
    closing = tokenizer(DIALECTS["multiverse"].branch[1]).input_ids
    own |= {"opening": f"<Parallel>\n<Goal>\n{outlines}</Goal>", "max_new_tokens": sizes.paths * sizes.length + 2048}
    rounds: dict[str, list[dict[str, float]]] = {positions: [] for positions in sizes.positions}
    rounds_and_warm_up = range(sizes.rounds + 1)
    for number in progress_bar(rounds_and_warm_up, what="Paths and plain decoding", unit="rounds"):
        clock = StepClock()
        model.generate(ids, generation_mode=None, streamer=clock, max_new_tokens=sizes.length, **settings)
        for positions, found in rounds.items():
            passes = PassClock(sizes.length, sizes.last, closing, eos)
            dialect = replace(DIALECTS["multiverse"], positions=positions)
            given = {**own, **settings, "dialect": dialect, "logits_processor": [passes]}
            hook = model.register_forward_pre_hook(passes.begin)
            out = model.generate(ids, generation_mode="fork_join", **given)
            hook.remove()
            ends = {(path.ended_by, len(path.tokens)) for path in out.forks[0][0].paths}
            assert len(ends) == 1, f"the paths have ended in different ways: {ends}"
            if number:
                sequential = sizes.paths * sum(clock.step_seconds)
                found.append({"generate_seconds": sequential, **passes.figures()})
    medians = {
        positions: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for positions, found in rounds.items()
    }
    ratios = {name: statistics.median(one[a] / one[b] for one in rounds["depth"]) for name, (a, b) in RATIOS.items()}
    return {"positions": medians, "ratios": ratios, "rounds": rounds}

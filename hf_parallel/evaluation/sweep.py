"""Sweep: accuracy of modes and settings against budgets of forward passes (Hogwild! Inference, section 4.1).

One generation per problem, run and sample at the largest budget gives the results at all budgets: its transcript shows
what was written by then. All generations are requests of one `Engine`, which batches the rows of all modes without
changing their tokens. Samples and early finishers share the keys and values of their prefixes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.cache.placement import execution_device
from hf_parallel.evaluation.judge import Judge
from hf_parallel.evaluation.results import Result, ResultStore, key_of
from hf_parallel.evaluation.runs import Finisher, Run, check_sweep
from hf_parallel.evaluation.solver import Generation, Solver
from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.models.ranks import leads, num_ranks
from hf_parallel.progress import progress_bar

PROCESS_TIMEOUT = timedelta(weeks=4)
"""Maximum time for which a process waits for the others, whose texts may be longer."""


def sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    runs: Sequence[Run] = (Run(),),
    budgets: Sequence[int] = (256,),
    samples: int = 1,
    seed: int = 0,
    output: str | Path | None = None,
    *,
    finisher: Finisher | None = None,
    judge: Judge | None = None,
    concurrent: int = 8,
    max_kv_bytes: int | None = None,
    progress: bool = False,
    **generation: object,
) -> list[Result]:
    """Solve problems in several modes and score what was written within each budget of decode passes.

    A pass generates one token for each row of a problem, such as each of two workers. Prefill and the early finisher do
    not count, as in the paper.

    Of several processes (`accelerate launch`, `torchrun`), each solves a part of the problems, unless they compute one
    model together. All return all results.

    Parameters
    ----------
    model, tokenizer
        As for `Engine`.
    problems : sequence of Problem
    runs : sequence of Run
        Modes and settings to compare.
    budgets : sequence of int
        Numbers of decode passes. The largest is `max_new_tokens` of all generations.
    samples : int
        Generations per problem and run. More than one require `do_sample=True`.
    seed : int
        The tokens of a generation depend on `(seed, index of the problem, sample)`, not on order.
    output : str or Path, optional
        Folder for results. A killed sweep resumes from it, also with more problems, runs and samples, and with other
        budgets below the largest. Stored scores are not computed again: if you change anything of a problem except its
        prompt and answer, use another folder. Default: store nothing.
    finisher : Finisher, optional
        Early finisher of all modes. Default: `Finisher()`.
    judge : Judge, optional
        Adds a `rating` to each result: see `Judge`. None, if no reply of the judge has a score.
    concurrent : int
        Number of simultaneous generations, all of the same run.
    max_kv_bytes : int, optional
        See `Engine`.
    progress : bool
        Show a progress bar with the rate and the time left on stderr, in the main process, if it is a terminal.
    **generation
        Settings of `generate` for all runs, such as `do_sample=True`; `chat_template_kwargs`: see `build_prompt`.

    Returns
    -------
    list of dict
        One result per run, problem, sample and budget, in this order, with the values at the budget: `score`, `passes`
        and `tokens` (of all rows). `answered`: whether the scored `text` had a final answer without the finisher.
        `seconds`: from the beginning of the prefill to the last of these passes. Results at the largest budget have
        `kv_bytes`, the size of keys and values, too.

    Raises
    ------
    ValueError
        For invalid arguments, if `output` holds results of another model, seed, largest budget, finisher or common
        settings, and if a problem's score is not a number from 0 to 1.

    Examples
    --------
    >>> runs = [Run(), Run("hogwild", {"num_workers": 2})]
    >>> results = sweep(model, tokenizer, problems, runs, budgets=[128, 256], output="runs/two_workers")
    >>> print(format_table(table(results)))
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object

    check_sweep(problems, runs, budgets, generation, seed, samples, concurrent)
    budgets = sorted(set(budgets))
    finisher = finisher or Finisher()
    device = execution_device(model)
    defaults = json.loads(model.generation_config.to_json_string())
    header: dict[str, Any] = {
        "fingerprint": fingerprint(model, "a sweep"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "seed": seed,
        "largest_budget": budgets[-1],
        "finisher": [finisher.tokens, finisher.prompt],
        "defaults": {name: value for name, value in defaults.items() if name != "transformers_version"},
        "generation": generation,
    }
    if finisher.preset:
        header["finisher"].append(finisher.preset)
    if judge is not None:
        header["judge"] = [judge.kind, judge.model]
    generations = [
        Generation(problem, index, run, sample, mix(mix(seed, index), sample), budgets)
        for run in runs
        for index, problem in enumerate(problems)
        for sample in range(samples)
    ]
    keys = [key_of(each.key(budget)) for each in generations for budget in budgets]
    share_model = num_ranks(model) > 1
    # without `cpu`, processes on a machine without accelerators would not find each other
    state = PartialState(cpu=device.type == "cpu", timeout=PROCESS_TIMEOUT)
    todo = generations
    if not share_model:
        with state.split_between_processes(list(range(len(problems)))) as part:
            todo = [each for each in generations if each.index in set(part)]
    solver = Solver(model, tokenizer, budgets[-1], finisher, generation, concurrent, max_kv_bytes, judge)
    results: list[Result] = []
    store = None
    if output is not None and leads(model):
        store = ResultStore(output, header, state.process_index)
        for each in todo:
            results += _take_stored(each, store)
    todo = [each for each in todo if each.budgets]
    if share_model and not broadcast_object_list([len(todo)])[0]:
        todo = []  # of the first process, which solves for all
    is_hidden = not progress or not state.is_main_process
    bar = progress_bar(total=len(todo), what="Evaluating", unit="generations", is_hidden=is_hidden)
    with warnings.catch_warnings(), bar:
        # a result says by `answered` that a mode found no final answer
        warnings.filterwarnings("ignore", "no .* matches answer_pattern", UserWarning)
        for solved in solver.solve(todo):
            if store is not None:
                store.add(solved)
            results += solved
            bar.update()
    by_key = {key_of(result): result for result in gather_object(results)}
    return [by_key[key] for key in keys]


def _take_stored(generation: Generation, store: ResultStore) -> list[Result]:
    """Return the stored results of a generation, and leave it the budgets that have none."""
    results = []
    missing = []
    for budget in generation.budgets:
        result = store.get(generation.key(budget))
        if result is None:
            missing.append(budget)
        else:
            results.append(result)
    generation.budgets = missing
    return results

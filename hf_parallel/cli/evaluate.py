"""`hf-parallel evaluate`: accuracy of modes and settings against budgets of forward passes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from hf_parallel.cli.generate import add_model_options, check_model_options, load
from hf_parallel.cli.serve import kv_budget, parse_bytes
from hf_parallel.cli.settings import add_template_option, check_generation, parse
from hf_parallel.evaluation import TASKS, Finisher, Run, format_table, load_problems, read_results, table
from hf_parallel.evaluation.judge import Judge
from hf_parallel.evaluation.plots import FORMATS, save_plots
from hf_parallel.evaluation.results import key_of
from hf_parallel.evaluation.runs import TEMPLATE, check_sweep
from hf_parallel.evaluation.tasks import check_task
from hf_parallel.files import JSONObject
from hf_parallel.generation import MODES
from hf_parallel.generation.modes import NO_MODE
from hf_parallel.generation.validation import suggestion

TASK = "task"  # prefix of settings of the task in `--set`


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("problems").add_argument
    add("--task", required=True, metavar="NAME", help=f"one of {', '.join(TASKS)}")
    add("--source", metavar="FILE_OR_ID", help="file or Hub id of the problems, for tasks that are not generated")
    add("--count", type=int, metavar="N", help="number of problems (all of the source; 100 generated ones)")
    add = parser.add_argument_group("what is compared").add_argument
    modes = [mode for mode, cls in MODES.items() if not cls.traits.needs_logits_cache]
    words = f"{', '.join(modes)}, or {NO_MODE} (plain `generate`); may be repeated"
    words += f"; default: {NO_MODE}, if --set names no mode"
    add("--mode", action="append", default=[], metavar="MODE", help=words)
    words = "a setting with one or more values, see below"
    add("--set", action="append", default=[], metavar="NAME=VALUES", help=words)
    add_template_option(add)
    words = "budgets of forward passes, separated by commas (64,128,256)"
    add("--budgets", default="64,128,256", metavar="N,N", help=words)
    words = "preset of the modes that have it, and of the early finisher: paper"
    add("--preset", metavar="NAME", help=words)
    add("--samples", type=int, default=1, metavar="N", help="generations per problem and mode (1)")
    add("--greedy", action="store_true", help="greedy decoding; default: sampling, which samples and votes need")
    add("--seed", type=int, default=0, metavar="N", help="seed of generated problems and of the sampling (0)")
    words = "tokens of the early finisher (1024 for programs, 64 for formulas, else 32); 0: only answers in time count"
    add("--finisher-tokens", type=int, metavar="N", help=words)
    add("--finisher-prompt", metavar="TEXT", help="text that it continues (default: depends on the task)")
    words = (
        "rate texts, too: collaboration (1 to 6) or answer (1 to 5), by MODEL at OPENAI_BASE_URL or the evaluated one"
    )
    add("--judge", metavar="KIND[=MODEL]", help=words)
    add = parser.add_argument_group("model").add_argument
    add_model_options(add)
    words = "number of generations to run concurrently (8)"
    add("--concurrent", type=int, default=8, metavar="N", help=words)
    words = "memory for keys and values, such as 2G (half of what is free)"
    add("--max-kv-bytes", type=parse_bytes, metavar="N", help=words)
    add = parser.add_argument_group("output").add_argument
    words = "folder of results.rankN.jsonl: an object for each mode, problem, sample and budget; resumed if it exists"
    add("-o", "--output", required=True, type=Path, metavar="FOLDER", help=words)
    words = "draw accuracy by passes, tokens and seconds into the folder, as png (default), svg or pdf"
    add("--plot", nargs="?", const=FORMATS[0], choices=FORMATS, metavar="FORMAT", help=words)
    parser.set_defaults(run=evaluate)


def evaluate(options: argparse.Namespace) -> int:
    """Run the command and return its exit status. Invalid options raise an error before a model is loaded."""
    from accelerate import PartialState

    from hf_parallel.evaluation.sweep import PROCESS_TIMEOUT, sweep

    budgets = _budgets(options.budgets)
    common, runs, of_task = read_runs(options)
    check_model_options(options)
    finisher = Finisher(options.finisher_tokens, options.finisher_prompt, options.preset)
    judge = None if options.judge is None else Judge(*options.judge.split("=", 1))
    check_task(options.task, of_task)  # `load_problems` has arguments of its own, such as `seed`
    problems = load_problems(options.task, options.source, options.count, options.seed, **of_task)
    check_sweep(problems, runs, budgets, common, options.seed, options.samples, options.concurrent)
    on_cpu = options.device == "cpu" or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu, timeout=PROCESS_TIMEOUT)
    if options.device is None and state.num_processes > 1 and not on_cpu:
        options.device = str(state.device)
    model, tokenizer = load(options)
    try:
        results = sweep(
            model,
            tokenizer,
            problems,
            runs,
            budgets,
            samples=options.samples,
            seed=options.seed,
            output=options.output,
            finisher=finisher,
            judge=judge,
            concurrent=options.concurrent,
            max_kv_bytes=kv_budget(options, model.device),
            progress=True,
            **common,
        )
    except KeyboardInterrupt:
        print(f"hf-parallel: interrupted: give the same command again to resume from {options.output}", file=sys.stderr)
        raise
    if state.is_main_process:
        stored = {key_of(result): result for result in [*results, *read_results(options.output)]}
        rows = table(stored.values())
        print(format_table(rows), end="")
        if options.plot:
            save_plots(rows, options.output, options.plot)
        print(f"Written to {options.output}", file=sys.stderr)
    state.destroy_process_group()
    return 0


def read_runs(options: argparse.Namespace) -> tuple[JSONObject, list[Run], JSONObject]:
    """Return the settings of `generate` for all runs, the runs, and the options of the task; check them."""
    modes = dict.fromkeys(options.mode)
    settings: dict[str, dict[str, list[object]]] = {}  # values by name, by mode, TASK, or "" for all modes
    for text in options.set:
        name, separator, values = text.partition("=")
        if not separator:
            raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
        owner, _, name = name.rpartition(".")
        settings.setdefault(owner, {})[name] = list(_values(owner, name, values))
        if owner not in ("", TASK):
            modes[owner] = None
    names = [*MODES, NO_MODE]
    for mode in modes:
        if mode not in names:
            raise ValueError(f"mode must be one of {', '.join(names)}, got {mode!r}{suggestion(mode, names)}")
        if mode != NO_MODE and options.preset in MODES[mode].traits.presets:
            settings.setdefault(mode, {}).setdefault("preset", [options.preset])
    runs = []
    for mode in modes or [NO_MODE]:
        of_mode = settings.get(mode, {})
        for values in product(*of_mode.values()):
            run_settings = dict(zip(of_mode, values, strict=True))
            runs.append(Run(None if mode == NO_MODE else mode, run_settings))
    of_all = settings.get("", {})
    of_task = settings.get(TASK, {})
    for name, values in [*of_all.items(), *of_task.items()]:
        if len(values) > 1:
            raise ValueError(f"only settings of a mode may have several values, got {name}: give MODE.{name}")
    common: dict[str, object] = {"do_sample": not options.greedy}
    common |= {name: values[0] for name, values in of_all.items()}
    if options.chat_template_kwargs:
        common[TEMPLATE] = options.chat_template_kwargs
    generation = Run(None, common).generation()
    for run in runs:
        check_generation({**generation, **run.generation()})
    return common, runs, {name: values[0] for name, values in of_task.items()}


def _values(owner: str, name: str, text: str) -> Iterator[object]:
    """Yield the values of a `--set` option."""
    default = getattr(MODES[owner], name, None) if owner in MODES else None
    try:
        json.loads(text)
        texts = [text]
    except ValueError:
        texts = text.split(",")
    for value in texts:
        yield parse(value, default)


def _budgets(text: str) -> list[int]:
    numbers = text.rstrip(", ").split(",")
    if not all(number.strip().isdigit() and int(number) for number in numbers):
        raise ValueError(f"--budgets must be numbers of at least 1, separated by commas, got {text!r}")
    return [int(number) for number in numbers]

"""`hf-parallel demo`: workers over one shared cache, then shared prefixes compared with plain `generate`.

All statements about speed and equality of tokens are measured while the demo runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from hf_parallel.cli.live import LiveView, make_console
from hf_parallel.cli.measure import StepClock, dense_bytes, long_prompt
from hf_parallel.cli.settings import add_template_option
from hf_parallel.detokenizer import decode
from hf_parallel.generation import build_prompt, enable
from hf_parallel.generation.modes import HogwildConfig, SharedPrefixConfig
from hf_parallel.generation.presets import SAMPLING
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.models.embedded import MODEL_NAME
from hf_parallel.models.loading import load_model
from hf_parallel.models.signature import CACHE

TASK = "Plan a picnic in the park for ten people."
SHOWN = 4  # sampled completions that are printed


@dataclass(frozen=True)
class Sizes:
    """Forward passes of the workers, tokens of the prompt, number of completions, and tokens of each."""

    passes: int = 128
    prompt: int = 1024
    rows: int = 16
    new_tokens: int = 24


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--quick", action="store_true", help="small sizes, takes a few seconds")
    parser.add_argument("--model", metavar="ID_OR_PATH", help="a chat model (default: the embedded one)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of each worker (128)")
    parser.add_argument("--task", default=TASK, metavar="TEXT", help=f"task of the workers ({TASK})")
    add_template_option(parser.add_argument)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (0)")
    parser.set_defaults(run=demo)


def demo(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if not options.task.strip():
        raise ValueError("--task must not be empty")
    console = make_console()
    sizes = Sizes(passes=24, prompt=96, rows=4, new_tokens=6) if options.quick else Sizes()
    with console.status(f"Loading {options.model or MODEL_NAME} ..."):
        model, tokenizer = load_model(options.model)
        enable(model)
    try:
        show_workers(console, model, tokenizer, options, options.max_new_tokens or sizes.passes)
    except KeyboardInterrupt:
        console.print("Stopped; on to the second part (Ctrl-C again to exit).\n")
    except UnsupportedModelError as error:
        console.print(f"Skipped: {error}\n")
    show_shared_prefix(console, model, tokenizer, sizes, options.seed)
    console.print(Rule("3. Your own model", align="left"))
    console.print(NEXT_STEPS, soft_wrap=True)
    return 0


def show_workers(
    console: Console, model: Any, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, passes: int
) -> None:
    """Show workers that generate concurrently."""
    config = HogwildConfig(seed=options.seed)
    template = options.chat_template_kwargs
    prompt = build_prompt(HogwildConfig, options.task, tokenizer, config, chat_template_kwargs=template)
    console.print(Rule(f"1. {config.num_workers} workers, one KV cache", align="left"))
    console.print(
        f"{' and '.join(config.names)} are rows of one batch over one KV cache. Each sees the text of the others token "
        "by token. A finished step moves into their common history and is marked with its last forward pass.\n"
    )
    console.print(f"Task: {options.task}\n")
    inputs = {name: tensor.to(model.device) for name, tensor in prompt.items()}
    settings = {**SAMPLING, "max_new_tokens": passes, "return_dict_in_generate": True}
    with LiveView(tokenizer, console) as view:
        output = model.generate(**inputs, **settings, parallel_config=config, tokenizer=tokenizer, streamer=view)
    moved, megabytes = sum(step.forward_pass is not None for step in output.history[0]), output.stats.kv_bytes / 1e6
    console.print(f"{moved} steps moved into the history. The cache stores every token once: {megabytes:.1f} MB.\n")
    if output.answers[0] is not None:
        console.print(f"Answer: {output.answers[0]}\n")


@dataclass(frozen=True)
class Measured:
    """Tokens and cost of a call; times in seconds."""

    sequences: torch.Tensor
    prefill: float
    step: float
    total: float
    kv_bytes: int


def show_shared_prefix(
    console: Console, model: Any, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, seed: int = 0
) -> None:
    """Compare completions of one prompt by plain `generate` and over a shared prefix, and show sampled ones."""
    mode = SharedPrefixConfig.mode
    ids = long_prompt(tokenizer, sizes.prompt).to(model.device)
    rows, new = sizes.rows, sizes.new_tokens
    device = f"the CPU ({torch.get_num_threads()} threads)" if model.device.type == "cpu" else str(model.device)
    console.print(Rule(f"2. One prompt, {rows} completions", align="left"))
    console.print(
        f"A prompt of {ids.shape[1]} tokens, {rows} completions of {new} tokens, greedy, float32, on {device}. "
        f"The same call of generate, without and with generation_mode={mode!r}:\n"
    )
    batch = ids.repeat(rows, 1)
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    bars = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*bars, console=console, disable=not console.is_interactive) as progress:
        with_mode, without = settings | {"generation_mode": mode}, settings | {"generation_mode": None}
        measure(progress, "warm-up", model, batch, with_mode)
        plain = measure(progress, "generate", model, batch, without)
        shared = measure(progress, mode, model, batch, with_mode)
    console.print(comparison(plain, shared, rows))
    same = torch.equal(plain.sequences, shared.sequences)
    console.print(f"\nsame tokens: {'yes' if same else 'NO'} (compared just now: {rows} x {new})\n")
    console.print(f"Sampled, {SHOWN} of {rows} completions:")
    sampling = {**SAMPLING, "seed": seed, "max_new_tokens": new, "generation_mode": mode}
    for row in model.generate(ids, num_return_sequences=rows, **sampling)[:SHOWN, ids.shape[1] :]:
        console.print(f"- {' '.join(decode(tokenizer, row, skip_special_tokens=True).split())}", markup=False)
    console.print()


def measure(progress: Progress, name: str, model: Any, ids: torch.Tensor, settings: dict[str, Any]) -> Measured:
    """Run one call of `generate` under a progress bar, which pulses during the prefill."""
    bar = progress.add_task(name, total=None)
    if progress.disable:
        progress.console.print(f"{name} ...")
    clock = StepClock(lambda count: progress.update(bar, completed=count, total=settings["max_new_tokens"]))
    output = model.generate(ids, streamer=clock, return_dict_in_generate=True, **settings)
    kv_bytes = output.stats.kv_bytes if hasattr(output, "stats") else dense_bytes(output[CACHE])
    return Measured(output.sequences.cpu(), clock.prefill_seconds, clock.median_step, clock.seconds, kv_bytes)


def comparison(plain: Measured, shared: Measured, rows: int) -> Table:
    """Return the table of both calls and their ratios."""
    table = Table("", *(Column(name, justify="right") for name in ("generate", SharedPrefixConfig.mode, "ratio")))
    for label, a, b, form, ratio in (
        ("prefill, s", plain.prefill, shared.prefill, ".2f", plain.prefill / shared.prefill),
        ("decode step, ms", 1e3 * plain.step, 1e3 * shared.step, ".0f", plain.step / shared.step),
        ("tokens/s", rows / plain.step, rows / shared.step, ".0f", plain.step / shared.step),
        ("whole call, s", plain.total, shared.total, ".1f", plain.total / shared.total),
        ("KV cache, MB", plain.kv_bytes / 1e6, shared.kv_bytes / 1e6, ".0f", plain.kv_bytes / shared.kv_bytes),
    ):
        table.add_row(label, format(a, form), format(b, form), f"{ratio:.1f}x")
    return table


NEXT_STEPS = f"""    import hf_parallel
    hf_parallel.enable(model)       # any RoPE decoder of transformers
    model.generate(**inputs, generation_mode="{SharedPrefixConfig.mode}",
                   num_return_sequences=16, do_sample=True)

README.md            all modes and their settings
make bench ARGS={SharedPrefixConfig.mode}    the same comparison in full, with continuous batching
make demo ARGS='--task "Write a song about the sea."'
make demo ARGS="--model Qwen/Qwen3-0.6B"
.venv/bin/hf-parallel generate --mode {HogwildConfig.mode} --format live "Plan a day in Rome."
"""

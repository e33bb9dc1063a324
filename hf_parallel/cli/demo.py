"""`make demo`: two workers over one shared cache in the terminal, then shared prefixes beside plain `generate`.

Run with `python -m hf_parallel.cli.demo`. Everything that it says about speed and sameness it measures as it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from hf_parallel.generation.config import SAMPLING
from hf_parallel.generation.modes.hogwild.presets import EMBEDDED_PRESET

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.rule import Rule
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"The demo needs rich ({error}):\n    pip install rich gguf") from error

from hf_parallel import HogwildConfig, UnsupportedModelError, enable, hogwild_prompt
from hf_parallel.cli.live import live_view
from hf_parallel.cli.measure import StepClock, dense_bytes, long_prompt
from hf_parallel.models.loading import load_model

TASK = "Plan a picnic in the park for ten people."
SEED = 0


@dataclass(frozen=True)
class Sizes:
    """How much the demo does."""

    passes: int = 128
    prompt: int = 1024
    rows: int = 16
    new_tokens: int = 24


QUICK = Sizes(passes=24, prompt=96, rows=4, new_tokens=6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parse(arguments)
    transformers.logging.set_verbosity_error()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = make_console()
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_console() -> Console:
    """Plain lines unless stdout is a terminal and colours are wanted; rich itself knows a dumb terminal."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return Console(highlight=False, markup=False, emoji=False)
    return Console(highlight=False, markup=False, emoji=False, force_terminal=False, force_interactive=False)


def _run(options: argparse.Namespace, console: Console) -> int:
    sizes = QUICK if options.quick else Sizes()
    passes = options.max_new_tokens or sizes.passes
    model, tokenizer = load(options.model, console)
    config = HogwildConfig(seed=options.seed, **({} if options.model else EMBEDDED_PRESET.settings))
    try:
        show_workers(console, model, tokenizer, config, options.task, passes)
    except KeyboardInterrupt:
        console.print("Stopped; on to the second part (Ctrl-C again: leave).\n")
    except UnsupportedModelError as error:
        console.print(f"Not with this model: {error}\n")
    show_shared_prefix(console, model, tokenizer, sizes)
    show_next_steps(console)
    return 0


def load(name: str | None, console: Console) -> tuple[Any, Any]:
    """The embedded model, or any other by Hub id or path, enabled; float32, so that equal tokens can be expected."""
    try:
        with console.status(f"Loading {name or 'SmolLM2-135M-Instruct'} ..."):
            model, tokenizer = load_model(name)
            return enable(model), tokenizer
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{name or 'The embedded model'} cannot be used: {error}") from error


def show_workers(console: Console, model: Any, tokenizer: Any, config: HogwildConfig, task: str, passes: int) -> None:
    """Two workers write side by side."""
    console.print(Rule(f"1. {config.num_workers} workers, one memory", align="left"))
    console.print(
        f"{' and '.join(config.names)} are rows of one batch over one cache of keys and values. Each sees what the "
        "other writes, token by token. A finished step moves into their common history; its mark is the forward pass "
        "at which it did.\n"
    )
    console.print(f"Task: {task}\n")
    small = config.collaboration_prompt == EMBEDDED_PRESET.settings["collaboration_prompt"]
    prompt = hogwild_prompt(EMBEDDED_PRESET.task.format(task=task) if small else task, tokenizer, config)
    view = live_view(config, console)
    with view, view.watching(model):
        output = model.generate(
            **{name: tensor.to(model.device) for name, tensor in prompt.items()},
            generation_mode="hogwild",
            parallel_config=config,
            tokenizer=tokenizer,
            max_new_tokens=passes,
            streamer=view,
            return_dict_in_generate=True,
            **SAMPLING,
        )
    moved = sum(step.forward_pass is not None for step in output.history[0])
    if not console.is_interactive:
        console.print(view.summary)
    megabytes = output.stats.kv_bytes / 1e6
    console.print(f"{moved} steps moved into the history. The cache holds every token once: {megabytes:.1f} MB.\n")
    if output.answers[0] is not None:
        console.print(f"Answer: {output.answers[0]}\n")


@dataclass(frozen=True)
class Measured:
    """What one way to generate gave and cost; times in seconds."""

    sequences: torch.Tensor
    prefill: float
    step: float
    total: float
    kv_bytes: int


def show_shared_prefix(console: Console, model: Any, tokenizer: Any, sizes: Sizes) -> None:
    """Many completions of one prompt, by `generate` and over a shared prefix."""
    ids = long_prompt(tokenizer, sizes.prompt).to(model.device)
    rows, new = sizes.rows, sizes.new_tokens
    console.print(Rule(f"2. One prompt, {rows} completions", align="left"))
    console.print(
        f"A prompt of {ids.shape[1]} tokens, {rows} completions of {new} tokens, greedy, float32, on {where(model)}. "
        "The same call of generate, without and with generation_mode='shared_prefix':\n"
    )
    batch = ids.repeat(rows, 1)
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    bars = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*bars, console=console, disable=not console.is_interactive) as progress:
        ours = measure(progress, "shared_prefix", model, batch, settings | {"generation_mode": "shared_prefix"})
        plain = measure(progress, "generate", model, batch, settings | {"generation_mode": None})
    console.print(comparison(plain, ours, rows))
    same = bool(torch.equal(plain.sequences, ours.sequences))
    console.print(f"\nsame tokens: {'yes' if same else 'NO'} (compared just now: {rows} x {new})")
    text = tokenizer.decode(ours.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    console.print(f"Every completion goes on: {' '.join(text.split())}\n")


def measure(progress: Progress, name: str, model: Any, ids: torch.Tensor, settings: dict[str, Any]) -> Measured:
    """Run one call of `generate` under a progress bar; layers advance it in the prefill, tokens while decoding."""
    layers, new = decoder_layers(model), settings["max_new_tokens"]
    reading = progress.add_task(f"{name:<13} prefill", total=len(layers))
    writing = progress.add_task(f"{name:<13} decode", total=new, start=False, visible=False)
    if progress.disable:
        progress.console.print(f"{name} ...")

    def token(count: int) -> None:
        if count == 1:
            _remove(handles)
            progress.update(reading, completed=len(layers))
            progress.start_task(writing)
        progress.update(writing, completed=count, visible=True)

    handles = [layer.register_forward_hook(lambda *_: progress.advance(reading)) for layer in layers]
    clock = StepClock(token)
    try:
        output = model.generate(ids, streamer=clock, return_dict_in_generate=True, **settings)
    finally:
        _remove(handles)
    cache = output.past_key_values
    kv_bytes = output.stats.kv_bytes if hasattr(output, "stats") else dense_bytes(cache)
    return Measured(output.sequences.cpu(), clock.prefill_seconds, clock.median_step, clock.seconds, kv_bytes)


def decoder_layers(model: Any) -> Sequence[torch.nn.Module]:
    """The layers of a decoder: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def comparison(plain: Measured, ours: Measured, rows: int) -> Table:
    """The table of both ways and their ratio."""
    table = Table()
    for heading in ("", "generate", "shared_prefix", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, a, b, form, gain in (
        ("prefill, s", plain.prefill, ours.prefill, ".2f", plain.prefill / ours.prefill),
        ("decode step, ms", 1e3 * plain.step, 1e3 * ours.step, ".0f", plain.step / ours.step),
        ("tokens/s", rows / plain.step, rows / ours.step, ".0f", plain.step / ours.step),
        ("whole call, s", plain.total, ours.total, ".1f", plain.total / ours.total),
        ("KV cache, MB", plain.kv_bytes / 1e6, ours.kv_bytes / 1e6, ".0f", plain.kv_bytes / ours.kv_bytes),
    ):
        table.add_row(label, format(a, form), format(b, form), f"{gain:.1f}x")
    return table


def where(model: Any) -> str:
    """The device, in words."""
    if model.device.type == "cpu":
        return f"the CPU ({torch.get_num_threads()} threads)"
    return str(model.device)


def show_next_steps(console: Console) -> None:
    """How to go on from here."""
    console.print(Rule("3. Your own model", align="left"))
    console.print(
        """    import hf_parallel
    hf_parallel.enable(model)       # any RoPE decoder of transformers
    model.generate(**inputs, generation_mode="shared_prefix",
                   num_return_sequences=16, do_sample=True)

README.md            all modes and their settings
make bench           the same comparison in full, with continuous batching
make demo ARGS='--task "Write a song about the sea."'
make demo ARGS="--model Qwen/Qwen3-0.6B"
.venv/bin/hf-parallel generate --mode hogwild --format live "Plan a day in Rome."
""",
        soft_wrap=True,
    )


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hf-parallel demo", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: some seconds in all")
    parser.add_argument("--model", metavar="ID_OR_PATH", help="a chat model (default: the embedded one)")
    parser.add_argument("--max-new-tokens", type=_positive, metavar="N", help="tokens that each worker writes (128)")
    parser.add_argument("--task", type=_text, default=TASK, metavar="TEXT", help=f"what the workers are to do ({TASK})")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"of the workers' sampling ({SEED})")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


if __name__ == "__main__":
    sys.exit(main())

"""`hf-parallel generate`: prompts in, answers out, as text that streams, as JSON lines or as a live view."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.cli.interruptible import InterruptibleCall
from hf_parallel.cli.printing import Floor, RowPrinter, StepPrinter
from hf_parallel.cli.settings import PLAIN, describe, read_settings
from hf_parallel.files import write_whole
from hf_parallel.generation import GenerationStats, ParallelConfig, enable
from hf_parallel.generation.config import is_int, make_config
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes.hogwild.config import HogwildConfig
from hf_parallel.generation.modes.hogwild.presets import EMBEDDED_PRESET
from hf_parallel.generation.modes.self_consistency import SelfConsistencyConfig
from hf_parallel.generation.modes.skeleton_of_thought import SkeletonOfThoughtConfig
from hf_parallel.generation.prompts import encode_task
from hf_parallel.generation.resampling.config import ReplayConfig
from hf_parallel.generation.rng import mix
from hf_parallel.models.embedded import MODEL_NAME
from hf_parallel.models.loading import load_model
from hf_parallel.models.probed import embedded_capabilities
from hf_parallel.transcript.page import render as page_of

FORMATS = ("text", "jsonl", "live")
_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {".json": json.dumps, ".html": page_of, ".htm": page_of}
"""How a run is written, by the suffix of its file."""
_HEADING = 72
"""Characters of a prompt that head its answer where there are several."""


def generate(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises
    ------
    ValueError, OSError, ImportError, RuntimeError
        For bad options before a model is loaded; for what the mode refuses.
    """
    if options.settings:
        print(describe(options.mode))
        return 0
    prompts = read_prompts(options)
    _check(options, prompts)
    config, settings = read_settings(options)
    model, tokenizer = load(options)
    if config is not None:  # settings that are stored with the model count too
        asked = {"generation_mode": config.mode, "parallel_config": config}
        config = take_parallel_config(model.generation_config, asked)
        enable(model, None if options.model else embedded_capabilities(model))
    elif options.seed is not None:
        torch.manual_seed(options.seed)
    settings["return_dict_in_generate"] = True
    stats: list[GenerationStats] = []
    runs: list[dict[str, Any]] = []
    with ExitStack() as at_end:  # also if a later batch fails, or nobody reads what is printed any more
        at_end.callback(_keep, options, runs, stats)
        at_end.callback(_keep_logits, options, config)
        for number, begin in enumerate(range(0, len(prompts), options.batch_size)):
            batch = prompts[begin : begin + options.batch_size]
            inputs = encode(batch, tokenizer, config, options)
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            call = InterruptibleCall(model, tokenizer, _of_batch(config, number), {**inputs, **settings})
            try:
                _show(options, call, batch, number, len(prompts) > 1)
            finally:
                stats += [call.stats] if call.stats is not None else []
                runs += [call.to_dict()] if options.output is not None and call.has_written else []
            if call.interrupted:
                break
    if options.stats and stats:
        print(_cost(_total(stats)), file=sys.stderr)
    if options.stats and call.interrupted and config is not None:
        print(f"interrupted after {call.progress}", file=sys.stderr)
    return 130 if call.interrupted else 0


def _of_batch(config: ParallelConfig | None, number: int) -> ParallelConfig | None:
    """The config of a batch: one seed would let each batch draw what the first one drew."""
    if config is None or number == 0 or not is_int(config.seed):
        return config
    return make_config(config.mode, {"seed": mix(config.seed, number)}, config)


def _keep(options: argparse.Namespace, runs: Sequence[dict[str, Any]], stats: Sequence[GenerationStats]) -> None:
    """Write the runs of all batches as one, if there are any."""
    if not runs:
        return
    told = {
        **runs[-1],  # says whether it was interrupted
        **runs[0],
        "stats": _total(stats).to_dict() if stats else None,
        "passes": sum(run["passes"] for run in runs),
        "sections": [section for run in runs for section in run["sections"]],
        "model": options.model or MODEL_NAME,
    }
    write_whole(options.output, _WRITERS[options.output.suffix.lower()](told))


def _keep_logits(options: argparse.Namespace, config: ParallelConfig | None) -> None:
    """Write what the cache of logits remembers, if that is anything."""
    if options.logits_cache is not None and isinstance(config, ReplayConfig) and len(config.logits_cache):
        config.logits_cache.save(options.logits_cache)


def _show(options: argparse.Namespace, call: InterruptibleCall, batch: Sequence[str], number: int, many: bool) -> None:
    """Run a call, and show its answers; where there are `many` prompts, each under its heading."""
    headings = [f"== {' '.join(prompt.split())[:_HEADING]}" if many else "" for prompt in batch]
    if options.format == "live":
        _watch(call)
        return
    if number and options.format == "text":
        print()
    _print(options, call, batch, headings)


def _print(options: argparse.Namespace, call: InterruptibleCall, prompts: Sequence[str], headings: list[str]) -> None:
    """Print answers as they are written, or as JSON lines."""
    config, answers = call.config, call.arguments.get("num_return_sequences") or 1
    out = StringIO() if options.format == "jsonl" else sys.stdout
    printer: RowPrinter | StepPrinter
    if isinstance(config, HogwildConfig | SelfConsistencyConfig | SkeletonOfThoughtConfig):
        printer = StepPrinter(out, headings, config, answers)
    else:
        ends = call.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        printer = RowPrinter(out, headings, call.tokenizer, answers, ends)
    call.run(printer)
    if call.interrupted:
        printer.finish()
    if options.format == "jsonl":
        for record in call.records(prompts):
            print_record(record)
    else:
        _print_answers(printer, getattr(call.output, "answers", None) or (), headings)


def _print_answers(printer: Floor, found: Sequence[str | None], headings: Sequence[str]) -> None:
    """Print the answers that were found, by prompt: they are known when all prompts have been printed."""
    each = len(found) // len(headings)
    for number, heading in enumerate(headings):
        answers = [
            f"[{place} of {each}] Answer: {answer}" if each > 1 else f"Answer: {answer}"
            for place, answer in enumerate(found[number * each :][:each], start=1)
            if answer is not None
        ]
        if answers and len(headings) > 1:
            printer.line(f"\n{heading}")
        for answer in answers:
            printer.line(answer)


def print_record(record: dict[str, Any]) -> None:
    """Print an object as a line of JSON, in characters that whoever reads it can have."""
    readable = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(record, ensure_ascii=not readable), flush=True)


def _watch(call: InterruptibleCall) -> None:
    """Show rows side by side while they are written."""
    from hf_parallel.cli.demo import make_console
    from hf_parallel.cli.live import live_view

    assert call.config is not None, "a live view of no mode has been refused"
    with live_view(call.config, make_console(), call.tokenizer) as view, view.watching(call.model):
        call.run(view)
        view.interrupted = call.interrupted


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of arguments, files and stdin.

    Raises
    ------
    ValueError
        If there is none, or an empty one, or one that is no text.
    """
    texts: list[str] = []
    given = options.prompts or ([] if options.file else ["-"])
    for prompt in given:
        if prompt != "-":
            texts.append(prompt)
        else:
            texts += _read(None, options.lines)
    for path in options.file:
        texts += _read(None if path == Path("-") else path, options.lines)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # bytes of an argument, or of stdin, that are none
        raise ValueError(f"a prompt is no text in UTF-8: {error}") from error
    if not all(text.strip() for text in texts):
        raise ValueError(f"a prompt must not be empty, got {texts!r}")
    return texts


def _read(path: Path | None, lines: bool) -> list[str]:
    """The prompts of a file, or of stdin: all of its text, or each of its lines."""
    if path is None and sys.stdin.isatty():
        raise ValueError('give a prompt: hf-parallel generate "Plan a picnic." (or --file, or text on stdin)')
    source = path or "stdin"
    try:
        text = sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"there is no prompt in {source}: it is {'blank' if text else 'empty'}")
    return [line for line in text.split("\n") if line.strip()] if lines else [text.rstrip("\n")]


def _check(options: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Raise an error for what would only be found out when the answers are there."""
    if options.output is not None and options.mode == PLAIN:
        raise ValueError(f"-o keeps the run of a mode, and --mode {PLAIN} is none")
    for option, path in (("-o", options.output), ("--logits-cache", options.logits_cache)):
        if path is not None and path.is_dir():
            raise ValueError(f"{option} {path} is a folder; name a file in it")
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{option} {path}: there is no folder {path.resolve().parent}")
        if path is not None and (path.is_file() or not path.exists()):  # a pipe is not replaced
            _check_folder(option, path)
    if options.output is not None and options.output.suffix.lower() not in _WRITERS:
        raise ValueError(f"-o {options.output} must end in .json, or in .html or .htm for the page")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.lines and options.prompts and "-" not in options.prompts and not options.file:
        raise ValueError("--lines splits files and stdin, and the prompts are arguments")
    if options.stats and options.mode == PLAIN:
        raise ValueError(f"--stats tells what a mode cost, and --mode {PLAIN} is none")
    _check_model(options)
    if options.format == "live":
        if importlib.util.find_spec("rich") is None:
            raise ValueError("--format live needs rich, which is not installed: pip install rich")
        if options.mode == PLAIN or len(prompts) > 1:
            raise ValueError(f"--format live shows one prompt in a mode, got {len(prompts)} and --mode {options.mode}")


def _check_folder(option: str, path: Path) -> None:
    """Raise an error if no file can be made where an option wants one."""
    try:
        TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error


def _check_model(options: argparse.Namespace) -> None:
    """Raise an error for a folder or a device that is not there."""
    name = options.model or ""
    if name.startswith((os.sep, ".", "~")) and not Path(name).is_dir():
        raise ValueError(f"--model {name}: no such folder")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # what comes behind the first line helps those who build torch
        raise ValueError(f"--device {options.device}: {str(error).partition(chr(10))[0]}") from error


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_model(options.model, getattr(torch, options.dtype, None), device)


def encode(
    prompts: Sequence[str], tokenizer: Any, config: ParallelConfig | None, options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """Prompts as `input_ids` and `attention_mask`, `int64 [prompts, longest]`, padded on the left."""
    rows = [_encoded(prompt, tokenizer, config, options).flatten() for prompt in prompts]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left"),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"),
    }


def _encoded(prompt: str, tokenizer: Any, config: ParallelConfig | None, options: argparse.Namespace) -> torch.Tensor:
    if options.raw:
        return tokenizer(prompt, return_tensors="pt").input_ids
    if getattr(config, "collaboration_prompt", None) == EMBEDDED_PRESET.settings["collaboration_prompt"]:
        prompt = EMBEDDED_PRESET.task.format(task=prompt)
    return encode_task(None if config is None else config.system_prompt(), prompt, tokenizer)["input_ids"]


def _total(stats: Sequence[GenerationStats]) -> GenerationStats:
    """What several calls cost together; of memory, what the largest of them took."""
    told = [of.to_dict() for of in stats]
    columns = {name: [of[name] for of in told] for name in told[0]}
    largest = {name: max(column) for name, column in columns.items() if name.endswith("_bytes")}
    return GenerationStats(**{name: sum(column) for name, column in columns.items()} | largest)


def _cost(of: GenerationStats) -> str:
    """What calls cost, in a line."""
    replayed = f" ({of.replayed_tokens} replayed)" if of.replayed_tokens else ""
    return (
        f"{of.forward_passes} forward passes, {of.decoded_tokens} tokens written{replayed}, {of.prefilled_tokens} "
        f"given tokens computed, {of.kv_bytes / 1e6:.1f} MB of keys and values, {of.prefill_seconds:.2f} s prefill, "
        f"{of.decode_seconds:.2f} s decode"
    )

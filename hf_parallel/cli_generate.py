"""`hf-parallel generate`: prompts in, answers out, as text that streams, as JSON lines or as a live view."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .cache.logits import LogitsCache
from .embedded import MODEL_NAME, load_embedded_model
from .generation import (
    MODES,
    GenerationStats,
    HogwildConfig,
    ParallelConfig,
    SelfConsistencyConfig,
    SkeletonOfThoughtConfig,
    enable,
)
from .generation.config import is_int, make_config, unknown_setting
from .generation.journal import write_whole
from .generation.mixin import take_parallel_config
from .generation.noise import mix
from .generation.page import render as page_of
from .generation.prompts import encode_task, rules_of
from .generation.recalling import RecallingConfig
from .interruptible import InterruptibleCall
from .presets import SAMPLING, SMALL_MODEL, SMALL_MODEL_TASK
from .printing import RowPrinter, StepPrinter
from .probed import enable_embedded

PLAIN = "generate"
"""Stands for no mode: what `generate` does by itself."""
FORMATS = ("text", "jsonl", "live")
GENERATION_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_new_tokens", int, "tokens of an answer; of a worker in hogwild (256)"),
    ("num_return_sequences", int, "answers per prompt (1)"),
    ("temperature", float, "of the sampling"),
    ("top_p", float, "sample from the likeliest tokens that have this probability together"),
    ("top_k", int, "sample from so many of the likeliest tokens"),
    ("repetition_penalty", float, "above 1: repeat less"),
)
"""Settings of `generate` that have an option: name, type, help."""
_DRAWING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of `generate` that have a sense only where tokens are drawn."""
_WRITTEN_OUT = {"True": True, "False": False, "None": None}
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
        (enable if options.model else enable_embedded)(model)
    elif options.seed is not None:
        torch.manual_seed(options.seed)
    settings["return_dict_in_generate"] = True
    show = _watch if options.format == "live" else _print
    stats: list[GenerationStats] = []
    runs: list[dict[str, Any]] = []
    for number, begin in enumerate(range(0, len(prompts), options.batch_size)):
        batch = prompts[begin : begin + options.batch_size]
        inputs = {name: tensor.to(model.device) for name, tensor in encode(batch, tokenizer, config, options).items()}
        call = InterruptibleCall(model, tokenizer, _of_batch(config, number), {**inputs, **settings})
        headings = [f"== {' '.join(prompt.split())[:_HEADING]}" for prompt in batch] if len(prompts) > 1 else [""]
        if number and options.format == "text":
            print()
        show(options, call, batch, headings)
        stats += [call.stats] if call.stats is not None else []
        runs += [call.to_dict()] if options.output is not None and call.has_written else []
        if call.interrupted:
            break
    total = _total(stats) if stats else None
    if options.stats and total is not None:
        print(_cost(total), file=sys.stderr)
    if options.stats and call.interrupted and config is not None:
        print(f"interrupted after {call.progress}", file=sys.stderr)
    if runs:
        _keep(options, runs, total)
    if options.logits_cache is not None and isinstance(config, RecallingConfig):
        config.logits_cache.save(options.logits_cache)
    return 130 if call.interrupted else 0


def _of_batch(config: ParallelConfig | None, number: int) -> ParallelConfig | None:
    """The config of a batch: one seed would let each batch draw what the first one drew."""
    if config is None or number == 0 or not is_int(config.seed):
        return config
    return make_config(config.mode, {"seed": mix(config.seed, number)}, config)


def _keep(options: argparse.Namespace, runs: Sequence[dict[str, Any]], stats: GenerationStats | None) -> None:
    """Write the runs of all batches as one."""
    told = {
        **runs[-1],  # says whether it was interrupted
        **runs[0],
        "stats": None if stats is None else stats.to_dict(),
        "passes": sum(run["passes"] for run in runs),
        "sections": [section for run in runs for section in run["sections"]],
        "model": options.model or MODEL_NAME,
    }
    write_whole(options.output, _WRITERS[options.output.suffix.lower()](told))


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
        for answer in getattr(call.output, "answers", None) or ():
            if answer is not None:
                printer.line(f"Answer: {answer}")


def print_record(record: dict[str, Any]) -> None:
    """Print an object as a line of JSON, in characters that whoever reads it can have."""
    readable = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(record, ensure_ascii=not readable), flush=True)


def _watch(options: argparse.Namespace, call: InterruptibleCall, prompts: Sequence[str], headings: list[str]) -> None:
    """Show rows side by side while they are written."""
    from .demo import make_console
    from .live import live_view

    assert call.config is not None, "a live view of no mode has been refused"
    with live_view(call.config, make_console(), call.tokenizer) as view, view.watching(call.model):
        call.run(view)
        view.interrupted = call.interrupted


def describe(mode: str) -> str:
    """What a mode does, and what its settings mean and are by default."""
    if mode not in MODES:
        return "No mode: what `generate` of transformers does. Its settings: " + ", ".join(GENERATION_SETTINGS)
    cls = MODES[mode]
    classes = [of for of in cls.__mro__ if dataclasses.is_dataclass(of) and of is not object]
    texts = [inspect.cleandoc(of.__doc__ or "") for of in classes]
    defaults = [f"{field.name} = {_default(field)}" for field in dataclasses.fields(cls) if field.name in cls.fields()]
    return "\n\n".join([*texts, "Defaults\n--------\n" + "\n".join(defaults)])


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return repr(value)


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
        elif sys.stdin.isatty():
            raise ValueError('give a prompt: hf-parallel generate "Plan a picnic." (or --file, or text on stdin)')
        else:
            texts += _read(None, options.lines)
    for path in options.file:
        texts += _read(path, options.lines)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # bytes of an argument, or of stdin, that are none
        raise ValueError(f"a prompt is no text in UTF-8: {error}") from error
    if not all(text.strip() for text in texts):
        raise ValueError(f"a prompt must not be empty, got {texts!r}")
    return texts


def _read(path: Path | None, lines: bool) -> list[str]:
    """The prompts of a file, or of stdin: all of its text, or each of its lines."""
    source = path or "stdin"
    try:
        text = sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"there is no prompt in {source}: it is {'blank' if text else 'empty'}")
    return [line for line in text.split("\n") if line.strip()] if lines else [text.rstrip("\n")]


def read_settings(options: argparse.Namespace) -> tuple[ParallelConfig | None, dict[str, Any]]:
    """The mode's config, None without a mode, and the arguments of `generate`.

    Raises
    ------
    ValueError
        Naming the setting, what was given and what is allowed.
    """
    cls = MODES.get(options.mode)
    preset = options.model is None and not options.no_preset
    settings: dict[str, Any] = {**SAMPLING} if preset and options.mode in ("hogwild", "self_consistency") else {}
    given = {} if options.seed is None else {"seed": options.seed}
    asked: dict[str, Any] = {}  # of `generate`
    named = _settings_with_options(options)
    for text in options.set:
        name, _, value = text.partition("=")
        if not _:
            raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
        if name in named:
            raise ValueError(f"--set {name} and {named[name]} are one setting, give one of them")
        if cls is not None and name == "logits_cache" and name in cls.fields():
            raise ValueError(f"--set cannot hold logits (got {text!r}); use --logits-cache FILE")
        if cls is not None and name in cls.fields() and name not in cls.not_stored:
            given[name] = parse(value, getattr(cls, name, None))
        elif name in GENERATION_SETTINGS:
            asked[name] = parse(value, getattr(GenerationConfig(), name))
        elif cls is None:
            raise ValueError(f"generate has no setting {name!r} (got {value!r})")
        else:
            raise unknown_setting(cls, name, value, GENERATION_SETTINGS)
    settings |= asked | _generation_options(options, asked)
    if settings.get("max_length") is None:
        settings.setdefault("max_new_tokens", 256)
    if not settings.get("do_sample", True):
        settings = {name: value for name, value in settings.items() if name not in _DRAWING}
    if options.logits_cache is not None or options.mode == "resample":
        given["logits_cache"] = _logits_cache(options.logits_cache, cls)
    if cls is None:
        return None, settings
    return make_config(cls.mode, given, SMALL_MODEL if preset and options.mode == "hogwild" else None), settings


def _settings_with_options(options: argparse.Namespace) -> dict[str, str]:
    """Settings that options give, and which."""
    names = [*(name for name, _, _ in GENERATION_OPTIONS), "seed"]
    named = {name: f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None}
    if options.greedy or options.sample:
        named["do_sample"] = "--greedy" if options.greedy else "--sample"
    return named


def _generation_options(options: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """What options say of the arguments of `generate`, and whether they or those `asked` for by --set draw tokens."""
    names = [name for name, _, _ in GENERATION_OPTIONS]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    drawing = [f"--{name.replace('_', '-')}" for name in _DRAWING if name in given]
    drawing += [f"--set {name}" for name in _DRAWING if asked.get(name) is not None]
    drawing += ["--sample"] * bool(options.sample)
    greedy = "--greedy" if options.greedy else "" if asked.get("do_sample", True) else "--set do_sample=False"
    if greedy and drawing:
        raise ValueError(f"{greedy} draws no tokens, so it cannot be combined with {', '.join(drawing)}")
    if greedy or drawing:
        given["do_sample"] = not greedy
    return given


GENERATION_SETTINGS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
"""What `generate` itself can be set to."""


def parse(text: str, default: Any) -> Any:
    """The value of a setting: JSON, `True`, `False` or `None`, or plain text, which a setting that is text remains.

    Parameters
    ----------
    text : str
    default : Any
        The setting's.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return _WRITTEN_OUT.get(text, text) if not isinstance(default, str) else text
    return value if isinstance(value, str) or not isinstance(default, str) else text


def _logits_cache(path: Path | None, cls: type[ParallelConfig] | None) -> LogitsCache:
    """The cache that a file holds, or a new one."""
    if cls is None or "logits_cache" not in cls.fields():
        raise ValueError(f"--logits-cache needs a mode that remembers logits, got {PLAIN if cls is None else cls.mode}")
    return LogitsCache.load(path) if path is not None and path.exists() else LogitsCache()


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
    dtype: Any = getattr(torch, options.dtype, "auto")
    if options.model is None:
        return load_embedded_model(dtype=torch.float32 if dtype == "auto" else dtype, device=device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    return model.to(device).eval(), tokenizer


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
    if getattr(config, "collaboration_prompt", None) == SMALL_MODEL["collaboration_prompt"]:
        prompt = SMALL_MODEL_TASK.format(task=prompt)
    return encode_task(None if config is None else rules_of(config), prompt, tokenizer)["input_ids"]


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

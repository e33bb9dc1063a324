"""The command `hf-parallel` and its subcommands.

Each subcommand is a module with `add_options(parser)`, imported when it runs: `--help` imports no torch, and a missing
demo model is an error before that import. Errors are printed as one line on stderr with exit status 2 (`--debug`: with
a traceback). Ctrl-C exits with 130, a closed pipe silently with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import hf_parallel
from hf_parallel.evaluation.packages import check_matplotlib
from hf_parallel.models.loading.demo_file import find_demo_file

COMMANDS = {
    "generate": (
        "answer prompts, in any mode and with any model",
        "Prompts go through the model's chat template and get the mode's instructions, unless --raw is given.",
    ),
    "evaluate": (
        "measure accuracy against budgets of forward passes",
        "Solves the problems of a task in several modes and settings, scores what was written within each budget, and "
        "writes results to a folder and prints a table. A run that was killed resumes: give the same command again.",
    ),
    "serve": (
        "serve many clients over an OpenAI-compatible API",
        "Serves a model in all modes. SIGTERM and Ctrl-C let running requests finish.",
    ),
    "view": (
        "render a transcript as an HTML page",
        "Renders a transcript, saved by `generate -o run.json`, or the trace of a run of agents as one HTML page.",
    ),
}
"""Subcommands: what each does, and details."""
WITH_MODEL = ("generate", "evaluate", "serve")
"""Subcommands that load a model: the demo model without `--model`."""
WITHOUT_RUN = {"-h", "--help", "--settings"}
"""Options with which a subcommand only prints a text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (default: `sys.argv[1:]`) and return its exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    if sys.stdout is None:  # closed by the caller, as by >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    showwarning = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        status = _run(list(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 1
    except Exception as error:
        if "--debug" in arguments:
            raise
        kind = "" if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: "
        remedy = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"hf-parallel: error: {kind}{_line(error)}{remedy}", file=sys.stderr)
        status = 2
    finally:
        warnings.showwarning = showwarning
        try:
            sys.stdout.flush()
        except OSError:  # discard the output; otherwise the interpreter prints an error at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    _check_packages(name, arguments)
    options = make_parser(name).parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    return options.run(options)


def _check_packages(command: str, arguments: Sequence[str]) -> None:
    """Raise `ImportError` if a package that the command needs is missing, before it imports torch for seconds."""
    given = {argument.partition("=")[0] for argument in arguments}
    if given & WITHOUT_RUN:
        return
    if command in WITH_MODEL and "--model" not in given:
        find_demo_file()
    if command == "evaluate" and "--plot" in given:
        check_matplotlib()


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of the program, with the options of one command."""
    parser = argparse.ArgumentParser(
        prog="hf-parallel",
        description="Parallel generation over a shared KV cache, for models of Hugging Face Transformers.",
        epilog=Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"hf_parallel {hf_parallel.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (words, description) in COMMANDS.items():
        words_of = f"{words[0].upper()}{words[1:]}. {description}"
        of_command = commands.add_parser(name, help=words, description=words_of, allow_abbrev=False)
        if name == command:
            of_command.add_argument("--debug", action="store_true", help="print the traceback of an error")
            import_module(f"hf_parallel.cli.{name}").add_options(of_command)
    return parser


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"hf-parallel: warning: {_line(message)}", file=sys.stderr)


def _line(message: object) -> str:
    return " ".join(str(message).split())


if __name__ == "__main__":
    sys.exit(main())

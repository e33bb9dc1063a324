"""Runs experiments of the four papers (docs/papers.md): `papers` lists them, `papers PAPER EXPERIMENT` runs one.

`papers.json` has the commands of each experiment: for a CPU, in the paper's size, and in the smallest form. They run
other benchmarks, `hf-parallel evaluate`, and examples. `{output}` is the path of the results without a suffix,
`{model}` stands for `--model`, `--device` and `--dtype`, `{settings}` for settings of the paper. `columns` says which
entry of the results, or which value of an entry, gives each column of the paper's table or axis of its figure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAPERS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PROGRAMS = {"benchmarks": ["-m", "benchmarks"], "evaluate": ["-m", "hf_parallel", "evaluate"]}
"""Arguments of Python for the first word of a command; that of an example is its path."""
MODEL = ("model", "device", "dtype")


def main(arguments: Sequence[str]) -> int:
    """List the experiments, or run one and return the exit status of its first failing command, or 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks papers", description=(__doc__ or "").splitlines()[0])
    parser.epilog = "Further options are those of the commands: --rounds 3."
    parser.add_argument("paper", nargs="?", choices=PAPERS)
    parser.add_argument("experiment", nargs="?")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--paper", dest="form", action="store_const", const="paper", help="the paper's model and sizes")
    form.add_argument("--quick", dest="form", action="store_const", const="quick", help="to check that everything runs")
    parser.add_argument("--show", action="store_true", help="print the commands, and run nothing")
    for name in MODEL:
        parser.add_argument(f"--{name}", help=f"for the commands that have a {name}")
    words = "where results are written (runs/PAPER-EXPERIMENT); a command adds its suffix"
    parser.add_argument("--output", type=Path, metavar="PATH", help=words)
    options, more = parser.parse_known_args(arguments)
    if options.paper is None:
        print(listing())
        return 0
    experiments = PAPERS[options.paper]["experiments"]
    if options.experiment not in experiments:
        parser.error(f"experiment must be one of {', '.join(experiments)}, got {options.experiment!r}")
    about, name = experiments[options.experiment], options.form or "cpu"
    if name not in about:
        parser.error(f"{options.experiment} has no form for a CPU: {about['why_no_cpu']}; --paper has the paper's size")
    given = [text for key in MODEL if (value := getattr(options, key)) for text in (f"--{key}", value)]
    if given and not any("{model}" in command for command in about[name]):
        parser.error(f"{options.experiment} chooses its own model, so {given[0]} cannot be given")
    output = options.output or Path("runs") / f"{options.paper}-{options.experiment}"
    commands = [[*command_of(text, options.paper, output, given), *more] for text in about[name]]
    print(f"{PAPERS[options.paper]['title']}, {options.experiment}: {about['shows']}")
    for command in commands:
        print(f"  {shlex.join(['python', *command])}")
    print(f"  time: {about.get(f'{name}_takes', 'at most a few minutes')}", flush=True)
    if options.show:
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        if status := subprocess.run([sys.executable, *command]).returncode:
            return status
    return 0


def command_of(text: str, paper: str, output: Path, given: Sequence[str]) -> list[str]:
    """Return the arguments of Python for a command of `papers.json`."""
    settings = PAPERS[paper].get("settings", "")
    texts = {"{output}": shlex.quote(str(output)), "{model}": shlex.join(given), "{settings}": settings}
    for name, value in texts.items():
        text = text.replace(name, value)
    first, *arguments = shlex.split(text)
    return [*PROGRAMS.get(first, [first]), *arguments]


def listing() -> str:
    """Return a line for each experiment."""
    lines = []
    for paper, entry in PAPERS.items():
        lines.append(f"{entry['title']}")
        for name, about in entry["experiments"].items():
            lines.append(f"  {paper} {name:<14} {about['shows']}{'' if 'cpu' in about else ' (--paper only)'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

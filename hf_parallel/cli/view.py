"""`hf-parallel view`: a transcript, or a trace of agents, as an HTML page."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from pathlib import Path

from hf_parallel.transcript.page import render


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    words = "the file that `generate -o` or a trace's `save` wrote; -: stdin"
    add("run_file", metavar="run.json", type=Path, help=words)
    words = "the page (default: run.html; -: stdout, the default for stdin)"
    add("-o", "--output", type=Path, metavar="FILE", help=words)
    add("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(run=view)


def view(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    piped = options.run_file == Path("-")
    source = "stdin" if piped else options.run_file
    target = options.output or (options.run_file if piped else options.run_file.with_suffix(".html"))
    if options.open and target == Path("-"):
        raise ValueError("--open needs a file to open; name one with -o")
    if options.output not in (None, Path("-")) and options.output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"-o {options.output} must end in .html or .htm, or be - for stdout")
    try:
        page = _page(json.loads(sys.stdin.read() if piped else options.run_file.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
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
    if isinstance(run, dict) and run.get("format") == "hf_parallel agents":
        from hf_parallel.agents import trace  # with an engine, which not all installations can import
        from hf_parallel.agents.drawing import page

        return page.render(trace.RunTrace.from_dict(run))
    return render(run)

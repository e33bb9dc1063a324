"""`hf-parallel view`: a transcript, or a trace of agents, as an HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_parallel.files import read_json
from hf_parallel.transcript.page import render


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    words = "the file that `generate -o` or a trace's `save` wrote"
    parser.add_argument("run_file", metavar="run.json", type=Path, help=words)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: run.html)")
    parser.set_defaults(run=view)


def view(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    target = options.output or options.run_file.with_suffix(".html")
    if target.suffix.lower() not in (".html", ".htm") or target.resolve() == options.run_file.resolve():
        raise ValueError(f"-o {target} must be a new file that ends in .html or .htm")
    try:
        page = _page(read_json(options.run_file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{options.run_file}: {error}") from error
    target.write_text(page, encoding="utf-8")
    print(f"Written to {target}", file=sys.stderr)
    return 0


def _page(run: object) -> str:
    if isinstance(run, dict) and run.get("format") == "hf_parallel agents":
        from hf_parallel.agents import drawing, trace

        return drawing.render(trace.RunTrace.from_dict(run))
    return render(run)

"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME` runs one; `NAME --help` has its options."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring, by name."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in texts.items()
        if re.search(r"^(def (run|main)\(|run = )", text, re.MULTILINE)
    }


def main() -> int:
    """Run the benchmark that the first argument names, or list all; return the exit status."""
    known = benchmarks()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in known:
        module = import_module(f"benchmarks.{name}")
        if hasattr(module, "main"):
            return int(module.main(arguments))
        from .report import run_benchmark  # imports PyTorch: a benchmark on a GPU sets variables before

        return run_benchmark(module, arguments)
    print("usage: python -m benchmarks NAME [options]\n")
    for benchmark, words in known.items():
        print(f"  {benchmark:<18}{words}")
    if name.startswith("-"):
        return 0
    print(f"\nthere is no benchmark {name!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

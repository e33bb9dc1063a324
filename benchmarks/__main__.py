"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME` runs one; `NAME --help` has its options."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring, by name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> int:
    """Run the benchmark that the first argument names, or list all; return the exit status."""
    known = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in known:
        del sys.argv[0]
        return import_module(f"benchmarks.{name}").main() or 0
    print("usage: python -m benchmarks NAME [options]\n")
    for benchmark, words in known.items():
        print(f"  {benchmark:<18}{words}")
    if name.startswith("-"):
        return 0
    print(f"\nthere is no benchmark {name!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

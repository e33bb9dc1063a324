"""Script that `formulas.py` starts: compare formulas by math-verify, one per line of JSON.

After its imports, it restricts itself like code of an answer; see `sandbox.py`.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> None:
    """Answer requests `{"gold", "given", "tolerance"}` from stdin with `true` or `false`."""
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    try:
        from math_verify import LatexExtractionConfig, parse, verify
        from sympy import Basic, FiniteSet, Tuple
    except ImportError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    logging.disable()  # math-verify warns that it has no time limit; the parent has one

    def read(latex: str) -> list[object]:
        return parse(f"\\boxed{{{latex}}}", [LatexExtractionConfig()], parsing_timeout=None)

    def close(gold: object, given: object, tolerance: float) -> bool:
        if isinstance(gold, FiniteSet | Tuple) and isinstance(given, FiniteSet | Tuple):
            same = len(gold.args) == len(given.args)
            return same and all(close(one, other, tolerance) for one, other in zip(gold.args, given.args, strict=True))
        if not isinstance(gold, Basic) or not isinstance(given, Basic):
            return False
        values = [complex(one.evalf()) for one in (gold, given) if one.is_number]
        if len(values) < 2:
            return False
        return any(abs(values[0] * scale - values[1]) <= tolerance * 1.01 for scale in (1, 100, 0.01))

    read("1")  # loads the parser
    packages = [module for name, module in sys.modules.items() if "." not in name and hasattr(module, "__path__")]
    readable = {os.path.realpath(path) for package in packages for path in package.__path__}
    restrict = runpy.run_path(str(Path(__file__).with_name("sandbox.py")))["restrict"]
    restrict([*settings["readable"], *readable], settings["seconds"], settings["memory"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(settings["alarm"])  # also ends this process if its parent was killed
        try:
            gold, given = read(request["gold"]), read(request["given"])
            equal = verify(gold, given, timeout_seconds=None)
            if not equal and request["tolerance"] and gold and given:
                equal = close(gold[0], given[0], request["tolerance"])
        except Exception:
            equal = False
        signal.alarm(0)
        print(json.dumps(bool(equal)), flush=True)


if __name__ == "__main__":
    main()

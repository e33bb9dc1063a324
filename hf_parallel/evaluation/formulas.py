"""Comparison of formulas by math-verify, in a separate process, for which this file is also the script.

math-verify limits its time by `signal.alarm`, which works only in the main thread and does not interrupt arithmetic
with huge numbers such as `10^{10^{10}}`. Here a slow process is killed, from any thread. The process may only read the
packages that math-verify uses; see `sandbox`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

MAX_MEMORY = 2 << 30


class FormulaComparer:
    """Compares LaTeX formulas by math-verify, in a process that starts with the first comparison.

    `seconds` is the wall-clock limit per comparison. After it, the process is killed and the formulas count as unequal.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id; a fork must start another process

    def compare(self, answer: str, given: str, tolerance: float = 0.0) -> bool:
        """Return whether two formulas are equal; for `tolerance` see `grading.formulas_equal`.

        Raises `ImportError` if math-verify is not installed.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            request = {"gold": answer, "given": given, "tolerance": tolerance}
            return self._ask(request, self.seconds) is True

    def _start(self) -> None:
        from hf_parallel.evaluation import sandbox

        settings = sandbox.limits([], 1 << 20, MAX_MEMORY, 0)
        settings["alarm"] = math.ceil(self.seconds) + 1
        settings["path"] = [os.path.realpath(entry) for entry in sys.path if entry]
        self._process = sandbox.start_python(__file__, settings, subprocess.PIPE, subprocess.PIPE, subprocess.DEVNULL)
        self._owner = os.getpid()
        reply = self._ask(None, sandbox.START_SECONDS)
        if reply != "ready":
            reason = reply["error"] if isinstance(reply, dict) else "its process has ended"
            raise ImportError(f"comparing formulas needs math-verify: pip install math-verify ({reason})")

    def _ask(self, request: object, seconds: float) -> object:
        """Send a request and return the reply, or None after `seconds` or if the process has ended."""
        # Without a reply, also after Ctrl-C, kill the process: a late reply would answer the next request
        from hf_parallel.evaluation import sandbox

        process = self._process
        reply = None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if request is not None:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            if sandbox.is_readable(process.stdout, seconds):
                reply = json.loads(process.stdout.readline() or "null")
        except (OSError, ValueError):
            pass
        finally:
            if reply is None:
                process.kill()
                process.communicate()
                self._process = None
        return reply


_comparer = FormulaComparer()
compare_formulas = _comparer.compare


def _main() -> None:
    """Restrict this process after its imports, and answer requests from stdin with `true` or `false`."""
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings.pop("path")
    alarm = settings.pop("alarm")
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
            if len(gold.args) != len(given.args):
                return False
            pairs = zip(gold.args, given.args, strict=True)
            return all(close(gold_item, given_item, tolerance) for gold_item, given_item in pairs)
        if not isinstance(gold, Basic) or not isinstance(given, Basic):
            return False
        if not gold.is_number or not given.is_number:
            return False
        gold_value = complex(gold.evalf())
        given_value = complex(given.evalf())
        distances = [abs(gold_value * scale - given_value) for scale in (1, 100, 0.01)]
        return any(distance <= tolerance * 1.01 for distance in distances)

    read("1")  # loads the parser
    packages = [module for name, module in sys.modules.items() if "." not in name and hasattr(module, "__path__")]
    settings["readable"] += {os.path.realpath(path) for package in packages for path in package.__path__}
    runpy.run_path(str(Path(__file__).with_name("sandbox.py")))["restrict"](**settings)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(alarm)  # also ends this process if its parent was killed
        try:
            gold = read(request["gold"])
            answer = read(request["given"])
            equal = verify(gold, answer, timeout_seconds=None)
            if not equal and request["tolerance"] and gold and answer:
                equal = close(gold[0], answer[0], request["tolerance"])
        except Exception:
            equal = False
        signal.alarm(0)
        print(json.dumps(bool(equal)), flush=True)


if __name__ == "__main__":
    _main()

"""Comparison of formulas by math-verify, in a separate process.

math-verify limits its time by `signal.alarm`, which works only in the main thread and does not interrupt arithmetic
with huge numbers such as `10^{10^{10}}`. Here a slow process is killed, from any thread. The process may only read the
packages that math-verify uses; see `sandbox`.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path

from hf_parallel.evaluation import sandbox

CHILD = str(Path(__file__).with_name("formulas_child.py"))
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
            return self._ask({"gold": answer, "given": given, "tolerance": tolerance}, self.seconds) is True

    def _start(self) -> None:
        settings = sandbox.limits([], 1 << 20, MAX_MEMORY)
        settings["alarm"] = math.ceil(self.seconds) + 1
        settings["path"] = [os.path.realpath(entry) for entry in sys.path if entry]
        streams = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process, self._owner = sandbox.start_python(CHILD, settings, **streams), os.getpid()
        reply = self._ask(None, sandbox.START_SECONDS)
        if reply != "ready":
            reason = reply["error"] if isinstance(reply, dict) else "its process has ended"
            raise ImportError(f"comparing formulas needs math-verify: pip install 'hf_parallel[eval]' ({reason})")

    def _ask(self, request: object, seconds: float) -> object:
        """Send a request and return the reply, or None after `seconds` or if the process has ended.

        Without a reply, also after Ctrl-C, kill the process: a late reply would answer the next request.
        """
        process, reply = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if request is not None:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if selector.select(seconds):
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

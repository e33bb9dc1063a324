"""Comparison of formulas by math-verify, in a process of its own.

math-verify limits its time by `signal.alarm`, which works in the main thread only and does not interrupt arithmetic
with huge numbers, such as `10^{10^{10}}`. Here a process is ended that takes too long, from any thread; it may read the
packages that math-verify has loaded and do nothing else, see the package.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from hf_parallel.evaluation.sandbox.run import START_SECONDS, limits

CHILD = str(Path(__file__).with_name("formulas_child.py"))
COMPARE_SECONDS = 5.0
MAX_MEMORY = 2 << 30


class FormulaComparer:
    """Compares formulas in LaTeX by math-verify in a process that starts at the first comparison.

    Parameters
    ----------
    seconds : float
        Wall-clock limit of a comparison. After it the process ends, and the answer counts as wrong.
    """

    def __init__(self, seconds: float = COMPARE_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: Callable[[], object] = _nothing

    def compare(self, answer: str, given: str, tolerance: float = 0.0) -> bool:
        """Return whether two formulas are equal; numbers also if they differ by `tolerance` at most.

        Raises `ImportError` if math-verify is not installed.
        """
        with self._lock:
            process = self._running()
            request = json.dumps({"gold": answer, "given": given, "tolerance": tolerance})
            return self._reply(process, request, self.seconds) is True

    def _reply(self, process: subprocess.Popen[bytes], request: str | None, seconds: float) -> object:
        """Return the reply to a request. Without one, also after Ctrl-C, end the process: it could reply later."""
        reply = None
        try:
            reply = _ask(process, request, seconds)
        finally:
            if reply is None:
                self._end()
        return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._end()
        settings = limits("/dev/null", 1 << 20, MAX_MEMORY, writable=False)
        settings |= {
            "alarm": math.ceil(self.seconds) + 1,
            "path": [os.path.realpath(entry) for entry in sys.path if entry],
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", CHILD, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end_own, os.getpid(), process)
        reply = self._reply(process, None, START_SECONDS)
        if reply != "ready":
            self._end()
            reason = reply["error"] if isinstance(reply, dict) else "its process has ended"
            raise ImportError(f"comparing formulas needs math-verify: pip install 'hf_parallel[eval]' ({reason})")
        return process


def _ask(process: subprocess.Popen[bytes], request: str | None, seconds: float) -> object:
    """Send a line and return the reply, or None after `seconds` or if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if request is not None:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return json.loads(process.stdout.readline() or "null")
    except (OSError, ValueError):
        return None


def _nothing() -> None:
    """Stand for the end of a process before there is one."""


def _end_own(owner: int, process: subprocess.Popen[bytes]) -> None:
    """End a process unless this one is a fork of its owner."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


_comparer = FormulaComparer()


def compare_formulas(answer: str, given: str, tolerance: float = 0.0) -> bool:
    """Return whether two formulas in LaTeX are equal by math-verify; see `FormulaComparer`."""
    return _comparer.compare(answer, given, tolerance)

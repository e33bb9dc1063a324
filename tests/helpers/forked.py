"""A function in a fork of this process, as a new interpreter takes seconds to import torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def exit_status(function: Callable[[], Any]) -> int:
    """Call a function in a fork and return the exit status: 0, 1 if the function raises, or its own by `os._exit`."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            signal.alarm(600)
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

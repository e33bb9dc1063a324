"""Processes that have torch, Transformers and the package imported from the start, as a new interpreter takes seconds
to import them: forks of one process without threads, which the first use in a test's process starts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

import pytest
from paths import PYTHONPATH

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mode_cases", "accelerate", "trl", "sweeps", "hf_parallel.cli.main"])
NO_FILES: dict[int, int] = {}


def start(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    files: Mapping[int, int] = NO_FILES,
) -> BaseProcess:
    """Call a function in a process; what it returns is the exit status.

    `files` maps file descriptors of the process, such as 1 for stdout, to those of this process.
    """
    with pytest.MonkeyPatch.context() as patch:  # the variables with which the server starts
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
        given = {target: (DupFd, file) for target, file in files.items()}
        process = CONTEXT.Process(target=_Call(given), args=(function, arguments, dict(environment or {})), daemon=True)
        process.start()
    return process


class _Call:
    """Calls a function in the new process."""

    def __init__(self, files: dict[int, Any]) -> None:
        self.files = files

    def __getstate__(self) -> dict[str, Any]:
        return {"files": {target: duplicate(file) for target, (duplicate, file) in self.files.items()}}

    def __call__(self, function: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str]) -> None:
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
        for target, file in self.files.items():
            os.dup2(file.detach(), target)
        names = ("stdin", "stdout", "stderr")
        for target in self.files:
            setattr(sys, names[target], os.fdopen(target, "w" if target else "r", closefd=False))
        sys.exit(function(*arguments))


def wait(processes: Sequence[BaseProcess], seconds: float = 600) -> None:
    """Wait until processes have ended well."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(codes)


def start_ranks(
    number: int, function: Callable[..., Any], *arguments: Any, files: Mapping[int, int] = NO_FILES
) -> list[BaseProcess]:
    """Call a function in processes with the variables that `torchrun` sets."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(number)]
    environments = [{name: str(value) for name, value in rank.items()} for rank in ranks]
    return [start(function, *arguments, environment=environment, files=files) for environment in environments]

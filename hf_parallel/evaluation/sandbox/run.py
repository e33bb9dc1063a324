"""Starts code of a model in a process with limits and ends it; `run_child.py` is what runs there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hf_parallel.generation.validation import check_int

CHILD = str(Path(__file__).with_name("run_child.py"))
READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"),
    *("/etc/localtime", "/dev/null", "/dev/urandom", "/dev/zero"),
)
"""Files and folders that Python needs, besides its own."""
START_SECONDS = 60.0
POLL_SECONDS = 0.05
MAX_DISK = 64 << 20
"""Bytes of all files that the code may write."""
MAX_FILE = MAX_DISK // 4
"""Bytes of a file."""
MAX_FILES = 1000
"""Number of files and folders that it may make."""
MAX_COUNTS = 50
"""Tries to count files that move meanwhile."""
MAX_THREADS = 256
KERNEL = frozenset({"one thread", "capabilities", "landlock", "seccomp"})
"""Steps of `run_child.restrict` that isolate a process."""


@dataclass(frozen=True)
class SandboxResult:
    """How a run ended.

    Parameters
    ----------
    returncode : int
        Exit status; 128 + n after signal n, as in a shell.
    stdout, stderr : str
        Output of the code, up to `max_output` characters each.
    timed_out : bool
        Whether the run was ended after `timeout` seconds.
    truncated : bool
        Whether the run was ended because it printed or wrote too much, or started too many threads.
    seconds : float
        Wall-clock time.
    enforced : frozenset[str]
        Limits that the kernel has enforced.
    """

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0
    enforced: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def is_isolated(self) -> bool:
        """Whether the kernel denied every system call that reaches beyond the process and its folder.

        Listed calls with checked arguments are allowed; all others fail: network, processes, signals, shared memory,
        queues, locks, links, watches, file attributes and namespaces. Landlock allows reading Python's own files and
        the shared libraries, and writing regular files in the folder. Code can still see whether a path exists, and its
        size, dates and owner; the system's name; and its own limits and use of time and memory. False on other
        architectures and kernels, and if a `.pth` file has started a thread.
        """
        return self.enforced >= KERNEL


def run_code(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    timeout: float = 10.0,
    max_memory: int = 1 << 29,
    max_output: int = 1 << 20,
    writable: bool = True,
    stop: threading.Event | None = None,
) -> SandboxResult:
    """Run Python code as `__main__` in a process with limits; see the package for what is guaranteed where.

    Parameters
    ----------
    code, stdin : str
        The code, and its standard input.
    files : Mapping[str, str], optional
        Texts of files in the working folder, by name. The folder is deleted afterwards.
    timeout : float
        Wall-clock seconds, without the start of Python. CPU time is limited to the next full second after it.
    max_memory : int
        Bytes of address space.
    max_output : int
        Bytes of stdout, and of stderr.
    writable : bool
        Whether the code may write files in its folder.
    stop : threading.Event, optional
        Ends the run early when it is set by another thread.

    Raises
    ------
    ValueError
        If a limit is not positive, or a file name has folders.
    RuntimeError
        On Windows, and if the process cannot be limited.
    """
    if os.name != "posix":
        raise RuntimeError("run_code needs Linux or macOS: it limits processes by setrlimit")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    check_int("max_memory", max_memory, at_least=1 << 26)
    check_int("max_output", max_output, at_least=1)
    with _folder() as base:
        folder = Path(base, "work")
        folder.mkdir()
        for name, text in (files or {}).items():
            if Path(name).name != name:
                raise ValueError(f"names of files must have no folders, got {name!r}")
            (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        Path(base, "code.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        Path(base, "stdin").write_text(stdin, encoding="utf-8", errors="surrogatepass")
        settings = limits(folder, math.ceil(timeout) + 1, max_memory, writable)
        settings |= {"code": str(Path(base, "code.py"))}
        read_end, write_end = os.pipe()
        with open(read_end, "rb") as status:
            try:
                with Path(base, "stdin").open("rb") as file:
                    process = subprocess.Popen(
                        [sys.executable, "-I", "-B", CHILD, json.dumps({**settings, "status": write_end})],
                        stdin=file,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        cwd=folder,
                        env={"PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                        start_new_session=True,
                        pass_fds=[write_end],
                    )
            finally:
                os.close(write_end)
            try:
                enforced = _started(process, status)
                output, ended_by, seconds = _wait(process, folder, timeout, max_output, stop)
            finally:
                _kill(process)
    code_ = process.returncode
    return SandboxResult(
        returncode=code_ if code_ >= 0 else 128 - code_,
        stdout=output[0].decode("utf-8", errors="replace"),
        stderr=output[1].decode("utf-8", errors="replace"),
        timed_out=ended_by == "time" or process.returncode == -signal.SIGXCPU,
        truncated=ended_by == "size",
        seconds=seconds,
        enforced=enforced,
    )


def limits(folder: Path | str, seconds: int, max_memory: int, writable: bool) -> dict[str, object]:
    """Return the settings of `run_child.restrict`; `seconds` of CPU time."""
    own = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix} - {"/usr", "/usr/local", "/"}
    return {
        "folder": os.path.realpath(folder),
        "readable": sorted(own | set(READABLE) | {os.path.dirname(os.__file__)}),
        "seconds": seconds,
        "memory": int(max_memory),
        "file_size": MAX_FILE,
        "writable": writable,
    }


def _started(process: subprocess.Popen[bytes], status: BinaryIO) -> frozenset[str]:
    """Wait until a process has limited itself, and return which limits the kernel enforces."""
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        enforced = status.read() if selector.select(START_SECONDS) else b""
    if not enforced:
        assert process.stderr is not None
        process.kill()
        raise RuntimeError(f"the process could not be limited: {process.stderr.read().decode(errors='replace')[-500:]}")
    return frozenset(json.loads(enforced))


def _wait(
    process: subprocess.Popen[bytes], folder: Path, timeout: float, max_output: int, stop: threading.Event | None
) -> tuple[tuple[bytes, bytes], str, float]:
    """Read the output until the process ends or exceeds a limit; return it, what has ended it, and the seconds."""
    start = time.monotonic()
    assert process.stdout is not None
    assert process.stderr is not None
    streams = [process.stdout, process.stderr]
    output = [bytearray(), bytearray()]
    ended_by = ""
    with selectors.DefaultSelector() as selector:
        for index, stream in enumerate(streams):
            selector.register(stream, selectors.EVENT_READ, index)
        while not ended_by and (selector.get_map() or process.poll() is None):
            for key, _ in selector.select(POLL_SECONDS):
                data = os.read(key.fd, 1 << 16)
                output[key.data] += data
                if not data:
                    selector.unregister(key.fileobj)
            if not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            written = _written(process.pid, folder)
            if max(map(len, output)) > max_output or written > MAX_DISK or _threads(process.pid) > MAX_THREADS:
                ended_by = "size"
            elif time.monotonic() - start > timeout:
                ended_by = "time"
            elif stop is not None and stop.is_set():
                ended_by = "stop"
    first, second = (bytes(one[:max_output]) for one in output)
    return (first, second), ended_by, time.monotonic() - start


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Make a temporary folder and remove it, however deep and with whatever rights code has made folders in it."""
    base = tempfile.mkdtemp(prefix="hf_parallel_sandbox_")
    try:
        yield base
    finally:
        try:
            shutil.rmtree(base)
        except (OSError, RecursionError):
            for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
                subprocess.run([*command, "--", base], check=False, stderr=subprocess.DEVNULL)


def _written(process: int, folder: Path) -> float:
    """Return the bytes of all files that a process has written, also of deleted ones that it keeps open or mapped.

    Infinity if there are more than `MAX_FILES`, or if they cannot be counted: a file that is renamed, or opened under
    another number, after it was listed is not found, so that code could hide files by moving them all the time.
    """
    for _ in range(MAX_COUNTS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _size(folder) + _unlinked(process, folder)
    return math.inf


def _size(folder: Path) -> float:
    """Return the bytes of all files in a folder, see `_written`. Raises `FileNotFoundError` if any has moved."""
    total, count, left = 0, 0, [str(folder)] if folder.exists() else []
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_FILES:
                        return math.inf
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            return math.inf
    return total


def _unlinked(process: int, folder: Path) -> int:
    """Return the bytes of files that a process has deleted and keeps open or mapped; 0 where the system does not tell.

    The first thread may have ended; all threads have the same files. A mapped file counts as of maximum size. Raises
    `FileNotFoundError` if a file was closed after it was listed.
    """
    sizes: dict[int, int] = {}
    threads: list[str] = []
    with contextlib.suppress(OSError):
        threads = sorted(os.listdir(f"/proc/{process}/task"), key=int)[:2]
    for thread in threads:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has ended
            for line in Path(f"/proc/{process}/task/{thread}/maps").read_bytes().splitlines():
                if line.endswith(b" (deleted)") and b" " + os.fsencode(folder.resolve()) + b"/" in line:
                    sizes[int(line.split()[4])] = MAX_FILE
            with os.scandir(f"/proc/{process}/task/{thread}/fd") as files:
                for file in files:
                    found = file.stat()
                    if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                        sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def _threads(process: int) -> int:
    """Return the number of threads of a process; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    return 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with its group, and close its pipes."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()

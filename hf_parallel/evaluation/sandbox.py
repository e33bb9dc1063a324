"""Run Python code from a model's answer in a separate process, with limits.

On Linux with Landlock (5.13) and seccomp, on x86-64 and 64-bit ARM, the kernel isolates the process, even as root and
in a container, where namespaces (bubblewrap) are often unavailable. Code can read Python's files, shared libraries and
its own folder. It cannot write files, use the network, start or signal other processes, or share memory. Time, memory,
threads and output are limited. It can still see whether a path exists, and its size, dates and owner.

Elsewhere `run_code` raises an error, unless `HF_ALLOW_CODE_EVAL=1` is set, as for `code_eval` of the evaluate library.
Then only the limits apply, so use a container or a virtual machine.

This file is also the script that runs in the process, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import math
import os
import platform
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"),
    *("/etc/localtime", "/dev/null", "/dev/urandom", "/dev/zero"),
)
"""Files and folders that Python needs besides its own."""
MIN_MEMORY = 1 << 26
MAX_THREADS = 256
START_SECONDS = 60.0
POLL_SECONDS = 0.05
ALLOW = "HF_ALLOW_CODE_EVAL"

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYSTEM_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, lseek 8 62, close 3 57, dup 32 23, dup2 33 -1,
dup3 292 24, pipe 22 -1, pipe2 293 59, stat 4 -1, lstat 6 -1, fstat 5 80, newfstatat 262 79, statx 332 291,
access 21 -1, faccessat 269 48, open 2 -1, openat 257 56, getdents64 217 61, getcwd 79 17, chdir 80 49, fcntl 72 25,
ioctl 16 29, select 23 -1, pselect6 270 72, poll 7 -1, ppoll 271 73, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -1, epoll_pwait 281 22, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233,
brk 12 214, clone 56 220, futex 202 98, set_robust_list 273 99, rseq 334 293, sched_yield 24 124,
sched_getaffinity 204 123, prctl 157 167, exit 60 93, exit_group 231 94, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, sigaltstack 131 132, pause 34 -1, restart_syscall 219 128, tgkill 234 131, alarm 37 -1,
setitimer 38 103, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -1, times 100 153, getrusage 98 165, prlimit64 302 261, getpid 39 172, gettid 186 178,
getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, uname 63 160, getrandom 318 278
"""
"""Allowed system calls, with their numbers on x86_64 and aarch64; -1: does not exist."""
ALL_BITS = 0xFFFFFFFF
CLOCKS = (*range(8), 11)
CHECKED_ARGUMENTS: dict[str, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    "open": ((1, os.O_ACCMODE | os.O_CREAT | os.O_TRUNC, (0, 1, 2)),),
    "openat": ((2, os.O_ACCMODE | os.O_CREAT | os.O_TRUNC, (0, 1, 2)),),
    "fcntl": ((1, ALL_BITS, (0, 1, 2, 3, 4, 1030)),),  # duplicate a descriptor, get and set its flags
    "ioctl": ((1, ALL_BITS, (0x5401, 0x5421, 0x5450, 0x5451)),),  # TCGETS (isatty), FIONBIO, FIONCLEX, FIOCLEX
    "prctl": ((0, ALL_BITS, (15, 16)),),  # name of a thread
    "clone": ((0, ALL_BITS, (0x3D0F00, 0x7D0F00)),),  # a thread, as glibc and musl start it
    "madvise": ((2, ALL_BITS, (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)),),  # not: write to disk, poison, merge
    **dict.fromkeys(("clock_gettime", "clock_getres", "clock_nanosleep"), ((0, ALL_BITS, CLOCKS),)),  # no process's
}
"""Index, mask and values of checked arguments: the masked argument must be one of the values."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a run.

    Parameters
    ----------
    returncode : int
        Exit status; 128 + n for signal n, as in a shell.
    stdout, stderr : str
        Output of the code, up to `max_output` characters each.
    timed_out : bool
        Whether the run was ended after `timeout` seconds.
    truncated : bool
        Whether the run was ended because it printed too much or started too many threads.
    seconds : float
        Wall-clock time.
    is_isolated : bool
        Whether the kernel isolated the process; see the module docstring.
    """

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0
    is_isolated: bool = False


def run_code(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    timeout: float = 10.0,
    max_memory: int = 1 << 29,
    max_output: int = 1 << 20,
    stop: threading.Event | None = None,
) -> SandboxResult:
    """Run Python code as `__main__` in a process with limits. The module docstring says what is guaranteed where.

    Parameters
    ----------
    code, stdin : str
        The code, and its standard input.
    files : Mapping[str, str], optional
        Texts of files in the working folder, by name, for the code to read.
    timeout : float
        Wall-clock seconds, without the start of Python. CPU time is limited to a second more, rounded up.
    max_memory : int
        Bytes of address space. Not enforced on macOS.
    max_output : int
        Bytes of stdout, and of stderr.
    stop : threading.Event, optional
        Ends the run when another thread sets it.

    Raises
    ------
    ValueError
        If a limit is not positive, or if a file name has folders.
    RuntimeError
        If the process cannot be limited, or if the kernel cannot isolate it and `HF_ALLOW_CODE_EVAL` is not 1.
    """
    if os.name != "posix":
        raise RuntimeError(f"run_code needs Linux or macOS, got {platform.system()}")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    for name, value, least in (("max_memory", max_memory, MIN_MEMORY), ("max_output", max_output, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    with tempfile.TemporaryDirectory(prefix="hf_parallel_sandbox_") as base:
        folder = Path(base, "work")
        folder.mkdir()
        for name, text in (files or {}).items():
            if Path(name).name != name:
                raise ValueError(f"names of files must have no folders, got {name!r}")
            _write(folder / name, text)
        settings = limits([str(folder)], math.ceil(timeout) + 1, max_memory)
        settings |= {"code": _write(Path(base, "code.py"), code), "folder": str(folder)}
        read_end, write_end = os.pipe()
        with open(read_end, "rb") as status:
            try:
                with open(_write(Path(base, "stdin"), stdin), "rb") as file:
                    settings["status"] = write_end
                    streams = {"stdin": file, "stderr": subprocess.PIPE, "pass_fds": [write_end]}
                    process = start_python(__file__, settings, **streams)
            finally:
                os.close(write_end)
            try:
                is_isolated = _started(process, status.fileno())
                output, ended_by, seconds = _wait(process, timeout, max_output, stop)
            finally:
                _kill(process)
    status_code = process.returncode
    return SandboxResult(
        returncode=status_code if status_code >= 0 else 128 - status_code,
        stdout=output[0].decode("utf-8", errors="replace"),
        stderr=output[1].decode("utf-8", errors="replace"),
        timed_out=ended_by == "time" or status_code == -signal.SIGXCPU,
        truncated=ended_by == "size",
        seconds=seconds,
        is_isolated=is_isolated,
    )


def limits(readable: list[str], seconds: int, memory: int) -> dict[str, object]:
    """Return the settings of `restrict`: readable paths, including Python's, CPU seconds, bytes of memory."""
    own = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)}
    paths = {os.path.realpath(path) for path in (*readable, *(own - {"/usr", "/usr/local", "/"}))}
    return {"readable": sorted({*paths, *READABLE}), "seconds": seconds, "memory": memory}


def start_python(script: str, settings: Mapping[str, object], **options: Any) -> subprocess.Popen[bytes]:
    """Start a script of this package in an empty environment; `settings` is its argument, as JSON."""
    return subprocess.Popen(
        [sys.executable, "-I", "-B", script, json.dumps(settings)],
        stdout=subprocess.PIPE,
        env={"PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        **options,
    )


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return str(path)


def _started(process: subprocess.Popen[bytes], status: int) -> bool:
    """Wait until a process has limited itself; return whether the kernel isolates it."""
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        found = os.read(status, 1) if selector.select(START_SECONDS) else b""
    if not found:
        process.kill()
        assert process.stderr is not None
        raise RuntimeError(f"the process could not be limited: {process.stderr.read().decode(errors='replace')[-500:]}")
    if found == b"0" and os.environ.get(ALLOW) != "1":
        raise RuntimeError(
            "code of a model is not run: this system cannot isolate it, which needs Linux 5.13 with Landlock and "
            f"seccomp. Inside a container or virtual machine, set {ALLOW}=1 to run it with limits only"
        )
    return found == b"1"


def _wait(
    process: subprocess.Popen[bytes], timeout: float, max_output: int, stop: threading.Event | None
) -> tuple[list[bytes], str, float]:
    """Read the output until the process ends or exceeds a limit. Return it, the limit and the seconds."""
    start = time.monotonic()
    output = [bytearray(), bytearray()]
    ended_by = ""
    with selectors.DefaultSelector() as selector:
        for index, stream in enumerate((process.stdout, process.stderr)):
            assert stream is not None
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
            if max(map(len, output)) > max_output or _num_threads(process.pid) > MAX_THREADS:
                ended_by = "size"
            elif time.monotonic() - start > timeout:
                ended_by = "time"
            elif stop is not None and stop.is_set():
                ended_by = "stop"
    return [bytes(one[:max_output]) for one in output], ended_by, time.monotonic() - start


def _num_threads(process: int) -> int:
    """Return the number of threads of a process; 0 if unknown."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    return 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, and close its pipes."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


# In the process


def restrict(readable: list[str], seconds: int, memory: int) -> bool:
    """Limit this process irrevocably; return whether the kernel isolates it."""
    import resource  # not on Windows

    for name, limit in {"CPU": seconds, "AS": memory, "FSIZE": 0, "NOFILE": 64, "CORE": 1}.items():
        # FSIZE limits files, not pipes. At CORE=0, programs still receive core dumps by a pipe.
        with contextlib.suppress(ValueError, OSError):  # macOS cannot limit memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    try:
        if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:  # only the calling thread is restricted
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
        _check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))
        _restrict_files(libc, readable)
        _filter_system_calls(libc)
    except (OSError, KeyError):
        return False
    return True


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _restrict_files(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Allow reading `readable` files and folders, and no other access (Landlock)."""
    version = _check(libc.syscall(444, None, 0, 1))
    all_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("=QQQ", all_rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(libc.syscall(444, rules, ctypes.c_size_t(len(rules)), 0))
    for path in readable:
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined, unused-ignore]
            rights = 0b1100 if os.path.isdir(path) else 0b100  # read files, list folders
            _check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, file), 0))
            os.close(file)
    _check(libc.syscall(446, ruleset, 0))
    os.close(ruleset)


def filter_program(machine: str, process: int) -> list[tuple[int, int, int, int]]:
    """Return the steps of a BPF program that allows `SYSTEM_CALLS` to a process on a machine.

    Others fail with EPERM, or with ENOSYS if they are newer than Linux 5.1, so that libraries fall back to older ones.
    """
    load, equal, at_least, mask_by, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, fail, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS
    itself = {"tgkill": (process,), "sched_getaffinity": (0, process)}
    checked = CHECKED_ARGUMENTS | {name: ((0, ALL_BITS, values),) for name, values in itself.items()}
    resources = tuple(number for number in range(16) if number != 4)  # RLIMIT_CORE
    checked["prlimit64"] = ((0, ALL_BITS, (0, process)), (1, ALL_BITS, resources))
    program = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    for name, *numbers in map(str.split, SYSTEM_CALLS.split(",")):
        number = int(numbers[list(ARCHITECTURES).index(machine)])
        steps = []
        for index, mask, values in checked.get(name, ()):
            steps += [(load, 0, 0, 16 + 8 * index), (mask_by, 0, 0, mask)]
            steps += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)] + [(give, 0, 0, fail)]
        if number >= 0:
            program += [(equal, 0, len(steps) + 1, number), *steps, (give, 0, 0, allow)]
    return [*program, (at_least, 0, 1, 424), (give, 0, 0, absent), (give, 0, 0, fail)]


def _filter_system_calls(libc: ctypes.CDLL) -> None:
    """Let all other system calls fail (seccomp)."""
    if sys.maxsize < 1 << 32:
        raise OSError("a 32-bit program has other system calls")
    program = filter_program(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    _check(libc.prctl(22, 2, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0))  # PR_SET_SECCOMP


def _main() -> None:
    """Restrict this process, tell the parent, and run the code as `__main__`."""
    settings = json.loads(sys.argv.pop(1))
    with open(settings["code"], encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with its parent
    os.chdir(settings["folder"])
    is_isolated = restrict(settings["readable"], settings["seconds"], settings["memory"])
    os.write(settings["status"], b"1" if is_isolated else b"0")
    os.close(settings["status"])
    module = ModuleType("__main__")
    vars(module).update(__file__="answer.py", __builtins__=__builtins__)
    sys.argv, sys.modules["__main__"] = ["answer.py"], module
    linecache.cache["answer.py"] = len(text), None, text.splitlines(True), "answer.py"
    try:
        exec(compile(text, "answer.py", "exec"), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        sys.exit(1)


if __name__ == "__main__":
    _main()

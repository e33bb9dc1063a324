"""Run Python code from a model's answer in a separate process, with limits.

On Linux with Landlock (5.13) and libseccomp, the kernel isolates the process, even as root and in a container, where
namespaces (bubblewrap) are often unavailable. Code can read Python's files, shared libraries and its own folder. It
cannot write files, use the network, start or signal other processes, or share memory. Time, memory and output are
limited. It can still see whether a path exists, and its size, dates and owner.

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
import select
import signal
import struct
import subprocess
import sys
import tempfile
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
START_SECONDS = 60.0
ALLOW = "HF_ALLOW_CODE_EVAL"
SYSTEM_CALLS = """
read write readv writev pread64 lseek close dup dup2 dup3 pipe pipe2 stat lstat fstat newfstatat statx access faccessat
open openat getdents64 getcwd chdir fcntl ioctl select pselect6 poll ppoll epoll_create1 epoll_ctl epoll_wait
epoll_pwait mmap munmap mremap mprotect madvise brk clone futex set_robust_list rseq sched_yield sched_getaffinity
prctl exit exit_group rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack pause restart_syscall tgkill alarm setitimer
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage prlimit64 getpid gettid getppid
getuid geteuid getgid getegid uname getrandom
"""
"""Allowed system calls."""
ABSENT = ("clone3", "openat2", "faccessat2", "close_range", "futex_waitv")
"""System calls that fail as on an older Linux, so that libraries fall back to allowed ones."""
ALL_BITS = 0xFFFFFFFF
OPENING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC if os.name == "posix" else 0
CHECKED_ARGUMENTS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "open": (1, OPENING, (0, 1, 2)),  # not: create, empty
    "openat": (2, OPENING, (0, 1, 2)),
    "fcntl": (1, ALL_BITS, (0, 1, 2, 3, 4, 1030)),  # duplicate a descriptor, get and set its flags
    "ioctl": (1, ALL_BITS, (0x5401, 0x5421, 0x5450, 0x5451)),  # TCGETS (isatty), FIONBIO, FIONCLEX, FIOCLEX
    "prctl": (0, ALL_BITS, (15, 16)),  # name of a thread
    "clone": (0, ALL_BITS, (0x3D0F00, 0x7D0F00)),  # a thread, as glibc and musl start it
    "madvise": (2, ALL_BITS, (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)),  # not: write to disk, poison, merge
    "prlimit64": (0, ALL_BITS, (0,)),  # its own
    **dict.fromkeys(("clock_gettime", "clock_getres", "clock_nanosleep"), (0, ALL_BITS, (*range(8), 11))),
}
"""Index, mask and values of a checked argument: the masked argument must be one of the values."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a run.

    Parameters
    ----------
    returncode : int
        Exit status; 128 + n for signal n, as in a shell.
    stdout, stderr : str
        Output of the code, up to `max_output` bytes each. Writing more raises `OSError` in the code.
    timed_out : bool
        Whether the run was ended after `timeout` seconds.
    is_isolated : bool
        Whether the kernel isolated the process; see the module docstring.
    """

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False
    is_isolated: bool = False


def run_code(
    code: str,
    *,
    stdin: str = "",
    timeout: float = 10.0,
    max_memory: int = 1 << 29,
    max_output: int = 1 << 20,
) -> SandboxResult:
    """Run Python code as `__main__` in a process with limits. The module docstring says what is guaranteed where.

    Parameters
    ----------
    code, stdin : str
        The code, and its standard input.
    timeout : float
        Wall-clock seconds, without the start of Python. CPU time is limited to a second more, rounded up.
    max_memory : int
        Bytes of address space. Not enforced on macOS.
    max_output : int
        Bytes of stdout, and of stderr.

    Raises
    ------
    ValueError
        If a limit is not positive.
    RuntimeError
        If the process cannot be limited, or if the kernel cannot isolate it and `HF_ALLOW_CODE_EVAL` is not 1.
    """
    if os.name != "posix":
        raise RuntimeError(f"run_code needs Linux or macOS, got {sys.platform}")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    for name, value, least in (("max_memory", max_memory, MIN_MEMORY), ("max_output", max_output, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    with tempfile.TemporaryDirectory(prefix="hf_parallel_sandbox_") as base:
        folder = Path(base, "work")
        paths = [Path(base, name) for name in ("code.py", "stdin", "stdout", "stderr")]
        folder.mkdir()
        for path, text in zip(paths, (code, stdin, "", ""), strict=True):
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
        settings = limits([str(folder)], math.ceil(timeout) + 1, max_memory, max_output)
        settings |= {"code": str(paths[0]), "folder": str(folder)}
        read_end, write_end = os.pipe()
        with open(read_end, "rb") as status, contextlib.ExitStack() as stack:
            with open(write_end, "wb"), contextlib.ExitStack() as files:
                streams = [
                    files.enter_context(open(path, mode))
                    for path, mode in zip(paths[1:], ("rb", "wb", "wb"), strict=True)
                ]
                settings["status"] = write_end
                process = start_python(__file__, settings, *streams, pass_fds=[write_end])
            stack.callback(kill, process)
            is_isolated = _started(status.fileno(), paths[3])
            try:
                process.wait(timeout)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
        output = [path.read_bytes().decode("utf-8", errors="replace") for path in paths[2:]]
    status_code = process.returncode
    return SandboxResult(
        returncode=status_code if status_code >= 0 else 128 - status_code,
        stdout=output[0],
        stderr=output[1],
        timed_out=timed_out or status_code == -signal.SIGXCPU,
        is_isolated=is_isolated,
    )


def limits(readable: list[str], seconds: int, memory: int, output: int) -> dict[str, Any]:
    """Return the arguments of `restrict`: readable paths and Python's, CPU seconds, bytes of memory and of output."""
    installation = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)}
    installation -= {"/usr", "/usr/local", "/"}
    paths = {os.path.realpath(path) for path in (*readable, *installation)}
    return {
        "readable": sorted({*paths, *READABLE}),
        "seconds": seconds,
        "memory": memory,
        "output": output,
    }


def start_python(
    script: str, settings: Mapping[str, object], stdin: Any, stdout: Any, stderr: Any, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a script of this package in an empty environment; `settings` is its argument, as JSON."""
    return subprocess.Popen(
        [sys.executable, "-I", "-B", script, json.dumps(settings)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={"PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        **options,
    )


def is_readable(file: Any, seconds: float) -> bool:
    """Wait until a file can be read or its other end is closed; return whether that was in time."""
    poll = select.poll()  # unlike `select`, it takes descriptors above 1023
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, also the processes that one without isolation has left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: not permitted if all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _started(status: int, errors: Path) -> bool:
    """Wait until a process has limited itself; return whether the kernel isolates it."""
    reported = os.read(status, 1) if is_readable(status, START_SECONDS) else b""
    if not reported:
        raise RuntimeError(f"the process could not be limited: {errors.read_text(errors='replace')[-500:]}")
    if reported == b"0" and os.environ.get(ALLOW) != "1":
        raise RuntimeError(
            "code of a model is not run: this system cannot isolate it, which needs Linux 5.13 with Landlock and "
            f"libseccomp. Inside a container or virtual machine, set {ALLOW}=1 to run it with limits only"
        )
    return reported == b"1"


# In the process


def restrict(readable: list[str], seconds: int, memory: int, output: int) -> bool:
    """Limit this process irrevocably; return whether the kernel isolates it."""
    import resource  # not on Windows

    for name, limit in {"CPU": seconds, "AS": memory, "FSIZE": output, "NOFILE": 64, "CORE": 1}.items():
        # At CORE=0, programs would still receive core dumps by a pipe.
        with contextlib.suppress(ValueError, OSError):  # macOS cannot limit memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    try:
        if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:  # only the calling thread is restricted
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        seccomp = ctypes.CDLL("libseccomp.so.2")
        _check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
        _check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))
        _restrict_files(libc, readable)
        _filter_system_calls(seccomp)
    except OSError:
        return False
    return True


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _restrict_files(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Allow reading `readable` files and folders, and no other access (Landlock)."""
    version = _check(libc.syscall(444, None, 0, 1))
    num_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    all_rights = (1 << num_rights) - 1
    size = 24
    if version < 4:
        size = 8
    elif version < 6:
        size = 16
    rules = struct.pack("=QQQ", all_rights, 3, 3)[:size]
    ruleset = _check(libc.syscall(444, rules, ctypes.c_size_t(len(rules)), 0))
    for path in readable:
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined, unused-ignore]
            rights = 0b1100 if os.path.isdir(path) else 0b100  # read files, list folders
            _check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, file), 0))
            os.close(file)
    _check(libc.syscall(446, ruleset, 0))
    os.close(ruleset)


def _filter_system_calls(seccomp: ctypes.CDLL) -> None:
    """Let all system calls fail except `SYSTEM_CALLS` (seccomp)."""
    allow = 0x7FFF0000
    fail = 0x00050001  # EPERM
    absent = 0x00050026  # ENOSYS
    masked_equal = 7  # SCMP_CMP_MASKED_EQ
    process = os.getpid()
    checked = dict(CHECKED_ARGUMENTS)
    checked["tgkill"] = (0, ALL_BITS, (process,))
    checked["sched_getaffinity"] = (0, ALL_BITS, (0, process))
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(fail))
    actions = dict.fromkeys(SYSTEM_CALLS.split(), allow) | dict.fromkeys(ABSENT, absent)
    for name, action in actions.items():
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # another architecture has it
            continue
        index, mask, values = checked.get(name, (0, 0, ()))
        for value in values:
            compared = struct.pack("=IIQQ", index, masked_equal, mask, value)
            _check(seccomp.seccomp_rule_add_array(context, action, number, 1, compared))
        if not values:
            _check(seccomp.seccomp_rule_add_array(context, action, number, 0, None))
    _check(seccomp.seccomp_load(context))


def _main() -> None:
    """Restrict this process, tell the parent, and run the code as `__main__`."""
    settings = json.loads(sys.argv.pop(1))
    with open(settings.pop("code"), encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with its parent
    os.chdir(settings.pop("folder"))
    status = settings.pop("status")
    os.write(status, b"1" if restrict(**settings) else b"0")
    os.close(status)
    module = ModuleType("__main__")
    vars(module).update(__file__="answer.py", __builtins__=__builtins__)
    sys.argv = ["answer.py"]
    sys.modules["__main__"] = module
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

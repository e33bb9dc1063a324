"""Runs untrusted Python code in this process, after it has given up its rights. `run.py` starts it as a script.

It imports the standard library only. `restrict` limits the whole process for good: resource limits, no capabilities,
Landlock (files; Linux 5.13) and a seccomp filter (system calls; x86-64 and 64-bit ARM). On other systems an audit hook
of Python is all there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYSTEM_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
lseek 8 62, close 3 57, dup 32 23, dup2 33 -1, dup3 292 24, pipe 22 -1, pipe2 293 59, sendfile 40 71,
stat 4 -1, lstat 6 -1, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -1, faccessat 269 48, umask 95 166,
open 2 -1, openat 257 56, creat 85 -1, ftruncate 77 46, fsync 74 82, fdatasync 75 83, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -1, renameat 264 38, mkdir 83 -1, mkdirat 258 34, rmdir 84 -1,
unlink 87 -1, unlinkat 263 35, fcntl 72 25, ioctl 16 29, select 23 -1, pselect6 270 72, poll 7 -1, ppoll 271 73,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -1, epoll_pwait 281 22, mmap 9 222, munmap 11 215,
mremap 25 216, mprotect 10 226, madvise 28 233, msync 26 227, brk 12 214, clone 56 220, futex 202 98,
set_robust_list 273 99, rseq 334 293, sched_yield 24 124, sched_getaffinity 204 123, prctl 157 167, exit 60 93,
exit_group 231 94, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -1, restart_syscall 219 128,
kill 62 129, tgkill 234 131, alarm 37 -1, setitimer 38 103, getitimer 36 102, nanosleep 35 101,
clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -1, times 100 153,
getrusage 98 165, prlimit64 302 261, getpid 39 172, gettid 186 178, getppid 110 173, getpgid 121 155, getpgrp 111 -1,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, uname 63 160, getrandom 318 278
"""
"""System calls that are allowed, with their numbers on x86_64 and aarch64; -1: does not exist there."""
ALL_BITS = 0xFFFFFFFF
CLOCKS = (*range(8), 11)
CHECKED_ARGUMENTS: dict[str, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    "open": ((1, os.O_ACCMODE | os.O_TRUNC, (os.O_RDONLY, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2)),),
    "openat": ((2, os.O_ACCMODE | os.O_TRUNC, (os.O_RDONLY, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2)),),
    "fcntl": ((1, ALL_BITS, (0, 1, 2, 3, 4, 1030)),),  # duplicate a descriptor, get and set its flags
    "ioctl": ((1, ALL_BITS, (0x5401, 0x5421, 0x5450, 0x5451)),),  # TCGETS (isatty), FIONBIO, FIONCLEX, FIOCLEX
    "prctl": ((0, ALL_BITS, (15, 16)),),  # name of a thread
    "clone": ((0, ALL_BITS, (0x3D0F00, 0x7D0F00)),),  # a thread, as glibc and musl start it
    "madvise": ((2, ALL_BITS, (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)),),  # not: write to disk, poison, merge
    **dict.fromkeys(("clock_gettime", "clock_getres", "clock_nanosleep"), ((0, ALL_BITS, CLOCKS),)),
}
"""Index, mask and values of arguments: the masked argument must be one of the values.

O_RDONLY with O_TRUNC empties a file, which Landlock checks from Linux 6.2 on. The clocks are not those of a process.
"""
REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.kill"),
    *("os.system", "os.startfile", "signal.pthread_kill", "resource.prlimit"),
)
"""Beginnings of audit events that raise without the kernel's help."""
CHANGES = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil."),
)
"""Beginnings of audit events that change files."""
LOOKS = ("os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.")
"""Beginnings of audit events that read folders."""
_libc = ctypes.CDLL(None, use_errno=True)


def restrict(settings: dict[str, Any]) -> list[str]:
    """Limit this process for good; return what the kernel enforces: limits, and steps such as landlock and seccomp.

    Settings: `seconds` of CPU time, `memory` and `file_size` in bytes, `folder` that may be written if `writable`, and
    `readable` paths.
    """
    enforced = []
    limits = {"CPU": settings["seconds"], "AS": settings["memory"], "FSIZE": settings["file_size"]}
    for name, limit in {**limits, "NOFILE": 64, "CORE": 1}.items():  # at 0, programs still receive core dumps by a pipe
        with contextlib.suppress(ValueError, OSError, AttributeError):  # macOS cannot limit memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
            enforced.append(f"limits.{name}")
    hook = _hook(settings)
    done: list[str] = []
    steps: dict[str, Callable[[], object]] = {
        "one thread": _check_threads,
        "capabilities": _drop_capabilities,
        "landlock": lambda: _restrict_files(settings),
        "seccomp": lambda: _filter_system_calls("landlock" in done),
    }
    if sys.platform == "linux":
        _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        for name, step in steps.items():
            with contextlib.suppress(OSError, KeyError):
                step()
                done.append(name)
    if len(done) < len(steps):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))
        sys.addaudithook(hook)
    return enforced + done


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _check_threads() -> None:
    """Raise `OSError` if there are other threads: the next steps limit the calling thread only."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("another thread is running")


def _drop_capabilities() -> None:
    _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))


def _restrict_files(settings: dict[str, Any]) -> None:
    """Allow reading of `readable`, and any use of `folder` (Landlock)."""
    version = _check(_libc.syscall(444, None, 0, 1))
    all_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("=QQQ", all_rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(_libc.syscall(444, rules, ctypes.c_size_t(len(rules)), 0))
    read, write = 0b1100, all_rights & 0b110_0001_1011_1110  # regular files and folders; nothing is executed
    allowed = [(path, read) for path in settings["readable"]]
    allowed += [(settings["folder"], write if settings["writable"] else read)]
    for path, rights in allowed:
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined, unused-ignore]
            rights &= -1 if os.path.isdir(path) else 0b100
            _check(_libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, file), 0))
            os.close(file)
    _check(_libc.syscall(446, ruleset, 0))
    os.close(ruleset)


def filter_program(machine: str, process: int, calls: str = SYSTEM_CALLS) -> list[tuple[int, int, int, int]]:
    """Return the steps of a BPF program that allows the system calls of a process on a machine.

    All others fail: with ENOSYS from Linux 5.1 on, so that libraries use an older one, and with EPERM before.
    """
    load, equal, at_least, mask_by, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, fail, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS
    itself = {"kill": (process,), "tgkill": (process,), "getpgid": (0, process), "sched_getaffinity": (0, process)}
    checked = CHECKED_ARGUMENTS | {name: ((0, ALL_BITS, values),) for name, values in itself.items()}
    resources = tuple(number for number in range(16) if number != resource.RLIMIT_CORE)
    checked["prlimit64"] = ((0, ALL_BITS, (0, process)), (1, ALL_BITS, resources))
    program = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    for name, *numbers in map(str.split, calls.split(",")):
        number = int(numbers[list(ARCHITECTURES).index(machine)])
        steps = []
        for index, mask, values in checked.get(name, ()):
            steps += [(load, 0, 0, 16 + 8 * index), (mask_by, 0, 0, mask)]
            steps += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)] + [(give, 0, 0, fail)]
        if number >= 0:
            program += [(equal, 0, len(steps) + 1, number), *steps, (give, 0, 0, allow)]
    return [*program, (at_least, 0, 1, 424), (give, 0, 0, absent), (give, 0, 0, fail)]


def _filter_system_calls(hide_links: bool) -> None:
    """Let all system calls fail that are not allowed (seccomp). The audit hook reads links."""
    if sys.maxsize < 1 << 32:
        raise OSError("a 32-bit program has other system calls")
    calls = SYSTEM_CALLS if hide_links else f"{SYSTEM_CALLS}, readlink 89 -1, readlinkat 267 78"
    program = filter_program(platform.machine(), os.getpid(), calls)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(_libc.prctl(22, 2, filters, 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _hook(settings: dict[str, Any]) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that refuses what the kernel refuses, as far as Python's audit events show it."""
    folder, writable = os.path.realpath(settings["folder"]), settings["writable"]
    readable = [os.path.realpath(path) for path in settings["readable"]]
    realpath, fsdecode, changing = os.path.realpath, os.fsdecode, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def inside(path: Any, folders: list[str]) -> bool:
        if isinstance(path, int):  # open already
            return True
        full = realpath(fsdecode(path))
        return any(full == one or full.startswith(one.rstrip("/") + "/") for one in folders)

    def guard(event: str, arguments: tuple[object, ...]) -> None:
        bad = event.startswith(REFUSED)
        if event == "open" and not isinstance(arguments[0], int):
            changes = isinstance(arguments[2], int) and arguments[2] & changing
            bad = bool(changes and not writable) or not inside(arguments[0], [folder, *(() if changes else readable)])
        elif event.startswith(CHANGES):
            paths = [one for one in arguments if isinstance(one, str | bytes | os.PathLike)]
            bad = not writable or not all(inside(path, [folder]) for path in paths)
        elif event.startswith(LOOKS):
            paths = [one for one in arguments[:1] if isinstance(one, str | bytes | os.PathLike)]
            bad = not all(inside(path, [folder, *readable]) for path in paths)
        if bad:
            raise PermissionError(f"{event} is not allowed here")

    return guard


def main() -> None:
    """Read settings and code, restrict this process, tell the parent, and run the code as `__main__`."""
    settings = json.loads(sys.argv.pop(1))
    with open(settings["code"], encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with its parent
    os.chdir(settings["folder"])
    enforced = restrict(settings)
    with open(settings["status"], "w", encoding="utf-8") as status:
        json.dump(enforced, status)
    if "seccomp" in enforced:  # realpath raises where links cannot be read; the folder has none
        os.path.realpath = lambda path, **_: os.path.abspath(path)  # type: ignore[assignment]
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
    main()

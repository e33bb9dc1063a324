"""Runs untrusted Python code in this process, after it has given up its rights. `run.py` starts it as a script.

It imports the standard library only. `restrict` limits the whole process for good: resource limits, no capabilities,
Landlock (files; Linux 5.13) and a seccomp filter (system calls; x86-64 and 64-bit ARM). An audit hook refuses the same
in Python, with clearer messages, and is all there is on other systems.
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
SYSTEM_CALLS = {  # (x86_64, aarch64); -1: does not exist there
    # network, shared memory and queues, which outlive the process
    **{"socket": (41, 198), "socketpair": (53, 199), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)},
    **{"mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447)},
    # processes
    **{"fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157)},
    **{"setpgid": (109, 154), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424)},
    **{"tkill": (200, 130), "process_madvise": (440, 440), "process_mrelease": (448, 448)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118)},
    **{"sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # what Landlock does not check on files
    **{"truncate": (76, 45), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1)},
    **{"utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466)},
    # the kernel
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97)},
    **{"setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsmount": (432, 432), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
}
"""System calls that fail with EPERM."""
ON_ITSELF = {"kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
"""System calls whose first argument must be the process itself."""
CLONE, CLONE3, PRLIMIT64, FCNTL = (56, 220), (435, 435), (302, 261), (72, 25)
OWNER_COMMANDS = (8, 10, 15, 1026)
"""Commands of fcntl by which a file sends signals to other processes: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_NOTIFY."""
REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.kill"),
    *("os.system", "os.startfile", "signal.pthread_kill", "resource.prlimit"),
)
"""Beginnings of audit events that are refused."""
CHANGES = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil."),
)
"""Beginnings of audit events that change files."""
LOOKS = ("os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.")
"""Beginnings of audit events that read folders."""
_libc = ctypes.CDLL(None, use_errno=True)


def restrict(settings: dict[str, Any]) -> list[str]:
    """Limit this process for good; return what the kernel enforces: limits, capabilities, landlock, seccomp.

    Settings: `seconds` of CPU time, `memory` and `file_size` in bytes, `folder` that may be written if `writable`, and
    `readable` paths.
    """
    enforced = []
    limits = {"CPU": settings["seconds"], "AS": settings["memory"], "FSIZE": settings["file_size"], "CORE": 0}
    for name, limit in {**limits, "NOFILE": 64}.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):  # macOS cannot limit memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
            enforced.append(f"limits.{name}")
    if sys.platform == "linux":
        _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        steps: dict[str, Callable[[], Any]] = {
            "capabilities": _drop_capabilities,
            "landlock": lambda: _restrict_files(settings),
            "seccomp": _filter_system_calls,
        }
        for name, step in steps.items():
            with contextlib.suppress(OSError, KeyError):
                step()
                enforced.append(name)
    if "seccomp" not in enforced:
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))
    sys.addaudithook(_hook(settings, check_paths="landlock" not in enforced))
    return enforced


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _drop_capabilities() -> None:
    _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))


def _restrict_files(settings: dict[str, Any]) -> None:
    """Allow reading of `readable`, and any use of `folder` (Landlock)."""
    version = _check(_libc.syscall(444, None, 0, 1))
    all_rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("=QQQ", all_rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(_libc.syscall(444, rules, ctypes.c_size_t(len(rules)), 0))
    read, write = 0b1100, all_rights & ~0b1  # nothing may be executed
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


def _filter_system_calls() -> None:
    """Let system calls fail that reach beyond this process (seccomp)."""
    machine = platform.machine()
    index, architecture = list(ARCHITECTURES).index(machine) if machine in ARCHITECTURES else -1, ARCHITECTURES[machine]
    load, equal, at_least, bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, fail, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":
        program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, fail)]  # x32
    program += [(equal, 0, 1, CLONE3[index]), (give, 0, 0, absent)]  # the C library uses clone instead
    program += [(equal, 0, 4, CLONE[index]), (load, 0, 0, 16), (bit, 0, 1, 0x10000), (give, 0, 0, allow)]  # threads
    program += [(give, 0, 0, fail)]
    for number in (numbers[index] for numbers in ON_ITSELF.values()):
        program += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 0, 1, os.getpid()), (give, 0, 0, allow)]
        program += [(give, 0, 0, fail)]
    program += [(equal, 0, 5, PRLIMIT64[index]), (load, 0, 0, 16), (equal, 1, 0, 0), (equal, 0, 1, os.getpid())]
    program += [(give, 0, 0, allow), (give, 0, 0, fail)]
    program += [(equal, 0, len(OWNER_COMMANDS) + 3, FCNTL[index]), (load, 0, 0, 24)]
    program += [(equal, len(OWNER_COMMANDS) - i, 0, command) for i, command in enumerate(OWNER_COMMANDS)]
    program += [(give, 0, 0, allow), (give, 0, 0, fail)]
    for number in (numbers[index] for numbers in SYSTEM_CALLS.values() if numbers[index] >= 0):
        program += [(equal, 0, 1, number), (give, 0, 0, fail)]
    program += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(_libc.prctl(22, 2, filters, 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _hook(settings: dict[str, Any], check_paths: bool) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses what the kernel refuses, as far as Python's audit events show it."""
    folder, writable = os.path.realpath(settings["folder"]), settings["writable"]
    readable = [os.path.realpath(path) for path in settings["readable"]]
    realpath, fsdecode, changing = os.path.realpath, os.fsdecode, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def inside(path: Any, folders: list[str]) -> bool:
        if isinstance(path, int):  # open already
            return True
        full = realpath(fsdecode(path))
        return any(full == one or full.startswith(one.rstrip("/") + "/") for one in folders)

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        bad = event.startswith(REFUSED)
        if event == "open" and not isinstance(arguments[0], int):
            changes = isinstance(arguments[2], int) and arguments[2] & changing
            bad = bool(changes and not writable)
            if check_paths:
                bad = bad or not inside(arguments[0], [folder] if changes else [folder, *readable])
        elif event.startswith(CHANGES):
            paths = [one for one in arguments if isinstance(one, str | bytes | os.PathLike)]
            bad = not writable or (check_paths and not all(inside(path, [folder]) for path in paths))
        elif check_paths and event.startswith(LOOKS):
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

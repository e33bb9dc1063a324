"""The sandbox: normal programs work, and hostile ones do not get out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_parallel.evaluation.sandbox import SandboxResult, run_child, run_code
from hf_parallel.evaluation.sandbox import run as sandbox_run

ARCHITECTURES = ("x86_64", "aarch64")
EXIT_THREAD = 60 if platform.machine() == "x86_64" else 93

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs setrlimit")


def run(code: str, **settings: Any) -> SandboxResult:
    return run_code(textwrap.dedent(code), **{"timeout": 10.0, **settings})


@pytest.fixture(scope="module")
def isolated() -> None:
    """Skip a test of what only the kernel guarantees."""
    if not run("").is_isolated:
        pytest.skip("needs Linux with Landlock and seccomp")


# Normal programs


def test_a_program_reads_stdin_and_files_and_prints() -> None:
    found = run(
        "import sys\nprint(input(), open('data.txt').read())\nprint('more', file=sys.stderr)",
        stdin="first\n",
        files={"data.txt": "é"},
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "first é\n", "more\n")
    assert not found.timed_out
    assert not found.truncated


def test_a_program_may_write_files_in_its_folder_which_is_deleted() -> None:
    found = run("import os\nopen('a', 'w').write('1')\nos.mkdir('b')\nprint(open('a').read(), os.getcwd())")
    content, folder = found.stdout.split()
    assert content == "1"
    assert not Path(folder).exists()


def test_a_folder_that_is_not_writable_stays_empty() -> None:
    for code in ("open('a', 'w')", "import os; os.mkdir('a')", "import os; os.open('a', os.O_CREAT)"):
        assert "PermissionError" in run(code, writable=False).stderr


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os._exit(3)", 3)])
def test_the_exit_status_is_returned(code: str, status: int) -> None:
    assert run(code).returncode == status


def test_an_error_shows_the_line_and_nothing_of_the_sandbox() -> None:
    found = run("def f():\n    return 1 / 0\nf()")
    assert "return 1 / 0" in found.stderr
    assert "ZeroDivisionError" in found.stderr
    assert "run_child" not in found.stderr


ORDINARY = {
    "numbers": """
        import decimal, fractions, hashlib, heapq, itertools, json, math, random, re, statistics, uuid, zlib
        random.seed(0)
        print(random.random(), math.comb(90, 45), fractions.Fraction(1, 3) + 1, decimal.Decimal(2).sqrt())
        print(hashlib.sha256(b"a").hexdigest(), zlib.crc32(b"a"), len(str(uuid.uuid4())), statistics.stdev([1, 2, 5]))
        print([*itertools.permutations("abc")], json.dumps({"a": [1]}), re.sub("a+", "b", "caat"), sorted(input()))
    """,
    "files": """
        import glob, mmap, os, pathlib, shutil, tempfile
        pathlib.Path("a").write_text("abc"); os.mkdir("d"); shutil.copyfile("a", "d/b"); os.rename("d/b", "c")
        with open("c", "r+b") as file: file.truncate(2); file.seek(0, 2); file.write(b"!"); os.fsync(file.fileno())
        with tempfile.TemporaryFile() as file: file.write(b"xyz"); file.flush(); print(mmap.mmap(file.fileno(), 3)[:])
        with tempfile.TemporaryDirectory(dir=".") as folder: print(os.path.isdir(folder), os.access(folder, os.W_OK))
        print(sorted(glob.glob("*")), open("c").read(), os.path.samefile(".", pathlib.Path("d/..").resolve()))
        os.chdir("d"); os.remove("../a"); os.rmdir("../d"); print(os.listdir(".."), os.stat("../c").st_size)
    """,
    "threads": """
        import concurrent.futures, queue, sys, threading
        sys.setrecursionlimit(10**5)
        def depth(n): return n and 1 + depth(n - 1)
        thread = threading.Thread(target=lambda: print(depth(20000)), name="deep")
        thread.start(); thread.join()
        with concurrent.futures.ThreadPoolExecutor(8) as pool: print([*pool.map(pow, range(9), range(9))])
        print(threading.Event().wait(0.01), queue.Queue().qsize())
    """,
    "time and signals": """
        import os, platform, resource, selectors, signal, sys, time
        signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1); signal.alarm(0)
        signal.raise_signal(signal.SIGALRM); os.kill(os.getpid(), signal.SIGALRM)
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        clocks = time.time(), time.monotonic(), time.process_time(), time.thread_time(), resource.getrusage(0).ru_utime
        print(all(clocks), time.localtime().tm_year > 2000, platform.system(), platform.machine(), sys.stdin.isatty())
        read, write = os.pipe(); os.set_blocking(read, False); os.write(write, b"x"); os.set_inheritable(write, True)
        with selectors.DefaultSelector() as selector: selector.register(read, 1); print(len(selector.select(1)))
        print(os.getpgrp() == os.getpid(), os.getuid(), os.cpu_count() > 0, len(os.urandom(8)))
    """,
    "native code": """
        import ctypes, os
        print(ctypes.CDLL(None).getpid() == os.getpid(), ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 5)())
        import numpy
        print(numpy.arange(4).sum(), numpy.linalg.inv(numpy.eye(300) * 2)[0, :2], numpy.ones(10**6).mean())
    """,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_print_the_same_outside(name: str, tmp_path: Path) -> None:
    code = textwrap.dedent(ORDINARY[name])
    command = [sys.executable, "-I", "-c", code]
    outside = subprocess.run(
        command, cwd=tmp_path, input="cab\n", capture_output=True, text=True, start_new_session=True, check=True
    )
    found = run(code, stdin="cab\n", timeout=60, max_memory=1 << 30)
    assert (found.stdout, found.stderr, found.returncode) == (outside.stdout, "", 0)


def test_the_environment_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert "SECRET" not in run("import os; print(dict(os.environ))").stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": float("inf")}, "timeout"),
        ({"max_memory": 1}, "max_memory must be an int of at least 67108864, got 1"),
        ({"max_output": 0}, "max_output"),
        ({"files": {"../a": ""}}, "names of files must have no folders, got '../a'"),
    ],
)
def test_malformed_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_code("", **settings)


def test_lone_surrogates_and_binary_output_do_no_harm() -> None:
    assert "UnicodeEncodeError" in run("print('\ud800')").stderr
    assert run("print(ascii(input()))", stdin="\ud800").stdout
    assert "�" in run("import os; os.write(1, bytes([255]))").stdout


# Limits


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(10**9): pass",
        "import time; time.sleep(60)",
        "import signal; signal.pause()",
        "import os; os.close(1); os.close(2)\nwhile True: pass",
        "10**10**9",
        "(_ for _ in iter(int, 1)).__next__() or sum(iter(int, 1))",
    ],
)
def test_long_runs_are_ended(code: str) -> None:
    found = run(code, timeout=0.5)
    assert found.timed_out
    assert found.returncode != 0


def test_a_run_that_ignores_signals_is_ended() -> None:
    code = """
    import signal, time
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True:
        try: time.sleep(60)
        except BaseException: pass
    """
    assert run(code, timeout=0.5).timed_out


def test_a_run_is_ended_by_another_thread() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    found = run("while True: pass", timeout=600, stop=stop)
    assert not found.timed_out
    assert found.returncode == 137


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize(
    "code", ["x = [0] * 10**9", "x = bytearray(10**10)", "x = []\nwhile True: x.append(' ' * 10**7)"]
)
def test_memory_is_limited(code: str) -> None:
    found = run(code, max_memory=1 << 28)
    assert found.returncode == 1
    assert "MemoryError" in found.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_cut_and_the_run_is_ended(stream: str) -> None:
    found = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)", max_output=1000)
    assert found.truncated
    assert getattr(found, stream) == "x" * 1000


def test_files_are_limited() -> None:
    code = """
    for number in range(1000):
        with open(str(number), 'wb') as file: file.write(bytes(10**7))
    """
    found = run(code, timeout=60)
    assert found.truncated
    assert "File too large" in run("open('a', 'wb').write(bytes(10**8))").stderr


KEEP_DELETED = """
def keep():
    kept = [open(str(n), "wb") for n in range(10)]
    for file in kept: os.unlink(file.name)
    for file in kept: file.write(bytes(10**7))
    time.sleep(60)
"""
KEEP_MAPPED = """
for n in range(10):
    with open(str(n), "wb+") as file:
        file.write(bytes(10**7)); file.flush()
        libc.mmap(None, 4096, 1, 2, file.fileno(), 0)
    os.unlink(str(n))
time.sleep(60)
"""
FILES = {
    "deleted": KEEP_DELETED + "keep()",
    "kept by another thread": f"{KEEP_DELETED}\nthreading.Thread(target=keep).start()\nlibc.syscall({EXIT_THREAD}, 0)",
    "mapped": KEEP_MAPPED,
    "unlistable": "os.mkdir('d', 0o300)\nfor n in range(10): open(f'd/{n}', 'wb').write(bytes(10**7))",
    "many threads": "for n in range(2000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("name", FILES)
def test_hidden_files_and_threads_are_limited(name: str) -> None:
    code = f"import ctypes, os, threading, time\nlibc = ctypes.CDLL(None)\n{FILES[name]}"
    found = run(code, timeout=60, max_memory=1 << 34)
    assert found.truncated, found


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize("moves", [3, 10**6])
@pytest.mark.parametrize("what", ["folder", "file", "number of an open file"])
def test_what_moves_while_it_is_counted_is_counted_or_infinite(
    what: str, moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, scan, numbers = sandbox_run.MAX_DISK + 1, os.scandir, iter(range(1, moves))
    place = tmp_path / "0"
    if what == "folder":
        place.mkdir()
    with open(place / "content" if what == "folder" else place, "wb") as file:
        file.truncate(size)  # takes no disk space
    held = [os.open(place, os.O_RDONLY)]
    watched = str(tmp_path)
    if what == "number of an open file":
        place.unlink()
        watched = f"/proc/{os.getpid()}/task/{os.getpid()}/fd"

    def list_and_move(path: str) -> Any:
        nonlocal place
        listed = [entry for entry in list(scan(path)) if os.path.exists(entry)]  # not the number of the listing itself
        number = next(numbers, None) if path == watched else None
        if number is not None and what == "number of an open file":
            held.append(fcntl.fcntl(held[-1], fcntl.F_DUPFD, held[-1] + 1))
            os.close(held[-2])
        elif number is not None:
            place = place.rename(tmp_path / str(number))
        return contextlib.nullcontext(listed)

    monkeypatch.setattr(os, "scandir", list_and_move)
    try:
        found = sandbox_run._written(os.getpid(), tmp_path)
    finally:
        os.close(held[-1])
    assert found >= size
    assert (found == math.inf) == (moves > 3)


def test_a_process_that_cannot_start_leaves_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        run("")
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
        "import os\nos.mkdir('d', 0)\nfor n in range(10**6): open(str(n), 'w').close()",
        "import os\nos.umask(0o777)\nfor n in range(10**6): os.mkdir(str(n))",
    ],
)
def test_folders_of_any_depth_and_number_are_removed(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(code, timeout=2).returncode != 0
    assert not list(tmp_path.iterdir())


# Hostile programs


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "import _socket; _socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=2)",
    ],
)
def test_there_is_no_network(code: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        found = run(code.format(port=server.getsockname()[1]))
        assert found.returncode == 1
        assert "not permitted" in found.stderr
        with pytest.raises(TimeoutError):
            server.accept()


FORBIDDEN = """
socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, sendmsg 46 211, sendto 44 206, accept4 288 242,
shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187,
semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, mq_open 240 180, mq_unlink 241 181,
mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185, memfd_create 319 279,
inotify_init 253 -1, inotify_init1 294 26, inotify_add_watch 254 27, fanotify_init 300 262, fanotify_mark 301 263,
flock 73 32, readlink 89 -1, readlinkat 267 78, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
llistxattr 195 12, flistxattr 196 13, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, chmod 90 -1, fchmod 91 52, fchmodat 268 53, chown 92 -1, fchown 93 55,
lchown 94 -1, fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1, utimensat 280 88, truncate 76 45,
fallocate 285 47, statfs 137 43, fstatfs 138 44, link 86 -1, linkat 265 37, symlink 88 -1, symlinkat 266 36,
mknod 133 -1, mknodat 259 33, renameat2 316 276, name_to_handle_at 303 264, open_by_handle_at 304 265, splice 275 76,
tee 276 77, vmsplice 278 75, copy_file_range 326 285, sync_file_range 277 84, fadvise64 221 223, mincore 27 232,
fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, setsid 112 157, setpgid 109 154, getsid 124 156, tkill 200 130,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, signalfd4 289 74, timer_create 222 107, timerfd_create 283 85,
eventfd2 290 19, getpriority 140 141, setpriority 141 140, ioprio_get 252 31, ioprio_set 251 30,
sched_getparam 143 121, sched_setparam 142 118, sched_getscheduler 145 120, sched_setscheduler 144 119,
sched_getattr 315 275, sched_setattr 314 274, sched_setaffinity 203 122, sched_rr_get_interval 148 127,
migrate_pages 256 238, move_pages 279 239, mbind 237 235, mlock 149 228, mlockall 151 230, membarrier 324 283,
get_robust_list 274 100, setrlimit 160 164, setuid 105 146, setgid 106 144, setgroups 116 159, setresuid 117 147,
setfsuid 122 151, capget 125 90, capset 126 91, personality 135 92, unshare 272 97, setns 308 268, mount 165 40,
umount2 166 39, pivot_root 155 41, chroot 161 51, swapon 167 224, quotactl 179 60, acct 163 89, reboot 169 142,
sethostname 170 161, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
init_module 175 105, finit_module 313 273, kexec_load 246 104, syslog 103 116, sync 162 81, syncfs 306 267,
vhangup 153 58, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, add_key 248 217, request_key 249 218,
keyctl 250 219, seccomp 317 277, lookup_dcookie 212 18, io_setup 206 0, io_submit 209 2, pidfd_send_signal 424 424,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, open_tree 428 428, move_mount 429 429,
fsopen 430 430, fsmount 432 432, fspick 433 433, pidfd_open 434 434, clone3 435 435, close_range 436 436,
openat2 437 437, pidfd_getfd 438 438, process_madvise 440 440, mount_setattr 442 442, quotactl_fd 443 443,
landlock_create_ruleset 444 444, memfd_secret 447 447, process_mrelease 448 448, cachestat 451 451, statmount 457 457,
setxattrat 463 463, getxattrat 464 464, open_tree_attr 467 467, file_setattr 469 469
"""
"""System calls that reach beyond a process and its folder, with their numbers on x86_64 and aarch64."""
FORBIDDEN_ARGUMENTS = """
fcntl 72 25: F_GETLK 0 5, F_SETLK 0 6, F_SETLKW 0 7, F_SETOWN 0 8, F_SETSIG 0 10, F_SETOWN_EX 0 15, F_OFD_SETLK 0 37,
 F_SETLEASE 0 1024, F_NOTIFY 0 1026, F_SETPIPE_SZ 0 1031, F_ADD_SEALS 0 1033
ioctl 16 29: FS_IOC_GETFLAGS 0 0x80086601, FS_IOC_SETFLAGS 0 0x40086602, FS_IOC_SETVERSION 0 0x40087602,
 FS_IOC_FSSETXATTR 0 0x401c5820, FICLONE 0 0x40049409, TIOCSTI 0 0x5412, FIOASYNC 0 0x5452, FIFREEZE 0 0xc0045877
prctl 157 167: PR_SET_PDEATHSIG 1 0, PR_SET_DUMPABLE 4 0, PR_SET_SECCOMP 22 2, PR_SET_PTRACER 0x59616d61 -1
clone 56 220: process 17 0, with_a_namespace 0x7D0F00|0x20000000 0, vfork 0x4111 0, thread_with_own_files 0x3D0B00 0
madvise 28 233: MADV_PAGEOUT 0 0 21, MADV_REMOVE 0 0 9, MADV_HWPOISON 0 0 100
kill 62 129: parent {parent} 0, all -1 0, group 0 0
tgkill 234 131: parent {parent} {parent} 0
getpgid 121 155: parent {parent}
sched_getaffinity 204 123: parent {parent} 128 0
prlimit64 302 261: of_parent {parent} 7 0 0, core_dumps 0 4 0 0
clock_gettime 228 113: of_parent ~{parent}<<3|2 0
openat 257 56: emptying_by_reading -100 0 512
"""
"""System calls that are allowed with other arguments only."""


def table(text: str) -> dict[str, tuple[int, int]]:
    return {name: (int(one), int(other)) for name, one, other in map(str.split, text.split(","))}


def forbidden(index: int, parent: int) -> list[tuple[str, list[int]]]:
    """Return all forbidden calls on an architecture: names, and numbers with arguments."""
    found = [(name, [numbers[index], *[-1] * 6]) for name, numbers in table(FORBIDDEN).items() if numbers[index] >= 0]
    for line in FORBIDDEN_ARGUMENTS.replace(",\n ", ",").strip().format(parent=parent).splitlines():
        call, cases = line.split(":")
        name, *numbers = call.split()
        for case in cases.split(","):
            label, *arguments = case.split()
            found.append((f"{name} {label}", [int(numbers[index]), *map(eval, arguments)]))
    return found


PROBE = """
import ctypes, json, os
system_call, own, found = ctypes.CDLL(None, use_errno=True).syscall, os.getpid(), {}
for name, (number, *arguments) in json.loads(input()):
    ctypes.set_errno(0)
    result = system_call(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if os.getpid() != own: os._exit(0)
    found[name] = result, ctypes.get_errno()
print(json.dumps(found))
"""


@pytest.mark.usefixtures("isolated")
def test_system_calls_that_reach_outside_fail() -> None:
    """Each table entry, every other number, and the numbers of the x32 ABI."""
    index = ARCHITECTURES.index(platform.machine())
    calls = forbidden(index, os.getpid())
    skipped = {335, 336} | {numbers[index] for numbers in table(run_child.SYSTEM_CALLS).values()}  # uprobes: SIGILL
    calls += [(f"number {n}", [n, *[-1] * 6]) for n in range(600) if n not in skipped]
    calls += [(f"x32 {n}", [0x40000000 + n, *[-1] * 6]) for n in range(548)]
    found = run(PROBE, stdin=json.dumps(calls))
    results = json.loads(found.stdout or "{}")
    assert len(results) == len(calls), found.stderr
    assert not {
        name: result for name, result in results.items() if result not in ([-1, errno.EPERM], [-1, errno.ENOSYS])
    }


@pytest.mark.usefixtures("isolated")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code")
def test_the_32_bit_gate_ends_the_process() -> None:
    code = """
    import ctypes, mmap
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
    print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
    """
    found = run(code)
    assert (found.returncode, found.stdout) == (128 + signal.SIGSYS, "")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_of_each_architecture_allows_what_programs_need_only(machine: str) -> None:
    """The BPF program run by hand, since tests run on one of the architectures."""
    index, own = ARCHITECTURES.index(machine), 12345
    program = run_child.filter_program(machine, own)

    def verdict(number: int, *arguments: int, architecture: int = run_child.ARCHITECTURES[machine]) -> int:
        data = struct.pack("=iIQ6Q", number, architecture, 0, *[one % 2**64 for one in (*arguments, *[0] * 6)][:6])
        position, value = 0, 0
        while True:
            code, yes, no, k = program[position]
            position += 1
            if code == 0x06:
                return k
            if code == 0x20:
                (value,) = struct.unpack_from("=I", data, k)
            elif code == 0x54:
                value &= k
            else:
                position += yes if (value == k if code == 0x15 else value >= k) else no

    for name, (number, *arguments) in forbidden(index, os.getpid()):
        assert verdict(number, *arguments) in (0x50000 + errno.EPERM, 0x50000 + errno.ENOSYS), name
    assert verdict(63, architecture=0x40000003) == 0x80000000
    calls = [
        *(("read", 0), ("write", 1), ("mmap", 0, 1), ("clone", 0x3D0F00), ("kill", own, 9), ("tgkill", own, own, 6)),
        *(
            ("openat", -100, 0, os.O_CREAT | os.O_WRONLY | os.O_TRUNC),
            ("openat", -100, 0, os.O_RDONLY),
            ("exit_group",),
        ),
        *(("fcntl", 0, 1030), ("ioctl", 1, 0x5401), ("clock_gettime", 1), ("prlimit64", 0, 3), ("futex", 0)),
    ]
    numbers = table(run_child.SYSTEM_CALLS)
    for name, *values in calls:
        assert verdict(numbers[name][index], *values) == 0x7FFF0000, name


def secret_file(folder: Path) -> Path:
    path = folder / "secret.txt"
    path.write_text("secret")
    path.chmod(0o666)
    return path


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "code",
    [
        "print(open({path!r}).read())",
        "import os; print(os.read(os.open({path!r}, os.O_RDONLY), 9))",
        "import os; os.symlink({path!r}, 'link'); print(open('link').read())",
        "import os; os.link({path!r}, 'link'); print(open('link').read())",
        "import os; print(os.listdir({folder!r}))",
        "import os; os.chdir({folder!r}); print(open('secret.txt').read())",
        "print(open('../code.py').read())",
        "print(open('/etc/passwd').read())",
        "print(open('/proc/self/environ').read() + 'secret')",
        "import io; print(io.FileIO({path!r}).read())",
        "import mmap, os; print(mmap.mmap(os.open({path!r}, os.O_RDONLY), 0, prot=1)[:])",
        "import importlib.util as u; s = u.spec_from_file_location('secret', {path!r}); s.loader.get_data({path!r})",
    ],
)
def test_files_outside_cannot_be_read(code: str, tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    found = run(code.format(path=str(path), folder=str(tmp_path)))
    assert found.returncode == 1
    assert "secret" not in found.stdout
    assert "root:" not in found.stdout


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    "code",
    [
        "open({path!r}, 'w')",
        "import os; os.remove({path!r})",
        "import os; os.rename({path!r}, 'here')",
        "open('a', 'w').close(); import os; os.replace('a', {path!r})",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.chmod({path!r}, 0)",
        "import os; os.utime({path!r}, (0, 0))",
        "import shutil; shutil.rmtree({folder!r})",
        "open({folder!r} + '/new', 'w')",
        "import os; os.mkdir({folder!r} + '/new')",
        "import os; os.mkfifo({folder!r} + '/new')",
    ],
)
def test_files_outside_cannot_be_changed(code: str, tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    before = path.stat()
    found = run(code.format(path=str(path), folder=str(tmp_path)))
    assert found.returncode == 1
    assert path.read_text() == "secret"
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import os; raise SystemExit(os.system('true') != 0)",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; m.Process(target=print).start()",
    ],
)
def test_there_are_no_other_processes(code: str) -> None:
    assert run(code, timeout=5).returncode == 1


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_the_parent_receives_no_signal(name: str) -> None:
    found = run(f"import os, signal; os.kill(os.getppid(), signal.{name})")
    assert found.returncode == 1
    found = run(f"import os, signal; os.killpg(0, signal.{name})", timeout=2)
    assert found.returncode != 0


def test_an_answer_that_ends_early_has_printed_nothing() -> None:
    for code in ("raise SystemExit(0)", "import os; os._exit(0)", "exit()", "import sys; sys.exit()"):
        found = run(code + "\nprint('done')")
        assert found.stdout == ""


def test_without_the_kernels_help_mistakes_are_contained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On other systems the audit hook is all there is: the same program, as if the kernel had neither."""
    change_child(monkeypatch, tmp_path, 'sys.platform == "linux"', "False")
    assert not run("").is_isolated
    path = secret_file(tmp_path)
    for code in (
        "import socket; socket.socket()",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        f"print(open({str(path)!r}).read())",
        f"import os; os.remove({str(path)!r})",
        f"import os; os.listdir({str(tmp_path)!r})",
    ):
        assert "not allowed" in run(code).stderr, code
    assert path.read_text() == "secret"
    found = run("import random, json\nopen('a', 'w').write('1')\nprint(open('a').read())")
    assert found.stdout == "1\n", found.stderr


def change_child(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    child = folder / "child.py"
    child.write_text(Path(sandbox_run.CHILD).read_text().replace(old, new))
    monkeypatch.setattr(sandbox_run, "CHILD", str(child))


def test_a_process_with_another_thread_is_not_isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a `.pth` file could start it: Landlock would not limit it."""
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    change_child(monkeypatch, tmp_path, "import platform\n", f"import platform\n{thread}\n")
    found = run("import os; os.fork()")
    assert not found.is_isolated
    assert "not allowed" in found.stderr


def test_the_start_of_python_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_child(monkeypatch, tmp_path, "import platform\n", "import platform, time\ntime.sleep(2)\n")
    assert run("print(1)", timeout=1.9).stdout == "1\n"


def test_a_process_that_cannot_be_limited_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_child(monkeypatch, tmp_path, "import platform\n", "raise RuntimeError('no limits')\n")
    with pytest.raises(RuntimeError, match=r"could not be limited: [^$]*no limits"):
        run("print(1)")

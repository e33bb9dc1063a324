"""The sandbox: ordinary programs work, hostile ones do not get out."""

from __future__ import annotations

import errno
import json
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

from hf_parallel.evaluation import sandbox
from hf_parallel.evaluation.sandbox import SandboxResult, run_code

ARCHITECTURES = ("x86_64", "aarch64")


def run(code: str, **settings: Any) -> SandboxResult:
    return run_code(textwrap.dedent(code), **{"timeout": 600.0, **settings})


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    """Skip what the kernel guarantees where it does not."""
    try:
        run("")
    except RuntimeError as error:
        pytest.skip(str(error))


# Ordinary programs


def test_a_program_reads_stdin_and_files_and_prints() -> None:
    found = run(
        "import sys\nprint(input(), open('data.txt').read())\nprint('more', file=sys.stderr)",
        stdin="first\n",
        files={"data.txt": "é"},
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "first é\n", "more\n")
    assert found.is_isolated
    assert not found.timed_out
    assert not found.truncated


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os._exit(3)", 3)])
def test_the_exit_status_is_returned(code: str, status: int) -> None:
    assert run(code).returncode == status


def test_an_error_shows_the_line_and_nothing_of_the_sandbox() -> None:
    found = run("def f():\n    return 1 / 0\nf()")
    assert "return 1 / 0" in found.stderr
    assert "ZeroDivisionError" in found.stderr
    assert "sandbox" not in found.stderr


ORDINARY = {
    "numbers": """
        import decimal, fractions, hashlib, heapq, itertools, json, math, random, re, statistics, uuid, zlib
        random.seed(0)
        print(random.random(), math.comb(90, 45), fractions.Fraction(1, 3) + 1, decimal.Decimal(2).sqrt())
        print(hashlib.sha256(b"a").hexdigest(), zlib.crc32(b"a"), len(str(uuid.uuid4())), statistics.stdev([1, 2, 5]))
        print([*itertools.permutations("abc")], json.dumps({"a": [1]}), re.sub("a+", "b", "caat"), sorted(input()))
    """,
    "threads": """
        import concurrent.futures, queue, sys, threading
        sys.setrecursionlimit(10**5); threading.stack_size(1 << 26)
        def depth(n): return n and 1 + depth(n - 1)
        thread = threading.Thread(target=lambda: print(depth(20000)), name="deep")
        thread.start(); thread.join(); threading.stack_size(0)
        with concurrent.futures.ThreadPoolExecutor(8) as pool: print([*pool.map(pow, range(9), range(9))])
        print(threading.Event().wait(0.01), queue.Queue().qsize())
    """,
    "time and signals": """
        import os, pathlib, platform, resource, selectors, signal, sys, time
        signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1); signal.alarm(0); signal.raise_signal(14)
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        clocks = time.time(), time.monotonic(), time.process_time(), time.thread_time(), resource.getrusage(0).ru_utime
        print(all(clocks), time.localtime().tm_year > 2000, platform.system(), platform.machine(), sys.stdin.isatty())
        read, write = os.pipe(); os.set_blocking(read, False); os.write(write, b"x"); os.set_inheritable(write, True)
        with selectors.DefaultSelector() as selector: selector.register(read, 1); print(len(selector.select(1)))
        print(os.getuid(), os.cpu_count() > 0, len(os.urandom(8)), pathlib.Path(".").resolve().is_dir())
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
    outside = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, input="cab\n", capture_output=True, text=True, check=True
    )
    found = run(code, stdin="cab\n", timeout=60, max_memory=1 << 30)
    assert (found.stdout, found.stderr, found.returncode) == (outside.stdout, "", 0)


def test_the_environment_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert "SECRET" not in run("import os; print(dict(os.environ))").stdout


@pytest.mark.parametrize(
    "settings",
    [{"timeout": 0}, {"timeout": float("inf")}, {"max_memory": 1}, {"max_output": 0}, {"files": {"../a": ""}}],
    ids=str,
)
def test_invalid_settings_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"timeout|max_memory|max_output|'../a'"):
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
        "import signal; signal.pause()",
        "import os; os.close(1); os.close(2)\nwhile True: pass",
        "10**10**9",
        """
        import signal, time
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True:
            try: time.sleep(60)
            except BaseException: pass
        """,
    ],
)
def test_long_runs_are_ended(code: str) -> None:
    found = run(code, timeout=0.5)
    assert found.timed_out
    assert found.returncode != 0


def test_another_thread_can_end_a_run() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    found = run("while True: pass", timeout=600, stop=stop)
    assert not found.timed_out
    assert found.returncode == 137


@pytest.mark.parametrize("code", ["x = bytearray(10**10)", "x = []\nwhile True: x.append(' ' * 10**7)"])
def test_memory_is_limited(code: str) -> None:
    found = run(code, max_memory=1 << 28)
    assert found.returncode == 1
    assert "MemoryError" in found.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_too_much_output_ends_the_run(stream: str) -> None:
    found = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)", max_output=1000)
    assert found.truncated
    assert getattr(found, stream) == "x" * 1000


def test_too_many_threads_end_the_run() -> None:
    code = "import threading, time\n"
    code += "for n in range(2000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert run(code, timeout=60, max_memory=1 << 34).truncated


def test_a_process_that_cannot_start_leaves_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        run("")
    assert psutil.Process().num_fds() == before


# Hostile programs


@pytest.mark.parametrize(
    "code",
    [
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
socket 41 198, connect 42 203, bind 49 200, sendto 44 206, shmget 29 194, msgget 68 186, semget 64 190,
mq_open 240 180, memfd_create 319 279, inotify_init1 294 26, flock 73 32, readlinkat 267 78, setxattr 188 5,
fchmod 91 52, fchmodat 268 53, fchown 93 55, utimensat 280 88, truncate 76 45, ftruncate 77 46, fallocate 285 47,
link 86 -1, linkat 265 37, symlinkat 266 36, mkdirat 258 34, unlinkat 263 35, renameat 264 38, mknodat 259 33,
name_to_handle_at 303 264, open_by_handle_at 304 265, splice 275 76, fork 57 -1, vfork 58 -1, execve 59 221,
execveat 322 281, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, setsid 112 157, kill 62 129,
tkill 200 130, rt_sigqueueinfo 129 138, setpriority 141 140, sched_setaffinity 203 122, mlock 149 228,
setrlimit 160 164, setuid 105 146, setresuid 117 147, capset 126 91, personality 135 92, unshare 272 97,
setns 308 268, mount 165 40, chroot 161 51, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, keyctl 250 219,
seccomp 317 277, io_setup 206 0, pidfd_send_signal 424 424, io_uring_setup 425 425, clone3 435 435, openat2 437 437,
pidfd_getfd 438 438, landlock_create_ruleset 444 444
"""
"""System calls that reach beyond a process, with their numbers on x86_64 and aarch64."""
FORBIDDEN_ARGUMENTS = """
fcntl 72 25: F_SETLK 0 6, F_SETOWN 0 8, F_SETLEASE 0 1024, F_NOTIFY 0 1026, F_SETPIPE_SZ 0 1031
ioctl 16 29: FS_IOC_SETFLAGS 0 0x40086602, FICLONE 0 0x40049409, TIOCSTI 0 0x5412
prctl 157 167: PR_SET_PDEATHSIG 1 0, PR_SET_DUMPABLE 4 0, PR_SET_SECCOMP 22 2
clone 56 220: process 17 0, with_a_namespace 0x7D0F00|0x20000000 0, vfork 0x4111 0, thread_with_own_files 0x3D0B00 0
madvise 28 233: MADV_PAGEOUT 0 0 21, MADV_REMOVE 0 0 9, MADV_HWPOISON 0 0 100
tgkill 234 131: parent {parent} {parent} 0
sched_getaffinity 204 123: parent {parent} 128 0
prlimit64 302 261: of_parent {parent} 7 0 0, core_dumps 0 4 0 0
clock_gettime 228 113: of_parent ~{parent}<<3|2 0
openat 257 56: emptying_by_reading -100 0 512, creating -100 0 65
"""
"""System calls that are allowed with other arguments only."""


def table(text: str) -> dict[str, tuple[int, int]]:
    return {name: (int(one), int(other)) for name, one, other in map(str.split, text.split(","))}


def forbidden(index: int, parent: int) -> list[tuple[str, list[int]]]:
    """Return all forbidden calls on an architecture: names, and numbers with arguments."""
    found = [(name, [numbers[index], *[-1] * 6]) for name, numbers in table(FORBIDDEN).items() if numbers[index] >= 0]
    for line in FORBIDDEN_ARGUMENTS.strip().format(parent=parent).splitlines():
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


def test_system_calls_that_reach_outside_fail() -> None:
    """Each table entry, every other number, and the numbers of the x32 ABI."""
    index = ARCHITECTURES.index(platform.machine())
    calls = forbidden(index, os.getpid())
    skipped = {335, 336} | {numbers[index] for numbers in table(sandbox.SYSTEM_CALLS).values()}  # uprobes: SIGILL
    calls += [(f"number {n}", [n, *[-1] * 6]) for n in range(600) if n not in skipped]
    calls += [(f"x32 {n}", [0x40000000 + n, *[-1] * 6]) for n in range(548)]
    found = run(PROBE, stdin=json.dumps(calls))
    results = json.loads(found.stdout or "{}")
    assert len(results) == len(calls), found.stderr
    assert not {
        name: result for name, result in results.items() if result not in ([-1, errno.EPERM], [-1, errno.ENOSYS])
    }


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
def test_the_filter_of_each_architecture_allows_only_what_programs_need(machine: str) -> None:
    """The BPF program run by hand, since tests run on one of the architectures."""
    index, own = ARCHITECTURES.index(machine), 12345
    program = sandbox.filter_program(machine, own)

    def verdict(number: int, *arguments: int, architecture: int = sandbox.ARCHITECTURES[machine]) -> int:
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
        *(("read", 0), ("write", 1), ("mmap", 0, 1), ("clone", 0x3D0F00), ("tgkill", own, own, 6), ("exit_group",)),
        *(("openat", -100, 0, os.O_RDONLY), ("fcntl", 0, 1030), ("ioctl", 1, 0x5401), ("clock_gettime", 1)),
        *(("prlimit64", 0, 3), ("futex", 0)),
    ]
    numbers = table(sandbox.SYSTEM_CALLS)
    for name, *values in calls:
        assert verdict(numbers[name][index], *values) == 0x7FFF0000, name


@pytest.mark.parametrize(
    "code",
    [
        "print(open({path!r}).read())",
        "import os; print(os.listdir({folder!r}))",
        "import os; os.chdir({folder!r}); print(open('secret.txt').read())",
        "print(open('../code.py').read())",
        "print(open('/etc/passwd').read())",
        "print(open('/proc/self/environ').read() + 'secret')",
        "import importlib.util as u; s = u.spec_from_file_location('secret', {path!r}); s.loader.get_data({path!r})",
        "open({path!r}, 'w')",
        "import os; os.remove({path!r})",
        "import os; os.symlink({path!r}, 'link')",
        "import os; os.link({path!r}, 'link')",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.chmod({path!r}, 0)",
        "import shutil; shutil.rmtree({folder!r})",
        "open({folder!r} + '/new', 'w')",
        "import os; os.mkfifo({folder!r} + '/new')",
        "open('new', 'w')",
        "import os; os.mkdir('new')",
        "import os; os.open('new', os.O_CREAT)",
        "import os; os.rename('own.txt', 'new')",
    ],
)
def test_files_cannot_be_read_outside_or_changed_anywhere(code: str, tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    path.chmod(0o666)
    before = path.stat()
    found = run(code.format(path=str(path), folder=str(tmp_path)), files={"own.txt": ""})
    assert found.returncode == 1
    assert "secret" not in found.stdout
    assert "root:" not in found.stdout
    assert path.read_text() == "secret"
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import os; raise SystemExit(os.system('true') != 0)",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import os, signal; os.killpg(0, signal.SIGSTOP)",
    ],
)
def test_there_are_no_other_processes(code: str) -> None:
    assert run(code).returncode == 1


# Systems without the kernel's help


def change_script(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    script = folder / "script.py"
    script.write_text(Path(sandbox.__file__).read_text().replace(old, new))
    monkeypatch.setattr(sandbox, "__file__", str(script))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('sys.platform != "linux"', "True"),
        ("import platform\n", "import platform, threading\nthreading.Thread(target=threading.Event().wait).start()\n"),
    ],
    ids=["another system", "a thread that a .pth file has started"],
)
def test_code_that_cannot_be_isolated_runs_only_if_allowed(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_script(monkeypatch, tmp_path, old, new)
    with pytest.raises(RuntimeError, match="HF_ALLOW_CODE_EVAL=1"):
        run("print(1)")
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    found = run("print(1, flush=True)\nwhile True: pass", timeout=0.5)
    assert (found.stdout, found.timed_out, found.is_isolated) == ("1\n", True, False)


def test_the_start_of_python_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_script(monkeypatch, tmp_path, "import platform\n", "import platform, time\ntime.sleep(3)\n")
    assert run("print(1)", timeout=2.9).stdout == "1\n"


def test_a_process_that_cannot_be_limited_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_script(monkeypatch, tmp_path, "import platform\n", "raise RuntimeError('no limits')\n")
    with pytest.raises(RuntimeError, match=r"could not be limited: [^$]*no limits"):
        run("print(1)")

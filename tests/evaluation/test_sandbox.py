"""The sandbox: ordinary programs work, hostile ones do not get out."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_parallel.evaluation import sandbox
from hf_parallel.evaluation.formulas import FormulaComparer
from hf_parallel.evaluation.sandbox import SandboxResult, run_code


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


def test_a_program_reads_stdin_and_prints() -> None:
    found = run(
        "import sys\nprint(input())\nprint('more', file=sys.stderr)",
        stdin="first é\n",
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "first é\n", "more\n")
    assert found.is_isolated
    assert not found.timed_out


def test_the_environment_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert "SECRET" not in run("import os; print(dict(os.environ))").stdout


def test_code_runs_and_formulas_are_compared_in_a_process_with_many_open_files() -> None:
    """Descriptors above 1023, which `select` does not take."""
    many = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < many:
        pytest.skip(f"at most {hard} files can be open")
    pytest.importorskip("math_verify")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many), hard))
    opened = []
    try:
        while not opened or opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        assert run("print(1)").stdout == "1\n"
        assert FormulaComparer(600.0).compare(r"\frac12", "0.5")
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


@pytest.mark.parametrize("code", ["x = bytearray(10**10)", "x = []\nwhile True: x.append(' ' * 10**7)"])
def test_memory_is_limited(code: str) -> None:
    found = run(code, max_memory=1 << 28)
    assert found.returncode == 1
    assert "MemoryError" in found.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_limited(stream: str) -> None:
    found = run(f"import os\nwhile True: os.write({1 + (stream == 'stderr')}, b'x' * 10**6)", max_output=1000)
    assert found.returncode != 0
    assert getattr(found, stream) == "x" * 1000


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
socket connect bind sendto shmget msgget semget mq_open memfd_create inotify_init1 flock readlinkat setxattr fchmod
fchmodat fchown utimensat truncate ftruncate fallocate linkat symlinkat mkdirat unlinkat renameat mknodat splice execve
execveat ptrace process_vm_readv process_vm_writev setsid kill tkill rt_sigqueueinfo setpriority sched_setaffinity mlock
setrlimit setuid setresuid capset personality unshare setns mount chroot bpf perf_event_open userfaultfd keyctl seccomp
io_setup pidfd_send_signal io_uring_setup clone3 openat2 pidfd_getfd landlock_create_ruleset
"""
"""System calls that reach beyond a process."""
FORBIDDEN_ARGUMENTS = f"""
fcntl 0 6, fcntl 0 8, fcntl 0 1024, fcntl 0 1026, fcntl 0 1031
ioctl 0 0x40086602, ioctl 0 0x40049409, ioctl 0 0x5412, prctl 1 0, prctl 4 0, prctl 22 2
clone 17 0, clone 0x7D0F00|0x20000000 0, clone 0x4111 0, clone 0x3D0B00 0
madvise 0 0 21, madvise 0 0 9, madvise 0 0 100, tgkill {os.getpid()} {os.getpid()} 0
sched_getaffinity {os.getpid()} 128 0, prlimit64 {os.getpid()} 7 0 0, clock_gettime ~{os.getpid()}<<3|2 0
openat -100 0 512, openat -100 0 65
""".replace("\n", ",")
"""System calls that are allowed with other arguments only: F_SETLK, F_SETOWN and the like, ioctls on files, ..."""
PROBE = """
import ctypes, json, os
system_call, own, found = ctypes.CDLL(None, use_errno=True).syscall, os.getpid(), []
for number, *arguments in json.loads(input()):
    ctypes.set_errno(0)
    result = system_call(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if os.getpid() != own: os._exit(0)
    found.append((result, ctypes.get_errno()))
print(json.dumps(found))
"""


def test_system_calls_that_reach_outside_fail() -> None:
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
    cases = [name.split() for name in (*FORBIDDEN.split(), *filter(str.strip, FORBIDDEN_ARGUMENTS.split(",")))]
    calls = [[resolve(name.encode()), *map(eval, given or ["-1"] * 6)] for name, *given in cases]
    found = run(PROBE, stdin=json.dumps(calls))
    results = json.loads(found.stdout or "[]")
    assert len(results) == len(calls), found.stderr
    failed = ([-1, errno.EPERM], [-1, errno.ENOSYS])
    assert not [case for case, result in zip(cases, results, strict=True) if result not in failed]


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
    ],
)
def test_files_cannot_be_read_outside_or_changed_anywhere(code: str, tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    path.chmod(0o666)
    before = path.stat()
    found = run(code.format(path=str(path), folder=str(tmp_path)))
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


def is_over(process: int, seconds: float = 60.0) -> bool:
    """Return whether a process ends within a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def change_script(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    script = folder / "script.py"
    script.write_text(Path(sandbox.__file__).read_text().replace(old, new))
    monkeypatch.setattr(sandbox, "__file__", str(script))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('sys.platform != "linux"', "True"),
        ("import select\n", "import select, threading\nthreading.Thread(target=threading.Event().wait).start()\n"),
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
    found = run("import os, time\nif child := os.fork(): print(child, flush=True)\nelse: time.sleep(600)", timeout=0.5)
    assert is_over(int(found.stdout))

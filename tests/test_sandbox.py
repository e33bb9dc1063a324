"""The sandbox: normal programs work, and hostile ones do not get out."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_parallel.evaluation.sandbox import SandboxResult, run_code
from hf_parallel.evaluation.sandbox import run as sandbox_run

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
        assert "not allowed" in run(code, writable=False).stderr


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os._exit(3)", 3)])
def test_the_exit_status_is_returned(code: str, status: int) -> None:
    assert run(code).returncode == status


def test_an_error_shows_the_line_and_nothing_of_the_sandbox() -> None:
    found = run("def f():\n    return 1 / 0\nf()")
    assert "return 1 / 0" in found.stderr
    assert "ZeroDivisionError" in found.stderr
    assert "run_child" not in found.stderr


def test_threads_deep_recursion_and_numpy_work() -> None:
    found = run(
        """
        import sys, threading
        sys.setrecursionlimit(10**5)
        def depth(n): return n and 1 + depth(n - 1)
        thread = threading.Thread(target=lambda: print(depth(20000)))
        thread.start(); thread.join()
        import numpy
        print(numpy.arange(4).sum())
        """,
        max_memory=1 << 30,
    )
    assert found.stdout.split() == ["20000", "6"], found.stderr


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
    start = time.monotonic()
    found = run(code, timeout=0.5)
    assert found.timed_out
    assert found.returncode != 0
    assert time.monotonic() - start < 5


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
    start = time.monotonic()
    found = run("while True: pass", timeout=60, stop=stop)
    assert time.monotonic() - start < 10
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
    start = time.monotonic()
    found = run(code, timeout=20)
    assert found.truncated
    assert time.monotonic() - start < 15
    assert "File too large" in run("open('a', 'wb').write(bytes(10**8))").stderr


@pytest.mark.parametrize(
    "code",
    [
        "kept = [open(str(n), 'wb') for n in range(10)]\nfor n in range(10): os.unlink(str(n))",
        "os.mkdir('d', 0o300)\nkept = [open(f'd/{n}', 'wb') for n in range(10)]",
    ],
    ids=["deleted", "unlistable"],
)
def test_files_that_cannot_be_listed_are_limited(code: str) -> None:
    found = run(f"import os, time\n{code}\nfor file in kept: file.write(bytes(10**7))\ntime.sleep(20)", timeout=20)
    assert found.truncated


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
    start = time.monotonic()
    assert run(code, timeout=2).returncode != 0
    assert time.monotonic() - start < 15
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
        "import ctypes; ctypes.CDLL(None).socket(2, 1, 0)",
    ],
)
def test_there_is_no_network(code: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        found = run(code.format(port=server.getsockname()[1]))
        assert found.returncode == 1
        assert "not allowed" in found.stderr or "not permitted" in found.stderr
        with pytest.raises(TimeoutError):
            server.accept()


RAW = """
import ctypes, gc, types
def system_call(*arguments):
    # Without ctypes' audit events: the function was made before the audit hook.
    child = [one for one in gc.get_objects() if isinstance(one, types.FunctionType) and one.__name__ == "restrict"][0]
    return child.__globals__["_libc"].syscall(*arguments)
"""


@pytest.mark.usefixtures("isolated")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("socket", "41, 2, 1, 0"), ("fork", "57"), ("kill", "62, {pid}, 9"), ("ptrace", "101, 16, {pid}, 0, 0")]
    + [("prlimit64", "302, {pid}, 7, 0, 0"), ("clone", "56, 17, 0, 0, 0, 0"), ("x32 socket", "0x40000029, 2, 1, 0")]
    + [("shmget", "29, 0, 4096, 0o1666"), ("chmod", "90, b'{file}', 0"), ("io_uring_setup", "425, 1, 0")],
)
def test_system_calls_fail_that_audit_events_do_not_show(name: str, arguments: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    mode = file.stat().st_mode
    given = arguments.format(pid=os.getpid(), file=file)
    found = run(f"{RAW}\nprint(system_call({given}))")
    assert found.stdout == "-1\n", found.stderr
    assert file.stat().st_mode == mode


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
        "import os; os.system('true')",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; m.Process(target=print).start()",
    ],
)
def test_there_are_no_other_processes(code: str) -> None:
    found = run(code, timeout=5)
    assert found.returncode == 1
    assert "not allowed" in found.stderr or "not permitted" in found.stderr


@pytest.mark.usefixtures("isolated")
def test_processes_cannot_be_made_without_an_audit_event() -> None:
    code = "import _posixsubprocess as p, os\nr, w = os.pipe()\nprint(p.fork_exec.__doc__ is not None)\nimport pty"
    assert run(code).returncode == 0
    found = run(
        """
        import subprocess, sys
        subprocess.sys = type(sys)("sys")
        subprocess.sys.__dict__.update(vars(sys), audit=lambda *arguments: None)
        subprocess.Popen([sys.executable, "-c", "print(1)"])
        """
    )
    assert found.returncode == 1
    assert "not permitted" in found.stderr


@pytest.mark.usefixtures("isolated")
def test_a_thread_bomb_ends_with_its_process() -> None:
    code = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    found = run(code, timeout=3, max_memory=1 << 28)
    assert found.timed_out or found.returncode == 1


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_the_parent_receives_no_signal(signal: str) -> None:
    found = run(f"import os, signal; os.kill(os.getppid(), signal.{signal})")
    assert found.returncode == 1
    found = run(f"import os, signal; os.killpg(0, signal.{signal})", timeout=2)
    assert found.returncode != 0


def test_an_answer_that_ends_early_has_printed_nothing() -> None:
    for code in ("raise SystemExit(0)", "import os; os._exit(0)", "exit()", "import sys; sys.exit()"):
        found = run(code + "\nprint('done')")
        assert found.stdout == ""


def test_without_the_kernels_help_mistakes_are_contained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On other systems the audit hook is all there is: the same program, as if the kernel had neither."""
    child = tmp_path / "child.py"
    text = Path(sandbox_run.CHILD).read_text().replace('sys.platform == "linux"', "False")
    child.write_text(text)
    monkeypatch.setattr(sandbox_run, "CHILD", str(child))
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


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("command", ["F_SETOWN", "F_SETSIG", "F_NOTIFY"])
def test_a_file_cannot_be_made_to_signal_other_processes(command: str) -> None:
    found = run(f"import fcntl, os; fcntl.fcntl(os.pipe()[0], getattr(fcntl, {command!r}, 10), 1)")
    assert "PermissionError" in found.stderr
    assert run("import fcntl, os; print(fcntl.fcntl(os.pipe()[0], fcntl.F_GETFD))").stdout == "1\n"

"""The library of the C kernels is compiled once per user, and loaded only if it is complete and the user's own."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_parallel.kernels import library, native
from hf_parallel.kernels.library import compiled, load

CC = shutil.which(os.environ.get("CC") or "cc")
pytestmark = pytest.mark.skipif(CC is None or os.name != "posix", reason="needs a C compiler, as the kernels do")
OTHER_USER = 12345


@pytest.fixture
def build(tmp_path: Path) -> Callable[[], Path]:
    """Path of a library with one function, `answer`. The file `compiled` has a line for each compilation."""
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/compiled\n{CC} "$@"\n')
    compiler.chmod(0o755)
    return lambda: compiled(tmp_path, "answer", [str(compiler), "-shared", "-fPIC", str(tmp_path / "answer.c")])


def compilations(folder: Path) -> int:
    return len((folder / "compiled").read_text().splitlines())


def functions_only(content: bytes, path: Path) -> bytes:
    subprocess.run([str(CC), "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(path)], check=True)
    return path.read_bytes()


DAMAGES: dict[str, Callable[[bytes, Path], bytes]] = {
    "empty": lambda whole, _: b"",
    "text": lambda whole, _: b"hello",
    "cut off": lambda whole, _: whole[: len(whole) * 9 // 10],
    "zeros at the end": lambda whole, _: whole[: len(whole) // 2].ljust(len(whole), b"\0"),
    "one bit": lambda whole, _: whole[:-1] + bytes([whole[-1] ^ 1]),
    "another library": functions_only,
}


def test_a_damaged_library_is_compiled_again(build: Callable[[], Path], tmp_path: Path) -> None:
    whole = build().read_bytes()
    for number, damage in enumerate(DAMAGES.values(), 1):
        path = build()
        assert compilations(tmp_path) == number
        path.unlink()  # this process has mapped the old file
        path.write_bytes(damage(whole, tmp_path / "other.so"))
        with pytest.raises(OSError, match="is damaged"):
            load(path)
        assert load(build()).answer() == 42
        assert compilations(tmp_path) == number + 1
        assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "lock"]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path one of another user."""
    user = os.getuid()
    if user == 0:
        os.chown(path, OTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: OTHER_USER)
        path.parent.joinpath(f"kernels-{user}").rename(path.parent / f"kernels-{OTHER_USER}")


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_or_file_that_others_can_write_to_is_not_used(
    build: Callable[[], Path], tmp_path: Path, mode: int
) -> None:
    path = build()
    path.chmod(mode)
    with pytest.raises(PermissionError, match="be writable by no other, got user .*rwxrwx"):
        load(path)
    assert build().stat().st_mode & 0o777 == 0o755
    assert compilations(tmp_path) == 2
    path.parent.chmod(mode)
    for function in (build, lambda: load(path)):
        with pytest.raises(PermissionError, match="be writable by no other, got user .*rwxrwx"):
            function()


@pytest.mark.skipif("os.getuid() != 0", reason="makes a folder of root")
def test_a_folder_of_root_that_others_can_write_to_is_passed_over(
    build: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().parent.chmod(0o777)
    monkeypatch.setattr(library, "_user", lambda: OTHER_USER)
    assert build().parent.name == f"kernels-{OTHER_USER}"
    assert build().parent.name == f"kernels-{OTHER_USER}"
    assert compilations(tmp_path) == 2


def test_a_folder_of_another_user_is_not_used(
    build: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(build().parent, monkeypatch)
    with pytest.raises(PermissionError, match=r"must belong to user \d+ or root"):
        build()
    assert compilations(tmp_path) == 1


def test_kernels_are_compiled_for_one_process_where_they_cannot_be_cached(
    build: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = build().parent
    folder.chmod(0o777)
    before = sorted(folder.iterdir())
    monkeypatch.setenv("HF_PARALLEL_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_SOURCES", (tmp_path / "answer.c",))
    assert native._open().answer() == 42
    assert sorted(folder.iterdir()) == before


WAITING = """
import sys
from pathlib import Path
from hf_parallel.kernels.library import compiled, load
folder = Path(sys.argv[1])
command = [str(folder / "compiler"), "-shared", "-fPIC", str(folder / "answer.c")]
print(load(compiled(folder, "answer", command)).answer())
"""


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WAITING, str(folder)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_start_together_compile_once(build: Callable[[], Path], tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(3)]
    assert [process.communicate(timeout=600)[0].strip() for process in processes] == ["42"] * 3
    assert compilations(tmp_path) == 1


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_was_killed_while_it_compiled(
    build: Callable[[], Path], tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    own = compiler.read_text()
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nmv {tmp_path}/pid {tmp_path}/begun\nexec sleep 600\n")
    process = start(tmp_path)
    until = time.monotonic() + 600
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.wait()
    os.kill(int((tmp_path / "begun").read_text()), signal.SIGKILL)  # its compiler
    compiler.write_text(own)
    path = build()
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "lock"]
    assert ctypes.CDLL(str(path)).answer() == 42

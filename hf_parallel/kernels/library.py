"""Shared libraries that the machine's own C compiler makes once per user.

A process runs what it loads. So it loads only what the user or root has written, completely: folder and file belong to
one of them, nobody else can write to them, and the file's name ends with the checksum of its content.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from hf_parallel.files import read_file, sync

COMPILE_SECONDS = 600
"""Limit of a compilation, which takes some seconds on an idle machine."""
MAX_BYTES = 1 << 28
"""Size of the largest library that is read."""
_UNFINISHED = "unfinished-"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def compiled(parent: Path, stem: str, command: Sequence[str]) -> Path:
    """Return the path of the complete library `stem`; `command -o PATH` makes it if there is none.

    The libraries of a user are in the folder `kernels-UID` of `parent`; those of root are used, too. Of several
    processes one compiles, and it replaces damaged libraries.

    Raises `OSError` if the user's own folder cannot be written, or others can write to it, `RuntimeError` if the
    compiler fails, and `subprocess.TimeoutExpired` if it does not end.
    """
    user_folder = parent / f"kernels-{_user()}"
    for folder in dict.fromkeys((parent / "kernels-0", user_folder)):
        try:
            path = _find(folder, stem) if folder.is_dir() else None
        except OSError:
            if folder == user_folder:
                raise
            continue  # others can write to root's folder
        if path is not None:
            return path
    user_folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with FileLock(user_folder / "lock", timeout=COMPILE_SECONDS):  # the end of a process releases it
        return _find(user_folder, stem) or _compile(user_folder, stem, command)


def load(path: Path) -> ctypes.CDLL:
    """Load a library that `compiled` returned; raises `OSError` if it is damaged, or others can write to it."""
    with _opened(path.parent) as folder:
        _check_content(folder / path.name)
        return ctypes.CDLL(str(folder / path.name))


def _find(folder: Path, stem: str) -> Path | None:
    with _opened(folder) as opened:
        for path in sorted(opened.glob(f"{stem}-*.so")):
            try:
                _check_content(path)
            except OSError:  # compiled again
                continue
            return folder / path.name
    return None


def _compile(folder: Path, stem: str, command: Sequence[str]) -> Path:
    """Compile while the folder is locked: what others left there is of killed processes, or damaged."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as temporary:
        output = Path(temporary) / "library.so"
        done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, timeout=COMPILE_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
        output.chmod(0o755)
        sync(output)
        for damaged in folder.glob(f"{stem}-*.so"):
            damaged.unlink()
        path = folder / _name(stem, output.read_bytes())
        output.replace(path)
    sync(folder)
    return path


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """Yield a path of a folder to which nobody but its user or root can write.

    On Linux, it names the opened folder: another one that takes its place is not read.
    """
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        _check_owner(os.fstat(descriptor), folder)
        opened = Path(f"/proc/self/fd/{descriptor}")
        yield opened if opened.is_dir() else folder
    finally:
        os.close(descriptor)


def _check_content(path: Path) -> None:
    status = path.lstat()
    _check_owner(status, path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    stem = path.stem.rpartition("-")[0]
    if path.name != _name(stem, read_file(path, MAX_BYTES)):
        raise OSError(errno.EIO, "is damaged", str(path))


def _check_owner(status: os.stat_result, path: Path) -> None:
    """Raise `PermissionError` if another user could have written a file or folder."""
    if os.name != "posix":
        return
    has_owner = status.st_uid in (0, _user())
    if not has_owner or status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.filemode(status.st_mode)
        reason = f"must belong to user {_user()} or root, and be writable by no other, got user {status.st_uid}, {mode}"
        raise PermissionError(errno.EPERM, reason, str(path))


def _name(stem: str, content: bytes) -> str:
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _user() -> int:
    return os.getuid() if os.name == "posix" else 0

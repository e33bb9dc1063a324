"""The package's cache folder, and files that are written completely or not at all."""

from __future__ import annotations

import errno
import glob
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import transformers

_logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return `HF_PARALLEL_CACHE`, else `hf_parallel` in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`).

    As with Hugging Face's own cache, the default is `~/.cache` on every operating system.
    """
    if own := os.environ.get("HF_PARALLEL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_parallel"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in a folder beside `path`; the file replaces `path`, or is deleted on failure.

    Follows a symbolic link and keeps the permissions of an existing file. Deletes what a killed process left of an
    earlier try. Raises `FileNotFoundError` if the folder of `path` does not exist, and `OSError` if `path` exists and
    is no regular file.
    """
    path = path.resolve()
    if not path.parent.is_dir():  # otherwise the error would name the temporary file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    _delete_unfinished(path)
    writer = f"{socket.gethostname()}.{os.getpid()}.{uuid4().hex}"  # unique among concurrent writers
    folder = path.with_name(f"{path.name}.{writer}.unfinished")
    folder.mkdir()
    try:
        temporary = folder / path.name
        temporary.touch()
        mode = (path if path.exists() else temporary).stat().st_mode
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete_unfinished(path: Path) -> None:
    """Delete temporary folders for `path` of processes of this machine that no longer run."""
    for folder in path.parent.glob(f"{glob.escape(path.name)}.{glob.escape(socket.gethostname())}.*.unfinished"):
        pid = folder.name.split(".")[-3]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (PermissionError, ValueError):
            continue


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file atomically; a pipe or device is written to directly, and a symbolic link is followed."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def warn_on_other_version(path: str | Path, version: str) -> None:
    """Log a warning if `version`, under which a file was saved, is not the installed version of transformers."""
    now = transformers.__version__
    if version != now:
        message = "%s was saved under transformers %s, this is %s: logits may differ in their last bits"
        _logger.warning(message, path, version, now)

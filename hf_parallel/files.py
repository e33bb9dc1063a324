"""The package's cache folder, and files that are written completely or not at all."""

from __future__ import annotations

import errno
import glob
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import transformers
from filelock import FileLock, Timeout

NAME_LENGTH = 40
"""Characters of a file's name in the name of its temporary folder."""
UNFINISHED_SECONDS = 60.0
"""Age from which a temporary folder that is not locked belongs to a writer that was killed."""
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
    is no regular file, or cannot be written.
    """
    path = path.resolve()
    if not path.parent.is_dir():  # otherwise the error would name the temporary file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    _delete_unfinished(path)
    folder = path.with_name(f"{path.name[:NAME_LENGTH]}.{uuid4().hex}.unfinished")  # unique among concurrent writers
    try:
        folder.mkdir()
        with FileLock(folder / "lock"):
            temporary = folder / "content"
            temporary.touch()
            mode = (path if path.exists() else temporary).stat().st_mode
            yield temporary
            with suppress(OSError):  # some file systems have no permissions
                temporary.chmod(mode)
            temporary.replace(path)
    except OSError as error:
        if str(error.filename or "").startswith(str(folder)):  # a temporary name, which tells the caller nothing
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete_unfinished(path: Path) -> None:
    """Delete old temporary folders for `path` that no writer has locked."""
    for folder in path.parent.glob(f"{glob.escape(path.name[:NAME_LENGTH])}.*.unfinished"):
        with suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime > UNFINISHED_SECONDS:
                with FileLock(folder / "lock", timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)


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

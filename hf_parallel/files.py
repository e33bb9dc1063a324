"""The package's cache folder, files that are written completely or not at all, and files that are not trusted."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import transformers

NAME_LENGTH = 40
"""Characters of a file's name in the name of its temporary file."""
MAX_JSON_BYTES = 1 << 30
"""Size of the largest JSON file that is read."""
MAX_NUMBER = 10**15
"""Largest number in a field of a file: floats of this size are exact to a unit."""
_logger = logging.getLogger(__name__)


JSONObject: TypeAlias = Mapping[str, Any]
"""JSON object whose fields have been checked, or that the package has made."""


def cache_folder() -> Path:
    """Return `HF_PARALLEL_CACHE`, else `hf_parallel` in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`).

    As with Hugging Face's own cache, the default is `~/.cache` on every operating system.
    """
    folder = os.environ.get("HF_PARALLEL_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_parallel"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; the file replaces `path`, or is deleted on failure.

    The content is on disk before it replaces the file, so that a machine that stops leaves the old one or the new one.
    Follows a symbolic link and keeps the permissions of an existing file. Raises `FileNotFoundError` if the folder of
    `path` does not exist, and `OSError` if `path` exists and is no regular file, or cannot be written.
    """
    path = path.resolve()
    if not path.parent.is_dir():  # otherwise the error would name the temporary file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    temporary = path.with_name(f"{path.name[:NAME_LENGTH]}.{uuid4().hex}.unfinished")  # unique among writers
    try:
        temporary.touch()
        mode = (path if path.exists() else temporary).stat().st_mode
        yield temporary
        with suppress(OSError):  # some file systems have no permissions
            temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        if str(error.filename or "") == str(temporary):  # a name that tells the caller nothing
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk, as far as the file system can say so."""
    with suppress(PermissionError):  # Windows opens no folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # not by this file system
                raise
        finally:
            os.close(descriptor)


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


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file, read from one descriptor: a writer that replaces the file changes nothing.

    Raises `OSError` if the file does not exist or cannot be read, and `ValueError` if it is not a regular file (a pipe
    would wait for a writer) or has more than `max_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"{path} has {status.st_size} bytes, at most {max_bytes} can be read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(descriptor)


def read_lines(path: str | Path) -> tuple[str, bytes]:
    """Return the text of a regular file up to its last line break, and the rest, which a writer has not finished.

    Raises the errors of `read_file`, and `ValueError` if the text is not UTF-8.
    """
    content = read_file(path, MAX_JSON_BYTES)
    end = content.rfind(b"\n") + 1
    try:
        return content[:end].decode(), content[end:]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def parse_json(text: str | bytes, where: object) -> Any:
    """Return the value of a JSON text; raise `ValueError` that says where it is not JSON, or nested too deeply."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file; see `read_file`. Raises `ValueError` if it is not JSON."""
    return parse_json(read_file(path, MAX_JSON_BYTES), path)

"""Where this package keeps what it makes for the user, and how files are written and read. Every floor may ask."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import transformers

_logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return `HF_PARALLEL_CACHE`, else `hf_parallel` in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`)."""
    if own := os.environ.get("HF_PARALLEL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_parallel"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a file to write that takes the place of `path` when all is written, and is gone when that fails.

    Raises
    ------
    FileNotFoundError
        If there is no folder that could hold it.
    """
    if not path.parent.is_dir():  # before a writer names the file that is not finished
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.unfinished")  # others may be writing it too
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write a file that is there whole or not at all. What is no file, such as a pipe, is written to as it is."""
    path = Path(path).resolve()  # not the link is replaced, but what it leads to
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def warn_of_version(path: str | Path, version: str) -> None:
    """Say that a file was saved under another version of transformers, if it was."""
    now = transformers.__version__
    if version != now:
        message = "%s was saved under transformers %s, this is %s: logits may differ in their last bits"
        _logger.warning(message, path, version, now)

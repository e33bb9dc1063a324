"""The package's cache folder, and files that are written completely or not at all."""

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
    """Return `HF_PARALLEL_CACHE`, else `hf_parallel` in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`).

    As with Hugging Face's own cache, the default is `~/.cache` on every operating system.
    """
    if own := os.environ.get("HF_PARALLEL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_parallel"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, whose folder must exist; it replaces `path`, or is deleted on failure."""
    if not path.parent.is_dir():  # otherwise the error would name the temporary file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.unfinished")  # unique among concurrent writers
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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

"""Files that are written completely or not at all: links, permissions, special files, and what killed writers leave."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from forked import exit_status

from hf_parallel import LogitsCache
from hf_parallel.files import write_atomically


def filled() -> LogitsCache:
    cache = LogitsCache()
    with cache.cursors() as cursors:
        cursors.start(0, "model", [1, 2])
        cursors.store(0, torch.randn(64))
    return cache


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_the_permissions_of_an_existing_file_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    write_atomically(path, "text")
    filled().save(path)
    assert path.stat().st_mode & 0o777 == mode


def test_a_new_file_has_the_permissions_of_other_new_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    filled().save(tmp_path / "logits")
    write_atomically(tmp_path / "text", "text")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_logits_are_saved_to_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        filled().save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        LogitsCache.load(tmp_path / "pipe")


def test_a_full_disk_raises_an_error_that_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    """The limit of a process on the size of files stands for a full disk."""
    cache, (reading, writing) = filled(), os.pipe()

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            cache.save(tmp_path / "logits")
        except OSError as error:
            os.write(writing, str(error).encode())

    assert exit_status(save) == 0
    os.close(writing)
    with open(reading) as printed:
        assert printed.read().startswith(f"{tmp_path / 'logits'} cannot be written: ")
    assert list(tmp_path.iterdir()) == []

"""Where this package keeps what it makes for the user. Knows nothing else; every floor may ask."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `HF_PARALLEL_CACHE`, else `hf_parallel` in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`)."""
    if own := os.environ.get("HF_PARALLEL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_parallel"

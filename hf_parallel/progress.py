"""Progress of long runs: one kind of bar for all of them, with the rate and the time left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.utils import logging

DELAY = 1.0
"""Seconds after which a bar appears: short runs have none."""


def progress_bar(
    iterable: Iterable[Any] | None = None, *, total: int | None = None, what: str, unit: str, is_hidden: bool = False
) -> Any:
    """Return a bar of tqdm on stderr, which is quiet unless stderr is a terminal.

    Parameters
    ----------
    iterable : iterable, optional
        What the bar iterates over. Without one, the caller calls `update`.
    total : int, optional
        Number of steps. Default: the length of `iterable`.
    what : str
        What is done, such as "Packing weights".
    unit : str
        What a step is, in the plural.
    is_hidden : bool
        Show nothing, on a terminal either. `transformers.utils.logging.disable_progress_bar` hides all bars.
    """
    return logging.tqdm(
        iterable,
        total=total,
        desc=what,
        unit=f" {unit}",
        delay=DELAY,
        dynamic_ncols=True,
        leave=False,
        disable=is_hidden or None,  # None: unless stderr is a terminal
    )

"""Warnings that point at the line of the caller's code, outside this package and the libraries that call it."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

_OWN = "hf_parallel"
_STANDARD = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def warn_caller(message: str) -> None:
    """Issue a `UserWarning` at the innermost frame outside this package, installed packages and the standard library.

    If there is none, as in a thread that runs `generate` itself, it is issued at the outermost frame.
    """
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_library(frame: FrameType) -> bool:
    """Whether a frame runs code of this package, of Python or of an installed package."""
    file = Path(frame.f_code.co_filename)
    if file.is_relative_to(_STANDARD) or not _INSTALLED.isdisjoint(file.parts):
        return True
    package, _, _ = frame.f_globals.get("__name__", "").partition(".")
    return package == _OWN


def name_prompts(affected: list[bool]) -> str:
    """Return which of the prompts are affected, in words: `the prompt`, or `2 of 3 prompts`."""
    return "the prompt" if len(affected) == 1 else f"{sum(affected)} of {len(affected)} prompts"


def warn_sequential(reasons: list[str | None]) -> None:
    """Warn about prompts whose answer has no parallel part, with the first of the reasons; None: it has one."""
    first_reason = next((reason for reason in reasons if reason is not None), None)
    if first_reason is not None:
        prompts = name_prompts([reason is not None for reason in reasons])
        warn_caller(f"nothing was generated in parallel for {prompts}: {first_reason}")

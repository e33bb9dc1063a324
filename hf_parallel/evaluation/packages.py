"""Check for an optional package of the evaluation. Imports no torch, so a command can name what is missing at once."""

from __future__ import annotations


def check_matplotlib() -> None:
    """Raise `ImportError` if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed: pip install matplotlib") from error

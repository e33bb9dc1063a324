"""Words: a text that somebody says to the rows of a run while they write."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field


class NotRunningError(RuntimeError):
    """Raised for text that is sent to a request, or to rows of it, after they have stopped generating."""


@dataclass(eq=False)
class Words:
    """A text for a run, which reads it between two steps."""

    text: str
    to: int | None  # row, counted from 0 within its prompt; None: all
    heard: Future[int] = field(default_factory=Future)
    """The number of decode passes after which the rows read the text, or why they do not."""

    def fail(self, reason: str) -> None:
        """Record that nobody reads the text any more."""
        if self.heard.set_running_or_notify_cancel():
            self.heard.set_exception(NotRunningError(reason))

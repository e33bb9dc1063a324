"""Updates of the weights between two steps of an engine: the thread of the engine waits while another changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

OnUpdate: TypeAlias = Literal["recompute", "finish", "drop"]
"""What happens to running requests; see `Engine.updating_weights`."""
ON_UPDATE: tuple[OnUpdate, ...] = ("recompute", "finish", "drop")
POLL_SECONDS = 0.1
"""Time after which a waiting thread looks whether the engine still runs."""


class Pause:
    """A pause of the engine's thread, from when it runs `hold` until another thread calls `end`."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then  # called by the engine's thread at the end of the pause
        self._is_held = threading.Event()
        self._has_ended = threading.Event()
        self._is_over = threading.Event()
        self._is_given_up = False

    def hold(self) -> None:
        """Wait for the end of the pause, unless nobody waits for it any more. In the engine's thread."""
        if self._is_given_up:
            return
        self._is_held.set()
        self._has_ended.wait()
        self._then()
        self._is_over.set()

    def begin(self, check: Callable[[], None]) -> None:
        """Wait until the engine has paused. `check` raises an error if it never will."""
        try:
            while not self._is_held.wait(POLL_SECONDS):
                check()
        except BaseException:  # also Ctrl-C
            self._is_given_up = True
            self._has_ended.set()
            raise

    def end(self, check: Callable[[], None]) -> None:
        """Let the engine continue, and wait until it does. `check` raises an error if it has stopped instead."""
        self._has_ended.set()
        while not self._is_over.wait(POLL_SECONDS):
            check()


class WeightUpdates:
    """Lets one thread at a time update the weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updating: threading.Thread | None = None

    @property
    def are_by_this_thread(self) -> bool:
        """Whether this thread is updating the weights now, so that the engine waits for it."""
        return self._updating is threading.current_thread()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Wait for the updates of other threads. Raises `RuntimeError` inside one of the same thread."""
        if self.are_by_this_thread:
            raise RuntimeError("the weights are being updated by this thread already")
        with self._lock:
            self._updating = threading.current_thread()
            try:
                yield
            finally:
                self._updating = None

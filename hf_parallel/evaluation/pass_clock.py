"""Clock of decode passes: accuracy by time, as in figure 8 (right) of Hogwild! Inference."""

from __future__ import annotations

import time

from hf_parallel.engine import RequestHandle
from hf_parallel.generation.pass_streamer import PassStreamer


class PassClock(PassStreamer):
    """Streamer that records when the decode passes of a call ended."""

    def __init__(self) -> None:
        super().__init__(self._add)
        self.times: list[float] = []  # seconds, as `time.perf_counter` counts them

    def _add(self, passes: int) -> None:
        self.times += [time.perf_counter()] * passes

    def until(self, passes: int, handle: RequestHandle) -> float:
        """Return the seconds from the beginning of the prefill to the end of a number of decode passes."""
        assert handle.times.started is not None
        return self.times[passes - 1] - handle.times.started if passes else 0.0

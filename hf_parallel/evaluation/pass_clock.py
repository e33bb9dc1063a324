"""Clock of decode passes: accuracy by time, as in figure 8 (right) of Hogwild! Inference."""

from __future__ import annotations

import time

from hf_parallel.engine import RequestHandle
from hf_parallel.generation.call import GenerationCall
from hf_parallel.transcript.record import Record


class PassClock:
    """Streamer that records when the decode passes of a call ended, whichever mode it runs in."""

    def __init__(self) -> None:
        self.times: list[float] = []  # seconds, as `time.perf_counter` counts them
        self._record: Record | None = None

    def begin_call(self, call: GenerationCall) -> None:
        """Receive the call, whose record counts its passes."""
        self._record = call.record

    def put(self, value: object) -> None:
        """Receive the prompt, or the tokens of a pass."""
        if self._record is not None:
            self.times += [time.perf_counter()] * (self._record.passes - len(self.times))

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text, in modes that stream tokens late."""
        self.put(text)

    def end(self) -> None:
        """Receive the end of the call."""
        self.put(None)

    def until(self, passes: int, handle: RequestHandle) -> float:
        """Return the seconds from the beginning of the prefill to the end of a number of decode passes."""
        assert handle.times.started is not None
        return self.times[passes - 1] - handle.times.started if passes else 0.0

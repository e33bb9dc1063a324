"""PassStreamer: a streamer that follows the decode passes of a call, in any mode."""

from __future__ import annotations

from collections.abc import Callable

from hf_parallel.generation.call import GenerationCall
from hf_parallel.transcript.record import Record


class PassStreamer:
    """Streamer that calls `on_passes` with the number of new decode passes, after each pass that wrote something."""

    def __init__(self, on_passes: Callable[[int], object]) -> None:
        self._on_passes = on_passes
        self._record: Record | None = None
        self._passes = 0

    def begin_call(self, call: GenerationCall) -> None:
        """Receive the call, whose record counts its passes."""
        self._record = call.record

    def put(self, value: object) -> None:
        """Receive the prompt, or the tokens of a pass."""
        if self._record is not None and self._record.passes > self._passes:
            self._on_passes(self._record.passes - self._passes)
            self._passes = self._record.passes

    def write_row(self, row: int, text: str, event: str) -> None:
        """Receive text, in modes that stream tokens late."""
        self.put(text)

    def end(self) -> None:
        """Receive the end of the call."""
        self.put(None)

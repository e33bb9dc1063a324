"""PassAhead: the next decode pass, queued before the sampled tokens are read on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_parallel.cache import Segment
from hf_parallel.generation.parts import Part
from hf_parallel.generation.rows import Row
from hf_parallel.generation.runner import Runner
from hf_parallel.kernels import to_device


class PassAhead:
    """A decode pass that appends one token to each row, `ids`, on the device, and nothing else. Creating it runs it.

    The cache does not hold its tokens until `confirm` finds that these are the inputs of the next pass: a token may
    have ended a row, or changed what rows attend to.
    """

    def __init__(self, runner: Runner, rows: Sequence[Row], ids: Part) -> None:
        self._rows, self._ids, self._cache = rows, ids, runner.cache
        self._segments = [Segment(row.current_view(), 1) for row in rows]
        log, self._cache.log = self._cache.log, None  # `confirm` records the pass
        logits = runner.run([self._segments], ids, range(len(rows)))
        assert isinstance(logits, torch.Tensor), "nothing was asked to be sampled"
        self._cache.log, self._logits = log, logits
        self._step = self._cache.take_back()

    def confirm(self, rows: Sequence[Row], tokens: Sequence[int]) -> torch.Tensor | None:
        """Return the logits `[len(rows), vocabulary]` if this is the next pass of `rows`; else None: it is void.

        `tokens` are those of the pass, read from the device. Rows may have ended, provided that no other row attends to
        their tokens, and that the pass is not logged: a log holds all tokens of a pass.
        """
        places = {row: place for place, row in enumerate(self._rows)}
        kept = [places.get(row, -1) for row in rows]
        if not kept or not all(self._holds(place, tokens) for place in kept):
            return None
        if len(kept) < len(self._rows):
            dropped = {self._segments[place].view[-1] for place in set(range(len(self._rows))) - set(kept)}
            if self._cache.log is not None or any(
                block in dropped for place in kept for block in self._segments[place].view
            ):
                return None
        self._cache.put_back(self._step, kept)
        for place in kept:
            self._rows[place].last_segment = self._segments[place]
        if self._cache.log is not None:
            self._cache.log.add_pass([self._segments], self._step, self._ids.tensor)
        if len(kept) == len(self._rows):
            return self._logits
        return self._logits.index_select(0, to_device(kept, self._logits.device))

    def _holds(self, place: int, tokens: Sequence[int]) -> bool:
        return place >= 0 and self._rows[place].continues(self._segments[place], tokens[place])

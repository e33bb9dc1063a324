"""What the demo and the benchmarks measure with: a clock for the steps of `generate`, a prompt, bytes of a cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.generation.streamers import BaseStreamer

GUESTS = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
TOWNS = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto")
LIKED = ("the garden", "the quiet rooms", "the breakfast", "the view of the lake", "the old library")
QUESTION = "...\n\nIn short, our guests like"


class StepClock(BaseStreamer):
    """When a call of `generate` had its prompt and each of its tokens. Pass it as `streamer=`, in any mode or none.

    A streamer is given the prompt when the work begins and tokens that have reached the host, so the times between
    are those of whole steps, on a GPU too.

    Parameters
    ----------
    on_step : callable, optional
        Called after each token (of all rows) with the number of tokens so far.

    Attributes
    ----------
    times : list of float
        `time.perf_counter()` at the prompt and at each token.
    """

    def __init__(self, on_step: Callable[[int], None] | None = None) -> None:
        self.times: list[float] = []
        self._on_step = on_step

    @property
    def prefill_seconds(self) -> float:
        """From the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def step_seconds(self) -> list[float]:
        """What each later token took."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]

    @property
    def median_step(self) -> float:
        """Median of `step_seconds`."""
        return statistics.median(self.step_seconds)

    @property
    def seconds(self) -> float:
        """From the prompt to the last token."""
        return self.times[-1] - self.times[0]

    def put(self, value: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())
        if self._on_step is not None and len(self.times) > 1:
            self._on_step(len(self.times) - 1)

    def write_row(self, row: int, text: str, event: str) -> None:
        """Text is not timed; who takes it is not put the prefixes of a row, which are no steps."""

    def end(self) -> None:
        """Nothing is left to note."""


def long_prompt(tokenizer: Any, length: int) -> torch.Tensor:
    """`int64 [1, length]`: the guest book of a hotel that does not exist, and the beginning of a remark on it."""
    draw = random.Random(0)
    lines = [
        f"{draw.choice(GUESTS)} came from {draw.choice(TOWNS)}, stayed {draw.randint(2, 9)} nights and liked "
        f"{draw.choice(LIKED)}."
        for _ in range(length // 8 + 1)
    ]
    book, question = (tokenizer(text)["input_ids"] for text in ("\n".join(lines), QUESTION))
    return torch.tensor([(book[: max(length - len(question), 0)] + question)[-length:]])


def dense_bytes(cache: Cache) -> int:
    """Bytes of keys and values in a cache of transformers' own, such as `DynamicCache`."""
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(states.nbytes for states in held if isinstance(states, torch.Tensor))

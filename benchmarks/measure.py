"""Measurements of the benchmarks: a clock for the steps of `generate`, a prompt, the size of a cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

GUESTS = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
TOWNS = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto")
LIKED = ("the garden", "the quiet rooms", "the breakfast", "the view of the lake", "the old library")
QUESTION = "...\n\nIn short, our guests like"


class StepClock(BaseStreamer):
    """Streamer that records when `generate` passes it the prompt and each token; works with any mode and with none.

    Streamers receive tokens in host memory, so each interval covers a complete decode step, on a GPU too.
    `on_step` is called after each step with the number of tokens that each row has generated so far.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda count: None) -> None:
        self.times: list[float] = []  # seconds
        self._on_step = on_step

    @property
    def prefill_seconds(self) -> float:
        """Time from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds per token after the first."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]

    @property
    def median_step(self) -> float:
        """Median of `step_seconds`."""
        return statistics.median(self.step_seconds)

    @property
    def seconds(self) -> float:
        """Time from the prompt to the last token."""
        return self.times[-1] - self.times[0]

    def put(self, value: torch.Tensor) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self._on_step(len(self.times) - 1)

    def write_row(self, row: int, text: str, event: str) -> None:
        """Ignore text. Without this method, `put` may also receive inserted tokens, such as step prefixes."""

    def end(self) -> None:
        """Ignore the end."""


def long_prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Return a prompt `int64 [1, length]`: the guest book of a fictional hotel and the beginning of a remark on it."""
    draw = random.Random(0)
    lines = [
        f"{draw.choice(GUESTS)} came from {draw.choice(TOWNS)}, stayed {draw.randint(2, 9)} nights and liked "
        f"{draw.choice(LIKED)}."
        for _ in range(length // 8 + 1)
    ]
    book, question = (tokenizer(text)["input_ids"] for text in ("\n".join(lines), QUESTION))
    return torch.tensor([(book[: max(length - len(question), 0)] + question)[-length:]])


def dense_bytes(cache: Cache) -> int:
    """Return the bytes of keys and values in a cache of transformers, such as `DynamicCache`."""
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in states if isinstance(tensor, torch.Tensor))

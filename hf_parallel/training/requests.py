"""Requests of an engine as rollouts: what a request has sampled, and what waits for requests as they end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from hf_parallel.generation.outputs import ParallelOutput

T = TypeVar("T")


def as_they_end(waiting: dict[Future[Any], T]) -> Iterator[list[T]]:
    """Remove and yield the values of futures as these end, until none is left. More may be added meanwhile.

    Values are yielded together if their futures have ended by then.
    """
    while waiting:
        wait(waiting, return_when=FIRST_COMPLETED)
        yield [waiting.pop(future) for future in [*waiting] if future.done()]


def sampled_row(output: ParallelOutput) -> tuple[list[int], list[float]]:
    """Return the tokens of an output with one row, and their log-probabilities under the sampled distribution."""
    (end,) = output.record.lengths
    tokens = output.sequences[0, output.record.begin : end].tolist()
    _, log_probs = output.record.sampled_log_probs(processed=True)
    return tokens, log_probs.tolist()

"""What a run wants from whoever drives it.

A run of a mode is a generator: it yields a want, and is sent the result. It never calls the model. So a call that has
the model to itself and an engine that serves many callers drive the same code: `LocalHost.drive`, `Engine`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.tree import Node
from hf_parallel.generation.decoding.standing import Standing
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import SamplingTask

T = TypeVar("T")


class Pass(NamedTuple):
    """A forward pass over a cache. The result is its logits `[len(ends), vocabulary]`, which the next may overwrite.

    `passes` are consecutive passes that are computed as one, over packed tokens `ids`, `int64 [T]`. The logits after
    the segments with the indices `ends` are wanted (None: after all tokens). `sampling` says what the run will sample
    from them: a driver that samples for several runs at once may sample now, and sends the `Sampled` instead.
    """

    cache: BlockCache
    passes: Sequence[Sequence[Segment]]
    ids: Part
    ends: Sequence[int] | None = None
    sampling: SamplingTask | None = None


class Draw(NamedTuple):
    """The next token of each row of a task, given logits `[rows, vocabulary]`. The result is a `Sampled`."""

    task: SamplingTask
    logits: torch.Tensor


class Prefix(NamedTuple):
    """The right to insert tokens, int64 `[length]`, below a node of the tree: no other run is computing them.

    `gap` is that of `Node`. The result is None.
    """

    tokens: np.ndarray
    root: Node
    gap: int


class Wait(NamedTuple):
    """One step of the other runs. The result is None."""


Want: TypeAlias = "Pass | Draw | Standing | Prefix | Wait"
Steps: TypeAlias = Generator[Want, Any, T]
"""A function of a run that wants something: call it with `yield from`. It returns a T."""


def check_steps(steps: Steps[T]) -> Steps[T]:
    """Return the steps of a run; raise `TypeError` if they are none, as of a mode without `yield from`."""
    if not isinstance(steps, Generator):
        raise TypeError(f"generate() of a run must be a generator (`yield from`), got {type(steps).__name__}")
    return steps

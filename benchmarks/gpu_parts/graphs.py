"""Decode steps replayed as CUDA graphs compute the same logits as eager ones.

Small models in float32, many steps, rows that end and steps that move: if a graph uses a stale value, the logits of a
later step differ.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_parallel.models import cuda_graph as graph

from .cases import Case
from .correctness import worst
from .models import PAD, Models, draw_prompt, hogwild_settings

TOLERANCE = 1e-4
"""Allowed absolute error of a logit: several hundred times the rounding error. Logits have a spread of about 0.3."""
TAIL = 3
"""Number of tokens at the end of a prompt that differ between rows."""
PENALTY = 2.0
"""Repetition penalty. Without it, models with random weights repeat one token: logits then hardly change between steps,
which would hide stale values, and no token could serve as an end token of single rows."""


@dataclass(frozen=True)
class GraphStage:
    """Settings and cases.

    Parameters
    ----------
    models : tuple of str
        Keys of `CONFIGS`.
    rows, workers : int
        Number of rows of `shared_prefix` and `hogwild`.
    prefix, steps : int
        Length of prompts, and number of new tokens. The default exceeds `HORIZON`: work items are made twice.
    """

    models: tuple[str, ...] = ("small", "small-window")
    rows: int = 12
    workers: int = 3
    prefix: int = 100
    steps: int = 100

    def cases(self, models: Models) -> Iterator[Case]:
        """Yield all checks for all models."""
        checks: dict[str, Callable[..., dict[str, Any]]] = {
            "shared_prefix": self.check_rows,
            "rows end": partial(self.check_rows, end=True),
            "compiled, rows end": partial(self.check_rows, end=True, compiles=True),
            "hogwild": self.check_workers,
        }
        for name, (way, check) in itertools.product(self.models, checks.items()):
            rows = self.workers if way == "hogwild" else self.rows
            yield Case({"model": name, "way": way, "rows": rows, "steps": self.steps}, partial(check, models, name))

    def check_rows(self, models: Models, name: str, end: bool = False, compiles: bool = False) -> dict[str, Any]:
        """Compare `shared_prefix` with plain `generate`. If rows end, the others use smaller graphs."""
        model = models.get(name)
        prompt = draw_prompt(model, self.rows, self.prefix)
        prompt[:, -TAIL:] = torch.randint_like(prompt[:, -TAIL:], PAD + 1, model.config.vocab_size)
        expected = self._generate(model, prompt, generation_mode=None)
        ends: list[int] = []
        if end:
            ends = late_tokens(expected.sequences[:, self.prefix :])
            expected = self._generate(model, prompt, generation_mode=None, eos_token_id=ends)
        with reasons() as messages:
            settings = {"generation_mode": "shared_prefix", "compile": compiles, "eos_token_id": ends or None}
            ours = self._generate(model, prompt, **settings)
        if compiles and not ours.stats.compiled_passes:
            raise RuntimeError("no decode step ran compiled layers")
        return compare(ours, expected, messages, ends)

    def check_workers(self, models: Models, name: str) -> dict[str, Any]:
        """Compare Hogwild! workers, whose finished steps move, with and without graphs."""
        model = models.get(name)
        settings = hogwild_settings(model, self.workers)
        prompt = draw_prompt(model, 1, self.prefix)
        text = self._generate(model, prompt, cuda_graph=False, **settings).texts[0]
        rare = min(sorted(set(text)), key=text.count)  # some steps end, but not all
        settings |= {"separator": rare, "sentence_ends": sorted(set(text))}
        expected = self._generate(model, prompt, cuda_graph=False, **settings)
        with reasons() as messages:
            ours = self._generate(model, prompt, **settings)
        return compare(ours, expected, messages, together=True)

    def _generate(self, model: Any, prompt: torch.Tensor, **settings: Any) -> Any:
        common: dict[str, Any] = {"do_sample": False, "max_new_tokens": self.steps, "pad_token_id": PAD}
        common |= {"repetition_penalty": PENALTY, "return_dict_in_generate": True, "output_scores": True}
        return model.generate(prompt, **common, **settings)


def late_tokens(written: torch.Tensor) -> list[int]:
    """Return the tokens that occur only in the second half of `int64 [rows, steps]`: end tokens reached late."""
    half = written.shape[1] // 2
    return sorted(set(written.flatten().tolist()) - set(written[:, :half].flatten().tolist()))


class _Collector(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store a message with its traceback."""
        self.messages.append(self.format(record))


@contextmanager
def reasons() -> Iterator[list[str]]:
    """Collect the log messages about decode steps that were not captured."""
    logger, hearer = logging.getLogger(graph.__name__), _Collector()
    level = logger.level
    logger.addHandler(hearer)
    logger.setLevel(logging.DEBUG)  # the level of the traceback
    try:
        yield hearer.messages
    finally:
        logger.setLevel(level)
        logger.removeHandler(hearer)


def compare(
    ours: Any, expected: Any, messages: Sequence[str] = (), ends: Sequence[int] = (), together: bool = False
) -> dict[str, Any]:
    """Return the figures of a case; raise `RuntimeError` if no decode step was captured on a GPU."""
    if ours.sequences.is_cuda and not ours.stats.graph_bytes:
        raise RuntimeError(": ".join(["no decode step was captured", *messages]))
    error, compared = largest_difference(ours.scores, expected.scores, ends, together)
    return {
        "max_error": error,
        "tolerance": TOLERANCE,
        "ok": error <= TOLERANCE,
        "compared": compared,
        "graph_bytes": ours.stats.graph_bytes,
    }


def largest_difference(
    ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], ends: Sequence[int] = (), together: bool = False
) -> tuple[float, int]:
    """Return the largest difference of scores as long as rows have the same tokens, and the number of compared scores.

    Parameters
    ----------
    ours, expected : sequence of [rows, vocabulary]
        Scores of each step.
    ends : sequence of int
        Tokens that end a row; later steps of the row are ignored.
    together : bool
        Whether rows attend to each other, so that one different token ends the comparison of all rows.

    Raises
    ------
    RuntimeError
        If steps are missing although rows have not ended.
    """
    alive = torch.ones(len(expected[0]), dtype=torch.bool, device=expected[0].device)
    error, compared = 0.0, 0
    for mine, its in zip(ours, expected, strict=False):
        if not alive.any():
            break
        error = worst(error, mine[alive], its[alive])
        compared += int(alive.sum())
        token = its.argmax(dim=-1)
        same = mine.argmax(dim=-1) == token
        alive = alive & (same.all() if together else same)
        alive = alive & ~torch.isin(token, torch.tensor(ends, dtype=token.dtype, device=token.device))
    if alive.any() and len(ours) != len(expected):
        raise RuntimeError(f"{len(ours)} steps instead of {len(expected)}")
    return error, compared

"""Row-wise processors: the common ones of Transformers, for rows of any settings and lengths at once.

Each returns the same bits as the processor of Transformers. `split_warpers` finds the warpers that
`hf_parallel.kernels.sampling` applies together with the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional as F
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_parallel.generation.processors import MinLengthProcessor, RowPenalty
from hf_parallel.kernels import to_device
from hf_parallel.kernels.sampling import Warpers


class Step(NamedTuple):
    """Processors of one class, one for each of n rows, with the rows' numbers in their tables and their lengths."""

    processors: list[Any]
    rows: list[int]
    lengths: list[int]


RowWise: TypeAlias = Callable[[torch.Tensor, Step], torch.Tensor]
"""(scores float32 `[n, vocabulary]`, step) -> processed scores; may write to its input."""


def penalize(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Apply repetition penalties."""
    rows_of: dict[RowPenalty, list[int]] = {}
    for processor, row in zip(step.processors, step.rows, strict=True):
        rows_of.setdefault(processor, []).append(row)
    vocabulary, longest = scores.shape[1], max(step.lengths)
    seen = [processor.tokens(rows, vocabulary) for processor, rows in rows_of.items()]
    tokens = torch.cat([F.pad(ids, (longest - ids.shape[1], 0), value=vocabulary) for ids in seen])
    tokens = tokens.clamp(max=vocabulary)
    padded = F.pad(scores, (0, 1))  # for tokens that are ignored, or outside the output vocabulary
    found, penalty = padded.gather(1, tokens), _setting([one.penalty for one in step.processors], scores.device)
    found = torch.where(found < 0, found * penalty, _divide(found, penalty))
    return padded.scatter_(1, tokens, found)[:, :-1]


def suppress(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Suppress the end tokens of rows that are too short."""
    first = step.processors[0]
    if step.processors.count(first) == len(step.processors) and max(step.lengths) < first.min_length:
        return scores.index_fill_(1, first.indices(scores), -torch.inf)
    places: list[int] = []
    tokens: list[int] = []
    for place, (processor, length) in enumerate(zip(step.processors, step.lengths, strict=True)):
        if length < processor.min_length:
            of_row = [token for token in processor.eos_token_ids if 0 <= token < scores.shape[1]]
            places += [place] * len(of_row)
            tokens += of_row
    if places:
        scores[to_device(places, scores.device), to_device(tokens, scores.device)] = -torch.inf
    return scores


def scale(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Divide by the temperature."""
    return _divide(scores, _setting([one.temperature for one in step.processors], scores.device))


def keep_top_k(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Keep the `top_k` highest scores, and ties with the lowest of them."""
    counts = [min(one.top_k, scores.shape[1]) for one in step.processors]
    highest = torch.topk(scores, max(counts))[0]
    if min(counts) == max(counts):
        last = highest[:, -1:]
    else:
        last = highest.gather(1, to_device(counts, scores.device)[:, None] - 1)
    return scores.masked_fill(scores < last, -torch.inf)


def keep_top_p(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Keep the most probable tokens of total probability `top_p`."""
    ascending, order = torch.sort(scores, descending=False)
    rest = _setting([1 - one.top_p for one in step.processors], scores.device)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= rest
    removed[..., -1:] = False
    return scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)


def keep_min_p(scores: torch.Tensor, step: Step) -> torch.Tensor:
    """Keep tokens of at least `min_p` times the highest probability."""
    probs = scores.softmax(dim=-1)
    limit = _setting([one.min_p for one in step.processors], scores.device) * probs.amax(dim=-1, keepdim=True)
    removed = (probs < limit).scatter_(-1, torch.topk(probs, 1, dim=-1).indices, False)
    return scores.masked_fill(removed, -torch.inf)


STAGES: dict[type, tuple[int, RowWise]] = {
    RowPenalty: (0, penalize),
    MinLengthProcessor: (1, suppress),
    TemperatureLogitsWarper: (2, scale),
    TopKLogitsWarper: (3, keep_top_k),
    TopPLogitsWarper: (4, keep_top_p),
    MinPLogitsWarper: (5, keep_min_p),
}
"""Number and function of each class, in the order in which `generate` applies them."""
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def stage_of(processor: LogitsProcessor) -> tuple[int, RowWise] | None:
    """Return number and function of a row-wise processor; None for any other."""
    is_plain = getattr(processor, "min_tokens_to_keep", 1) == 1
    is_plain = is_plain and getattr(processor, "filter_value", -torch.inf) == -torch.inf
    return STAGES.get(type(processor)) if is_plain else None


def split_warpers(processors: Sequence[LogitsProcessor]) -> tuple[list[LogitsProcessor], Warpers]:
    """Return the processors before the last warpers, and the settings of these."""
    settings: dict[str, float] = {}
    head, before = list(processors), len(STAGES)
    while head and type(head[-1]) in _WARPERS:
        stage = stage_of(head[-1])
        if stage is None or stage[0] >= before:
            break
        before, warper = stage[0], head.pop()
        name = _WARPERS[type(warper)]
        settings[name] = getattr(warper, name)
    return head, Warpers(**settings)  # type: ignore[arg-type]  # `top_k` is an int


def _setting(values: list[float], device: torch.device) -> float | torch.Tensor:
    """Return the setting if all rows share it, else a column with one setting per row."""
    if values.count(values[0]) == len(values):
        return values[0]
    return to_device(values, device, torch.float32)[:, None]


def _divide(scores: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """Divide rows as PyTorch divides by a number: on CUDA it multiplies by the inverse."""
    if isinstance(divisor, torch.Tensor) and scores.device.type != "cpu":
        return scores * divisor.reciprocal()
    return scores / divisor

"""Warpers of Transformers that `hf_parallel.kernels.sampling` applies together with the draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_parallel.kernels.sampling import Warpers

ORDER: tuple[type, ...] = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Order in which `generate` applies them."""


def is_plain(warper: Any) -> bool:
    """Whether a top-k, top-p or min-p warper keeps at least one token and sets the others to minus infinity."""
    return bool(warper.min_tokens_to_keep == 1 and warper.filter_value == -torch.inf)


def split_warpers(processors: Sequence[Any]) -> tuple[list[Any], Warpers]:
    """Return the processors before the last warpers, and the settings of these."""
    settings: dict[str, Any] = {}
    head, before = list(processors), len(ORDER)
    while head and type(head[-1]) in ORDER[:before]:
        warper = head[-1]
        before = ORDER.index(type(warper))
        if isinstance(warper, TemperatureLogitsWarper):
            settings["temperature"] = warper.temperature
        elif not is_plain(warper):
            break
        elif isinstance(warper, TopKLogitsWarper):
            settings["top_k"] = warper.top_k
        elif isinstance(warper, TopPLogitsWarper):
            settings["top_p"] = warper.top_p
        else:
            settings["min_p"] = warper.min_p
        head.pop()
    return head, Warpers(**settings)

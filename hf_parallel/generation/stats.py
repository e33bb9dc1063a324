"""GenerationStats: the cost of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class GenerationStats:
    """Cost of one call.

    Attributes
    ----------
    forward_passes : int
        Forward passes of the model, prefill included.
    prefilled_tokens : int
        Computed tokens that were not generated (prompts, headers, inserted texts).
    reused_tokens : int
        Tokens that were not generated and whose keys and values were cached, counted once per row.
    decoded_tokens : int
        Generated tokens of all rows.
    replayed_tokens : int
        Generated tokens whose logits were cached, so that they needed no forward pass.
    drafted_tokens, accepted_tokens : int
        Draft tokens that were verified (`draft_tokens`), and those of them that were accepted.
    kv_bytes : int
        Bytes of keys and values at the end, each unique token counted once.
    reserved_bytes : int
        Bytes of storage reserved for them at the end.
    graph_bytes : int
        Bytes held by captured decode steps (CUDA graphs) during the call.
    prefill_seconds, decode_seconds : float
        Wall-clock time of prefill and of decoding.
    plan_seconds : float
        Part of it that was spent on planning forward passes on the host.
    """

    forward_passes: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    replayed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes: int = 0
    reserved_bytes: int = 0
    graph_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    plan_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a plain dictionary."""
        return asdict(self)

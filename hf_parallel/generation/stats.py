"""GenerationStats: the cost of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class GenerationStats:
    """What a call cost. Benchmarks and tests read these.

    Attributes
    ----------
    forward_passes : int
        Forward passes of the model, prefill included.
    prefilled_tokens : int
        Tokens that were given (prompts, headers, inserted texts) and had to be computed.
    reused_tokens : int
        Tokens that were given and whose keys and values were held already, counted once per row.
    decoded_tokens : int
        Tokens that were generated, over all rows.
    replayed_tokens : int
        Generated tokens that needed no forward pass because their logits were remembered.
    drafted_tokens, accepted_tokens : int
        Tokens that were computed on trial (`draft_tokens`), and those of them that were generated then.
    kv_bytes : int
        Bytes of keys and values held at the end: unique tokens, once.
    reserved_bytes : int
        Bytes of storage for them at the end, used or not.
    graph_bytes : int
        Bytes that captured decode steps (CUDA graphs) kept while the call ran.
    prefill_seconds, decode_seconds : float
        Wall-clock time of either part, everything included.
    plan_seconds : float
        Part of it that went into laying out forward passes, outside the model.
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
        """As a plain dictionary."""
        return asdict(self)

"""GenerationStats: the cost of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class GenerationStats:
    """Cost of one call."""

    forward_passes: int = 0
    """Forward passes of the model, prefill included."""
    compiled_passes: int = 0
    """Decode steps that ran compiled layers (`compile`)."""
    prefilled_tokens: int = 0
    """Tokens computed other than in decode steps: prompts, headers, inserted texts, replayed and reencoded tokens."""
    reused_tokens: int = 0
    """Tokens that were not generated and whose keys and values were cached, counted once per row."""
    cached_tokens: int = 0
    """Tokens of the prompts whose keys and values were cached before the call, counted once per distinct prompt."""
    decoded_tokens: int = 0
    """Generated tokens of all rows."""
    replayed_tokens: int = 0
    """Generated tokens whose logits were cached, so that they needed no forward pass."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that were verified (`draft_tokens`), and how many of them were accepted."""
    kv_bytes: int = 0
    """Bytes of keys and values at the end, each unique token counted once."""
    state_bytes: int = 0
    """Bytes of the states that layers keep instead of keys, at the end."""
    reserved_bytes: int = 0
    """Bytes of storage reserved for them at the end."""
    graph_bytes: int = 0
    """Bytes held by captured decode steps (CUDA graphs) during the call."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """Wall-clock time of prefill and of decoding."""
    plan_seconds: float = 0.0
    """Part of it that was spent on planning forward passes on the host."""

    def add(self, other: GenerationStats) -> None:
        """Add the cost of another call: sums, and the maximum of the memory."""
        for name, value in other.to_dict().items():
            total = getattr(self, name)
            if name.endswith("_bytes"):
                total = max(total, value)
            else:
                total += value
            setattr(self, name, total)

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a plain dictionary."""
        return asdict(self)

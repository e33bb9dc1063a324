"""Beam search over one long prompt: `shared_prefix` beside `generate` without a mode.

Both read keys and values after each step. `generate` is measured once, as it prefills the prompt for every beam.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from hf_parallel import SharedPrefixCache

from .measure import dense_bytes, long_prompt

SIZES: dict[str, Any] = {"prompt": 1024, "beams": 64, "new_tokens": 32, "rounds": 1}
QUICK: dict[str, Any] = {"prompt": 48, "beams": 4, "new_tokens": 6}
TARGETS = (
    ("seconds_of_generate_by_ours", "at least", 1.0, "seconds of generate relative to ours"),
    ("kv_bytes_of_generate_by_ours", "at least", 1.0, "KV bytes of generate relative to our most"),
)


class Peak:
    """A processor that changes no scores, and records the most bytes of keys and values, and when steps begin."""

    def __init__(self, cache: SharedPrefixCache | None = None) -> None:
        self.cache = cache
        self.kv_bytes = 0
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`."""
        self.times.append(time.perf_counter())
        if self.cache is not None:
            self.kv_bytes = max(self.kv_bytes, self.cache.kv_bytes)
        return scores

    def figures(self, began: float) -> dict[str, Any]:
        """Return the seconds of the call and of its parts."""
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return {
            "seconds": time.perf_counter() - began,
            "prefill_seconds": self.times[0] - began,
            "step_seconds": statistics.median(steps),
        }


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    ids = long_prompt(tokenizer, sizes.prompt).to(model.device)
    call = {
        "attention_mask": torch.ones_like(ids),
        "num_beams": sizes.beams,
        "max_new_tokens": sizes.new_tokens,
        "min_new_tokens": sizes.new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": False,
    }
    rounds = []
    for _ in range(sizes.rounds):
        cache = SharedPrefixCache()
        peak = Peak(cache)
        began = time.perf_counter()
        output = model.generate(
            ids, generation_mode="shared_prefix", past_key_values=cache, logits_processor=[peak], **call
        )
        rounds.append(peak.figures(began) | {"kv_bytes": peak.kv_bytes, "stats": output.stats.to_dict()})
    ours = min(rounds, key=lambda figures: figures["seconds"])
    print(f"generate, {sizes.beams} beams over {sizes.prompt} tokens")
    peak = Peak()
    began = time.perf_counter()
    expected = model.generate(ids, generation_mode=None, logits_processor=[peak], **call)
    plain = peak.figures(began) | {"kv_bytes": dense_bytes(expected.past_key_values)}
    ratios = {f"{name}_of_generate_by_ours": plain[name] / ours[name] for name in plain}
    same = torch.equal(output.sequences, expected.sequences)
    return {"shared_prefix": ours, "generate": plain, "ratios": ratios, "same_sequences": same}

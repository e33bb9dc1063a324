"""Completions of one long prompt: `shared_prefix`, three methods of transformers, and a lower bound.

The bound is the same batch over a prompt of 4 tokens, whose attention costs next to nothing.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import hf_parallel

from .continuous_batching import generate_batch
from .measure import StepClock, dense_bytes, long_prompt
from .report import run_benchmark
from .rounds import PrefilledCache, Times, prefill_ratio, run_rounds, step_ratio

BOUND_PROMPT = 4
KEPT_STATES = 2
"""States of the prompt, if layers keep states: at its end and before its last token."""
TARGETS = (
    ("prefill_by_one_row", "at most", 1.1, "prefill relative to one row"),
    ("step_by_bound", "at most", 1.25, "decode step relative to the bound"),
    ("kv_bytes_by_unique_tokens", "at most", 1.0, "KV bytes relative to the unique tokens'"),
    ("states_by_rows_and_prompt", "at most", 1.0, "states relative to one per row and two of the prompt"),
)


@dataclass(frozen=True)
class SharedPrefixBenchmark:
    """Settings and run.

    Parameters
    ----------
    prompt, rows, new_tokens, rounds : int
    generate, generate_batch, prefilled_cache : bool
        Whether to measure plain `generate`, which prefills every row, continuous batching, and copies of a cache.
    """

    prompt: int = 2048
    rows: int = 16
    new_tokens: int = 16
    rounds: int = 5
    generate: bool = True
    generate_batch: bool = True
    prefilled_cache: bool = True

    def run(self, model: Any, ids: torch.Tensor) -> dict[str, Any]:
        """Measure with the prompt `ids`, `int64 [1, prompt]`; return the entries of the report."""
        batch = ids.repeat(self.rows, 1)
        prefill = self._prefill_rounds(model, ids, batch)
        decode, prefilled = self._decode_rounds(model, ids, batch)
        print("shared_prefix")
        ours = self._call(model, batch, generation_mode="shared_prefix")
        one_row = statistics.median(prefill["one row"].prefill)
        unique = self.prompt + self.rows * (self.new_tokens - 1)
        result: dict[str, Any] = {
            "settings": asdict(self),
            "one_row": {"prefill_seconds": one_row},
            **{name: self._way(times) for name, times in decode.items()},
            "same_tokens_as": "generate" if self.generate else "prefilled_cache",
            "ratios": {
                "prefill_by_one_row": prefill_ratio(prefill["shared_prefix"], prefill["one row"]),
                "step_by_bound": step_ratio(decode["shared_prefix"], decode["bound"]),
                "kv_bytes_by_unique_tokens": ours.stats.kv_bytes
                / (unique * ours.past_key_values.pool.arena.bytes_per_token),
            },
        }
        reference = ours.sequences if prefilled is None else prefilled.sequences
        if self.generate:
            result["generate"], reference = self._generate(model, batch)
        states = ours.past_key_values.pool.states
        if states.in_use:
            held = ours.stats.state_bytes / states.bytes_per_slot
            result["ratios"]["states_by_rows_and_prompt"] = held / (self.rows + KEPT_STATES)
        result["shared_prefix"] |= {
            "prefill_seconds": statistics.median(prefill["shared_prefix"].prefill),
            "kv_bytes": ours.stats.kv_bytes,
            "stats": ours.stats.to_dict(),
            "same_tokens": bool(torch.equal(reference, ours.sequences)),
        }
        if prefilled is not None:
            copies, own = decode["prefilled_cache"], decode["shared_prefix"]
            result["ratios"]["step_of_prefilled_cache_by_ours"] = step_ratio(copies, own)
            result["prefilled_cache"] |= {
                "prefill_seconds": one_row + statistics.median(prefilled.copying),
                "kv_bytes": prefilled.kv_bytes,
                "same_tokens": bool(torch.equal(reference, prefilled.sequences)),
            }
        if self.generate_batch:
            result["generate_batch"] = self._generate_batch(model, ids, reference)
        return result

    def _call(self, model: Any, batch: torch.Tensor, tokens: int | None = None, **settings: Any) -> Any:
        """Call `generate` greedily for exactly `tokens` new tokens per row (default: `new_tokens`)."""
        tokens = tokens or self.new_tokens
        settings = {"generation_mode": None, "max_new_tokens": tokens, "min_new_tokens": tokens} | settings
        return model.generate(batch, do_sample=False, return_dict_in_generate=True, **settings)

    def _prefill_rounds(self, model: Any, ids: torch.Tensor, batch: torch.Tensor) -> dict[str, Times]:
        """Measure the prefill of all rows, and of a single row by plain `generate`."""
        ways = {
            "one row": lambda clock: self._call(model, ids, 1, streamer=clock),
            "shared_prefix": lambda clock: self._call(model, batch, 1, streamer=clock, generation_mode="shared_prefix"),
        }
        return run_rounds(ways, self.rounds)

    def _decode_rounds(
        self, model: Any, ids: torch.Tensor, batch: torch.Tensor
    ) -> tuple[dict[str, Times], PrefilledCache | None]:
        """Measure the steps of all methods but plain `generate`, over cached prompts."""
        kept = hf_parallel.SharedPrefixCache(device=model.device)
        ours: dict[str, Any] = {"generation_mode": "shared_prefix", "past_key_values": kept, "keep_completions": False}
        print("prefill of the caches")
        self._call(model, batch, 1, **ours)
        prefilled = PrefilledCache(model, ids) if self.prefilled_cache else None

        def over_copies(clock: StepClock) -> None:
            assert prefilled is not None
            output = self._call(model, batch, streamer=clock, past_key_values=prefilled.repeated(self.rows))
            prefilled.sequences, prefilled.kv_bytes = output.sequences, dense_bytes(output.past_key_values)

        ways = {
            "bound": lambda clock: self._call(model, batch[:, -BOUND_PROMPT:], streamer=clock),
            "shared_prefix": lambda clock: self._call(model, batch, streamer=clock, **ours),
        } | ({} if prefilled is None else {"prefilled_cache": over_copies})
        return run_rounds(ways, self.rounds), prefilled

    def _way(self, times: Times) -> dict[str, Any]:
        return {"step_seconds": times.step, "tokens_per_second": self.rows / times.step, "steps": times.rounded_steps}

    def _generate(self, model: Any, batch: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        """Measure plain `generate` on all rows once, mainly for its prefill."""
        print(f"generate, prefill of {self.rows} x {self.prompt} tokens")
        clock = StepClock()
        output = self._call(model, batch, streamer=clock)
        times = Times([clock.prefill_seconds], [clock.step_seconds])
        kv_bytes = dense_bytes(output.past_key_values)
        return self._way(times) | {"prefill_seconds": clock.prefill_seconds, "kv_bytes": kv_bytes}, output.sequences

    def _generate_batch(self, model: Any, ids: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
        """Measure continuous batching with `num_return_sequences`, whose rows share the pages of the prompt."""
        print("generate_batch (continuous batching)")
        try:
            requests = generate_batch(model, [ids[0].tolist()], self.new_tokens, self.rows, do_sample=False)
        except Exception as error:  # an error is reported as a result
            return {"error": f"{type(error).__name__}: {error}"}
        began = min(request.lifespan[0] for request in requests)
        ticks = [max(at) for at in zip(*(request.timestamps for request in requests), strict=True)]
        times = Times([ticks[0] - began], [[after - before for before, after in itertools.pairwise(ticks)]])
        expected = reference[0, self.prompt :].tolist()
        same = all(request.generated_tokens == expected for request in requests)
        return self._way(times) | {"prefill_seconds": times.prefill[0], "same_tokens": same}


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        sizes = (48, 3, 4, 1) if options.quick else (options.prompt, options.rows, options.new_tokens, options.rounds)
        also = {"generate": bool(options.generate), "generate_batch": bool(options.generate_batch)}
        benchmark = replace(SharedPrefixBenchmark(*sizes), **also)
        return benchmark.run(model, long_prompt(tokenizer, benchmark.prompt).to(model.device))

    sizes: dict[str, Any] = {"prompt": 2048, "rows": 16, "new_tokens": 16, "rounds": 5}
    return run_benchmark("shared_prefix", __doc__, measure, TARGETS, **sizes, generate=1, generate_batch=1)


if __name__ == "__main__":
    sys.exit(main())

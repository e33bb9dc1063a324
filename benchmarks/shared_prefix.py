"""Completions of one long prompt: `shared_prefix`, three methods of transformers, and a lower bound.

The bound is the same batch over a prompt of 4 tokens, whose attention costs next to nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_parallel
from hf_parallel.cli.measure import StepClock, dense_bytes

from .rounds import Bar, PrefilledCache, Times, prefill_ratio, run_rounds, step_ratio

BOUND_PROMPT = 4
PAGE = 256
"""Tokens per page of the cache of continuous batching."""


def page_settings(pages: int, prompt: int) -> dict[str, Any]:
    """Return the settings of continuous batching for so many pages, and prompts computed in one pass."""
    name = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # in transformers 5.17.0
    return {name: PAGE, "num_blocks": pages, "max_batch_tokens": max(prompt, PAGE)}


@dataclass(frozen=True)
class SharedPrefixBenchmark:
    """Settings and run.

    Parameters
    ----------
    prompt, rows, new_tokens, rounds : int
    generate, generate_batch : bool
        Whether to measure plain `generate`, which prefills every row, and continuous batching.
    """

    prompt: int = 2048
    rows: int = 16
    new_tokens: int = 16
    rounds: int = 5
    generate: bool = True
    generate_batch: bool = True

    @property
    def calls(self) -> int:
        """Number of calls of `generate`, for a progress bar."""
        return 5 * (self.rounds + 1) + 2 + self.generate + self.generate_batch

    def run(self, model: Any, ids: torch.Tensor, bar: Bar) -> dict[str, Any]:
        """Measure with the prompt `ids`, `int64 [1, prompt]`; return an entry of the report."""
        batch = ids.repeat(self.rows, 1)
        prefill = self._prefill_rounds(model, ids, batch, bar)
        decode, prefilled = self._decode_rounds(model, ids, batch, bar)
        bar.next("shared_prefix")
        ours = self._call(model, batch, generation_mode="shared_prefix")
        one_row = statistics.median(prefill["one row"].prefill)
        unique = self.prompt + self.rows * (self.new_tokens - 1)
        result: dict[str, Any] = {
            "one_row": {"prefill_seconds": one_row},
            **{name: self._way(times) for name, times in decode.items()},
            "same_tokens_as": "generate" if self.generate else "prefilled_cache",
            "ratios": {
                "prefill_by_one_row": prefill_ratio(prefill["shared_prefix"], prefill["one row"]),
                "step_by_bound": step_ratio(decode["shared_prefix"], decode["bound"]),
                "step_of_prefilled_cache_by_ours": step_ratio(decode["prefilled_cache"], decode["shared_prefix"]),
                "kv_bytes_by_unique_tokens": ours.stats.kv_bytes
                / (unique * ours.past_key_values.pool.arena.bytes_per_token),
            },
        }
        reference = prefilled.sequences
        if self.generate:
            result["generate"], reference = self._generate(model, batch, bar)
        result["shared_prefix"] |= {
            "prefill_seconds": statistics.median(prefill["shared_prefix"].prefill),
            "kv_bytes": ours.stats.kv_bytes,
            "stats": ours.stats.to_dict(),
            "same_tokens": bool(torch.equal(reference, ours.sequences)),
        }
        result["prefilled_cache"] |= {
            "prefill_seconds": one_row + statistics.median(prefilled.copying),
            "kv_bytes": prefilled.kv_bytes,
            "same_tokens": bool(torch.equal(reference, prefilled.sequences)),
        }
        if self.generate_batch:
            result["generate_batch"] = self._generate_batch(model, ids, reference, bar)
        return result

    def _call(self, model: Any, batch: torch.Tensor, tokens: int | None = None, **settings: Any) -> Any:
        """Call `generate` greedily for exactly `tokens` new tokens per row (default: `new_tokens`)."""
        tokens = tokens or self.new_tokens
        settings = {"generation_mode": None, "max_new_tokens": tokens, "min_new_tokens": tokens} | settings
        return model.generate(batch, do_sample=False, return_dict_in_generate=True, **settings)

    def _prefill_rounds(self, model: Any, ids: torch.Tensor, batch: torch.Tensor, bar: Bar) -> dict[str, Times]:
        """Measure the prefill of all rows, and of a single row by plain `generate`."""
        ways = {
            "one row": lambda clock: self._call(model, ids, 1, streamer=clock),
            "shared_prefix": lambda clock: self._call(model, batch, 1, streamer=clock, generation_mode="shared_prefix"),
        }
        return run_rounds(ways, self.rounds, bar)

    def _decode_rounds(
        self, model: Any, ids: torch.Tensor, batch: torch.Tensor, bar: Bar
    ) -> tuple[dict[str, Times], PrefilledCache]:
        """Measure the steps of all methods but plain `generate`, over cached prompts."""
        kept = hf_parallel.SharedPrefixCache(device=model.device)
        ours: dict[str, Any] = {"generation_mode": "shared_prefix", "past_key_values": kept, "keep_completions": False}
        bar.next("prefill of the caches")
        self._call(model, batch, 1, **ours)
        prefilled = PrefilledCache(model, ids)

        def over_copies(clock: StepClock) -> None:
            output = self._call(model, batch, streamer=clock, past_key_values=prefilled.repeated(self.rows))
            prefilled.sequences, prefilled.kv_bytes = output.sequences, dense_bytes(output.past_key_values)

        ways = {
            "bound": lambda clock: self._call(model, batch[:, -BOUND_PROMPT:], streamer=clock),
            "shared_prefix": lambda clock: self._call(model, batch, streamer=clock, **ours),
            "prefilled_cache": over_copies,
        }
        return run_rounds(ways, self.rounds, bar), prefilled

    def _way(self, times: Times) -> dict[str, Any]:
        return {"step_seconds": times.step, "tokens_per_second": self.rows / times.step, "steps": times.rounded_steps}

    def _generate(self, model: Any, batch: torch.Tensor, bar: Bar) -> tuple[dict[str, Any], torch.Tensor]:
        """Measure plain `generate` on all rows once, mainly for its prefill."""
        bar.next(f"generate, prefill of {self.rows} x {self.prompt} tokens")
        clock = StepClock()
        output = self._call(model, batch, streamer=clock)
        times = Times([clock.prefill_seconds], [clock.step_seconds])
        kv_bytes = dense_bytes(output.past_key_values)
        return self._way(times) | {"prefill_seconds": clock.prefill_seconds, "kv_bytes": kv_bytes}, output.sequences

    def _generate_batch(self, model: Any, ids: torch.Tensor, reference: torch.Tensor, bar: Bar) -> dict[str, Any]:
        """Measure continuous batching with `num_return_sequences`, whose rows share the pages of the prompt."""
        bar.next("generate_batch (continuous batching)")
        pages = self.rows * (-(-(self.prompt + self.new_tokens) // PAGE) + 1)
        batching = page_settings(pages, self.prompt)
        if model.device.type == "cpu":
            batching |= {"use_cuda_graph": False, "use_async_batching": False}
        config = GenerationConfig(do_sample=False, max_new_tokens=self.new_tokens, eos_token_id=-1, pad_token_id=0)
        config.num_return_sequences = self.rows  # its constructor rejects this without sampling
        try:
            done = model.generate_batch(
                [ids[0].tolist()],
                generation_config=config,
                continuous_batching_config=ContinuousBatchingConfig(**batching),
                record_timestamps=True,
            )
            requests = list(done.values())
            errors = [request.error for request in requests if request.error]
            if errors or len(requests) != self.rows:
                raise RuntimeError(errors[0] if errors else f"{len(requests)} of {self.rows} requests came back")
        except Exception as error:  # an error is reported as a result
            return {"settings": batching, "error": f"{type(error).__name__}: {error}"}
        began = min(request.lifespan[0] for request in requests)
        ticks = [max(at) for at in zip(*(request.timestamps for request in requests), strict=True)]
        times = Times([ticks[0] - began], [[after - before for before, after in zip(ticks, ticks[1:], strict=False)]])
        expected = reference[0, self.prompt :].tolist()
        return self._way(times) | {
            "prefill_seconds": times.prefill[0],
            "settings": batching,
            "same_tokens": all(request.generated_tokens == expected for request in requests),
        }

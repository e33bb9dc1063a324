"""Keys and values of prompts in 8 bits (`cache_dtype`): bytes, seconds per step, and how far the tokens diverge.

Divergence is measured over greedy completions of several prompts: the share of tokens equal to those without
`cache_dtype`; and, with these tokens forced, that of equal choices, the mean KL divergence, the largest difference of a
logit.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_parallel import SharedPrefixCache

from .measure import StepClock, long_prompt
from .report import run_benchmark
from .rounds import Times, run_rounds, step_ratio

DTYPES = (None, "int8", "fp8")


class Forced(LogitsProcessor):
    """Allows only the tokens `int64 [rows, length]`, prompts included."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that are finite for the next token only."""
        following = self.tokens[:, input_ids.shape[1]]
        return torch.full_like(scores, -torch.inf).scatter(1, following[:, None], 0.0)


@dataclass(frozen=True)
class CacheDtypeBenchmark:
    """Settings and run. `rows` rows of one prompt are timed, and `prompts` prompts compared."""

    prompt: int = 2048
    rows: int = 16
    steps: int = 16
    rounds: int = 3
    prompts: int = 8
    new_tokens: int = 64

    def run(self, model: Any, prompts: list[torch.Tensor]) -> dict[str, Any]:
        """Measure with prompts `int64 [1, prompt]`; return the entries of the report."""
        caches = {str(dtype): SharedPrefixCache(cache_dtype=dtype) for dtype in DTYPES}
        times = {rows: self._times(model, prompts[0], rows, caches) for rows in (1, self.rows)}
        found: dict[str, Any] = {"settings": asdict(self), "dtypes": {}}
        for dtype, cache in caches.items():
            found["dtypes"][dtype] = {
                "prompt_bytes": cache.kv_bytes,
                "step_seconds": {str(rows): own[dtype].step for rows, own in times.items()},
                "step_ratio": {str(rows): step_ratio(own[dtype], own["None"]) for rows, own in times.items()},
            }
        measured: dict[str, list[dict[str, float]]] = {"int8": [], "fp8": []}
        for index, ids in enumerate(prompts):
            print(f"prompt {index + 1} of {len(prompts)}")
            plain = self._call(model, ids, max_new_tokens=self.new_tokens, output_logits=True)
            for dtype, all_of_it in measured.items():
                all_of_it.append(self._divergence(model, ids, plain, dtype))
        for dtype, each in measured.items():
            found["dtypes"][dtype] |= {name: sum(one[name] for one in each) / len(each) for name in each[0]}
            found["dtypes"][dtype]["logit_difference"] = max(one["logit_difference"] for one in each)
        return found

    def _times(
        self, model: Any, ids: torch.Tensor, rows: int, caches: dict[str, SharedPrefixCache]
    ) -> dict[str, Times]:
        """Time steps over caches that hold the prompt."""

        def way(cache: SharedPrefixCache, clock: StepClock) -> None:
            settings = {"past_key_values": cache, "keep_completions": False, "streamer": clock}
            self._call(model, ids.repeat(rows, 1), max_new_tokens=self.steps, **settings)

        return run_rounds({dtype: partial(way, cache) for dtype, cache in caches.items()}, self.rounds)

    @staticmethod
    def _call(model: Any, ids: torch.Tensor, **arguments: Any) -> Any:
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
        return model.generate(ids, generation_mode="shared_prefix", **settings, **arguments)

    def _divergence(self, model: Any, ids: torch.Tensor, plain: Any, dtype: str) -> dict[str, float]:
        cache = SharedPrefixCache(cache_dtype=dtype)
        settings = {"past_key_values": cache, "max_new_tokens": self.new_tokens, "output_logits": True}
        own = self._call(model, ids, **settings)
        same = (own.sequences == plain.sequences)[0, ids.shape[1] :]
        forced = LogitsProcessorList([Forced(plain.sequences)])
        logits = torch.cat(self._call(model, ids, logits_processor=forced, **settings).logits)
        expected = torch.cat(plain.logits)
        a, b = (one.double().log_softmax(-1) for one in (expected, logits))
        return {
            "equal_tokens": float(same.double().mean()),
            "equal_choices": float((expected.argmax(-1) == logits.argmax(-1)).double().mean()),
            "kl": float((a.exp() * (a - b)).sum(-1).mean()),
            "logit_difference": float((expected - logits).abs().max()),
        }


def main() -> int:
    """Run the benchmark; return the exit status."""

    def measure(model: Any, tokenizer: Any, options: Any) -> dict[str, Any]:
        benchmark = CacheDtypeBenchmark(prompts=options.prompts)
        if options.quick:
            benchmark = CacheDtypeBenchmark(48, 3, 4, 1, 2, 4)
        prompts = [long_prompt(tokenizer, benchmark.prompt)]
        if options.text:
            tokens = torch.tensor(tokenizer(Path(options.text).read_text(encoding="utf-8"))["input_ids"])
            spacing = len(tokens) // benchmark.prompts
            prompts = [tokens[None, i * spacing : i * spacing + benchmark.prompt] for i in range(benchmark.prompts)]
        return benchmark.run(model, [ids.to(model.device) for ids in prompts])

    return run_benchmark("cache_dtype", __doc__, measure, prompts=8, text="")


if __name__ == "__main__":
    sys.exit(main())

"""Keys and values of prompts in 8 bits (`cache_dtype`): bytes, seconds per step, and how far the tokens diverge.

Divergence is measured over greedy completions of several prompts: the share of tokens equal to those without
`cache_dtype`; and, with these tokens forced, that of equal choices, the mean KL divergence, the largest difference of a
logit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_parallel import SharedPrefixCache
from hf_parallel.progress import progress_bar

from .measure import StepClock, long_prompt, run_rounds, step_ratio

SIZES: dict[str, Any] = {"prompt": 2048, "rows": 16, "steps": 16, "rounds": 3}
SIZES |= {"prompts": 8, "new_tokens": 64, "text": ""}
QUICK: dict[str, Any] = {"prompt": 48, "rows": 3, "steps": 4, "rounds": 1, "prompts": 2, "new_tokens": 4}
DTYPES = (None, "int8", "fp8")


class Forced(LogitsProcessor):
    """Allows only the tokens `int64 [rows, length]`, prompts included."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that are finite for the next token only."""
        following = self.tokens[:, input_ids.shape[1]]
        return torch.full_like(scores, -torch.inf).scatter(1, following[:, None], 0.0)


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report. `rows` rows of one prompt are timed, and `prompts` prompts compared."""
    prompts = [long_prompt(tokenizer, sizes.prompt).to(model.device)]
    if sizes.text:
        tokens = torch.tensor(tokenizer(Path(sizes.text).read_text(encoding="utf-8"))["input_ids"], device=model.device)
        spacing = len(tokens) // sizes.prompts
        prompts = [tokens[None, i * spacing : i * spacing + sizes.prompt] for i in range(sizes.prompts)]

    def call(ids: torch.Tensor, **arguments: Any) -> Any:
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
        return model.generate(ids, generation_mode="shared_prefix", **settings, **arguments)

    def timed(rows: int, cache: SharedPrefixCache, clock: StepClock) -> None:
        settings = {"past_key_values": cache, "keep_completions": False, "streamer": clock}
        call(prompts[0].repeat(rows, 1), max_new_tokens=sizes.steps, **settings)

    caches = {str(dtype): SharedPrefixCache(cache_dtype=dtype) for dtype in DTYPES}
    times = {
        rows: run_rounds({name: partial(timed, rows, cache) for name, cache in caches.items()}, sizes.rounds)
        for rows in (1, sizes.rows)
    }
    found: dict[str, Any] = {}
    for dtype, cache in caches.items():
        found[dtype] = {
            "prompt_bytes": cache.kv_bytes,
            "step_seconds": {str(rows): own[dtype].step for rows, own in times.items()},
            "step_ratio": {str(rows): step_ratio(own[dtype], own["None"]) for rows, own in times.items()},
        }
    measured: dict[str, list[dict[str, float]]] = {"int8": [], "fp8": []}
    length = {"max_new_tokens": sizes.new_tokens, "output_logits": True}
    for ids in progress_bar(prompts, what="Comparing logits", unit="prompts"):
        plain = call(ids, **length)
        for dtype, those in measured.items():
            settings = length | {"past_key_values": SharedPrefixCache(cache_dtype=dtype)}
            own = call(ids, **settings)
            forced = call(ids, logits_processor=LogitsProcessorList([Forced(plain.sequences)]), **settings)
            those.append(divergence(plain, own, forced, ids.shape[1]))
    for dtype, each in measured.items():
        found[dtype] |= {name: sum(one[name] for one in each) / len(each) for name in each[0]}
        found[dtype]["logit_difference"] = max(one["logit_difference"] for one in each)
    return {"dtypes": found}


def divergence(plain: Any, own: Any, forced: Any, start: int) -> dict[str, float]:
    """Compare outputs without and with `cache_dtype`, the last with the tokens of the first."""
    expected, logits = torch.cat(plain.logits), torch.cat(forced.logits)
    a, b = (one.double().log_softmax(-1) for one in (expected, logits))
    return {
        "equal_tokens": float((own.sequences == plain.sequences)[0, start:].double().mean()),
        "equal_choices": float((expected.argmax(-1) == logits.argmax(-1)).double().mean()),
        "kl": float((a.exp() * (a - b)).sum(-1).mean()),
        "logit_difference": float((expected - logits).abs().max()),
    }

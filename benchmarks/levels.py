"""Rows whose prompts share text on two levels (Hydragen, sections 4.3 and 4.4): what sharing each level saves.

All prompts begin with one document, which each of the groups continues with a text of its own, which its rows share.
Many questions about a document are groups of one row; many programs for each of several problems are groups of rows.

- `two levels`: a group's text is stored and read once, as in `shared_prefix`.
- `one level`: only the document is; each row has a copy of its group's text.
- `no level`: each row has a copy of the document, too.
- `bound`: the same rows over prompts of 4 tokens.

Only decode steps count, as in the paper, which excludes the time to process the prefix. Tokens are random.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .measure import StepClock, run_rounds, step_ratio

SIZES: dict[str, Any] = {"document": 1024, "groups": 2, "problem": 256, "rows": 8, "new_tokens": 12, "rounds": 3}
SIZES |= {"no_level": 1, "one_level": 1}
"""The last two: whether to measure rows with copies of the document, and of their group's text, which take memory.

Without them, more groups fit at once: compare `group_seconds`.
"""
QUICK: dict[str, Any] = {"document": 24, "problem": 6, "rows": 2, "new_tokens": 4, "rounds": 1}
BOUND_PROMPT = 4


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    torch.manual_seed(0)
    rows, length = sizes.groups * sizes.rows, sizes.document + sizes.problem

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(1, model.config.vocab_size, shape, device=model.device)

    document, problems = draw(1, sizes.document).expand(rows, -1), draw(sizes.groups, sizes.problem)
    prompts = {
        "two levels": torch.cat((document, problems.repeat_interleave(sizes.rows, dim=0)), dim=1),
        "bound": draw(rows, BOUND_PROMPT),
    }
    if sizes.one_level:
        prompts["one level"] = torch.cat((document, draw(rows, sizes.problem)), dim=1)
    if sizes.no_level:
        prompts["no level"] = draw(rows, length)
    stats: dict[str, Any] = {}

    def decode(name: str, clock: StepClock) -> None:
        settings = {"max_new_tokens": sizes.new_tokens, "min_new_tokens": sizes.new_tokens, "do_sample": False}
        settings |= {"streamer": clock, "return_dict_in_generate": True, "pad_token_id": 0}
        stats[name] = model.generate(prompts[name], generation_mode="shared_prefix", **settings).stats

    times = run_rounds({name: partial(decode, name) for name in prompts}, sizes.rounds)
    ratios = {f"{name} by two levels": step_ratio(times[name], times["two levels"]) for name in prompts}
    ratios.pop("two levels by two levels")
    found = {
        name: {
            "step_seconds": of.step,
            "group_seconds": of.step * sizes.new_tokens / sizes.groups,
            "kv_bytes": stats[name].kv_bytes,
            "steps": of.rounded_steps,
        }
        for name, of in times.items()
    }
    return {"ways": found, "prompt": length, "ratios": ratios}

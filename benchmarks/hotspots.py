"""Plots the hotspots of one answer to a Game of 24 puzzle (Hive, section 6.2, figure 7; needs matplotlib).

The bars are the scores of the steps (eq. 2 to 4). A replay samples the steps above the threshold again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_parallel import Hotspot
from hf_parallel.generation.replay.policies import uncertainty_of

from .resample import encode, solvable

SIZES, QUICK = {"length": 100, "seed": 0, "picture": "docs/hotspots.png"}, {"length": 10}


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Sample an answer, and draw it; return its steps."""
    from matplotlib import pyplot

    ids, policy = encode(tokenizer, next(solvable())).to(model.device), Hotspot()
    settings = {"temperature": 0.6, "max_new_tokens": sizes.length, "seed": sizes.seed, "top_k": 0, "pad_token_id": 0}
    settings |= {"do_sample": True, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, generation_mode="shared_prefix", **settings)
    uncertainty = np.array([uncertainty_of(logits[0]) for logits in output.logits])
    tokens = [tokenizer.decode([token]) for token in output.sequences[0, ids.shape[1] :].tolist()]
    scores, hot = policy.scores(uncertainty), policy.draws(uncertainty, 0)
    steps = np.arange(len(scores))
    figure, panel = pyplot.subplots(figsize=(12, 3.8), layout="constrained")
    panel.bar(steps, scores, width=0.8, color=np.where(hot, "tab:red", "silver"))
    panel.axhline(policy.threshold, color="black", linewidth=0.8, linestyle="--", label="threshold")
    panel.set_xticks(steps, [visible(token) for token in tokens], rotation=90, fontsize=8, family="monospace")
    for label, is_hot in zip(panel.get_xticklabels(), hot, strict=True):
        label.set(color="tab:red" if is_hot else "dimgrey", weight="bold" if is_hot else "normal")
    panel.set(ylabel="entropy x (1 - top-1) x decay", xlim=(-1, len(steps)))
    panel.set_title(f"{hot.sum()} of {len(steps)} steps are hotspots", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=9, frameon=False)
    figure.savefig(sizes.picture, dpi=120)
    pyplot.close(figure)
    return {"text": "".join(f"[{token}]" if is_hot else token for token, is_hot in zip(tokens, hot, strict=True))}


def visible(token: str) -> str:
    """Return a token with visible spaces and line breaks, escaped for matplotlib."""
    return token.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{RETURN SYMBOL}").replace("$", r"\$")

"""Plots the hotspots of one answer (Hive, section 6.2, figure 7): `python -m benchmarks.hotspots --help`.

The answer is a Game of 24 puzzle. The plot shows the scores of its steps (eq. 2 to 4), the threshold, and the tokens
that a replay would sample anew. Needs matplotlib (extra `eval`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_parallel import Hotspot
from hf_parallel.generation.replay.policies import uncertainty_of

from .report import add_model_options, set_up
from .resample import encode, solvable


@dataclass(frozen=True)
class Answer:
    """One decoded answer.

    Attributes
    ----------
    tokens : list of str
        Text of each token.
    scores : float64 [n]
    hotspots : bool [n]
        Steps at which a replay samples anew.
    """

    tokens: list[str]
    scores: np.ndarray
    hotspots: np.ndarray


def decode(model: Any, tokenizer: Any, ids: torch.Tensor, policy: Hotspot, **settings: Any) -> Answer:
    """Sample one answer to a prompt `int64 [1, length]` and score its steps."""
    output = model.generate(
        ids,
        generation_mode="shared_prefix",
        do_sample=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    uncertainty = np.array([uncertainty_of(logits[0]) for logits in output.logits])
    tokens = [tokenizer.decode([token]) for token in output.sequences[0, ids.shape[1] :].tolist()]
    return Answer(tokens, policy.scores(uncertainty), policy.draws(uncertainty, 0))


def draw(answer: Answer, threshold: float, path: Path) -> None:
    """Plot the score and token of each step, hotspots in red."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(12, 3.8), layout="constrained")
    steps = np.arange(len(answer.scores))
    colors = np.where(answer.hotspots, "tab:red", "silver")
    panel.bar(steps, answer.scores, width=0.8, color=colors)
    panel.axhline(threshold, color="black", linewidth=0.8, linestyle="--")
    panel.text(1.005, threshold, "threshold", transform=panel.get_yaxis_transform(), va="center", fontsize=9)
    panel.set_xticks(steps, [visible(token) for token in answer.tokens], rotation=90, fontsize=8, family="monospace")
    for label, hot in zip(panel.get_xticklabels(), answer.hotspots, strict=True):
        label.set(color="tab:red" if hot else "dimgrey", weight="bold" if hot else "normal")
    panel.tick_params(axis="x", length=0)
    panel.set(ylabel="entropy x (1 - top-1) x decay", xlim=(-1, len(steps)))
    panel.set_title(f"{answer.hotspots.sum()} of {len(steps)} steps are hotspots", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def visible(token: str) -> str:
    """Return a token with visible spaces and line breaks, escaped for matplotlib."""
    return token.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{RETURN SYMBOL}").replace("$", r"\$")


def main() -> int:
    """Decode, plot and print the answer; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hotspots", description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="output file, such as docs/hotspots.png")
    add_model_options(parser)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--length", type=int, default=100, help="maximum number of tokens (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, tokenizer = set_up(options)
    ids = encode(tokenizer, next(solvable())).to(model.device)
    settings = {"temperature": options.temperature, "max_new_tokens": options.length, "seed": options.seed, "top_k": 0}
    policy = Hotspot()
    answer = decode(model, tokenizer, ids, policy, **settings)
    print("".join(f"[{t}]" if hot else t for t, hot in zip(answer.tokens, answer.hotspots, strict=True)))
    draw(answer, policy.threshold, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plots the hotspots of one answer (Hive, section 6.2, figure 7): `python -m benchmarks.hotspots --help`.

The model answers a Game of 24 puzzle. The plot shows the scores of the steps (eq. 2 to 4), the threshold, and the
tokens that a replay would sample again. Needs matplotlib (extra `eval`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_parallel import Hotspot
from hf_parallel.generation.replay.policies import uncertainty_of

from .report import new_parser, set_up
from .resample import encode, solvable


class Answer(NamedTuple):
    """One answer: text of each token, score of each step `[n]`, and whether a replay would sample it again `[n]`."""

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
    parser = new_parser("hotspots", __doc__)
    parser.set_defaults(output=Path("docs/hotspots.png"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, tokenizer = set_up(options)
    ids = encode(tokenizer, next(solvable())).to(model.device)
    length = 10 if options.quick else 100
    settings = {"temperature": 0.6, "max_new_tokens": length, "seed": options.seed, "top_k": 0}
    policy = Hotspot()
    answer = decode(model, tokenizer, ids, policy, **settings)
    print("".join(f"[{t}]" if hot else t for t, hot in zip(answer.tokens, answer.hotspots, strict=True)))
    draw(answer, policy.threshold, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

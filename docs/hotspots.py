"""Draws docs/hotspots.png (needs matplotlib): `python docs/hotspots.py [PATH]`.

The demo model answers a Game of 24 puzzle. The bars are the scores of the answer's steps (Hive, equations 2 to 4);
a replay samples the steps above the threshold again (Hive, section 6.2, figure 7).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot

sys.path.append(str(Path(__file__).parent.parent))  # for benchmarks

from benchmarks.resample import encode, solvable
from hf_parallel import Hotspot, enable
from hf_parallel.generation.decoding.replay.policies import uncertainty_of
from hf_parallel.models.loading import load_model

LENGTH = 100
TEMPERATURE = 0.6
PICTURE = Path(__file__).with_suffix(".png")


def answer(model: Any, tokenizer: Any) -> tuple[list[str], np.ndarray]:
    """Sample an answer; return its tokens and the uncertainty of its steps, `float64 [steps]`."""
    ids = encode(tokenizer, next(solvable())).to(model.device)
    output = model.generate(
        ids,
        generation_mode="shared_prefix",
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=LENGTH,
        seed=0,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = [tokenizer.decode([token]) for token in output.sequences[0, ids.shape[1] :].tolist()]
    return tokens, np.array([uncertainty_of(logits[0]) for logits in output.logits])


def draw(tokens: list[str], uncertainty: np.ndarray, path: Path) -> int:
    """Draw a bar per step, hotspots in red; return the number of hotspots."""
    policy = Hotspot()
    scores = policy.scores(uncertainty)
    hot = policy.draws(uncertainty, 0)
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return int(hot.sum())


def visible(token: str) -> str:
    """Return a token with visible spaces and line breaks, escaped for matplotlib."""
    return token.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{RETURN SYMBOL}").replace("$", r"\$")


def main() -> int:
    """Draw the picture, at the path of the command line or in docs/."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    model, tokenizer = load_model(None, preset=False)
    tokens, uncertainty = answer(enable(model), tokenizer)
    count = draw(tokens, uncertainty, path)
    print(f"{count} of {len(tokens)} steps are hotspots: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

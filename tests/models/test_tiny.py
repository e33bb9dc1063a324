"""The tiny models are suitable for tests: their greedy output varies, depends on distant tokens and on every tested
feature, and is insensitive to rounding. Runs stock transformers only."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import tiny
import torch
from tiny import ARCHITECTURES
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateOutput

NEW_TOKENS = 16


class Greedy(NamedTuple):
    """Greedy output for the three prompts of `make_rows`, without padding and in one left-padded batch."""

    alone: list[torch.Tensor]  # 3 x [NEW_TOKENS]
    batched: torch.Tensor  # [3, NEW_TOKENS]
    margins: torch.Tensor  # [3 * NEW_TOKENS], best logit minus the second
    noise: float  # maximum difference between a cached decode step and a forward pass over the whole row


def make_rows() -> list[torch.Tensor]:
    """Return a prompt of 40 tokens, the same with another first token, and a short one."""
    long, short = tiny.make_prompts([40, 9])
    changed = long.clone()
    changed[0] = 100 if long[0] < 64 else 20
    return [long, changed, short]


def decode_greedily(name: str) -> Greedy:
    model, rows = tiny.build(name), make_rows()
    alone, margins, noise = [], [], 0.0
    for same in (torch.stack(rows[:2]), rows[2][None]):  # of one length: nothing is padded
        output = generate(model, same, torch.ones_like(same))
        alone += output.sequences[:, same.shape[1] :]
        assert output.logits is not None
        logits = torch.stack(output.logits, dim=1)
        best = logits.topk(2).values
        margins.append((best[..., 0] - best[..., 1]).flatten())
        with torch.no_grad():
            whole_rows = model(output.sequences).logits[:, same.shape[1] - 1 : -1]
        noise = max(noise, (logits - whole_rows).abs().max().item())
    input_ids, attention_mask = tiny.left_pad(rows)
    batched = generate(model, input_ids, attention_mask).sequences[:, input_ids.shape[1] :]
    return Greedy(alone, batched, torch.cat(margins), noise)


def generate(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> GenerateOutput:
    return model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=attention_mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )


@torch.no_grad()
def prompt_logits(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits after each token of the long prompt, `[40, vocab]`."""
    logits = model(make_rows()[0][None], **inputs).logits[0]
    assert logits.isfinite().all()
    return logits


def differ(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether two sets of logits differ by more than rounding."""
    return (logits - others).abs().max().item() > 0.05 * logits.std().item()


@pytest.mark.parametrize("name", tiny.each())
def test_greedy_output_is_sensitive_and_has_large_margins(name: str) -> None:
    """It varies, depends on the first token and on positions, and is the same in a left-padded batch."""
    greedy, model = decode_greedily(name), tiny.build(name)
    assert min(len(row.unique()) for row in greedy.alone) >= 5
    assert not torch.equal(*greedy.alone[:2])
    assert greedy.noise < 2e-4
    assert greedy.margins.min() > 5e-4
    assert greedy.margins.median() > 0.2
    assert torch.equal(greedy.batched, torch.stack(greedy.alone))
    assert differ(prompt_logits(model), prompt_logits(model, position_ids=2 * torch.arange(40)[None]))
    assert getattr(model.config, "sliding_window", None) == ARCHITECTURES[name].sliding_window

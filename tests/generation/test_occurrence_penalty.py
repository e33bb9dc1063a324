"""Frequency and presence penalty: as computed by hand, in `generate`, in modes, in joint sampling and in the server."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import hf_parallel
from hf_parallel import OccurrencePenalty
from hf_parallel.engine import Engine

IDS, MASK = tiny.left_pad(tiny.make_prompts([6, 3], seed=3))
BEGIN, NEW = IDS.shape[1], 12
PENALTIES = {"frequency": (0.7, 0.0), "presence": (0.0, 1.5), "both": (1.3, -0.4)}


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_parallel.enable(tiny.build("llama"))


def expected(model: Any, prompt: torch.Tensor, frequency: float, presence: float) -> list[int]:
    """Greedy tokens with a forward pass each, whose logits are changed token by token."""
    new: list[int] = []
    while len(new) < NEW and tiny.EOS not in new:
        logits = model(torch.cat((prompt, torch.tensor(new, dtype=torch.int64)))[None]).logits[0, -1]
        for token in set(new):
            logits[token] -= frequency * new.count(token) + presence
        new.append(int(logits.argmax()))
    return new


def tokens(row: torch.Tensor) -> list[int]:
    new = row[BEGIN:].tolist()
    return new[: new.index(tiny.EOS) + 1] if tiny.EOS in new else new


@torch.no_grad()
def test_penalties_equal_a_reference_by_hand_everywhere(model: Any) -> None:
    prompts = [row[mask.bool()] for row, mask in zip(IDS, MASK, strict=True)]
    found = {name: [expected(model, prompt, *given) for prompt in prompts] for name, given in PENALTIES.items()}
    assert found["frequency"] != found["presence"] != [expected(model, prompt, 0, 0) for prompt in prompts]
    call = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}
    for name, given in PENALTIES.items():
        for mode in (None, "shared_prefix"):
            processors = [OccurrencePenalty(BEGIN, *given)]
            out = model.generate(IDS, generation_mode=mode, logits_processor=processors, **call)
            assert [tokens(row) for row in out] == found[name], (name, mode)
    with Engine(model) as engine:
        prompt = {"input_ids": IDS, "attention_mask": MASK}
        settings = {"max_new_tokens": NEW, "do_sample": True, "top_k": 1, "seed": 4}  # sampled together
        requests = [
            engine.submit(prompt, logits_processor=[OccurrencePenalty(BEGIN, *given)], **settings)
            for given in PENALTIES.values()
        ]
        for name, request in zip(PENALTIES, requests, strict=True):
            assert [tokens(row) for row in request.result().sequences] == found[name]


def test_invalid_penalties_raise() -> None:
    for arguments in ((-1,), (3, float("nan")), (3, 0.0, "1")):
        with pytest.raises(ValueError, match="must be"):
            OccurrencePenalty(*arguments)  # type: ignore[arg-type]

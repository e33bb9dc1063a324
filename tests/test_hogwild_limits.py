"""Limits of a Hogwild! run: what counts towards them, what they cut off, and what is counted as prefill."""

from __future__ import annotations

import time
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor
from workers import SETTINGS, encode, small_model

from hf_parallel.generation.decode import DecodeLoop

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = encode("P")
ENDS: dict[str, Any] = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}


def generate(num_workers: int = 2, **settings: Any) -> Any:
    settings = {"max_new_tokens": 4, "finisher_tokens": 0, "do_sample": False, **SETTINGS, **settings}
    return small_model().generate(
        torch.tensor([PROMPT]),
        generation_mode="hogwild",
        num_workers=num_workers,
        return_dict_in_generate=True,
        **settings,
    )


class Tired(LogitsProcessor):
    """Wants to end every row at once."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = torch.zeros_like(scores)
        wanted[:, tiny.EOS] = 1e4
        return scores + wanted


@pytest.mark.parametrize("limit", [{"min_new_tokens": 6}, {"min_length": len(PROMPT) + 6}], ids=["new", "length"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_least_length_counts_what_workers_generate(limit: dict[str, int], num_workers: int) -> None:
    """Not the prefixes of their steps, nor the longest of them."""
    output = generate(num_workers, max_new_tokens=20, logits_processor=[Tired()], **ENDS, **limit)
    assert [step.forward_pass for step in output.history[0]] == [7] * num_workers


def test_an_end_is_forced_in_the_last_pass() -> None:
    sequences = generate(forced_eos_token_id=tiny.EOS, **ENDS).sequences
    for row, name in zip(sequences, ("Alice", "Bob"), strict=True):
        last = len(PROMPT) + len(f"{name} 1: ") + 4 - 1
        assert (row == tiny.EOS).nonzero().flatten().tolist() == [last]


def test_a_step_that_time_cuts_off_is_not_finished() -> None:
    output = generate(max_time=1e-9)
    assert [(len(step.tokens) > 0, step.forward_pass) for step in output.history[0]] == [(True, None)] * 2
    output = generate(logits_processor=[Tired()], max_time=1e-9, **ENDS)
    assert [step.forward_pass for step in output.history[0]] == [1, 1]  # these ended by themselves


def test_a_budget_that_only_time_ends_takes_no_memory_beforehand() -> None:
    output = generate(max_new_tokens=10**9, max_time=0.01)
    assert output.sequences.shape[1] < 1000


def test_every_forward_pass_is_in_the_seconds_of_prefill_or_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the headers, and the one in which the finisher reads all that was written."""
    pause, run = 0.05, DecodeLoop._run

    def slow(*given: Any) -> torch.Tensor:
        time.sleep(pause)
        return run(*given)

    monkeypatch.setattr(DecodeLoop, "_run", slow)
    stats = generate(finisher_tokens=2).stats
    assert stats.prefill_seconds >= 3 * pause
    assert stats.prefill_seconds + stats.decode_seconds >= stats.forward_passes * pause

"""Limits of a Hogwild! run: lengths, times and the model's positions; and the tokens that are allowed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from talks import TALK, begin, change_at_random, tokens_held
from transformers import LogitsProcessor
from transformers.utils import logging
from workers import SETTINGS, Recording, encode, small_model

from hf_parallel.generation.modes.hogwild.cache import LAYOUTS

PROMPT = encode("P")
ENDS: dict[str, Any] = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}


def generate(num_workers: int = 2, prompts: Sequence[Sequence[int]] = (PROMPT,), **settings: Any) -> Any:
    settings = {"max_new_tokens": 4, "finisher_tokens": 0, "do_sample": False, **SETTINGS, **settings}
    return small_model().generate(
        torch.tensor(prompts),
        generation_mode="hogwild",
        num_workers=num_workers,
        return_dict_in_generate=True,
        **settings,
    )


class Tired(LogitsProcessor):
    """Prefers to end every row at once."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = torch.zeros_like(scores)
        wanted[:, tiny.EOS] = 1e4
        return scores + wanted


@pytest.mark.parametrize("limit", [{"min_new_tokens": 6}, {"min_length": len(PROMPT) + 6}], ids=["new", "length"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_minimum_length_counts_generated_tokens(limit: dict[str, int], num_workers: int) -> None:
    """Step prefixes do not count."""
    output = generate(num_workers, max_new_tokens=20, logits_processor=[Tired()], **ENDS, **limit)
    assert [step.forward_pass for step in output.history[0]] == [7] * num_workers


# The model's positions


@pytest.fixture
def recorded() -> Recording:
    """The forward passes of the small model during a test."""
    return Recording()


def longest_view(recording: Recording) -> int:
    """Most tokens that any token attended to, itself included."""
    return max(len(segment.places) for one in recording.passes for segment in one.segments)


LONG = encode("P") * 330
TO_THE_END: dict[str, Any] = {**TALK, "max_new_tokens": None, "max_length": tiny.MAX_POSITIONS, "finisher_tokens": 60}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [2, 5])
def test_workers_stop_when_the_models_positions_are_used_up(
    num_workers: int, layout: str, recorded: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    """Early enough for the finisher, which reads all steps."""
    logging.warning_once.cache_clear()
    for _ in range(2):
        output = generate(num_workers, [LONG], layout=layout, **TO_THE_END)
        assert output.record.passes < tiny.MAX_POSITIONS - len(LONG)
        assert output.conclusions[0].startswith(SETTINGS["finisher_prompt"])
    assert tiny.MAX_POSITIONS - 150 < longest_view(recorded) <= tiny.MAX_POSITIONS
    warnings = [record.getMessage() for record in caplog.records if "workers stop" in record.getMessage()]
    assert warnings == ["workers stop: together they have used up the model's 512 positions"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_are_counted_correctly_after_any_changes(layout: str) -> None:
    """Workers stop when the text in memory leaves no capacity."""
    session = begin(layout=layout, max_new_tokens=480, stop_on_answer="never")
    change_at_random(session, random.Random(layout), changes=12)
    session.run()
    assert session.passes < 480
    assert tokens_held(session) <= tiny.MAX_POSITIONS
    # Without a history, finished steps of removed workers count too.
    assert tokens_held(session) > tiny.MAX_POSITIONS - 150 or layout == "contiguous"


def test_a_prompt_that_leaves_no_position_for_the_workers_raises() -> None:
    with pytest.raises(ValueError, match="leaves no capacity for 3 workers in the model's 512 positions"):
        generate(3, [encode("P") * 480], max_new_tokens=10)

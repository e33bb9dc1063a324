"""What completions over shared prompts reserve: little while they are short, and in the end no more than they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from transformers import PreTrainedModel
from workers import TOKENIZER

import hf_parallel
from hf_parallel.generation import prefill as prefix
from hf_parallel.generation.prefill import BATCH_ROOM, LEAST_ROOM, SUFFIX_ROOM, first_room

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tiny.make_prompts([20], seed=5)[0][None]


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


def generate(model: PreTrainedModel, rows: int, mode: str = "shared_prefix", **settings: Any) -> Any:
    if mode == "self_consistency":
        settings |= {"tokenizer": TOKENIZER, "num_answers": rows}
    else:
        settings["num_return_sequences"] = rows
    return model.generate(  # type: ignore[operator]
        PROMPT,
        generation_mode=mode,
        do_sample=True,
        seed=1,
        eos_token_id=None,
        return_dict_in_generate=True,
        **settings,
    )


@pytest.mark.parametrize("rows", [1, 7, 128, 129, 512, 5000])
@pytest.mark.parametrize("longest", [0, 1, 64, 65, 299, 512, 513, 600, 2047, 10**9])
def test_room_that_doubles_ends_at_the_longest_completion(longest: int, rows: int) -> None:
    first = room = first_room(longest, rows)
    assert first <= min(longest, SUFFIX_ROOM)
    assert first <= LEAST_ROOM or first * rows <= BATCH_ROOM
    while room < longest:
        room *= 2
    assert longest <= room < longest + max(room // max(first, 1), 1)


def test_a_few_short_completions_never_move() -> None:
    assert first_room(SUFFIX_ROOM, BATCH_ROOM // SUFFIX_ROOM) == SUFFIX_ROOM


@pytest.mark.parametrize("mode", ["shared_prefix", "self_consistency"])
def test_many_completions_that_end_early_reserve_little(model: PreTrainedModel, mode: str) -> None:
    """Whatever they might have written."""
    early = [lambda ids, _: ids.shape[1] >= PROMPT.shape[1] + 3]
    stats = generate(model, 256, mode, max_new_tokens=480, stopping_criteria=early).stats
    per_token = stats.kv_bytes / (PROMPT.shape[1] + 256 * 2)  # nobody reads the last ones
    assert stats.reserved_bytes <= (BATCH_ROOM + PROMPT.shape[1]) * per_token


def test_completions_that_write_on_reserve_what_they_hold(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_new_tokens": 97, "min_new_tokens": 97}
    expected = generate(model, 16, **settings).sequences
    monkeypatch.setattr(prefix, "LEAST_ROOM", 4)
    monkeypatch.setattr(prefix, "BATCH_ROOM", 256)
    assert first_room(96, 16) == 12
    out = generate(model, 16, **settings)
    assert torch.equal(out.sequences, expected)
    assert out.stats.reserved_bytes == out.stats.kv_bytes

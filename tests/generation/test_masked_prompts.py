"""Masked tokens inside prompts: sliding windows count them as `generate` does, wherever a prompt is kept or shared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import TOKENIZER

import hf_parallel
from hf_parallel import HogwildSession, LogitsCache, SharedPrefixCache
from hf_parallel.engine import Engine
from hf_parallel.training import ParallelExample

WINDOWED = ("mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "gpt_oss")))
LENGTH, NEW = 36, 6
IDS = torch.stack(tiny.make_prompts([LENGTH] * 2)).repeat_interleave(2, dim=0)
HOLE = torch.ones_like(IDS)
HOLE[1::2, 24:31] = 0
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module", params=WINDOWED)
def kept(request: pytest.FixtureRequest) -> tuple[Any, SharedPrefixCache, LogitsCache]:
    """A model, and caches that all examples of a test share."""
    return hf_parallel.enable(copy.deepcopy(tiny.build(request.param))), SharedPrefixCache(), LogitsCache()


@pytest.fixture
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("mistral")))


MASKS = st.lists(
    st.lists(st.tuples(st.integers(0, LENGTH - 2), st.integers(1, 20)), min_size=1, max_size=3), min_size=4, max_size=4
)


@given(holes=MASKS, chunk=st.sampled_from([None, 5]), turn=st.integers(0, 9))
@settings(max_examples=4)
def test_greedy_rows_of_masked_prompts_equal_generate(
    kept: tuple[Any, SharedPrefixCache, LogitsCache], holes: list[list[tuple[int, int]]], chunk: int | None, turn: int
) -> None:
    model, cache, logits = kept
    mask = torch.ones_like(IDS)
    for row, ranges in enumerate(holes):
        for start, length in ranges:
            mask[row, start : min(start + length, LENGTH - 1)] = 0
    ids = out = IDS
    for width in (0, turn):  # the next turn begins after `width` padded tokens in every other row
        if width:
            ids = torch.cat((out, torch.zeros(4, width, dtype=torch.long), IDS[:, :6]), dim=1)
            padding = torch.ones(4, NEW + width + 6, dtype=torch.long)
            padding[::2, NEW : NEW + width] = 0
            mask = torch.cat((mask, padding), dim=1)
        out = model.generate(ids, attention_mask=mask, generation_mode=None, **SETTINGS)
        for caches in ({"prefill_chunk_size": chunk}, {"past_key_values": cache}, {"logits_cache": logits}):
            got = model.generate(ids, attention_mask=mask, generation_mode="shared_prefix", **SETTINGS, **caches)
            assert torch.equal(got, out), caches


def test_a_pad_token_inside_a_prompt_is_masked_as_in_generate(model: Any) -> None:
    ids = IDS.masked_fill(HOLE == 0, tiny.PAD)
    plain = model.generate(ids, generation_mode=None, **SETTINGS)
    assert torch.equal(model.generate(ids, generation_mode="shared_prefix", **SETTINGS), plain)
    assert not torch.equal(plain[0::2, LENGTH:], plain[1::2, LENGTH:])


def test_masked_prompts_in_an_engine_equal_generate(model: Any) -> None:
    masks = [HOLE[1:2].roll(shift, dims=1) for shift in (0, -3, -9, 4)]
    expected = [model.generate(IDS[:1], attention_mask=mask, generation_mode=None, **SETTINGS) for mask in masks]
    with Engine(model) as engine:
        handles = [engine.submit({"input_ids": IDS[:1], "attention_mask": mask}, **SETTINGS) for mask in masks * 2]
        for handle, one in zip(handles, expected * 2, strict=True):
            assert torch.equal(handle.result().sequences, one)


@pytest.mark.parametrize("mode", ["best_of", "self_consistency", "pdos"])
def test_modes_that_continue_masked_prompts_equal_generate(mode: str, model: Any) -> None:
    settings = {"best_of": {"num_candidates": 1}, "self_consistency": {"num_answers": 1, "answer_header": ""}}
    more: dict[str, Any] = settings.get(mode, {})
    more |= {"tokenizer": TOKENIZER, "generation_mode": mode, **SETTINGS}
    plain = model.generate(IDS, attention_mask=HOLE, generation_mode=None, **SETTINGS)
    assert torch.equal(model.generate(IDS, attention_mask=HOLE, **more)[:, : LENGTH + NEW], plain)


def test_runs_over_masked_tokens_are_no_examples(model: Any) -> None:
    prompt = {"input_ids": IDS[1:2], "attention_mask": HOLE[1:2]}
    with HogwildSession(model, TOKENIZER, prompt, max_new_tokens=2) as session:
        session.run()
    out = model.generate(**prompt, generation_mode="shared_prefix", return_dict_in_generate=True, **SETTINGS)
    with pytest.raises(ValueError, match="without masked tokens inside"):
        ParallelExample.from_output(out)

"""Modes whose tokens change what rows attend to: passes that are queued before the tokens are read may be void."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from mode_cases import BUILT_IN, small_call
from workers import SETTINGS, TOKENIZER, WORDY, Listener, small_model

import hf_parallel
from hf_parallel.generation import MODES
from hf_parallel.generation.decoding import host
from hf_parallel.generation.decoding import loop as decode

PROMPTS, MASK = tiny.left_pad(tiny.make_prompts([23, 11]))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that calls another one without and with passes that are queued ahead, however many are void."""
    monkeypatch.setattr(decode, "VOID_COST", 0)

    def both(function: Any) -> tuple[Any, Any]:
        results = []
        for devices in ((), ("cpu",)):
            monkeypatch.setattr(host, "ASYNC_DEVICES", devices)
            results.append(function())
        return results[0], results[1]

    return both


def check_equal(expected: Any, actual: Any) -> None:
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("history", "texts", "answers", "conclusions", "blocks", "transcripts"):
        assert getattr(actual, name, None) == getattr(expected, name, None)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(actual, name) or (), getattr(expected, name) or (), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert actual.record.events == expected.record.events
    assert actual.record.truncated == expected.record.truncated
    ours, theirs = (out.record.sampled_log_probs() for out in (actual, expected))
    assert np.array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])
    assert actual.stats.kv_bytes == expected.stats.kv_bytes
    assert actual.stats.decoded_tokens == expected.stats.decoded_tokens
    assert actual.stats.prefilled_tokens == expected.stats.prefilled_tokens
    if expected.record.pass_log is not None:
        ours, theirs = (out.record.pass_log.freeze() for out in (actual, expected))
        assert np.array_equal(ours.input_ids, theirs.input_ids)
        assert np.array_equal(ours.position_ids, theirs.position_ids)
        assert ours.segments == theirs.segments
        assert ours.samples == theirs.samples


@pytest.mark.parametrize(
    ("layout", "workers", "sampling"),  # every two of them in all combinations
    [
        ("combined", 1, "greedy"),
        ("combined", 2, "seed"),
        ("combined", 4, "global"),
        ("interleaved", 1, "seed"),
        ("interleaved", 2, "global"),
        ("interleaved", 4, "greedy"),
        ("contiguous", 1, "global"),
        ("contiguous", 2, "greedy"),
        ("contiguous", 4, "seed"),
    ],
)
def test_workers_write_the_same_where_steps_end_often(both: Any, layout: str, workers: int, sampling: str) -> None:
    settings: dict[str, Any] = {"num_workers": workers, "layout": layout, "finisher_tokens": 4, "max_new_tokens": 28}
    settings |= {"do_sample": sampling != "greedy", "seed": 3 if sampling == "seed" else None}
    settings |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    streamers: list[Listener] = []

    def generate() -> Any:
        torch.manual_seed(0)
        streamers.append(Listener())
        given = SETTINGS | WORDY | settings | {"streamer": streamers[-1], "attention_mask": MASK}
        return small_model().generate(PROMPTS, generation_mode="hogwild", **given)

    expected, actual = both(generate)
    assert sum(step.forward_pass is not None for steps in expected.history for step in steps) > 3
    check_equal(expected, actual)
    assert streamers[0].received == streamers[1].received


@pytest.mark.parametrize(
    ("name", "mode"),
    [("llama", mode) for mode in BUILT_IN] + [("lfm2", mode) for mode in BUILT_IN if MODES[mode].traits.keeps_states],
)
def test_every_mode_generates_the_same(both: Any, name: str, mode: str) -> None:
    model = hf_parallel.enable(tiny.build(name))

    def generate() -> Any:
        settings = {"tokenizer": TOKENIZER, "do_sample": True, "seed": 5, "return_dict_in_generate": True}
        return model.generate(PROMPTS, attention_mask=MASK, **(settings | small_call(mode)))  # type: ignore[operator]

    try:
        expected, actual = both(generate)
    finally:
        hf_parallel.disable(model)
    check_equal(expected, actual)

"""Noise of rows: in no mode are two tokens of a call drawn with the same noise, nor does replaying change which."""

from __future__ import annotations

from typing import Any

import pytest
import test_hogwild_recall
import test_recall_baselines
import tiny
import torch
from workers import small_model

from hf_parallel import Hotspot, LogitsCache
from hf_parallel.generation.noise import RowNoise

pytestmark = pytest.mark.usefixtures("one_thread")


def complete(**settings: Any) -> Any:
    ids, mask = tiny.left_pad(tiny.make_prompts([17, 9], seed=4))
    given: dict[str, Any] = {"do_sample": True, "seed": 0, "max_new_tokens": 9, "num_return_sequences": 3}
    given |= {"attention_mask": mask, "return_dict_in_generate": True}
    return small_model().generate(ids, generation_mode="shared_prefix", **(given | settings))


WRITERS = {
    "shared_prefix": complete,
    "hogwild": test_hogwild_recall.write,
    "self_consistency": test_recall_baselines.answer,
    "skeleton_of_thought": test_recall_baselines.outline,
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The states of the generators from which tokens were drawn."""
    states: list[int] = []
    following = RowNoise.next

    def noted(self: RowNoise) -> torch.Generator:
        generator = following(self)
        states.append(hash(generator.get_state().numpy().tobytes()))
        return generator

    monkeypatch.setattr(RowNoise, "next", noted)
    return states


@pytest.mark.parametrize("mode", WRITERS)
def test_no_two_tokens_of_a_call_have_the_same_noise(mode: str, drawn: list[int]) -> None:
    out = WRITERS[mode]()
    assert len(drawn) == out.stats.decoded_tokens > 20
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("mode", WRITERS)
def test_replayed_tokens_have_the_noise_of_those_that_were_computed(mode: str, drawn: list[int]) -> None:
    cache = LogitsCache()
    WRITERS[mode](logits_cache=cache)
    first = sorted(drawn)
    drawn.clear()
    assert WRITERS[mode](logits_cache=cache).stats.forward_passes == 0
    assert sorted(drawn) == first
    drawn.clear()
    WRITERS[mode](logits_cache=cache, replay=Hotspot(threshold=2.0))
    assert set(drawn) < set(first), "tokens that are kept pass over their noise"

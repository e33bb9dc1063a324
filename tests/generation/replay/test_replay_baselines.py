"""Replay in `self_consistency` and `skeleton_of_thought`: outputs with a LogitsCache equal those without."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from test_skeleton_of_thought import POINTS, TEXTS, Replies
from workers import TOKENIZER, Listener, encode, small_model

from hf_parallel import LogitsCache, SharedPrefixCache

NEW = 9
PROMPTS = tiny.make_prompts([17, 9], seed=4)
BATCH, MASK = tiny.left_pad(PROMPTS)
QUESTIONS, QUESTIONS_MASK = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in ("PQRST", "U")])


def answer(**settings: Any) -> Any:
    """Generate several answers to each prompt and a conclusion."""
    given: dict[str, Any] = {"num_answers": 3, "vote": "final", "answer_pattern": "q", "conclusion_tokens": 5}
    given |= {"answer_header": "[{number}]", "conclusion_prompt": "So "}
    return _generate("self_consistency", BATCH, MASK, **(given | settings))


def outline(**settings: Any) -> Any:
    """Generate points and a conclusion after a fixed outline."""
    given: dict[str, Any] = {"logits_processor": [Replies({"[OUTLINE]1.": POINTS})], "outline_tokens": 20, **TEXTS}
    return _generate("skeleton_of_thought", QUESTIONS, QUESTIONS_MASK, **(given | settings))


def _generate(mode: str, ids: torch.Tensor, mask: torch.Tensor, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "temperature": 0.4, "seed": 0, "max_new_tokens": NEW}
    given |= {"return_dict_in_generate": True, "tokenizer": TOKENIZER, "attention_mask": mask}
    return small_model().generate(ids, generation_mode=mode, **(given | settings))


_outputs: dict[str, Any] = {}


def plain(write: Any, **settings: Any) -> Any:
    """Return the output without a cache, computed once per settings."""
    key = f"{write.__name__} {sorted(settings.items())}"
    if key not in _outputs:
        _outputs[key] = write(**settings)
    return _outputs[key]


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for name in ("texts", "found", "votes", "chosen", "answers", "conclusions", "outlines", "points", "fallback"):
        assert getattr(one, name, None) == getattr(other, name, None)
    assert one.stats.decoded_tokens == other.stats.decoded_tokens


CASES = [
    (answer, {}),
    (answer, {"vote": "majority"}),
    (answer, {"top_p": 0.8, "eos_token_id": [ord("e"), ord("t")], "pad_token_id": tiny.PAD}),
    (outline, {}),
    (outline, {"conclusion_tokens": 0}),
    (outline, {"logits_processor": [], "min_points": 10}),
]
NAMES = ["answers", "majority", "answers of several lengths", "points", "no conclusion", "no outline"]


@pytest.mark.parametrize(("write", "settings"), CASES, ids=NAMES)
def test_the_same_seed_again_needs_no_forward_pass(write: Any, settings: dict[str, Any]) -> None:
    cache, expected = LogitsCache(), plain(write, seed=0, **settings)
    for _ in range(2):
        out = write(logits_cache=cache, **settings)
        assert_same(out, expected)
    assert out.stats.forward_passes == 0
    assert out.stats.replayed_tokens == out.stats.decoded_tokens


@pytest.mark.parametrize("kept", [False, True], ids=["logits", "logits and KV"])
@pytest.mark.parametrize(("write", "settings"), CASES, ids=NAMES)
def test_other_seeds_give_the_outputs_without_a_cache(write: Any, settings: dict[str, Any], kept: bool) -> None:
    cache, replayed = LogitsCache(), 0
    more: dict[str, Any] = {"past_key_values": SharedPrefixCache()} if kept else {}
    for seed in range(3):
        out, expected = write(logits_cache=cache, seed=seed, **settings, **more), plain(write, seed=seed, **settings)
        assert_same(out, expected)
        assert out.stats.forward_passes <= expected.stats.forward_passes
        replayed += out.stats.replayed_tokens
    assert replayed > 0


@pytest.mark.parametrize("write", [answer, outline])
def test_a_streamer_receives_the_same_from_a_replay(write: Any) -> None:
    cache, received = LogitsCache(), []
    for settings in ({}, {"logits_cache": cache}, {"logits_cache": cache}):
        listener = Listener()
        write(streamer=listener, **settings)
        received.append((listener.rows, listener.tokens, listener.ended))
    assert received[0] == received[1] == received[2]

"""The baselines over a LogitsCache: their texts replay what was written before them and are those without it."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from test_self_consistency import Listener
from test_skeleton_of_thought import POINTS, TEXTS, Replies
from workers import TOKENIZER, encode, small_model

from hf_parallel import Hotspot, LogitsCache, SharedPrefixCache

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 9
PROMPTS = tiny.make_prompts([17, 9], seed=4)
BATCH, MASK = tiny.left_pad(PROMPTS)
ASKED, ASKED_MASK = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in ("PQRST", "U")])


def answer(**settings: Any) -> Any:
    """Several answers to each prompt, and one drawn from all of them."""
    given: dict[str, Any] = {"num_answers": 3, "vote": "final", "answer_pattern": "q", "conclusion_tokens": 5}
    given |= {"answer_header": "[{number}]", "conclusion_prompt": "So "}
    return _generate("self_consistency", BATCH, MASK, **(given | settings))


def outline(**settings: Any) -> Any:
    """An outline as it is told, and points and a conclusion as the model likes."""
    given: dict[str, Any] = {"logits_processor": [Replies({"[OUTLINE]1.": POINTS})], "outline_tokens": 20, **TEXTS}
    return _generate("skeleton_of_thought", ASKED, ASKED_MASK, **(given | settings))


def _generate(mode: str, ids: torch.Tensor, mask: torch.Tensor, **settings: Any) -> Any:
    given: dict[str, Any] = {"do_sample": True, "temperature": 0.4, "seed": 0, "max_new_tokens": NEW}
    given |= {"return_dict_in_generate": True, "tokenizer": TOKENIZER, "attention_mask": mask}
    return small_model().generate(ids, generation_mode=mode, **(given | settings))


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
    (outline, {"point_workers": 1}),
    (outline, {"point_workers": 2, "conclusion_tokens": 0}),
    (outline, {"logits_processor": [], "min_points": 10}),
]
NAMES = ["answers", "a vote", "answers of several lengths", "points", "points in turn", "two at a time", "no outline"]


@pytest.mark.parametrize(("write", "settings"), CASES, ids=NAMES)
def test_the_same_seed_again_needs_no_forward_pass(write: Any, settings: dict[str, Any]) -> None:
    cache, expected = LogitsCache(), write(**settings)
    for _ in range(2):
        out = write(logits_cache=cache, **settings)
        assert_same(out, expected)
    assert out.stats.forward_passes == 0
    assert out.stats.replayed_tokens == out.stats.decoded_tokens


@pytest.mark.parametrize("kept", [False, True], ids=["logits alone", "keys and values too"])
@pytest.mark.parametrize(("write", "settings"), CASES, ids=NAMES)
def test_other_samples_are_those_without_a_cache(write: Any, settings: dict[str, Any], kept: bool) -> None:
    cache, replayed = LogitsCache(), 0
    more: dict[str, Any] = {"past_key_values": SharedPrefixCache()} if kept else {}
    for seed in range(4):
        out, expected = write(logits_cache=cache, seed=seed, **settings, **more), write(seed=seed, **settings)
        assert_same(out, expected)
        assert out.stats.forward_passes <= expected.stats.forward_passes
        replayed += out.stats.replayed_tokens
    assert replayed > 0


def test_what_was_replayed_is_kept_with_what_was_written_behind_it() -> None:
    cache, partly = LogitsCache(), 0
    for seed in range(4):
        kept = SharedPrefixCache()
        out = answer(logits_cache=cache, past_key_values=kept, seed=seed, vote="majority")
        partly += 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
        for leaf in (node for node in kept.nodes() if not node.all_children()):
            spelled = [token for node in leaf.path for token in node.tokens.tolist()]
            row = next(row for row, prompt in enumerate(PROMPTS) if spelled[: len(prompt)] == prompt.tolist())
            written = spelled[len(PROMPTS[row]) :]
            assert len(written) == NEW - 1, "the last token of a text is not read"
            assert any(text.startswith(TOKENIZER.decode(written)) for text in out.texts[row])
    assert partly


def test_a_policy_that_draws_nothing_repeats_what_was_written_last() -> None:
    cache, nothing = LogitsCache(), {"replay": Hotspot(threshold=1e9), "seed": 3}
    first, again = outline(logits_cache=cache), outline(logits_cache=cache, **nothing)
    assert_same(again, first)  # each of its texts follows from a prompt of its own
    first, again = (answer(logits_cache=cache, vote="majority", **more) for more in ({}, nothing))
    assert again.stats.forward_passes == 0
    assert again.texts == [[again_of[0]] * 3 for again_of in again.texts]
    assert all(text[0] in of for text, of in zip(again.texts, first.texts, strict=True))


@pytest.mark.parametrize("write", [answer, outline])
def test_a_streamer_hears_the_same_of_what_is_replayed(write: Any) -> None:
    cache, heard = LogitsCache(), []
    for settings in ({}, {"logits_cache": cache}, {"logits_cache": cache}):
        listener = Listener()
        write(streamer=listener, **settings)
        heard.append((listener.rows, listener.put_tokens, listener.ended))
    assert heard[0] == heard[1] == heard[2]


def test_scores_of_what_is_replayed_are_kept() -> None:
    cache = LogitsCache()
    settings: dict[str, Any] = {"output_scores": True, "output_logits": True}
    first, again = (answer(logits_cache=cache, **settings) for _ in range(2))
    assert again.stats.forward_passes == 0
    for name in ("scores", "logits"):
        for one, other in zip(getattr(first, name), getattr(again, name), strict=True):
            assert torch.equal(one, other)


def test_an_interrupt_in_a_replay_leaves_model_and_cache_usable() -> None:
    cache, kept = LogitsCache(), SharedPrefixCache()
    expected = answer(logits_cache=cache)

    class Interrupting:
        def put(self, value: torch.Tensor) -> None:
            """Wants no tokens."""

        def write_row(self, row: int, text: str, event: str) -> None:
            if row == 3 and event == "token":
                raise KeyboardInterrupt

        def end(self) -> None:
            """Has nothing to end."""

    for settings in ({"logits_cache": cache}, {}):
        with pytest.raises(KeyboardInterrupt):
            answer(streamer=Interrupting(), past_key_values=kept, **settings)
        assert {node.block for node in kept.nodes()} == kept.blocks
    assert_same(answer(logits_cache=cache, past_key_values=kept), expected)

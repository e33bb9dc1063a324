"""Incremental detokenization, the end of a step, and the prompt of the workers."""

from __future__ import annotations

from typing import Any

import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.modes.hogwild.worker import ends_step


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizers.make("byte_level")


# Incremental detokenization


def test_a_character_over_several_tokens_appears_when_it_is_complete(tokenizer: Any) -> None:
    tokens = tokenizer("a🦊b", add_special_tokens=False).input_ids
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert len(tokens) > 3
    assert [piece for piece in (detokenizer.add([token]) for token in tokens) if piece] == ["a", "🦊", "b"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=40)
@given(
    text=st.text(max_size=60) | st.text("tAn 東😀.", max_size=60),
    cuts=st.lists(st.integers(1, 3), min_size=9, max_size=60),
)
def test_any_text_can_be_added_in_any_pieces(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = small_tokenizers.make(kind)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    detokenizer, added, at = IncrementalDetokenizer(tokenizer), "", 0
    for cut in [*cuts, len(tokens)]:
        added += detokenizer.add(tokens[at : at + cut])
        at += cut
    whole = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert added == detokenizer.text
    assert whole.startswith(detokenizer.text)
    assert detokenizer.text == whole or whole.endswith("\ufffd")  # an incomplete character is held back


# The end of a step


def step_ends(text: str, added: str, separator: str = "\n\n", fence: str = "```") -> bool:
    assert text.endswith(added)
    return ends_step(text, added, separator, (".", "?", '."', "$$"), fence)


@given(st.lists(st.sampled_from(["a", ".", "\n", "\n\n", "```", ",", ".\n\n", " "]), max_size=12))
def test_the_end_is_found_once_however_the_text_is_cut_into_tokens(tokens: list[str]) -> None:
    """It is found when the separator after the first end of a sentence is complete."""
    whole, found = "".join(tokens), None
    for i in range(len(tokens)):
        text = "".join(tokens[: i + 1])
        if step_ends(text, tokens[i]):
            found = len(text)
            break
    places = [i for i in range(len(whole)) if whole.startswith("\n\n", i)]
    ends = [i + 2 for i in places if whole[:i].rstrip().endswith((".", "?")) and whole[:i].count("```") % 2 == 0]
    assert (found is None) == (not ends)
    if found is not None:
        assert ends[0] <= found < ends[0] + 3  # the token may continue after the separator

"""Vocabularies: bytes of tokens, and tokens of bytes."""

from __future__ import annotations

import copy

import pytest
import small_tokenizers

from hf_parallel import BlockFormat
from hf_parallel.generation.modes.pdos.format_processor import get_block_mask
from hf_parallel.generation.modes.pdos.token_text import Vocabulary, encode_exactly, get_vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [kind.__name__ for kind in small_tokenizers.KINDS]
TEXTS = [
    "Let us see. ####Anna Berg:......\n####Tom:\n......####%%%%",
    "two  spaces\n\nand GPA 4.09: 10:30",
    "Grüße, 東京 und 😀🏳️‍🌈",
]


# Tokens


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_read_as_the_bytes_that_they_stand_for(name: str, text: str) -> None:
    tokenizer = small_tokenizers.make(name)
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    spelled = vocabulary.encode(text.encode())
    if name in ("split_marker", "merged_colon") and not text.isascii():
        assert spelled is None
        return
    tokens = tokenizer.encode(text, add_special_tokens=False)
    read = vocabulary.decode(tokens).decode()
    assert read == " " * (name == "sentencepiece") + text
    assert vocabulary.decode(spelled).decode() == text
    assert len(spelled) <= len(tokens)


def test_every_byte_can_be_encoded_if_the_tokenizer_has_byte_tokens() -> None:
    for name in ("byte_level", "sentencepiece"):
        tokenizer = small_tokenizers.make(name)
        vocabulary = get_vocabulary(tokenizer, len(tokenizer))
        assert all(vocabulary.decode(vocabulary.encode(bytes([byte])) or ()) == bytes([byte]) for byte in range(256))


def test_tokens_without_a_tokenizer_entry_have_no_text() -> None:
    tokenizer = small_tokenizers.make("byte_level")
    vocabulary = Vocabulary(tokenizer, len(tokenizer) + 5)
    assert len(vocabulary) == len(tokenizer) + 5
    assert vocabulary.texts[-5:] == [b""] * 5


# Made once


def test_a_vocabulary_is_made_once() -> None:
    tokenizer = small_tokenizers.make("byte_level")
    assert get_vocabulary(tokenizer, 300) is get_vocabulary(tokenizer, 300)
    assert len(get_vocabulary(tokenizer, 310)) == 310
    masks = [get_block_mask(BlockFormat(max_branches=n), get_vocabulary(tokenizer, 415)) for n in (4, 4, 5)]
    assert masks[0] is masks[1]
    assert masks[1] is not masks[2]


def test_tokens_that_are_added_later_are_known() -> None:
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    assert len(get_vocabulary(tokenizer, 200).encode(b"<part>")) == len("<part>")
    tokenizer.add_tokens(["<part>"])
    assert get_vocabulary(tokenizer, 200).encode(b"<part>") == [tokenizer.convert_tokens_to_ids("<part>")]


# Texts of the caller


def test_a_text_is_encoded_by_its_tokenizer() -> None:
    """The fewest tokens would differ from the training data of a model."""
    tokenizer = small_tokenizers.make("merged_colon")
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    text = "r:\n#"
    written = tokenizer.encode(text)
    assert encode_exactly(tokenizer, vocabulary, text) == written
    assert len(vocabulary.encode(text.encode())) < len(written)


def test_a_text_to_which_its_tokenizer_adds_a_space_is_encoded_exactly() -> None:
    tokenizer = small_tokenizers.make("sentencepiece")
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    tokens = encode_exactly(tokenizer, vocabulary, "Anna")
    assert vocabulary.decode(tokens) == b"Anna"
    assert vocabulary.decode(tokenizer.encode("Anna")) == b" Anna"

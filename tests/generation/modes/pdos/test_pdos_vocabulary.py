"""Vocabularies: bytes of tokens, and tokens of bytes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import small_tokenizers
from small_tokenizers import Fixed
from tokenizers import AddedToken

from hf_parallel import BlockFormat
from hf_parallel.generation.modes.pdos.format_processor import get_block_mask
from hf_parallel.generation.modes.pdos.parser import SkeletonParser
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


def test_the_embedded_tokenizer_is_read_as_it_decodes(embedded: tuple[Any, Any]) -> None:
    tokenizer = embedded[1]
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    for text in TEXTS:
        assert vocabulary.decode(tokenizer.encode(text, add_special_tokens=False)).decode() == text
    assert all(vocabulary.texts)
    special = {vocabulary.texts[token] for token in vocabulary.special}
    assert {b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"} <= special


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


def test_parts_of_a_character_may_be_named_by_their_bytes() -> None:
    class Bytes(Fixed):
        def convert_ids_to_tokens(self, token: int) -> bytes:
            return [b"a", b"\xc3", b"\xbc"][token]

    assert Vocabulary(Bytes("a", "\ufffd", "\ufffd"), 3).texts == [b"a", b"\xc3", b"\xbc"]


def test_special_tokens_that_have_no_role_are_special_too() -> None:
    """As Llama 3's `<|start_header_id|>`, which `all_special_ids` leaves out."""
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    tokenizer.add_tokens([AddedToken("<|start|>", special=True), AddedToken("<tool>", special=False)])
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    start, tool = tokenizer.convert_tokens_to_ids(["<|start|>", "<tool>"])
    assert start not in tokenizer.all_special_ids
    reader = SkeletonParser(BlockFormat())
    reader.feed(b"####A")
    allowed = get_block_mask(BlockFormat(), vocabulary).allowed(reader)
    assert not allowed[start]
    assert allowed[tool]


def test_a_tokenizer_that_refuses_to_list_its_added_tokens_is_taken_at_its_word() -> None:
    class Silent(Fixed):
        all_special_ids = (1, None)

        @property
        def added_tokens_decoder(self) -> dict[int, Any]:
            raise NotImplementedError

    assert Vocabulary(Silent("a", "</s>"), 2).special == {1}


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


def test_a_tokenizer_may_have_no_hash() -> None:
    @dataclass
    class Wrapped:
        inner: Fixed

        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            return self.inner(text)

        def decode(self, tokens: list[int], **kwargs: Any) -> str:
            return self.inner.decode(tokens)

    assert get_vocabulary(Wrapped(Fixed("a", "####")), 2).texts == [b"a", b"####"]


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


def test_a_text_whose_tokens_are_outside_the_vocabulary_is_encoded_otherwise() -> None:
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    size = len(tokenizer)
    tokenizer.add_tokens(["<part>"])
    vocabulary = get_vocabulary(tokenizer, size)
    assert vocabulary.decode(encode_exactly(tokenizer, vocabulary, "<part>")).decode() == "<part>"
    assert encode_exactly(tokenizer, vocabulary, "é") is None

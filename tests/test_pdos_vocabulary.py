"""Vocabularies: tokens are read as the bytes that they stand for, and texts are spelled in tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import small_tokenizers
from small_tokenizers import Fixed
from tokenizers import AddedToken

from hf_parallel import BlockFormat
from hf_parallel.generation.modes.pdos.format_processor import mask_of
from hf_parallel.generation.modes.pdos.parser import Skeleton
from hf_parallel.generation.modes.pdos.token_text import Vocabulary, tokens_of, vocabulary_of

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
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    spelled = vocabulary.spell(text.encode())
    if name in ("split_marker", "merged_colon") and not text.isascii():
        assert spelled is None
        return
    tokens = tokenizer.encode(text, add_special_tokens=False)
    read = vocabulary.join(tokens).decode()
    assert read == " " * (name == "sentencepiece") + text
    assert vocabulary.text(spelled) == text
    assert len(spelled) <= len(tokens)


def test_the_embedded_tokenizer_is_read_as_it_decodes(embedded: tuple[Any, Any]) -> None:
    tokenizer = embedded[1]
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    for text in TEXTS:
        assert vocabulary.text(tokenizer.encode(text, add_special_tokens=False)) == text
    assert all(vocabulary.texts)
    special = {vocabulary.texts[token] for token in vocabulary.special}
    assert {b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"} <= special


def test_every_byte_can_be_spelled_where_the_tokenizer_knows_bytes() -> None:
    for name in ("byte_level", "sentencepiece"):
        tokenizer = small_tokenizers.make(name)
        vocabulary = vocabulary_of(tokenizer, len(tokenizer))
        assert all(vocabulary.join(vocabulary.spell(bytes([byte])) or ()) == bytes([byte]) for byte in range(256))


def test_tokens_that_only_the_model_knows_have_no_text() -> None:
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
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    start, tool = tokenizer.convert_tokens_to_ids(["<|start|>", "<tool>"])
    assert start not in tokenizer.all_special_ids
    reader = Skeleton(BlockFormat())
    reader.feed(b"####A")
    allowed = mask_of(BlockFormat(), vocabulary).allowed(reader)
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
    assert vocabulary_of(tokenizer, 300) is vocabulary_of(tokenizer, 300)
    assert len(vocabulary_of(tokenizer, 310)) == 310
    masks = [mask_of(BlockFormat(max_branches=n), vocabulary_of(tokenizer, 415)) for n in (4, 4, 5)]
    assert masks[0] is masks[1]
    assert masks[1] is not masks[2]


def test_tokens_that_are_added_later_are_known() -> None:
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    assert len(vocabulary_of(tokenizer, 200).spell(b"<part>")) == len("<part>")
    tokenizer.add_tokens(["<part>"])
    assert vocabulary_of(tokenizer, 200).spell(b"<part>") == [tokenizer.convert_tokens_to_ids("<part>")]


def test_a_tokenizer_may_have_no_hash() -> None:
    @dataclass
    class Wrapped:
        inner: Fixed

        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            return self.inner(text)

        def decode(self, tokens: list[int], **kwargs: Any) -> str:
            return self.inner.decode(tokens)

    assert vocabulary_of(Wrapped(Fixed("a", "####")), 2).texts == [b"a", b"####"]


# Texts of a caller's own


def test_a_text_is_given_as_its_tokenizer_writes_it() -> None:
    """Not in the fewest tokens, which a model has not learnt to read."""
    tokenizer = small_tokenizers.make("merged_colon")
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    text = "r:\n#"
    written = tokenizer.encode(text)
    assert tokens_of(tokenizer, vocabulary, text) == written
    assert len(vocabulary.spell(text.encode())) < len(written)


def test_a_text_that_its_tokenizer_adds_a_space_to_is_spelled() -> None:
    tokenizer = small_tokenizers.make("sentencepiece")
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    tokens = tokens_of(tokenizer, vocabulary, "Anna")
    assert vocabulary.join(tokens) == b"Anna"
    assert vocabulary.join(tokenizer.encode("Anna")) == b" Anna"


def test_a_text_of_tokens_that_the_model_does_not_know_is_spelled() -> None:
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    size = len(tokenizer)
    tokenizer.add_tokens(["<part>"])
    vocabulary = vocabulary_of(tokenizer, size)
    assert vocabulary.text(tokens_of(tokenizer, vocabulary, "<part>")) == "<part>"
    assert tokens_of(tokenizer, vocabulary, "é") is None

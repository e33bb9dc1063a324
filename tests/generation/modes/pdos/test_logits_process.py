"""Forced formats for any tokenizer: parsers, masks, and generated blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import regex
import small_tokenizers
import tiny
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_tokenizers import Fixed
from stories import tell
from transformers import StoppingCriteria, StoppingCriteriaList, SynthIDTextWatermarkingConfig
from workers import TOKENIZER

from hf_parallel import BlockFormat, ParallelBlockLogitsProcessor
from hf_parallel.generation.modes.branches.token_text import Vocabulary, encode_exactly, get_vocabulary
from hf_parallel.generation.modes.pdos.format_processor import BlockMask, get_block_mask
from hf_parallel.generation.modes.pdos.parser import DONE, SkeletonParser

KINDS = [kind.__name__ for kind in small_tokenizers.KINDS]
BLOCK = regex.compile(r"(?:####(?P<title>[^\n\r]*?\S[^\n\r]*?):\s*\.{6}\s*)+####%%%%", regex.DOTALL)


def titles_of(text: str) -> list[str] | None:
    """Return the titles of the well-formed block at the first marker of a text; None if there is none."""
    found = BLOCK.match(text[text.find("####") :])
    return None if found is None else found.captures("title")


# Parsers


def read(text: str, fmt: BlockFormat | None = None) -> SkeletonParser:
    reader = SkeletonParser(fmt or BlockFormat())
    reader.feed(text.encode())
    return reader


@given(st.text(alphabet="AB:#%. \n", max_size=60), st.lists(st.integers(1, 6), max_size=60))
def test_parsing_does_not_depend_on_the_split_into_tokens(text: str, cuts: list[int]) -> None:
    text = text.replace("#", "####").replace(".", "......")
    whole, pieces, at = read(text), SkeletonParser(BlockFormat()), 0
    for cut in [*cuts, len(text)]:
        pieces.feed(text[at : at + cut].encode())
        at += cut
    pieces.title_tokens = whole.title_tokens
    assert vars(pieces) == vars(whole)


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("Hi ####A:......####B:......####%%%% more", ["A", "B"]),
        ("Hi ####A: \n ......\n\n ####B:......\n####%%%%", ["A", "B"]),
        ("#####A:......####50% of it:......####%%% of it:......####%%%%", ["#A", "50% of it", "%%% of it"]),
        ("### ####Zürich 東京:......####B:......####%%%%", ["Zürich 東京", "B"]),
    ],
)
def test_spans_of_a_block(text: str, titles: list[str]) -> None:
    reader, raw = read(text), text.encode()
    assert (reader.phase, list(reader.titles)) == ("done", titles)
    assert [raw[begin:end].decode() for begin, end in reader.spans] == [f"####{title}:" for title in titles]
    assert raw[reader.terminator_start : reader.offset] == b"####%%%%"


# Masks


def allowed_texts(mask: BlockMask, reader: SkeletonParser) -> set[str]:
    allowed = mask.allowed(reader)
    assert allowed is not None
    return {mask.vocabulary.texts[token].decode() for token in allowed.nonzero()[:, 0].tolist()}


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_allowed_tokens_complete_a_well_formed_block(name: str, data: st.DataObject) -> None:
    """Against a regular expression that is partially matched after each token."""
    tokenizer = small_tokenizers.make(name)
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    fmt = BlockFormat(max_branches=3, max_title_tokens=3)
    mask, reader, text = get_block_mask(fmt, vocabulary), read("####", fmt), b"####"
    for _ in range(200):
        allowed = mask.allowed(reader)
        if allowed is None:
            break
        tokens = allowed.nonzero()[:, 0].tolist()
        for token in tokens[:: max(len(tokens) // 9, 1)]:
            after = (text + vocabulary.texts[token]).decode(errors="ignore")
            assert BLOCK.fullmatch(after, partial=True) or BLOCK.match(after), (text, vocabulary.texts[token])
        token = data.draw(st.sampled_from(tokens))
        reader.feed(vocabulary.texts[token])
        text += vocabulary.texts[token]
    found = titles_of(text.decode())
    assert reader.phase == "done"
    assert 2 <= len(found or ()) <= 3
    assert found == list(reader.titles)
    assert len({title.strip().casefold() for title in found}) == len(found)


def test_no_token_leads_to_a_dead_end() -> None:
    mask = BlockMask(BlockFormat(), Vocabulary(Fixed("a", "####", ":", "....", "......", "%%%%"), 6))
    assert allowed_texts(mask, read("####a:")) == {"......"}


def test_titles_have_bounds() -> None:
    vocabulary = get_vocabulary(TOKENIZER, tiny.VOCAB_SIZE)
    mask = BlockMask(BlockFormat(max_title_tokens=4), vocabulary)

    def token_by_token(text: str) -> SkeletonParser:
        reader = read("")
        for character in text:
            reader.feed(character.encode())
        reader.format = BlockFormat(max_title_tokens=4)
        return reader

    assert ":" not in allowed_texts(mask, token_by_token("####"))
    assert {":", "b", " "} <= allowed_texts(mask, token_by_token("####ab"))
    assert allowed_texts(mask, token_by_token("####abcd")) == {":"}
    repeated = allowed_texts(mask, token_by_token("####abcd:......####ABcd"))
    assert ":" not in repeated
    assert "e" in repeated


def test_a_marker_that_the_tokenizer_cannot_encode_raises() -> None:
    processor = ParallelBlockLogitsProcessor(small_tokenizers.make("split_marker"), ellipsis="……")
    with pytest.raises(ValueError, match="ellipsis must be text that the tokenizer can encode, got '……'"):
        processor(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 104))


# Generated blocks


class Closed(StoppingCriteria):
    """Ends rows whose block has closed."""

    def __init__(self, tokenizer: Any, start: int) -> None:
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        closed = torch.tensor(["%%" in text for text in self.tokenizer.batch_decode(input_ids[:, -3:])])
        for row in closed.nonzero()[:, 0]:  # others cannot have closed at this step
            closed[row] = titles_of(self.tokenizer.decode(input_ids[row, self.start :])) is not None
        return closed


def assert_well_formed(texts: Iterable[str], at_most: int) -> None:
    for text in texts:
        titles = titles_of(text)
        assert titles is not None, text
        assert 2 <= len(titles) <= at_most
        assert len({" ".join(title.split()).casefold() for title in titles}) == len(titles)


@pytest.mark.parametrize("name", KINDS)
def test_plain_generate_gives_a_well_formed_skeleton_in_40_of_40_runs(name: str) -> None:
    tokenizer = small_tokenizers.make(name)
    model = copy.deepcopy(tiny.build("llama"))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = torch.tensor([get_vocabulary(tokenizer, len(tokenizer)).encode(b"Hi ####")])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=[ParallelBlockLogitsProcessor(tokenizer, prompt_length=0, max_branches=4, max_title_tokens=3)],
        stopping_criteria=StoppingCriteriaList([Closed(tokenizer, 0)]),
        do_sample=True,
        temperature=2.0,
        num_return_sequences=40,
        max_new_tokens=150,
        tokenizer=tokenizer,
    )
    assert_well_formed(tokenizer.batch_decode(out), at_most=4)


EOS = tiny.EOS


MARKER = st.text(alphabet="#:.% ab", min_size=1, max_size=4).filter(lambda text: text == text.strip())


@st.composite
def formats(draw: st.DrawFn) -> BlockFormat:
    texts = {name: draw(MARKER) for name in ("branch_marker", "title_end", "ellipsis", "terminator")}
    try:
        return BlockFormat(**texts, max_branches=3, max_title_tokens=2)
    except ValueError:
        assume(False)
        raise


@pytest.mark.parametrize("name", ["split_marker", "merged_colon"])
@settings(max_examples=60)
@given(fmt=formats(), data=st.data())
def test_any_format_can_be_completed(name: str, fmt: BlockFormat, data: st.DataObject) -> None:
    tokenizer = small_tokenizers.make(name)
    vocabulary = get_vocabulary(tokenizer, len(tokenizer))
    mask, reader = BlockMask(fmt, vocabulary), SkeletonParser(fmt)
    reader.feed(reader.marker)
    for _ in range(150):
        allowed = mask.allowed(reader)
        if allowed is None:
            break
        tokens = allowed.nonzero()[:, 0].tolist()
        assert tokens, (reader.phase, reader.title, reader.matched)
        reader.feed(vocabulary.texts[data.draw(st.sampled_from(tokens))])
    assert (reader.phase, reader.error) == (DONE, "")
    assert 2 <= len(reader.titles) <= 3


@pytest.mark.parametrize(
    "given",
    [
        {"prefix_allowed_tokens_fn": lambda row, tokens: [[40], [50]][row]},
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])},
    ],
)
def test_arguments_that_depend_on_row_numbers_raise(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} cannot be honored by pdos: branches are rows"):
        tell("a", **given)
    neutral = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
    assert tell(["Now.", EOS], **neutral).transcripts == ["Now."]


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

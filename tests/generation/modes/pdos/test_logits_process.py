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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import Fixed
from transformers import StoppingCriteria, StoppingCriteriaList
from workers import TOKENIZER

from hf_parallel import BlockFormat, ParallelBlockLogitsProcessor
from hf_parallel.generation.modes.pdos.format_processor import BlockMask, get_block_mask
from hf_parallel.generation.modes.pdos.parser import SkeletonParser
from hf_parallel.generation.modes.pdos.token_text import Vocabulary, get_vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("####A:", {".", "..", "...", "....", ".....", " .", " ..", " ...", " ...."}),
        ("####A:....", {".", ".."}),
        ("####A:......", {"#", "##", "###", "####", " #", " ##", " ###", " ####", "\n"}),
        ("####A:......\n", {"#", "##", "###", "####", " #", " ##", " ###", " ####"}),
        ("####A:......##", {"#", "##"}),
        ("####A:......####B:......####%", {"%", "%%"}),
    ],
)
def test_allowed_tokens_of_the_embedded_tokenizer(embedded: tuple[Any, Any], text: str, expected: set[str]) -> None:
    tokenizer = embedded[1]
    mask = get_block_mask(BlockFormat(), get_vocabulary(tokenizer, len(tokenizer)))
    assert allowed_texts(mask, read(text)) == expected


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
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


@pytest.mark.parametrize(
    ("text", "character", "may"),
    [
        ("####", " ", False),
        ("####", "#", False),
        ("####", "%", False),
        ("####A:......####B:......####", "%", True),
        ("####A:......####B:......####", "\n", False),
        ("####A###", "#", False),
        ("####A", "\n", False),
        ("####A", "%", True),
        ("####A", tiny.EOS, False),
    ],
)
def test_characters_of_titles(text: str, character: Any, may: bool) -> None:
    mask = BlockMask(BlockFormat(), get_vocabulary(TOKENIZER, tiny.VOCAB_SIZE), banned=[tiny.EOS])
    token = character if isinstance(character, int) else ord(character)
    assert bool(mask.allowed(read(text))[token]) is may


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


@pytest.mark.parametrize("given", [{"fmt": 3}, {"fmt": BlockFormat(), "max_branches": 3}])
def test_a_processor_takes_a_format_or_its_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give a BlockFormat or its settings"):
        ParallelBlockLogitsProcessor(TOKENIZER, **given)

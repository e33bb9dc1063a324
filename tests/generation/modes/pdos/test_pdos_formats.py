"""Custom block formats: their markers are forced and parsed, and impossible ones raise."""

from __future__ import annotations

from typing import Any

import pytest
import small_tokenizers
import tiny
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from stories import tell
from transformers import SynthIDTextWatermarkingConfig
from workers import TOKENIZER

from hf_parallel import BlockFormat, PDOSConfig
from hf_parallel.generation.modes.pdos.format_processor import BlockMask, get_block_mask
from hf_parallel.generation.modes.pdos.parser import DONE, SkeletonParser
from hf_parallel.generation.modes.pdos.token_text import get_vocabulary

EOS = tiny.EOS

pytestmark = pytest.mark.usefixtures("one_thread")

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
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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


@pytest.mark.parametrize("terminator", ["#####", "########", "####  #"])
def test_a_terminator_may_continue_like_a_marker_one_byte_later(terminator: str) -> None:
    fmt = BlockFormat(terminator=terminator, max_branches=2)
    vocabulary = get_vocabulary(TOKENIZER, tiny.VOCAB_SIZE)
    mask, reader = get_block_mask(fmt, vocabulary), SkeletonParser(fmt)
    text = "####A:......####B:......" + terminator
    for character in text:
        allowed = mask.allowed(reader)
        assert allowed is None or allowed[ord(character)], reader.offset
        reader.feed(character.encode())
    assert reader.phase == DONE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"title_end": ":####:"}, "title_end must not contain branch_marker '####' before its end, got ':####:'"),
        ({"branch_marker": "\ud800"}, r"branch_marker must be text without lone surrogates, got '\\ud800'"),
        ({"opening": "\ud800"}, "opening must be text without lone surrogates"),
        ({"branch_separator": "\ud800"}, "branch_separator must be text without lone surrogates"),
        ({"branch_stops": ["\n", "\ud800"]}, r"branch_stops must be text without lone surrogates, got '\\ud800'"),
    ],
)
def test_impossible_markers_raise(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PDOSConfig(**given)


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
    with pytest.raises(ValueError, match=f"{name} cannot be honoured by pdos: branches are rows"):
        tell("a", **given)
    neutral = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
    assert tell(["Now.", EOS], **neutral).transcripts == ["Now."]

"""Calls of pdos: malformed skeletons, batches, scores, streamers, settings; no generated text is lost."""

from __future__ import annotations

from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import Scripted, answer, tell
from workers import TOKENIZER, Listener, encode

import hf_parallel
from hf_parallel import PDOSConfig, PDOSOutput
from hf_parallel.generation.modes.branches.token_text import get_vocabulary

EOS, PAD = tiny.EOS, tiny.PAD
SKELETON = "####A:......\n####B:......\n####%%%%"


# Malformed skeletons


@pytest.mark.parametrize(
    ("story", "why"),
    [
        ("####%%%% So.", "there are no branches"),
        ("####A:......\n####%%%% So.", "there is 1 branch"),
        ("####A:......\n####A:......\n####%%%%", "the title 'A' is repeated"),
        ("####:......\n####B:......\n####%%%%", "a title is empty"),
        ("####A####B:......\n####%%%%", "a title contains the branch marker"),
        ("#### Heading\nText", "a title does not end on its line"),
        ("####A: the text itself\n####B:", "no ellipsis follows the title 'A'"),
        ("####A:.......\n####B:", "neither a branch nor the terminator follows the title 'A'"),
        ("####A:......####B:......####C:......####D:......####%%%%", "there are more than 3 branches"),
        (["####A:......\n####", EOS], "the answer ended inside a block"),
    ],
)
def test_malformed_skeletons_are_decoded_sequentially(story: Any, why: str) -> None:
    tokens = encode(story)
    tokens += [EOS] * (tokens[-1] != EOS)
    out = tell(tokens, max_branches=3)
    assert out.fallback == [why]
    assert answer(out) == tokens
    assert out.blocks == [[]]
    assert out.stages["branches"].forward_passes == 0


# Anything


PIECES = ["#", "##", "####", ":", "...", "......", "....\n", "%", "%%%%", "####%%%%", "\n", " ", "A", "A:......####"]
BROKEN = st.lists(st.one_of(st.sampled_from(PIECES), st.integers(1, 127), st.just(EOS)), max_size=14)
TITLES = st.text(alphabet="ABab:#%. \n", max_size=6)


@st.composite
def stories(draw: st.DrawFn) -> list[Any]:
    """Draw trunks that mostly contain skeletons, with arbitrary titles and text between them."""
    parts: list[Any] = []
    for _ in range(draw(st.integers(0, 2))):
        parts += draw(st.one_of(st.just([" x "]), BROKEN))
        for title in draw(st.lists(TITLES, max_size=4)):
            parts += ["####", title, ":......", draw(st.sampled_from(["", "\n", " ", ":"]))]
        parts.append("####%%%%")
    return [*parts, *draw(BROKEN)]


def assert_nothing_is_lost(out: PDOSOutput, script: Scripted, texts: list[bytes], given: dict[str, Any]) -> None:
    """Check that the output contains the opening and all sampled tokens: in the answer, or in the record of a block."""

    def text(tokens: list[int]) -> bytes:
        return b"".join(texts[token] for token in tokens if token != EOS)

    assert out.blocks is not None
    tokens, branches = answer(out), [branch for block in out.blocks[0] for branch in block.branches]
    read, at = b"", 0
    for block in out.blocks[0]:
        read += text(tokens[at : block.start]) + block.skeleton.encode()
        at = block.end
        assert all(text(branch.prefix + branch.tokens).startswith(text(branch.prefix)) for branch in block.branches)
        assert all(text(branch.tokens).startswith(branch.text.encode()) for branch in block.branches)
        joined, place = text(tokens[block.start : block.end]), 0
        for branch in block.branches:
            written = text(branch.prefix) + branch.text.encode()
            place = joined.index(written, place) + len(written)
    read += text(tokens[at:])
    if given["parallel_hint"]:  # the format replaces scripted tokens by others, each of at least a byte
        lengths = [min(len(texts[token]), 1) for token in script.drawn[0] if token != EOS]
        assert len(read) >= len(given["opening"].encode()) + sum(lengths)
    else:
        assert read == given["opening"].encode() + text(script.drawn[0])
    assert [branch.tokens for branch in branches] == [script.drawn[row] for row in sorted(script.drawn) if row]
    assert out.stats.decoded_tokens == sum(map(len, script.drawn.values()))


SETTINGS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.one_of(st.integers(1, 12), st.integers(1, 80)),
        "join": st.sampled_from(["reencode", "rotate"]),
        "parallel_hint": st.booleans(),
        "fill_in": st.booleans(),
        "max_blocks": st.sampled_from([None, 1]),
        "max_branches": st.sampled_from([2, 5]),
        "max_title_tokens": st.sampled_from([1, 8]),
        "branch_max_new_tokens": st.sampled_from([None, 1, 6]),
        "branch_stops": st.sampled_from([(), ("\n",)]),
        "branch_separator": st.sampled_from(["\n", "", "; "]),
        "prefill_chunk_size": st.sampled_from([None, 3]),
        "opening": st.sampled_from(["", "####", "So, ####A:......####B:......####%%%%"]),
    }
)


FUZZ = settings(max_examples=12)


def fitting(given: dict[str, Any]) -> dict[str, Any]:
    """Cut the opening so that at least one token can be generated."""
    return {**given, "opening": given["opening"][: given["max_new_tokens"] - 1]}


@FUZZ
@given(story=stories(), branches=st.lists(BROKEN, max_size=8), given=SETTINGS)
def test_no_generated_text_is_lost(story: Any, branches: Any, given: dict[str, Any]) -> None:
    script, given = Scripted([story], branches), fitting(given)
    out = tell(script=script, **given)
    texts = get_vocabulary(TOKENIZER, tiny.VOCAB_SIZE).texts
    assert 1 <= len(answer(out)) <= given["max_new_tokens"]
    assert_nothing_is_lost(out, script, texts, given)


@FUZZ
@given(data=st.data(), given=SETTINGS, name=st.sampled_from(["merged_colon", "split_marker"]))
def test_no_text_is_lost_if_tokens_cross_borders(data: st.DataObject, given: dict[str, Any], name: str) -> None:
    tokenizer = small_tokenizers.make(name)
    soup = st.lists(st.one_of(st.sampled_from(PIECES), st.integers(1, len(tokenizer) - 1)), max_size=20)
    script = Scripted([""], [])
    script.scripts = [
        [t for part in data.draw(soup) for t in (tokenizer.encode(part) if isinstance(part, str) else [part])]
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    given = fitting(given)
    out = tell(script=script, tokenizer=tokenizer, **given)
    texts = get_vocabulary(tokenizer, tiny.VOCAB_SIZE).texts
    assert_nothing_is_lost(out, script, texts, given)


# Batches and randomness


def test_a_seeded_answer_is_the_same_in_any_batch() -> None:
    settings: dict[str, Any] = {"do_sample": True, "seed": 11, "branch_max_new_tokens": 9, "max_new_tokens": 60}
    alone = tell(SKELETON, prompts=["One: "], **settings)
    both = tell(SKELETON, "Later. " + SKELETON, prompts=["One: ", "Two: "], **settings)
    assert both.blocks[0] == alone.blocks[0]
    assert both.transcripts[0] == alone.transcripts[0]
    other = tell(SKELETON, prompts=["One: "], **{**settings, "seed": 12})
    assert other.transcripts != alone.transcripts


# Scores


def test_scores_are_aligned_with_the_tokens_of_the_answer() -> None:
    out = tell("Now. " + SKELETON, max_new_tokens=70, branch_max_new_tokens=7, output_scores=True, output_logits=True)
    tokens, (block,) = answer(out), out.blocks[0]
    assert len(out.scores) == len(out.logits) == len(tokens) == 70
    given = [not scores.any() for scores in out.scores]
    chosen = [scores[0].argmax().item() for scores in out.scores]
    assert all(none or token == best for none, token, best in zip(given, tokens, chosen, strict=True))
    separators = [block.start + len("####A:") + 7, block.start + len("####A:####B:") + 15]
    assert [place for place, none in enumerate(given) if none] == separators
    free = range(block.start + len("####A:"), block.start + len("####A:") + 7)
    assert all(torch.equal(out.scores[place], out.logits[place]) for place in free)  # no script there


# Streamers


def test_a_parallel_streamer_receives_skeletons_branches_and_joins() -> None:
    listener = Listener()
    out = tell([SKELETON + "So.", EOS], branches=["aa\n####", ["b", EOS]], streamer=listener)
    assert isinstance(listener, hf_parallel.ParallelStreamer)
    skeleton = [(character, "token") for character in SKELETON]
    joined = "####A:aa\n####B:b\n####%%%%"
    end = [("S", "token"), ("o", "token"), (".", "token"), ("", "token"), ("", "end")]
    assert listener.rows[0] == [*skeleton, (joined, "join"), *end]
    assert listener.rows[1] == [("####A:", "begin"), *((c, "token") for c in "aa\n####"), ("", "end")]
    assert listener.rows[2] == [("####B:", "begin"), ("b", "token"), ("", "token"), ("\n", "inject"), ("", "end")]
    assert [token for tokens in listener.tokens for token in tokens] == [encode("Tell: "), *answer(out)]
    assert listener.ended == 1


# Settings


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("branch_marker", "", "branch_marker must be one line of text without spaces at its ends, got ''"),
        ("terminator", "####", "terminator must not be a prefix of branch_marker '####', got '####'"),
        ("title_end", ":####:", "title_end must not contain branch_marker"),
        ("branch_stops", "\n", r"branch_stops must be a list of non-empty strings, got '\\n'"),
        ("titles", ["A"], r"titles must form one block after opening, got \['A'\]: there is 1 branch"),
        ("titles", ["A", "B: C"], r"got \['A', 'B: C'\]: no ellipsis follows the title 'B'"),
        ("format_prompt", "{what}", r"format_prompt may hold {branch_marker} and"),
    ],
)
def test_invalid_settings_raise(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PDOSConfig(**{setting: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenizer": None}, "pass generate.*tokenizer=tokenizer"),
        ({"branch_marker": "§"}, "branch_marker must be text that the tokenizer can encode, got '§'"),
        ({"opening": "x" * 200}, "opening must be shorter than the 200 new tokens"),
        ({"past_key_values": hf_parallel.SharedPrefixCache()}, "pdos makes its own cache"),
        ({"seed": [1, 2]}, "seed must have one entry per row"),
    ],
)
def test_unsupported_arguments_raise(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tell("a", **given)
    assert tell(["Now.", EOS]).transcripts == ["Now."]

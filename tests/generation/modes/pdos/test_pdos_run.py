"""Runs of pdos: borders of blocks and branches, budgets, forward passes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from stories import answer, pass_sizes, tell
from transformers import StoppingCriteria, StoppingCriteriaList
from workers import TOKENIZER, Script, encode

from hf_parallel import PDOSOutput

EOS = tiny.EOS
BLANK_LINE, STOP_BLANK = 3, 4  # tokens "\n\n" and ".\n\n"
SKELETON = "####A:......\n####B:......\n####%%%%"
STORY = f"Now. {SKELETON}"
BODIES = ("aa\n####", "bb\n####")


def texts(out: PDOSOutput) -> list[list[tuple[str, str]]]:
    """Return for each branch of the first prompt what ended it, and its text."""
    assert out.blocks is not None
    return [[(branch.ended_by, branch.text) for branch in block.branches] for block in out.blocks[0]]


# The answer


@pytest.mark.parametrize("join", ["reencode", "rotate"])
def test_an_answer_is_trunk_branches_terminator_and_what_follows(join: str) -> None:
    out = tell([STORY + "\nSo.", EOS], branches=BODIES, join=join)
    assert out.transcripts == ["Now. ####A:aa\n####B:bb\n####%%%%\nSo."]
    assert answer(out) == [*encode(out.transcripts[0]), EOS]
    assert out.skeletons == [[SKELETON]]
    assert out.titles == [[["A", "B"]]]
    assert out.branch_texts == [[["aa\n", "bb\n"]]]
    assert out.fallback == [None]


def test_text_that_is_forced_is_filled_in_at_once() -> None:
    branches = (*BODIES, "cc####")
    out = tell(["Now. ####A:B:C: So.", EOS], branches=branches, parallel_hint=True, max_branches=3)
    assert out.skeletons == [["####A:......\n####B:......\n####C:......\n####%%%%"]]
    assert out.transcripts[0].startswith("Now. ####A:aa\n####B:bb\n####C:cc\n####%%%%")
    titles, again = "####A:####B:####C:", "####B:bb\n####C:cc\n"
    filled = 2 * "......\n####"  # the third filling is not read
    assert out.stats.prefilled_tokens == len("Tell: " + filled + titles + again + "####%%%%")
    assert out.stages["branches"].computed_again == len(titles) - 1  # nor is the last colon
    slow = tell([STORY, EOS], branches=BODIES, parallel_hint=True, fill_in=False)
    assert slow.transcripts == ["Now. ####A:aa\n####B:bb\n####%%%%"]
    assert out.stages["skeleton"].forward_passes < slow.stages["skeleton"].forward_passes


@pytest.mark.parametrize("fill_in", [True, False])
def test_titles_have_the_length_that_is_allowed(fill_in: bool) -> None:
    settings: dict[str, Any] = {"opening": "####", "max_branches": 2, "max_title_tokens": 4, "fill_in": fill_in}
    out = tell("abcdefgh", parallel_hint=True, branch_max_new_tokens=2, max_blocks=1, **settings)
    first, second = out.titles[0][0]
    assert first == "abcd"
    assert len(second) <= 4


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize(("opening", "begins"), [("", ""), ("Now.", "Now.\n"), ("Now. ", "Now. ")])
def test_titles_force_the_parts_of_an_answer(opening: str, begins: str, hint: bool) -> None:
    settings: dict[str, Any] = {"parallel_hint": hint, "opening": opening}
    out = tell([" So.", EOS], branches=BODIES, titles=["A", "B b"], **settings)
    assert out.transcripts == [f"{begins}####A:aa\n####B b:bb\n####%%%% So."]
    assert out.titles == [[["A", "B b"]]]
    assert out.fallback == [None]
    assert out.stages["skeleton"].decoded_tokens == 0


# Tokens that hold markers and more


@pytest.mark.parametrize("join", ["reencode", "rotate"])
@pytest.mark.parametrize("name", ["split_marker", "merged_colon"])
def test_markers_in_several_tokens_or_merged_with_other_text(name: str, join: str) -> None:
    """`merged_colon` has the tokens `r:`, `:.`, `:\\n`, `\\n#` and `%\\n`, which lie across borders here."""
    tokenizer = small_tokenizers.make(name)
    story, bodies = "So,\n####Tar:......\n####B:\n......\n####%%%%\n!", ["aa.\n####", "bb\n####"]
    script = [*tokenizer.encode(story), EOS]
    branches = [tokenizer.encode(body) for body in bodies]
    out = tell(script, branches=branches, tokenizer=tokenizer, join=join)
    end = ":\n" if name == "merged_colon" else ":"  # one token as the model wrote it
    assert out.transcripts == [f"So,\n####Tar:aa.\n####B{end}bb\n####%%%%\n!"]
    assert out.titles == [[["Tar", "B"]]]
    assert out.branch_texts == [[["aa.\n", "bb\n"]]]
    began = "\n####Tar:" if name == "merged_colon" else "####Tar:"
    assert tokenizer.decode(out.blocks[0][0].branches[0].prefix) == began


# Ends of branches


@pytest.mark.parametrize(
    ("body", "settings", "ended"),
    [
        ("aa####", {}, ("marker", "aa")),
        (["aa", EOS], {}, ("eos", "aa")),
        ("####", {}, ("marker", "")),
        ([EOS], {}, ("eos", "")),
        ("aa\nbb", {"branch_stops": ["\n"]}, ("stop", "aa\n")),
        ("\n \naa\nbb", {"branch_stops": ["\n"]}, ("stop", "\n \naa\n")),
        (["aa", STOP_BLANK, "b"], {"branch_stops": ["\n"]}, ("stop", "aa.\n")),  # the token is cut
        ("aa####", {"branch_stops": ["###"]}, ("stop", "aa###")),
        ("aabb", {"branch_max_new_tokens": 3}, ("budget", "aab")),
        ("aa##", {"branch_max_new_tokens": 4}, ("budget", "aa##")),
    ],
)
def test_what_ends_a_branch(body: Script, settings: dict[str, Any], ended: tuple[str, str]) -> None:
    out = tell([STORY, EOS], branches=[body, "bb\n####"], **settings)
    why, text = ended
    assert texts(out)[0][0] == (why, text)
    ends_line = text.endswith("\n")
    other = texts(out)[0][1][1]
    assert out.transcripts[0].startswith(f"Now. ####A:{text}" + "\n" * (not ends_line) + f"####B:{other}")
    branch = out.blocks[0][0].branches[0]
    assert TOKENIZER.decode(branch.tokens).startswith(text)
    assert branch.prefix == encode("####A:")


class EndsAt(StoppingCriteria):
    """Ends rows whose last token is a given one."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("kind", ["criterion", "string"])
def test_a_criterion_ends_a_branch_or_an_answer(kind: str) -> None:
    tokenizer = small_tokenizers.make("split_marker")
    mine = StoppingCriteriaList([EndsAt(tokenizer.convert_tokens_to_ids("z"))])
    criterion = {"stopping_criteria": mine} if kind == "criterion" else {"stop_strings": ["z"]}
    script = tokenizer.encode(STORY + " So z more")
    branches = [tokenizer.encode(body) for body in ("aaz and more", "bb\n####")]
    out = tell(script, branches=branches, tokenizer=tokenizer, **criterion)
    assert texts(out) == [[("criterion", "aaz"), ("marker", "bb\n")]]
    assert out.transcripts == ["Now. ####A:aaz\n####B:bb\n####%%%% So z"]
    out = tell(tokenizer.encode("Now. ####Az:......"), tokenizer=tokenizer, **criterion)
    assert out.transcripts == ["Now. ####Az"]
    assert out.fallback == ["the answer ended inside a block"]


# Budgets


def test_the_budget_is_that_of_the_joined_answer() -> None:
    for budget in (len(STORY), len(STORY) + 1, 60, 71):
        out = tell(STORY, branches=("a" * 50, "b" * 50), max_new_tokens=budget)
        assert len(answer(out)) == budget
        assert out.fallback == [None]
        assert out.transcripts[0].startswith("Now. ####A:a")
        (one, other) = (branch.text for branch in out.blocks[0][0].branches)
        assert len(one) - len(other) in (0, 1)  # the first branch gets the odd token


@pytest.mark.parametrize(("hint", "budget"), [*zip(itertools.cycle([True, False]), range(1, len(STORY)))])
def test_a_budget_that_ends_inside_a_block_falls_back(hint: bool, budget: int) -> None:
    out = tell(STORY, max_new_tokens=budget, parallel_hint=hint, fill_in=False)
    assert answer(out) == encode(STORY)[:budget]
    inside = budget >= len("Now. ####")
    assert out.fallback == ["the budget ended inside a block" if inside else None]
    assert out.blocks == [[]]


@pytest.mark.parametrize("join", ["reencode", "rotate"])
def test_joined_tokens_are_computed_in_chunks_of_a_prefill(join: str) -> None:
    settings: dict[str, Any] = {"branches": ["a" * 20 + "####", None], "branch_max_new_tokens": 30, "join": join}
    with pass_sizes() as sizes:
        whole = tell(STORY, max_new_tokens=120, **settings)
    again = len("\n####B:") + 30 + len("\n####%%%%")
    titles = len("####A:####B:")
    assert max(sizes) == (again if join == "reencode" else titles)
    with pass_sizes() as sizes:
        out = tell(STORY, max_new_tokens=120, prefill_chunk_size=5, **settings)
    assert max(sizes) <= 5 + 3  # a chunk and the pending writes of the branches
    assert out.transcripts == whole.transcripts
    assert out.stats.forward_passes == 2 + sum(stage.forward_passes for stage in out.stages.values())


def test_decoding_costs_one_pass_for_a_token_of_every_branch() -> None:
    out = tell([STORY, EOS], branches=["a" * 20 + "####", "b" * 30 + "####"])
    stages = out.stages
    assert (stages["skeleton"].decoded_tokens, stages["skeleton"].forward_passes) == (len(STORY), len(STORY) - 1)
    assert (stages["branches"].decoded_tokens, stages["branches"].forward_passes) == (24 + 34, 34)
    assert (stages["continuation"].decoded_tokens, stages["continuation"].forward_passes) == (1, 1)
    assert out.stats.forward_passes == 1 + sum(stage.forward_passes for stage in stages.values())
    assert out.stats.decoded_tokens == sum(stage.decoded_tokens for stage in stages.values())

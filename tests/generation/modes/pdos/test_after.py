"""`after`: the format begins where the thinking has ended, as if the thinking had been a part of the prompt."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from stories import answer, tell
from workers import TOKENIZER, Listener, encode, small_model

import hf_parallel
from hf_parallel import ForkJoinConfig, PDOSConfig
from hf_parallel.generation.sampling import sampler as sampling
from hf_parallel.generation.sampling.rng import RowRNG

EOS = tiny.EOS
PROMPTS = ("Q: ", "And then ", "So, ")
STORY = "####A:......\n####B:......\n####%%%%"
BRACKETS = {"region": ["[", "]"], "branch": ["(", ")"], "outline": "~", "fork": "|"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def random_call(rng: random.Random) -> dict[str, Any]:
    """Return a call after whose thinking a format is forced on a random model."""
    if rng.random() < 0.5:
        marker = rng.choice("etaoin")
        return {
            "generation_mode": "pdos",
            "branch_marker": marker,
            "title_end": "=",
            "ellipsis": "..",
            "terminator": marker + "%",
            "max_branches": 3,
            "max_title_tokens": rng.randint(1, 4),
            "join": rng.choice(["reencode", "rotate"]),
            "fill_in": rng.random() < 0.7,
            "opening": rng.choice(["", marker, f"So {marker}"]),
            "branch_max_new_tokens": 5,
        }
    return {
        "generation_mode": "fork_join",
        "dialect": rng.choice(["pdos", "threadweaver", {**BRACKETS, "positions": rng.choice(["depth", "reencode"])}]),
        "force": True,
        "paths": rng.randint(1, 3),
        "opening": rng.choice(["", "So "]),
        "path_max_new_tokens": 5,
    }


def generate(prompts: list[list[int]], **settings: Any) -> Any:
    ids, mask = tiny.left_pad([torch.tensor(prompt) for prompt in prompts])
    given = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "pad_token_id": tiny.PAD, **settings}
    return hf_parallel.enable(small_model()).generate(ids, attention_mask=mask, **given)


def new_tokens(out: Any, row: int) -> list[int]:
    return out.sequences[row, out.record.begin : out.record.lengths[row]].tolist()


def shifted(records: list[Any], offset: int) -> list[Any]:
    """Return records of blocks or forks of an answer whose tokens begin `offset` tokens later."""
    for record in records:
        record.start += offset
        record.end += offset
    return records


@pytest.mark.parametrize("cases", [range(3), pytest.param(range(3, 25), marks=pytest.mark.slow)])
def test_the_answer_after_a_thinking_is_that_to_a_prompt_that_holds_it(
    cases: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded. The random numbers of the oracle begin after those of the thinking, which is that of
    `generate`."""
    compared = 0
    for case in cases:
        rng = random.Random(case)
        settings = random_call(rng) | rng.choice([{"do_sample": False}, {"do_sample": True, "top_k": 4}])
        prompts = [encode(prompt) for prompt in PROMPTS[: 1 + case % 3]]
        settings |= {"max_new_tokens": 110, "seed": case, "eos_token_id": EOS}
        ends = {"after": rng.choice(["A", "%", re.compile(r"(?s).{4}.*?[0-9a-z]")])}
        out = generate(prompts, **settings, **ends)
        plain_mode = {"generation_mode": "shared_prefix", "seed": case, "max_new_tokens": 40}
        sampled = {name: settings[name] for name in ("do_sample", "top_k", "eos_token_id") if name in settings}
        plain = generate(prompts, **plain_mode, **sampled)
        for row, prompt in enumerate(prompts):
            tokens = new_tokens(out, row)
            count = out.thinking_tokens[row]
            rest = ""  # of a token that the thinking ends inside
            if TOKENIZER.decode(tokens[:count], skip_special_tokens=True) != out.thinking[row]:
                rest = TOKENIZER.decode(tokens[: count + 1]).removeprefix(out.thinking[row])
                count += 1
            assert tokens[: min(count, 40)] == new_tokens(plain, row)[:count]
            if count >= 40:
                continue
            seed = sampling.make_rngs(case, len(prompts))[row].seed
            own = settings | {"max_new_tokens": 110 - count, "seed": 0}
            with monkeypatch.context() as patched:
                begun = RowRNG(seed)
                begun.count = count
                patched.setattr(sampling, "make_rngs", lambda *_, begun=begun: [begun])
                expected = generate([prompt + tokens[:count]], **own)
            assert tokens[count:] == new_tokens(expected, 0), case
            assert out.fallback[row] == expected.fallback[0]
            assert out.without_thinking[row] == rest + expected.transcripts[0]
            kind = "blocks" if settings["generation_mode"] == "pdos" else "forks"
            records = getattr(out, kind)[row]
            if len(prompts) == 1:  # else paths of several answers are numbered together
                assert records == shifted(getattr(expected, kind)[0], count)
            compared += bool(records)
    assert compared >= len(cases) // 2


@pytest.mark.parametrize("after", ["</t>", re.compile(r"</t(hink)?>")])
@pytest.mark.parametrize(("join", "name"), [("reencode", "split_marker"), ("rotate", "merged_colon")])
def test_a_format_in_the_thinking_is_text_and_so_is_what_a_token_holds_after_it(
    after: Any, join: str, name: str
) -> None:
    """`merged_colon` has the token `:\\n`, which ends the thinking in its middle or at its end."""
    tokenizer = small_tokenizers.make(name)
    ends = after if name == "split_marker" else (":\n" if isinstance(after, str) else re.compile(r":\n"))
    mark = "</t>" if name == "split_marker" else ":\n"
    thought = f"I try #### and {STORY.replace(':', '=')}{mark}"
    script = [*tokenizer.encode(thought + STORY), EOS]
    branches = [tokenizer.encode(body) for body in ("aa\n####", "bb\n####")]
    out = tell(script, branches=branches, tokenizer=tokenizer, join=join, after=ends, max_new_tokens=300)
    assert out.thinking == [thought]
    assert out.without_thinking == ["####A:aa\n####B:bb\n####%%%%"]
    assert out.transcripts == [thought + out.without_thinking[0]]
    assert out.titles == [[["A", "B"]]]
    (block,) = out.blocks[0]
    assert tokenizer.decode(answer(out)[: block.start]) == thought
    assert out.stages["thinking"].decoded_tokens >= len(tokenizer.encode(thought)) - 1


def test_a_token_that_ends_the_thinking_may_begin_a_block() -> None:
    """The token `\\n#` holds the end of the thinking and the first character of a marker; it is cut."""
    tokenizer = small_tokenizers.make("merged_colon")
    story = "So it is\n" + STORY
    script = [*tokenizer.encode(story), EOS]
    assert tokenizer.convert_tokens_to_ids("\n#") in script
    branches = [tokenizer.encode(body) for body in ("aa\n####", "bb\n####")]
    for settings in ({}, {"parallel_hint": True, "fill_in": False}):
        out = tell(script, branches=branches, tokenizer=tokenizer, after="is\n", max_new_tokens=300, **settings)
        assert out.thinking == ["So it is\n"]
        assert out.titles == [[["A", "B"]]]
        assert out.without_thinking[0].startswith("####A:aa\n####B:bb\n####%%%%")


@pytest.mark.parametrize("mode", ["pdos", "fork_join"])
def test_a_prompt_that_has_ended_its_thinking_begins_the_format_at_once(mode: str) -> None:
    settings: dict[str, Any] = {"mode": mode, "opening": "So ", "max_new_tokens": 60, "do_sample": False}
    settings |= {"force": True, "path_max_new_tokens": 4} if mode == "fork_join" else {"titles": ["A", "B"]}
    for prompt, is_over in (("</t> <t>", False), ("<t></t>\n\n", True), ("</t> and", False), ("", False)):
        given = {"prompts": [prompt or "Q"], **settings}
        out = tell(None, after="</t>", **given)
        assert (out.thinking == [""]) == is_over
        if is_over:
            assert out.sequences.tolist() == tell(None, **given).sequences.tolist()
        else:
            assert out.fallback == ["the budget ended before '</t>'"]
            assert out.thinking == out.transcripts


@pytest.mark.parametrize("mode", ["pdos", "fork_join"])
def test_the_end_is_inserted_at_the_limit_of_the_thinking(mode: str) -> None:
    settings: dict[str, Any] = {"mode": mode, "opening": "So ", "after": "</t>", "max_new_tokens": 300}
    settings |= {"force": True, "path_max_new_tokens": 4} if mode == "fork_join" else {"titles": ["A", "B"]}
    listener = Listener()
    out = tell("thinking on and on", thinking_max_new_tokens=8, streamer=listener, **settings)
    assert out.thinking == ["thinking</t>"]
    assert out.without_thinking[0].startswith("So ")
    assert out.fallback == [None]
    assert out.stages["thinking"].decoded_tokens == 8
    assert out.log_probs_mask[0, :16].tolist() == [True] * 8 + [False] * 7 + out.log_probs_mask[0, 15:16].tolist()
    assert tell("think</t>", thinking_max_new_tokens=9, **settings).thinking == ["think</t>"]
    events = listener.rows[0]
    assert "".join(text for text, event in events if event == "token").startswith("thinking")
    assert events[8:10] == [("</t>", "inject"), ("", "step")]
    assert events[10][1] == "inject"


def test_a_budget_that_is_too_small_for_the_end_or_the_opening_ends_the_answer() -> None:
    settings: dict[str, Any] = {"after": "</t>", "opening": "Then ", "max_new_tokens": 10}
    out = tell("thinking on and on", thinking_max_new_tokens=8, **settings)
    assert out.fallback == ["the budget ended before '</t>'"]
    assert out.thinking == out.transcripts == ["thinking o"]
    out = tell("a</t> and more", **settings)
    assert out.fallback == ["after the thinking, the budget is too small for opening"]
    assert out.thinking == out.transcripts == ["a</t> and "]


def test_a_thinking_that_does_not_end_is_the_answer() -> None:
    for script, why in (("on and on", "budget"), (["I say", EOS], "answer")):
        out = tell(script, after="</t>", parallel_hint=True, opening="####", max_new_tokens=12)
        assert out.fallback == [f"the {why} ended before '</t>'"]
        assert out.blocks == [[]]
        assert out.thinking == out.transcripts
        assert out.without_thinking == [""]


@pytest.mark.parametrize("cls", [PDOSConfig, ForkJoinConfig])
def test_invalid_ends_raise(cls: Any) -> None:
    for after in ("", 5, [], re.compile("a*"), re.compile(b"a"), "\ud800"):
        with pytest.raises(ValueError, match="after must"):
            cls(after=after)
    for after in (None, re.compile("a")):
        with pytest.raises(ValueError, match="thinking_max_new_tokens=3 needs after"):
            cls(after=after, thinking_max_new_tokens=3)
    with pytest.raises(ValueError, match="thinking_max_new_tokens must"):
        cls(after="a", thinking_max_new_tokens=0)
    with pytest.raises(ValueError, match="cannot be stored"):
        cls(after=re.compile("a")).stored()

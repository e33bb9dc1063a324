"""Texts in the formats of the papers: they parse, run, and stand where the papers' own code places them."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import stories
import tiny
import torch
from players import Player
from small_tokenizers import make, small_llama
from workers import TOKENIZER, encode, small_model

import hf_parallel
from hf_parallel import Fork, ForkJoinConfig, ForkJoinOutput, Path, PDOSConfig
from hf_parallel.generation.dialects import DIALECTS, Dialect
from hf_parallel.training import ParallelExample
from hf_parallel.training.dialects import Piece, parse

PROMPTS = ("Q: ", "And ", "So, then: ")
TEXTS = {
    "apar": [
        "Three tips:\n1. Eat well[SplitMask][SplitSop]: rice and beans.</s>\n2. Sleep[SplitMask][SplitSop]: eight hours"
        ".</s>\n3. Walk[SplitMask][SplitSop].</s>",
        "[SplitMask][SplitSop]a[SplitMask][SplitSop]b b[SplitMask][SplitSop]c</s></s> d</s> e[SplitMask][SplitSop]"
        "</s>\n",
    ],
    "multiverse": [
        "Let's think in parallel.\n<Parallel>\n<Goal>\n<Outline>\n1: Price of the pens.\n</Outline>\n<Outline>\n"
        "2: Price of the books.\n</Outline>\n</Goal>\n<Path>\n1: Six pens at 2 cost 12.\n</Path>\n<Path>\n2: 27.\n"
        "</Path>\n<Conclusion>\nPens 12, books 27.\n</Conclusion>\n</Parallel>\nTogether 39.",
        "<Parallel>\n<Goal>\n<Outline>\n1: a\n</Outline>\n</Goal>\n<Path>\n1: Alone.\n</Path>\n<Conclusion>\nSo.\n"
        "</Conclusion>\n</Parallel>\n<Parallel>\n<Goal>\n<Outline>\n1: b\n</Outline>\n<Outline>\n2: c\n</Outline>\n"
        "<Outline>\n3: d\n</Outline>\n</Goal>\n<Path>\n1: x\n</Path>\n<Path>\n2: yy yy\n</Path>\n<Path>\n3: \n</Path>\n"
        "<Conclusion>\n</Conclusion>\n</Parallel>\nEnd.",
        "Nested.\n<Parallel>\n<Goal>\n<Outline>\n1: a\n</Outline>\n<Outline>\n2: b\n</Outline>\n</Goal>\n<Path>\n"
        "1: First,\n<Parallel>\n<Goal>\n<Outline>\n1.1: c\n</Outline>\n<Outline>\n1.2: d\n</Outline>\n</Goal>\n<Path>\n"
        "1.1: one\n</Path>\n<Path>\n1.2: two two\n</Path>\n<Conclusion>\nboth\n</Conclusion>\n</Parallel>\nthen.\n"
        "</Path>\n<Path>\n2: short\n</Path>\n<Conclusion>\nAll.\n</Conclusion>\n</Parallel>\nDone.",
    ],
    "npr": [
        "<guideline>\n<plan>1: Count by hand.</plan>\n<plan>2: Use the formula.</plan>\n</guideline>\n<step>\n"
        "1: 1+2+3 is 6.\n</step>\n<step>\n2: 3*4/2 is 6.\n</step>\n<takeaway>\nBoth give 6.\n</takeaway>\n\n"
        "The sum is \\boxed{6}.",
        "<guideline>\n<plan>1: a</plan>\n</guideline>\n<step>\n1: x\n</step>\n<takeaway>\nOne.\n</takeaway>\n\n"
        "<guideline>\n<plan>1: b</plan>\n<plan>2: c</plan>\n<plan>3: d</plan>\n</guideline>\n<step>\n1: yyy\n</step>\n"
        "<step>\n2: z\n</step>\n<step>\n3: ww\n</step>\n<takeaway>\nTwo.\n</takeaway>\n\n\\boxed{2}",
    ],
    "parallel_r1": [
        "Let c be the cats.\n\n<Parallel><Path>\nBy legs: 2 + c = 6.\n</Path><Path>\nBy pairs: 3 pairs, one of dogs.\n"
        "</Path></Parallel>\n<Summary>\nc = 4 both ways.\n</Summary>\n\nFinal Answer: 4",
        "<Parallel><Path>Same</Path><Path>Same, longer</Path></Parallel>\n<Summary>s</Summary>\n\n<Parallel><Path>b"
        "</Path><Path></Path></Parallel>\n<Summary>\nt</Summary>\n\nFinal Answer: n",
    ],
    "threadweaver": [
        "<Parallel>\n<Outlines>\n<Outline>1: Square the first.</Outline>\n<Outline>2: Square the second.</Outline>\n"
        "</Outlines>\n<Thread>\n1: 6 squared is 36.\n</Thread><Thread>\n2: 9 squared is 81.\n</Thread>\n</Parallel>\n"
        "The sum is 117.",
        "I think.\n<Parallel>\n<Outlines>\n<Outline>1: a</Outline>\n<Outline>2: b</Outline>\n<Outline>3: c</Outline>\n"
        "</Outlines>\n<Thread>\n1: x\n</Thread><Thread>\n2: yy\n</Thread><Thread>\n3: z\n</Thread>\n</Parallel>\nThen\n"
        "<Parallel>\n<Outlines>\n<Outline>1: d</Outline>\n</Outlines>\n<Thread>\n1: w\n</Thread>\n</Parallel>\nEnd.",
    ],
}


def play(player: Player, pieces: Sequence[Piece], begun: str, opening: str = "") -> str:
    """Let rows write the pieces of a text, each path after the text before its fork. Return the text that a row reads.

    `opening`: of paths that the text after them does not read.
    """
    for piece in pieces:
        ends = [play(player, branch, begun, opening) for branch in piece.branches]
        begun += "".join(end[len(begun) :] for end in ends if not opening)
        if opening and piece.text.startswith(opening):
            begun, piece = begun + opening, Piece(piece.text.removeprefix(opening))
        begun = player.add(begun, piece.text)
    return begun


def run(dialect: str | Dialect, answers: Sequence[Sequence[Piece]], **settings: Any) -> ForkJoinOutput:
    """Return the output of a model that writes answers to prompts, given as pieces."""
    player = Player()
    for prompt, pieces in zip(PROMPTS, answers, strict=False):
        play(player, pieces, prompt, "[SplitSop]" if dialect in ("apar", DIALECTS["apar"]) else "")
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in PROMPTS[: len(answers)]])
    return hf_parallel.enable(small_model()).generate(
        ids,
        attention_mask=mask,
        generation_mode="fork_join",
        dialect=dialect,
        tokenizer=TOKENIZER,
        **{
            "logits_processor": [player],
            "max_new_tokens": 1000,
            "do_sample": False,
            "return_dict_in_generate": True,
            **settings,
        },
    )


def places(text: str, begin: int = 0) -> Counter[tuple[int, str]]:
    return Counter(enumerate(text, start=begin))


def placed(example: ParallelExample) -> Counter[tuple[int, str]]:
    return Counter(zip(example.position_ids.tolist(), map(chr, example.input_ids.tolist()), strict=True))


def public_places(text: str, dialect: Dialect) -> Counter[tuple[int, str]]:
    """Return the characters of a text, the prompt before it included, at the positions of the papers' runners.

    A path starts at the position after the text before the fork, and the text after the join at the end of the longest
    path. So do the engines of Multiverse (python/sglang/srt/managers/schedule_batch.py:1593, scheduler.py:1578,1598)
    and NPR (the same files), and the training of Parallel-R1 (verl/utils/dataset/parallel_thinking_sft_dataset.py:
    322-361). ThreadWeaver (threadweaver_sft/src/simple_eval.py:493,650-661) computes each thread after the text before
    the fork, and then the merged text as plain text. APAR (vllm/vllm/engine/llm_engine.py:404-420) goes on after the
    fork at the position where a thread starts, too.
    """
    found: Counter[tuple[int, str]] = Counter()
    regions: list[list[int]] = []  # position of the fork, and of the end of the longest path
    at, plain, closing = 0, 0, dialect.branch[1] + dialect.gap
    tags = [*filter(None, dialect.region), dialect.branch[0], closing]
    for part in re.split(f"({'|'.join(map(re.escape, tags))})", text):
        if part == dialect.region[0] and dialect.positions != "separate":
            regions.append([])
        if part == dialect.branch[0] and dialect.positions == "separate":
            regions.append([at, at])
        elif part == dialect.branch[0]:
            regions[-1] = regions[-1] or [at, at]
            at = regions[-1][0]
        found += places(part, at)
        if dialect.positions == "reencode" and at != plain:
            found += places(part, plain)
        at, plain = at + len(part), plain + len(part)
        if part == closing and dialect.positions == "separate":
            at = regions.pop()[0]
        elif part == closing:
            regions[-1][1] = at = plain if dialect.positions == "reencode" else max(at, regions[-1][1])
        elif part and part == dialect.region[1]:
            regions.pop()
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_paper_are_written_as_they_are_and_stand_where_its_code_places_them(name: str) -> None:
    texts, dialect = TEXTS[name], DIALECTS[name]
    out = run(name, [parse(text, dialect) for text in texts])
    assert out.transcripts == texts
    assert out.fallback == [None] * len(texts)
    trained: Counter[tuple[int, str]] = Counter()
    for prompt, text, forks in zip(PROMPTS, texts, out.forks, strict=False):
        trained += placed(ParallelExample.from_text(text, TOKENIZER, name, prompt))
        paths = all_paths(forks)
        numbers = re.findall(f"{re.escape(dialect.branch[0])}\n([0-9.]+):", text)
        if name == "apar":  # numbered in the order in which they begin
            assert sorted(path.number for path in paths) == [str(index) for index in range(1, len(paths) + 1)]
        else:
            assert [path.number for path in paths] == (numbers or ["1", "2"] * (len(paths) // 2))
        assert len(paths) == text.count(dialect.branch[0])
        assert all(path.text in text and path.ended_by == "tag" for path in paths)
    pairs = zip(PROMPTS, texts, strict=False)
    assert trained == sum((public_places(prompt + text, dialect) for prompt, text in pairs), Counter())
    ran = placed(ParallelExample.from_output(out))
    twice = "]" * "".join(texts).count("[SplitMask]")  # the token before a fork, which both rows compute
    assert "".join(text for _, text in (ran - trained).elements()) == twice
    # Nothing sees the last token of a path of apar; that of a thread but the first is computed in the merged text only
    unseen = sum("".join(texts).count(tags) for tags in ("</Thread><Thread>", "</s>"))
    assert "".join(text for _, text in (trained - ran).elements()) == ">" * unseen


def all_paths(forks: Sequence[Fork]) -> list[Path]:
    return [one for fork in forks for path in fork.paths for one in (path, *all_paths(path.forks))]


PLAN = "<Parallel>\n<Goal>\n<Outline>\n1: a\n</Outline>\n<Outline>\n2: b\n</Outline>\n</Goal>"
MALFORMED = [
    ("apar", "One.\n[SplitSop] two", "line 2: [SplitSop] must follow [SplitMask]", None),
    ("apar", "It ends.</s>", "</s> closes nothing", None),
    ("multiverse", "No region.\n</Goal>\nSo.", None, None),
    ("multiverse", "<Parallel>\n<Goal>\nno outline\n</Goal>\n</Parallel>", None, "announces no path"),
    ("multiverse", "It ends.\n</Path>", "line 2: </Path> closes nothing", None),
    ("multiverse", "<Path>\n1: x</Path>", "<Path> must be directly in <Parallel>", None),
    ("multiverse", "<Parallel>\n<Goal>\n<Parallel>", "<Parallel> must be in a branch", None),
    ("npr", "<guideline>\n<plan>none</plan>\n</guideline>", "<guideline> is not closed", "announces no path"),
    ("npr", "<step>\n1: x\n</step>", "<step> must be directly in <guideline>", None),
    ("parallel_r1", "One </Parallel>\n<Summary>", "</Parallel> closes nothing", None),
    ("threadweaver", "<Parallel>\n<Outlines>\n</Outlines>\n</Parallel>", None, "announces no path"),
    ("threadweaver", "<Thread>\n1: x</Thread>", "<Thread> must be directly in <Parallel>", None),
]


@pytest.mark.parametrize(("name", "text", "error", "reason"), MALFORMED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_malformed_text_is_written_as_plain_text_and_raises_in_training(
    name: str, text: str, error: str | None, reason: str | None
) -> None:
    out = run(name, [[Piece(text)]])
    assert out.transcripts == [text]
    assert out.forks == [[]]
    assert (reason or "the model has not written") in str(out.fallback[0])
    if error is None:
        assert placed(ParallelExample.from_text(text, TOKENIZER, name, PROMPTS[0])) == places(PROMPTS[0] + text)
    else:
        with pytest.raises(ValueError, match=re.escape(error)):
            ParallelExample.from_text(text, TOKENIZER, name, PROMPTS[0])


@pytest.mark.parametrize("name", ["npr", "parallel_r1", "threadweaver"])
def test_a_fork_in_a_path_is_text_where_the_paper_has_none_and_raises_in_training(name: str) -> None:
    dialect, text = DIALECTS[name], TEXTS[name][0]
    before, region, *after = parse(text, dialect)
    path = region.branches[0][0]
    path.text = path.text.replace(dialect.branch[1], before.text + dialect.branch[1])
    out = run(name, [[before, region, *after]])
    assert [path.number for path in all_paths(out.forks[0])] == ["1", "2"]
    assert out.forks[0][0].paths[0].text == path.text
    assert out.fallback == ["a path may not fork in this dialect"]
    with pytest.raises(ValueError, match=f"{dialect.region[0]} must not be in a branch"):
        ParallelExample.from_text(out.transcripts[0], TOKENIZER, name)


def test_paths_without_a_closing_tag_get_it_and_outlines_of_the_same_number_announce_one_path() -> None:
    plan = PLAN.replace("2: b", "1: b")
    player = Player()
    player.add(player.add(PROMPTS[0], plan) + "\n<Path>\n1:", " x")
    text = f"{plan}\n<Path>\n1: x</Path>\n<Conclusion>\n"
    player.add(PROMPTS[0] + text, "So.")
    out = run("multiverse", [[]], logits_processor=[player])
    assert out.transcripts == [text + "So."]
    assert [(path.number, path.ended_by) for path in all_paths(out.forks[0])] == [("1", "eos")]


def test_a_path_of_apar_may_end_with_the_last_token_of_answers_and_streams_beside_its_text() -> None:
    player, streamed = Player(), defaultdict(str)

    class Streamer(hf_parallel.ParallelStreamer):
        def write_row(self, row: int, text: str, event: str) -> None:
            streamed[row] += text

    fork = PROMPTS[0] + "One.[SplitMask]"
    player.add(player.add(PROMPTS[0], "One.[SplitMask]") + "[SplitSop]", "two")
    player.add(fork, " Three.")
    out = run("apar", [[]], logits_processor=[player], streamer=Streamer())
    assert out.transcripts == ["One.[SplitMask][SplitSop]two</s> Three."]
    assert [(path.number, path.text, path.ended_by) for path in all_paths(out.forks[0])] == [
        ("1", "[SplitSop]two</s>", "eos")
    ]
    assert out.sequences[0, -1] == tiny.EOS
    assert streamed == {0: "One.[SplitMask] Three.", 1: "[SplitSop]two</s>"}
    assert out.critical_path == [len("One.[SplitMask] Three.") + 1]


def test_the_closing_tag_of_apar_may_be_the_end_of_sequence_token() -> None:
    tokenizer = make("byte_level")
    out = hf_parallel.enable(small_llama(tokenizer)).generate(
        tokenizer("Q:", return_tensors="pt").input_ids,
        generation_mode="fork_join",
        dialect="apar",
        opening="One[SplitMask]",
        path_max_new_tokens=3,
        max_new_tokens=60,
        suppress_tokens=[tokenizer.eos_token_id],
        tokenizer=tokenizer,
        return_dict_in_generate=True,
    )
    (path,) = out.forks[0][0].paths
    assert path.text.startswith("[SplitSop]")
    assert path.text.endswith("</s>")
    assert path.tokens[-1] == tokenizer.eos_token_id
    assert out.transcripts[0].count("</s>") == 1
    example = ParallelExample.from_text(out.transcripts[0], tokenizer, "apar", "Q:")
    assert example.input_ids.tolist().count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"region": ("a", "b")}, "separate"),
        ({"plan": ("a", "{number}{title}", "a")}, "separate"),
        ({"branch": ("a", "d")}, "three different tags"),
    ],
)
def test_invalid_separate_dialects_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dialect(**{"region": ("a", ""), "branch": ("c", "d"), "positions": "separate", **settings})


def test_an_opening_with_text_after_the_fork_raises_and_an_answer_without_a_fork_says_why() -> None:
    with pytest.raises(ValueError, match=re.escape("opening must end with '[SplitMask]'")):
        ForkJoinConfig(dialect="apar", opening="One.[SplitMask] Two.")
    with pytest.raises(ValueError, match="force=True needs .*'apar'"):
        ForkJoinConfig(dialect="apar", force=True)
    assert ForkJoinConfig(opening=PLAN + "\n").opening.endswith("</Goal>\n")
    with pytest.warns(UserWarning, match="the model has not written '</Goal>'"):
        out = run("multiverse", [[Piece("No fork.")]])
    assert out.fallback == ["the model has not written '</Goal>'"]


SKELETON = "I look.\n####a:......\n####b b:......\n####%%%%"
PARTS = ["####a:x y\n", "####b b:zz\n"]


def test_an_answer_of_pdos_is_written_as_it_is_and_stands_where_the_mode_places_it() -> None:
    """Skeleton and parts start after the text before them. Then parts and what follows are computed as plain text."""
    before, joined = f"{PROMPTS[0]}I look.\n", "".join(PARTS) + "####%%%%\nSo."
    out = stories.tell([SKELETON + "\nSo.", tiny.EOS], branches=["x y\n####", "zz\n####"], prompts=PROMPTS[:1])
    assert PROMPTS[0] + out.transcripts[0] == before + joined
    trained = placed(ParallelExample.from_text("I look.\n" + joined, TOKENIZER, "pdos", PROMPTS[0]))
    after = (SKELETON.removeprefix("I look.\n"), *PARTS, joined)
    assert trained == sum((places(text, len(before)) for text in after), places(before))


@pytest.mark.parametrize("join", ["reencode", "rotate"])
def test_pdos_as_a_dialect_gives_the_answer_of_the_mode(join: str) -> None:
    story = [SKELETON + " Then ####c:......####d:......####%%%%\nSo.", tiny.EOS]
    given: dict[str, Any] = {"branches": ["x y\n####", None, "z####", "w\n####"], "prompts": PROMPTS[:1]}
    block = stories.tell(story, **given, join=join, branch_max_new_tokens=9)
    dialect = {**asdict(PDOSConfig().format), "join": join} if join == "rotate" else "pdos"
    fork = stories.tell(story, **given, mode="fork_join", dialect=dialect, path_max_new_tokens=9)
    assert torch.equal(fork.sequences, block.sequences)
    assert [path.number for path in all_paths(fork.forks[0])] == ["a", "b b", "c", "d"]
    assert [path.ended_by for path in all_paths(fork.forks[0])] == ["tag", "budget", "tag", "tag"]
    written = [one.text for part in block.blocks[0] for one in part.branches]
    assert all(text in path.text for text, path in zip(written, all_paths(fork.forks[0]), strict=True))
    assert fork.columns(0) == ["Path a", "Path b b", "Path c", "Path d"]
    given = {"path_max_new_tokens": 3, "prompts": PROMPTS[:1]}
    forced = stories.tell(mode="fork_join", dialect=dialect, force=True, paths=3, opening="I look. ", **given)
    assert len(forced.forks[0][0].paths) == 3


def test_a_transcript_has_a_column_for_each_path_named_by_its_number() -> None:
    dialect = Dialect(("[", "]"), ("(", ")"), outline="#", fork=";", opening="({number}:")
    text = "So[#1: #2: ;(1:x[#1.1: #1.2: ;(1.1:aa)(1.2:b)]y)(2:c)]z[#1: ;(1:d)]."
    out = run(dialect, [parse(text, dialect)])
    (section,) = out.to_dict(TOKENIZER)["sections"]
    written = defaultdict(str)
    for card in section["cards"]:
        written[card["column"]] += (
            card["given"] + "".join(piece for _, piece, _ in card["pieces"]) + f" {card['ended']} "
        )
    names = {name: written[index].split() for index, name in enumerate(section["columns"])}
    assert names == {
        "Path 1": ["(1:x[#1.1:", "#1.2:", ";", "join", "y)", "end"],
        "Path 2": ["(2:c)", "end"],
        "Path 1.1": ["(1.1:aa)", "end"],
        "Path 1.2": ["(1.2:b)", "end"],
        "Path 1 (2)": ["(1:d)", "end"],
    }
    assert written[None].split() == ["So[#1:", "#2:", ";", "join", "z[#1:", ";", "join", ".", "end"]
    assert [path.index for path in all_paths(out.forks[0])] == [1, 3, 4, 2, 5]
    assert "Path 1.2" in out.to_html(TOKENIZER)


BRACKETS = {"region": ["[", "]"], "branch": ["(", ")"], "gap": "|"}


def test_a_dialect_is_a_name_an_object_a_mapping_or_json() -> None:
    own = Dialect(**BRACKETS)
    for given in (own, BRACKETS, json.dumps(BRACKETS)):
        config = ForkJoinConfig(dialect=given)
        assert config.format == own
        assert json.loads(json.dumps(config.to_dict()))["dialect"]["gap"] == "|"
    assert ForkJoinConfig(dialect="npr").format is DIALECTS["npr"]


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ("nonsense", "dialect must be one of"),
        (False, "dialect must be one of"),
        ({**BRACKETS, "plan": ("[", "{number}", "")}, "plan must announce its branches and end with '['"),
        ("{", "dialect must be a name or JSON, got"),
        ({**BRACKETS, "tags": []}, "dialect has no 'tags'; it has"),
        ({"region": ["[", "]"]}, "branch is missing"),
        ({"branch_marker": "#", "title_end": ":", "ellipsis": "..."}, "terminator is missing"),
        ({"branch_marker": "##", "title_end": ":", "ellipsis": "...", "terminator": "#"}, "terminator must not be"),
        ({**BRACKETS, "region": "[]"}, "must be pairs of tags"),
        ({**BRACKETS, "region": [{}, "]"]}, "must be four different tags"),
        ({**BRACKETS, "gap": 5}, "gap must be a string, got 5"),
        ({**BRACKETS, "is_nested": 1}, "is_nested must be True or False"),
        ({**BRACKETS, "positions": "sideways"}, "positions must be one of"),
        ({**BRACKETS, "positions": "concatenated"}, "is for training"),
        ({**BRACKETS, "opening": "x("}, "opening must begin with '('"),
    ],
)
def test_invalid_dialects_raise(dialect: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ForkJoinConfig(dialect=dialect)

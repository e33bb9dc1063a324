"""Transcripts record which row generated which text at which forward pass, and which rows could attend to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
from ascii_tokenizer import SPECIAL, AsciiTokenizer
from stories import tell
from test_self_consistency import vote
from workers import write

from hf_parallel import ParallelOutput
from hf_parallel.transcript.sections import FORMAT, VERSION

EOS = tiny.EOS
ALICE, BOB = "Ann.\n\nTwo.", "Bo is slow.\n\nx"
"""Alice finishes a step at pass 6, Bob at pass 13; their last steps stay unfinished."""

pytestmark = pytest.mark.usefixtures("one_thread")


class Tokenizer(AsciiTokenizer):
    """Tokenizer that lists its special tokens."""

    all_special_ids = list(SPECIAL)


def text_of(card: dict[str, Any]) -> str:
    return "".join(text for _, text, _ in card["pieces"])


def one_section(out: ParallelOutput, tokenizer: Any = None) -> dict[str, Any]:
    (section,) = out.to_dict(tokenizer)["sections"]
    return section


def of_column(section: dict[str, Any], column: int | None) -> list[dict[str, Any]]:
    return [card for card in section["cards"] if card["column"] == column]


# Contents


def test_every_token_of_a_worker_has_the_pass_that_generated_it() -> None:
    section = one_section(write(ALICE, BOB))
    assert section["columns"] == ["Alice", "Bob"]
    first, second = of_column(section, 0)
    assert [piece[:2] for piece in first["pieces"]] == list(enumerate("Ann.\n\n", start=1))
    assert [piece[:2] for piece in second["pieces"]] == list(enumerate("Two.xxxx"[: len(BOB) - 6], start=7))
    assert (first["given"], second["given"]) == ("Alice 1: ", "Alice 2: ")
    assert [(card["begin"], card["end"]) for card in of_column(section, 1)] == [(0, 13), (13, 14)]


def test_each_prompt_has_its_own_section() -> None:
    out = write("a", "b", "c", "d", prompts=["P", "QQ"])
    assert out.names == [["Alice", "Bob"]] * 2
    sections = out.to_dict(Tokenizer())["sections"]
    assert [[text_of(card) for card in section["cards"]] for section in sections] == [["a", "b"], ["c", "d"]]
    assert [(section["prompt"], section["prompt_tokens"]) for section in sections] == [("P", 1), ("QQ", 2)]


def test_branches_are_columns_and_their_trunk_spans_them() -> None:
    story = "Now. ####A:......\n####B:......\n####%%%%"
    out = tell([story + "\nSo.", EOS], branches=("aa\n####", "b\n####"))
    section = one_section(out)
    assert section["columns"] == ["A", "B"]
    trunk, after = of_column(section, None)
    assert text_of(trunk) == story
    assert text_of(after) == "\nSo."
    for column, text in enumerate(("aa\n####", "b\n####")):
        (branch,) = of_column(section, column)
        assert text_of(branch) == text
        assert (branch["begin"], branch["end"]) == (len(story), len(story) + len(text))
    assert after["begin"] == len(story) + len("aa\n####")
    assert ("Joined answer", out.transcripts[0]) in [tuple(note) for note in section["notes"]]


def test_answers_are_columns_and_a_conclusion_spans_them() -> None:
    out = vote(["\\boxed{4}", EOS], ["\\boxed{5}", EOS], vote="final", final="5}")
    section = one_section(out)
    assert [text_of(card) for card in section["cards"]] == ["\\boxed{4}", "\\boxed{5}", "5}"]
    assert [card["column"] for card in section["cards"]] == [0, 1, None]
    assert (section["ranking"], section["chosen"]) == ([1, 0], [1])
    assert section["cards"][2]["begin"] == max(card["end"] for card in section["cards"][:2])
    assert dict(map(tuple, section["notes"])) == {"Answer": "5", "Votes": "4: 1, 5: 1", "Chosen": "answer 2"}


def test_a_transcript_is_json_with_the_settings_of_the_mode() -> None:
    run = write(ALICE, BOB, seed=3, layout="interleaved").to_dict()
    assert json.loads(json.dumps(run))["settings"]["layout"] == "interleaved"
    assert run["stats"]["decoded_tokens"] == 2 * run["passes"]
    assert (run["format"], run["version"], run["mode"]) == (FORMAT, VERSION, "hogwild")

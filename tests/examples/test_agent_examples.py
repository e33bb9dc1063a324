"""The examples with agents: exact results with a scripted model, and a short run on the embedded model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from pages import ROOT
from scripted_model import ScriptedModel
from test_examples import check_promised_lines

import hf_parallel
from hf_parallel.agents import (
    Runtime,
    TreeOfThoughts,
)
from hf_parallel.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

Messages = Sequence[Mapping[str, Any]]


def load(name: str) -> ModuleType:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


game24, bug_repair = load("agents_game24"), load("agents_bug_repair")
debate, hogwild, mcts = load("agents_debate"), load("agents_hogwild"), load("agents_mcts")
leap, pacore = load("agents_leap"), load("agents_pacore")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "small"),
    [
        (game24, {"PUZZLES": ("1 1 4 6",), "solve": game24.solve.under(TreeOfThoughts(2, 2, value=game24.judge))}),
        (bug_repair, {"ROUNDS": 1, "BUGS": {name: bug_repair.BUGS[name] for name in ("mean", "flatten")}}),
        (debate, {"SIDES": {"Ana": "a library", "Ben": "a pool", "Cem": "a park"}}),
        (hogwild, {"ROUNDS": 1}),
        (mcts, {"ITERATIONS": 2}),
        (leap, {"INTERVAL": 6}),
        (pacore, {}),
    ],
    ids=lambda one: one.__name__ if isinstance(one, ModuleType) else "",
)
def test_example_runs_on_the_embedded_model(
    example: ModuleType,
    small: dict[str, Any],
    embedded: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hf_parallel, "load_embedded_model", lambda: embedded)
    monkeypatch.setattr(sys, "argv", [f"{example.__name__}.py"])
    for name, value in small.items():
        monkeypatch.setattr(example, name, value)
    submit = Engine.submit

    def short(self: Engine, *arguments: Any, max_new_tokens: int, **settings: Any) -> Any:
        return submit(self, *arguments, max_new_tokens=min(8, max_new_tokens), **settings)

    monkeypatch.setattr(Engine, "submit", short)
    example.main()
    printed = capsys.readouterr().out.replace("of 1\n", "of 4\n")
    check_promised_lines(ROOT / "examples" / f"{example.__name__}.py", printed)


# Game of 24

STEPS = {
    "1 1 4 6": ["6 / 1 = 6", "1 + 1 = 2", "6 - 4 = 3", "rubbish", "6 * 4 = 24"],
    "1 4 6": ["6 * 4 = 24", "4 + 6 = 10", "1 / 6 = 1/6"],
    "2 4 6": ["2 * 4 = 8"],
    "1 24": ["1 * 24 = 24", "24 - 1 = 23"],
}
"""Proposed steps in turn."""
SURE = {"1 4 6", "1 24"}


def play(messages: Messages, settings: Mapping[str, Any], seed: int) -> str:
    """Answer as a model: a proposal, or a vote."""
    numbers = messages[-1]["content"]
    if messages[0]["content"] == game24.JUDGE:
        return "Sure" if numbers in SURE else "impossible"
    proposals = STEPS.get(numbers, ["?"])
    return proposals[seed % len(proposals)]


def test_tree_of_thoughts_solves_a_game_of_24() -> None:
    model = ScriptedModel(play)
    result = Runtime(model).run(game24.solve, "1 1 4 6")
    assert result.value["left"] == "24"
    assert result.value["steps"][-1] == "1 * 24 = 24"
    numbers = "1 1 4 6"
    for step in result.value["steps"]:
        numbers = game24.apply(step, numbers)
    assert numbers == "24"
    votes = [messages for messages in model.calls if messages[0]["content"] == game24.JUDGE]
    assert votes
    assert result.stats.completions == len(model.calls) + (game24.VOTES - 1) * len(votes)


@pytest.mark.parametrize(
    ("step", "left"),
    [("1 / 3 = 1/3", "1/3 3 8"), (" 8 - 3 = 5 (good)", "1 3 5"), ("1 - 3 = -2", "-2 3 8"), ("3 * 3 = 9", "1 8 9")],
)
def test_steps_are_computed_exactly(step: str, left: str) -> None:
    assert game24.apply(step, "1 3 3 8") == left


@pytest.mark.parametrize(
    "step", ["", "8", "8 + 8 = 16", "1 / 3 = 0.33", "3 - 3 = 1", "1 ^ 3 = 1", "8 / 0 = 8", "3+3=6"]
)
def test_a_step_that_is_wrong_raises_an_error(step: str) -> None:
    with pytest.raises(ValueError, match="step"):
        game24.apply(step, "1 3 3 8")


# Hogwild


def test_workers_write_again_until_the_checker_is_content() -> None:
    def write(messages: Messages, settings: Mapping[str, Any], seed: int) -> str:
        if "check answers" in messages[0]["content"]:
            return "OK." if "better" in messages[-1]["content"] else "No food."
        assert settings["generation_mode"] == "hogwild"
        return "a better plan" if messages[-1]["content"].startswith("No food.") else "a plan"

    result = Runtime(ScriptedModel(write)).run(hogwild.team, "Plan.")
    assert result.value == {"answer": "a better plan", "remarks": ["No food.", "OK."]}
    content = Runtime(ScriptedModel(lambda *_: "ok")).run(hogwild.team, "Plan.")
    assert content.value == {"answer": "ok", "remarks": ["ok"]}
    assert content.stats.completions == 2


# Paths that read each other


def test_answers_of_a_round_read_first_sentences_of_the_last() -> None:
    model = ScriptedModel(lambda messages, settings, seed: f"{len(messages[-1]['content'])} it is. And more.")
    value = Runtime(model).run(pacore.coordinated, "Q").value
    first, later = value["messages"][:4], value["messages"][4:]
    assert first == ["1 it is."] * 4
    assert later == [f"{len(model.calls[4][-1]['content'])} it is."] * 2
    assert value["answer"] == f"{len(model.calls[-1][-1]['content'])} it is. And more."
    assert all("And more" not in messages[-1]["content"] for messages in model.calls)


def test_paths_read_the_summary_of_one_peer() -> None:
    def think(messages: Messages, settings: Mapping[str, Any], seed: int) -> str:
        if "</summarize>" in settings.get("stop_strings", ()):
            return " it is so </summarize>"
        return " ".join(["word"] * leap.INTERVAL)

    paths = Runtime(ScriptedModel(think)).run(leap.peers, "Q").value
    assert [len(path.messages) for path in paths] == [2] * leap.PATHS
    assert all(len(message.read) == 1 for path in paths for message in path.messages)

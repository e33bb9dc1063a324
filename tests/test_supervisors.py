"""Supervisors: which states each continues, which path wins, and what does not change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hf_parallel.agents import (
    AgentError,
    AgentResult,
    BeamSearch,
    BestOfN,
    BudgetExceededError,
    Chat,
    Runtime,
    ScriptedModel,
    SelfConsistency,
    State,
    TreeOfThoughts,
    agent,
    next,
    spawn,
)


def number(state: State) -> float:
    """Value: the number that the last completion ends with."""
    return float(state.text.split()[-1])


def tree(completions: Mapping[str, Sequence[str]]) -> ScriptedModel:
    """Return a model with given completions, in order, by the previous completions of the conversation."""
    used: Counter[str] = Counter()

    def script(messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int) -> str:
        before = "/".join(message["content"] for message in messages if message["role"] == "assistant")
        used[before] += 1
        return completions[before][used[before] - 1]

    return ScriptedModel(script)


def digits(messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int) -> str:
    """Script: a number that depends on the seed alone."""
    return str(seed % 1000)


@agent
async def walk() -> Any:
    """Goes on until a completion begins with `end` or `fail`."""
    chat = Chat()
    text = ""
    while not text.startswith("end"):
        chat.user("Go on.")
        text = await chat.gen()
        if text.startswith("fail"):
            raise ValueError(text)
    yield text


def committed(result: AgentResult, agent_id: str | None = None) -> list[tuple[str, float | None]]:
    """Return ids and values of the states in the order in which they were committed."""
    found = [event for event in result.trace.events if event.kind == "state" and event.data["status"] == "committed"]
    return [(event.state, event.data["value"]) for event in found if agent_id in (None, event.agent)]


def ids(result: AgentResult) -> list[str]:
    return [state for state, _ in committed(result)]


def test_best_of_n_continues_all_paths_to_the_end_and_takes_the_best() -> None:
    model = tree({"": ["a 1", "end 2", "b 3"], "a 1": ["end 7"], "b 3": ["c 0"], "b 3/c 0": ["end 5"]})
    result = Runtime(model).run(walk.under(BestOfN(3, value=number)))
    assert result.value == "end 7"
    assert committed(result) == [
        ("0.0", None),
        ("0.1", 2.0),
        ("0.2", None),
        ("0.0.0", 7.0),
        ("0.2.0", None),
        ("0.2.0.0", 5.0),
    ]
    assert result.stats.completions == 6


def test_best_of_n_without_a_value_takes_the_first_that_has_not_failed() -> None:
    result = Runtime(tree({"": ["fail 1", "end 2", "end 3"]})).run(walk.under(BestOfN(3)))
    assert result.value == "end 2"


def test_self_consistency_takes_the_first_of_the_most_frequent_answers() -> None:
    model = tree({"": ["end 3", "end 5", "end 7", "fail", "end 5 ", "end 7"]})
    assert Runtime(model).run(walk.under(SelfConsistency(6))).value == "end 5"


def test_self_consistency_compares_what_key_returns() -> None:
    model = tree({"": ["end: 3", "end", "end", "end: 4", "end = 4"]})
    key = {"end: 3": 3, "end: 4": 4, "end = 4": 4, "end": None}.get
    assert Runtime(model).run(walk.under(SelfConsistency(5, key=key))).value == "end: 4"


def test_self_consistency_weighs_votes_by_value() -> None:
    model = tree({"": ["end a 1", "end a 1", "end b 3"]})
    supervisor = SelfConsistency(3, key=lambda text: text.split()[1], value=number)
    assert Runtime(model).run(walk.under(supervisor)).value == "end b 3"


def test_beam_search_keeps_the_best_states_of_each_round() -> None:
    model = tree(
        {
            "": ["a 1", "b 4", "end 3", "c 2"],
            "b 4": ["d 9", "e 2"],
            "b 4/d 9": ["end 4", "end 1"],
        }
    )
    result = Runtime(model).run(walk.under(BeamSearch(2, 2, value=number)))
    assert result.value == "end 4"
    assert ids(result) == ["0.0", "0.1", "0.2", "0.3", "0.1.0", "0.1.1", "0.1.0.0", "0.1.0.1"]


def test_tree_of_thoughts_breadth_first_expands_the_best_states() -> None:
    model = tree(
        {
            "": ["a 1", "b 4", "c 3"],
            "b 4": ["end 2", "d 6", "e 0"],
            "c 3": ["f 1", "end 5", "g 2"],
            "b 4/d 6": ["end 9", "end 3", "h 1"],
        }
    )
    result = Runtime(model).run(walk.under(TreeOfThoughts(2, 3, value=number)))
    assert result.value == "end 9"
    assert ids(result) == [
        *("0.0", "0.1", "0.2"),
        *("0.1.0", "0.1.1", "0.1.2", "0.2.0", "0.2.1", "0.2.2"),
        *("0.1.1.0", "0.1.1.1", "0.1.1.2"),
    ]


def test_tree_of_thoughts_breadth_first_ends_at_the_goal() -> None:
    model = tree({"": ["a 9", "end 4"]})
    result = Runtime(model).run(walk.under(TreeOfThoughts(2, 2, value=number, goal=4)))
    assert (result.value, result.stats.completions) == ("end 4", 2)


def test_tree_of_thoughts_depth_first_goes_back_from_states_below_the_threshold() -> None:
    model = tree({"": ["a 5", "b 7"], "b 7": ["c 1", "end 2"], "a 5": ["d 3", "end 6"]})
    supervisor = TreeOfThoughts(expand=2, value=number, search="dfs", threshold=3)
    result = Runtime(model).run(walk.under(supervisor))
    assert result.value == "end 6"
    assert ids(result) == ["0.0", "0.1", "0.1.0", "0.1.1", "0.0.0", "0.0.1"]


def test_tree_of_thoughts_depth_first_goes_on_to_the_goal() -> None:
    model = tree({"": ["a 5", "end 7"], "a 5": ["d 3", "end 8"]})
    supervisor = TreeOfThoughts(expand=2, value=number, search="dfs", goal=8)
    assert Runtime(model).run(walk.under(supervisor)).value == "end 8"


def test_states_deeper_than_max_depth_get_one_completion() -> None:
    model = tree({"": ["a 1", "b 2"], "b 2": ["c 1"], "a 1": ["end 1"], "b 2/c 1": ["end 0"]})
    result = Runtime(model).run(walk.under(TreeOfThoughts(3, 2, value=number, max_depth=1)))
    assert (result.value, result.stats.completions) == ("end 1", 5)


@pytest.mark.parametrize("search", ["bfs", "dfs"])
def test_a_search_that_drops_all_states_continues_the_best_singly(search: str) -> None:
    model = tree({"": ["a 1", "b 2", "c 2"], "b 2": ["d 0"], "b 2/d 0": ["fail 0"], "c 2": ["end 0"]})
    result = Runtime(model).run(walk.under(TreeOfThoughts(2, 3, value=number, search=search, threshold=5)))
    assert result.value == "end 0"
    assert ids(result) == ["0.0", "0.1", "0.2", "0.1.0", "0.1.0.0", "0.2.0"]


@agent
async def judge(text: str) -> Any:
    chat = Chat()
    chat.user(f"Score of {text}?")
    yield await chat.gen()


async def judged(state: State) -> float:
    """Value: what an agent generates."""
    return float(await next(spawn(judge, state.text)))


def test_completions_of_a_value_function_are_not_those_of_the_state() -> None:
    def script(messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int) -> str:
        return "1" if "Score" in messages[-1]["content"] else "end"

    async def value(state: State) -> float:
        chat = Chat()
        chat.user("Score?")
        return float(await chat.gen()) if state.text == "end" else 0.0

    seen: list[str] = []

    class Seeing(BestOfN):
        def commit(self, parent: State, child: State) -> None:
            super().commit(parent, child)
            seen.append(child.text)

    Runtime(ScriptedModel(script)).run(walk.under(Seeing(2, value=value)))
    assert seen == ["end", "end"]


def test_agents_that_score_the_states_of_a_path_have_ids_of_their_own() -> None:
    def script(messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int) -> str:
        is_score = "Score" in messages[-1]["content"]
        return "1" if is_score else ["a", "b", "end"][sum(message["role"] == "assistant" for message in messages)]

    result = Runtime(ScriptedModel(script)).run(walk.under(BeamSearch(1, 1, value=judged)))
    spawned = [event.data["child"] for event in result.trace.events if event.kind == "spawn"]
    assert len(spawned) == len(set(spawned)) == 3


def test_a_value_must_be_a_number() -> None:
    supervised = walk.under(BestOfN(1, value=lambda state: float("nan")))
    with pytest.raises(AgentError, match=r"value of State\(walk#0, 0.0, yield\) must be a number, got nan"):
        Runtime(tree({"": ["end"]})).run(supervised)


def test_a_budget_that_cuts_unfinished_paths_is_named_although_another_path_failed() -> None:
    supervised = walk.under(BestOfN(2, max_tokens=2))
    with pytest.raises(AgentError, match="max_tokens=2") as found:
        Runtime(tree({"": ["fail", "a"]})).run(supervised)
    assert isinstance(found.value.__cause__, BudgetExceededError)

"""Supervisors: which states each continues, which path wins, and what does not change it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted_model import ScriptedModel

from examples.agents_mcts import MCTS
from hf_parallel.agents import (
    AgentError,
    AgentResult,
    BeamSearch,
    BestOfN,
    BudgetExceededError,
    Chat,
    Runtime,
    SelfConsistency,
    Single,
    State,
    Supervisor,
    TreeOfThoughts,
    agent,
    next,
    resume,
    rng,
    spawn,
    tool,
)

Messages = Sequence[Mapping[str, Any]]


def number(state: State) -> float:
    """Value: the number that the last completion ends with."""
    return float(state.text.split()[-1])


def tree(completions: Mapping[str, Sequence[str]]) -> ScriptedModel:
    """Return a model with given completions, in order, by the previous completions of the conversation."""
    used: Counter[str] = Counter()

    def script(messages: Messages, settings: Mapping[str, Any], seed: int) -> str:
        before = "/".join(message["content"] for message in messages if message["role"] == "assistant")
        used[before] += 1
        return completions[before][used[before] - 1]

    return ScriptedModel(script)


def digits(messages: Messages, settings: Mapping[str, Any], seed: int) -> str:
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


def test_self_consistency_takes_the_first_of_the_most_frequent_answers() -> None:
    model = tree({"": ["end 3", "end 5", "end 7", "fail", "end 5 ", "end 7"]})
    assert Runtime(model).run(walk.under(SelfConsistency(6))).value == "end 5"


def test_self_consistency_compares_what_key_returns_and_weighs_votes_by_value() -> None:
    model = tree({"": ["end: 3", "end", "end", "end: 4", "end = 4"]})
    key = {"end: 3": 3, "end: 4": 4, "end = 4": 4, "end": None}.get
    assert Runtime(model).run(walk.under(SelfConsistency(5, key=key))).value == "end: 4"
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


def test_tree_of_thoughts_depth_first_goes_back_from_states_below_the_threshold() -> None:
    model = tree({"": ["b 7", "a 5", "x 4"], "b 7": ["c 1", "end 2", "fail"], "a 5": ["d 3", "end 6", "fail"]})
    supervisor = TreeOfThoughts(expand=3, value=number, search="dfs", threshold=3)
    result = Runtime(model).run(walk.under(supervisor))
    assert result.value == "end 6"
    assert ids(result) == ["0.0", "0.1", "0.2", "0.0.0", "0.0.1", "0.0.2", "0.1.0", "0.1.1", "0.1.2"]


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


def test_mcts_continues_each_new_state_to_the_end_and_descends_by_uct() -> None:
    model = tree(
        {
            "": ["a", "b"],
            "a": ["end 0", "end 1"],
            "b": ["c", "end 8"],
            "b/c": ["end 10", "end 9"],
        }
    )
    result = Runtime(model).run(walk.under(MCTS(5, 2, value=number, exploration=0.5)))
    assert result.value == "end 10"
    assert ids(result) == [
        *("0.0", "0.0.0"),  # 0
        *("0.1", "0.1.0", "0.1.0.0"),  # 10
        "0.1.1",  # b has the higher value
        "0.1.0.1",  # c, with 10, before the path that has ended with 8, and a, with 0
        "0.0.1",  # all else is complete
    ]


def thousandths(state: State) -> float:
    """Value of a state under the script `digits`, from 0 to 1."""
    return int(state.text) / 1000


@agent
async def three_choices() -> Any:
    chat = Chat()
    return [await chat.gen() for _ in range(3)]


EVERY: dict[str, Supervisor] = {
    "single": Single(),
    "best_of_n": BestOfN(3, value=thousandths),
    "self_consistency": SelfConsistency(4),
    "beam_search": BeamSearch(2, 2, value=thousandths),
    "tree_of_thoughts_bfs": TreeOfThoughts(2, 3, value=thousandths),
    "tree_of_thoughts_dfs": TreeOfThoughts(expand=2, search="dfs", value=thousandths),
    "mcts": MCTS(6, 2, parallel=3, value=thousandths),
}
SOME = ("self_consistency", "beam_search", "mcts")
with_some = pytest.mark.parametrize("supervisor", [EVERY[name] for name in SOME], ids=SOME)


@agent
async def strict(limit: int) -> Any:
    """Fails if its number is below a limit."""
    text = await Chat().gen()
    if int(text) < limit:
        raise ValueError(f"{text} is below {limit}")
    return int(text)


@pytest.mark.parametrize("name", ["best_of_n", "mcts"])
def test_a_search_fails_only_if_all_paths_fail(name: str) -> None:
    supervised = strict.under(EVERY[name])
    drafts = [
        event.data["text"]
        for event in Runtime(ScriptedModel(digits)).run(supervised, 0).trace.events
        if event.kind == "gen"
    ]
    greatest = max(map(int, drafts))
    assert Runtime(ScriptedModel(digits)).run(supervised, greatest).value == greatest
    with pytest.raises(AgentError, match=f"is below {greatest + 1}"):
        Runtime(ScriptedModel(digits)).run(supervised, greatest + 1)


@agent
async def helper(question: str) -> Any:
    chat = Chat()
    chat.user(question)
    remark = yield await chat.gen()
    chat.user(remark)
    yield await chat.gen()


@agent
async def busy(supervisor: Supervisor) -> Any:
    """Chooses, yields, uses tools and another agent, ends at different depths and fails at times."""
    chat = Chat()
    handle = spawn(helper.under(supervisor), "What?")
    answer = yield await next(handle)
    for index in range(4):
        chat.user(f"{answer} {index}")
        text = await chat.gen()
        if int(text) % 7 == 0:
            raise ValueError(text)
        if int(text) % 3 == 0:
            break
        await tool(str, text)
    await resume(handle, text)
    yield text, await next(handle), rng().random()


def everything(result: AgentResult) -> dict[str, Any]:
    """Return what must not depend on when which request ends: each agent's states, texts, values and messages."""
    found: dict[str, Any] = {"values": result.values}
    for event in result.trace.events:
        data = {name: value for name, value in event.data.items() if name not in ("begin", "seconds")}
        found.setdefault(f"{event.agent} {event.kind} {event.state}", []).append(data)
    return found


@pytest.mark.parametrize("supervisor", EVERY.values(), ids=EVERY)
def test_results_do_not_depend_on_when_requests_end(supervisor: Supervisor) -> None:
    """Agents yield and are resumed, use tools and each other, and fail."""

    def run(delays: int | None) -> dict[str, Any]:
        moments = random.Random(delays)

        async def script(messages: Messages, settings: Mapping[str, Any], seed: int) -> str:
            if delays is not None:
                await asyncio.sleep(moments.random() / 1000)
            return digits(messages, settings, seed)

        try:
            return everything(Runtime(ScriptedModel(script)).run(busy.under(supervisor), supervisor))
        except AgentError as error:
            return {"error": str(error)}

    expected = run(None)
    for delays in range(3):
        assert run(delays) == expected


@pytest.mark.parametrize(
    ("name", "num_started", "limit"),
    [("beam_search", 4, "max_tokens"), ("mcts", 2, "max_passes")],
)
def test_a_search_that_has_used_its_budget_starts_nothing_more(name: str, num_started: int, limit: str) -> None:
    """After the first states that are committed; those that run already are finished."""
    supervisor = replace(EVERY[name], **{limit: 1})
    model = ScriptedModel(digits)
    with pytest.raises(AgentError, match=rf"three_choices#0 .*{limit}=") as found:
        Runtime(model).run(three_choices.under(supervisor))
    assert isinstance(found.value.__cause__, BudgetExceededError)
    assert len(model.calls) == num_started

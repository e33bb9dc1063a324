"""Traces of agents are saved, and drawn as the page of a transcript, with all text escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ScriptedModel

from hf_parallel.agents import (
    BestOfN,
    Chat,
    Runtime,
    RunTrace,
    State,
    TreeOfThoughts,
    agent,
    gather,
    next,
    resume,
    spawn,
    tool,
)
from hf_parallel.agents.drawing import render
from hf_parallel.agents.search_tree import SearchTree, search_trees
from hf_parallel.cli import main as cli

HOSTILE = '</span></script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;b ]]> <!-- \x00\ud800'
"""Text that would leave an element, an attribute, a script or a comment."""


async def look_up(bug: str) -> str:
    return f"code of {bug}"


@agent(supervisor=BestOfN(3, value=lambda state: float(state.text)))
async def repair(bug: str) -> Any:
    gathering = spawn(gather_code, bug)
    patch = await Chat().user(await next(gathering)).gen()
    await resume(gathering, patch)
    return patch


@agent
async def gather_code(bug: str) -> Any:
    while True:
        yield await tool(look_up, bug)


def a_run(answer: str = "7") -> RunTrace:
    return Runtime(ScriptedModel(lambda messages, settings, seed: answer)).run(repair, "bug").trace


def test_a_saved_trace_loads_unchanged(tmp_path: Path) -> None:
    trace = a_run()
    trace.save(tmp_path / "run.json")
    assert RunTrace.load(tmp_path / "run.json") == trace
    kinds = {event.kind for event in trace.events}
    assert {"spawn", "gen", "tool", "next", "resume", "yield", "state", "end"} <= kinds


@pytest.mark.parametrize("change", [{"version": 9}, {"events": 3}, {"events": [{"time": 0.0}]}, {"format": "x"}])
def test_another_file_raises_with_its_name(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RunTrace().to_dict() | change))
    with pytest.raises(ValueError, match="run.json"):
        RunTrace.load(path)


def hostile_run(text: str) -> RunTrace:
    trace = RunTrace()
    trace.add(text, "spawn", child=f"{text}x", name=text)
    trace.add(text, "gen", text, begin=0.0, tokens=1, prompt_tokens=0, reused=0, text=text, settings={text: text})
    trace.add(text, "tool", text, begin=0.0, name=text, result=text, error=None)
    for name in "ab":
        trace.add(text, "gen", f"{text}.{name}", begin=0.0, tokens=1, prompt_tokens=0, reused=0, text=text, settings={})
        trace.add(text, "state", f"{text}.{name}", parent=text, value=float("nan"), status=text, reached=text)
    trace.add(text, "scores", scores={text: 0.5})
    trace.add(f"{text}x", "error", error=text)
    return trace


def test_all_text_of_a_run_is_escaped() -> None:
    plain, hostile = render(hostile_run("a")), render(hostile_run(HOSTILE))
    assert re.findall(r"<[/\w]+", plain) == re.findall(r"<[/\w]+", hostile)


def test_view_renders_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, trace = tmp_path / "run.json", a_run()
    trace.save(path)
    assert cli.main(["view", str(path)]) == 0
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page == render(trace)
    assert "code of bug" in page
    data = json.loads(path.read_text())
    for event in data["events"]:
        event["data"].pop("child", None)
    path.write_text(json.dumps(data))
    assert cli.main(["view", str(path)]) == 2
    assert "damaged: KeyError 'child'" in capsys.readouterr().err


VALUES = {"a": 3.0, "b": 2.0, "c": 1.0, "aa": 1.0, "ab": 5.0, "ac": 0.0, "ba": 4.0, "bb": 0.0, "bc": 0.0}


def a_search() -> RunTrace:
    """Return a run of a breadth-first search whose `n`-th completion of a choice is the `n`-th letter."""
    counts: dict[str, int] = {}

    def script(messages: Any, settings: Any, seed: int) -> str:
        path = "".join(message["content"] for message in messages if message["role"] == "assistant")
        counts[path] = counts.get(path, -1) + 1
        return "abc"[counts[path]]

    async def value(state: State) -> float:
        words = [message["content"] for message in state.conversation if message["role"] == "assistant"]
        assert await gather(Chat(system="vote").user("".join(words)).gen())  # a completion that no state shows
        return VALUES["".join(words)]

    @agent(supervisor=TreeOfThoughts(breadth=2, expand=3, value=value))
    async def think(task: str) -> Any:
        chat = Chat().user(task)
        await chat.gen()
        second = await chat.gen()
        if second == "c":
            raise ValueError("a thought that fails")
        return second

    def scripted(messages: Any, settings: Any, seed: int) -> str:
        return "vote" if messages[0]["role"] == "system" else script(messages, settings, seed)

    return Runtime(ScriptedModel(scripted)).run(think, "task").trace


def test_the_tree_of_a_search_has_the_values_and_outcomes_of_its_states() -> None:
    (tree,) = search_trees(a_search().events)
    found = {node.id: (node.text, node.value, node.outcome) for node in tree.root.walk()}
    assert found == {
        "0": ("", None, "start"),
        "0.0": ("a", 3.0, "selected"),
        "0.1": ("b", 2.0, "continued"),
        "0.2": ("c", 1.0, "pruned"),
        "0.0.0": ("a", 1.0, "ended"),
        "0.0.1": ("b", 5.0, "selected"),
        "0.0.2": ("c", None, "failed"),
        "0.1.0": ("a", 4.0, "ended"),
        "0.1.1": ("b", 0.0, "ended"),
        "0.1.2": ("c", None, "failed"),
    }
    assert tree.root.num_leaves == 7


def test_the_page_of_a_search_has_a_cell_for_each_state() -> None:
    trace = a_search()
    cells = re.findall(r'class="state (\w+)" style="grid-column:(\d+);grid-row:(\d+) / span (\d+)"', render(trace))
    assert cells == [
        ("start", "1", "1", "7"),
        ("selected", "2", "1", "3"),
        ("ended", "3", "1", "1"),
        ("selected", "3", "2", "1"),
        ("failed", "3", "3", "1"),
        ("continued", "2", "4", "3"),
        ("ended", "3", "4", "1"),
        ("ended", "3", "5", "1"),
        ("failed", "3", "6", "1"),
        ("pruned", "2", "7", "1"),
    ]
    assert "9 states, 1 pruned" in render(trace)


def test_a_tree_begins_at_the_last_state_before_its_first_branches() -> None:
    trace = RunTrace()
    for state in ("0.2.0.0", "0.2.0.1"):  # a resumed copy, whose earlier states belong to another agent
        trace.add("a#0", "state", state, parent="0.2.0", value=None, status="committed", reached="end")
    tree = SearchTree("a#0", trace.events)
    assert [node.id for node in tree.root.walk()] == ["0.2.0", "0.2.0.0", "0.2.0.1"]


def test_a_run_without_a_search_has_no_tree() -> None:
    @agent
    async def ask() -> str:
        return await Chat().user("hi").gen()

    trace = Runtime(ScriptedModel(lambda *_: "two words")).run(ask).trace
    assert search_trees(trace.events) == []
    assert 'class="tree"' not in render(trace)


def test_usage_has_the_tokens_and_calls_of_each_role() -> None:
    model = ScriptedModel(lambda messages, settings, seed: "7")
    result = Runtime(model).run(repair, "bug")
    usage = result.trace.usage()
    assert list(usage) == ["repair", "gather_code"]
    assert usage["repair"].requests == len(model.calls) == 3
    assert usage["repair"].tokens == result.stats.tokens
    assert usage["repair"].prompt_tokens == result.stats.prompt_tokens
    assert usage["gather_code"].tool_calls == result.stats.tool_calls
    assert sum(role.agents for role in usage.values()) == len({event.agent for event in result.trace.events})
    assert re.search(r"<td>repair</td><td>1</td><td>3</td><td class=\"part\">100%</td>", render(result.trace))


def test_the_page_draws_the_scores_of_each_round() -> None:
    trace = RunTrace(clock=iter(float(second) for second in range(9)).__next__)
    for scores in ({"a": 1.0}, {"a": 0.5, "b": 0.25}, {"a": 0.0, "b": 0.75}):
        trace.add("a#0", "scores", scores=scores)
    lines = re.findall(r'polyline points="([^"]*)"', render(trace))
    assert lines == ["0.0,0.0 320.0,80.0 640.0,160.0", "320.0,120.0 640.0,40.0"]

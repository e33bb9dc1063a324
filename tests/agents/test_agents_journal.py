"""A run with a journal continues after its process died, and a run with a timeout ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ScriptedModel

from hf_parallel.agents import AgentError, BestOfN, Chat, ReplayError, Runtime, ToolError, agent, gather, now, tool

calls: list[int] = []
"""Arguments of the tool and seeds of the model, in the order of their calls."""


def echo(messages: Sequence[Any], settings: Any, seed: int) -> str:
    calls.append(seed)
    return f"{messages[-1]['content']}{seed % 10}"


def lookup(number: int) -> tuple[int, float]:
    calls.append(number)
    if number == 2:
        raise LookupError(f"no number {number}")
    return number, 0.5


@agent(supervisor=BestOfN(2, value=lambda state: float(len(state.text))))
async def work(topic: str) -> Any:
    began = now()
    facts = await gather(tool(lookup, 0), tool(lookup, 1))
    try:
        await tool(lookup, 2)
    except ToolError as error:
        facts.append(str(error))
    chat = Chat().user(f"{topic} {facts} {began}")
    yield [facts, await chat.gen(), await chat.user("more").sample(2)]


def run(journal: Path, topic: str = "owls", seed: int = 0) -> Any:
    calls.clear()
    return Runtime(ScriptedModel(echo), seed=seed).run(work, topic, journal=journal)


def test_a_run_continues_from_each_line_of_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    whole = run(journal)
    expected = whole.value
    assert expected[0] == [[0, 0.5], [1, 0.5], "tool lookup failed: LookupError('no number 2')"]
    lines = journal.read_text().splitlines(keepends=True)
    num_calls = len(calls)
    for count in range(2, len(lines) + 1):  # with `now`, which is the first operation
        cut = "".join(lines[:count])
        unfinished = lines[count][:9] if count < len(lines) else ""
        journal.write_text(cut + unfinished)
        resumed = run(journal)
        assert resumed.value == expected
        assert resumed.stats.tool_calls == whole.stats.tool_calls
        assert resumed.stats.completions == whole.stats.completions
        assert resumed.stats.resumed == count - 2
        assert sorted(journal.read_text().splitlines(keepends=True)) == sorted(lines)
    assert num_calls > 0
    assert not calls  # the last run had the whole journal


def test_a_journal_of_another_run_raises(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    run(journal)
    with pytest.raises(ValueError, match="with the seed 0, this Runtime has 1"):
        run(journal, seed=1)
    with pytest.raises(AgentError, match="same agents and arguments") as raised:
        run(journal, "cats")
    assert isinstance(raised.value.__cause__, ReplayError)
    journal.write_text('{"format": "other"}\n')
    with pytest.raises(ValueError, match="must have the format"):
        run(journal)


def test_a_result_that_json_cannot_hold_raises(tmp_path: Path) -> None:
    @agent
    async def use() -> Any:
        return await tool(object)

    with pytest.raises(AgentError, match="only values of JSON, tool object"):
        Runtime(ScriptedModel(echo)).run(use, journal=tmp_path / "run.jsonl")


def test_a_timeout_ends_a_run(tmp_path: Path) -> None:
    @agent
    async def wait() -> Any:
        await tool(lookup, 1)
        await tool(asyncio.sleep, 60)

    journal = tmp_path / "run.jsonl"
    with pytest.raises(TimeoutError, match=r"the run of agent wait took more than 0\.2 seconds"):
        Runtime(ScriptedModel(echo)).run(wait, journal=journal, timeout=0.2)
    assert len(journal.read_text().splitlines()) == 2
    with pytest.raises(ValueError, match="timeout must be positive, got 0"):
        Runtime(ScriptedModel(echo)).run(wait, timeout=0)

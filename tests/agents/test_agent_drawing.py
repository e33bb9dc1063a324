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
    agent,
    next,
    resume,
    spawn,
    tool,
)
from hf_parallel.agents.drawing import render
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
    trace.add(text, "state", text, parent="0", value=float("nan"), status="dropped")
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

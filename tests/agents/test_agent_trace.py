"""Traces of agents: saving and loading changes nothing, and a file that is no trace is an error that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_traces import ticking

from hf_parallel.agents.trace import Event, RunTrace


def small_trace() -> RunTrace:
    """Return a trace with an event of each kind."""
    trace = RunTrace(clock=ticking())
    trace.add("solve#0", "spawn", child="solve#0/gather#0", name="gather")
    numbers = {"begin": 1.5, "tokens": 3, "prompt_tokens": 5, "reused": 4}
    trace.add("solve#0", "gen", "0", **numbers, text="caf\u00e9 </script>", settings={"temperature": 0.5})
    trace.add("solve#0/gather#0", "tool", "0", begin=2.0, name="grep", result=None, error="timeout")
    trace.add("solve#0", "next", "0", child="solve#0/gather#0", begin=3.0)
    trace.add("solve#0", "resume", "0", child="solve#0/gather#0")
    trace.add("solve#0", "yield", "0", value="7")
    trace.add("solve#0", "state", "0.0", parent="0", value=0.5, status="committed")
    trace.add("solve#0", "kv", bytes=1024)
    trace.add("solve#0", "scores", scores={"solve": 0.25})
    trace.add("solve#0/gather#0", "cancel")
    trace.add("solve#0", "error", error="ValueError: no")
    trace.add("solve#0", "end", value="None")
    return trace


def test_a_saved_trace_loads_unchanged_and_continues_after_its_last_event(tmp_path: Path) -> None:
    trace = small_trace()
    trace.add("solve#0", "of an unknown kind", anything=[1])
    trace.save(tmp_path / "run.json")
    assert RunTrace.load(tmp_path / "run.json") == trace
    assert trace.events[0] == Event(1.0, "solve#0", "spawn", "", {"child": "solve#0/gather#0", "name": "gather"})
    loaded = RunTrace(RunTrace.load(tmp_path / "run.json").events, clock=ticking())
    assert loaded.add("solve#0", "cancel").time == 14


def test_values_that_json_cannot_hold_are_saved_as_text_or_numbers(tmp_path: Path) -> None:
    trace = RunTrace(clock=ticking())
    settings = {"stop": ("a", {1}), "dtype": np.dtype("float32"), "bias": {(1, 2): -1.0}}
    numbers = {"begin": 0, "tokens": np.int64(3), "prompt_tokens": 0, "reused": 0}
    trace.add("solve#0", "gen", **numbers, text="", settings=settings)
    trace.add("solve#0", "state", "0", parent=None, value=np.float32(-np.inf), status="dropped")
    trace.save(tmp_path / "run.json")
    gen, state = RunTrace.load(tmp_path / "run.json").events
    assert gen.data["settings"] == {"stop": ["a", [1]], "dtype": "dtype('float32')", "bias": {"(1, 2)": -1.0}}
    assert gen.data["tokens"] == 3
    assert state.data["value"] == -np.inf


def changed(index: int, **entries: Any) -> dict[str, Any]:
    """Return the small trace as plain data with other entries in an event or its data; ... removes one."""
    data = json.loads(json.dumps(small_trace().to_dict()))
    event = data["events"][index]
    for name, value in entries.items():
        target = event if name in event else event["data"]
        target[name] = value
        if value is ...:
            del target[name]
    return data


def test_a_malformed_trace_raises_and_names_the_entry(tmp_path: Path) -> None:
    """Damage at any place is in test_untrusted_files.py."""
    path = tmp_path / "run.json"
    for data, message in [
        (small_trace().to_dict() | {"version": 9}, "version 9"),
        (changed(0, time=float("nan")), "'time' must be"),
        (changed(0, child=...), "event 0 .*'child' is missing"),
        (changed(1, tokens=-1), "'tokens' must be .* got -1"),
        (changed(1, begin=99), "event 1: begin 99 must not be after time 2"),
        (changed(6, status="won"), "'status' must be .* got 'won'"),
    ]:
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message) as found:
            RunTrace.load(path)
        assert str(path) in str(found.value)

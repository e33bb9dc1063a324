"""`agent_hints` of `Engine.submit` and of the HTTP endpoint: what is accepted, and that policies receive it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer

pytest.importorskip("greenlet")

from hf_parallel.engine import AgentHints, Engine, RequestObserver

HINTS = {
    "workflow_id": "repair-7",
    "agent_id": "Patcher",
    "step_id": "12",
    "parent_step_id": "11",
    "expected_tool_duration_ms": 250,
}
TOKENIZER: Any = AsciiTokenizer()
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(copy.deepcopy(tiny.build("llama")), TOKENIZER) as engine:
        yield engine


def test_hints_are_given_as_a_mapping_or_as_an_object() -> None:
    assert AgentHints.of(HINTS) == AgentHints(**HINTS) == AgentHints.of(AgentHints(**HINTS))
    assert AgentHints.of(None) == AgentHints.of({}) == AgentHints()


def test_hints_change_no_token(engine: Engine) -> None:
    plain, hinted = (engine.submit(PROMPT, max_new_tokens=6, agent_hints=hints) for hints in (None, HINTS))
    assert torch.equal(plain.result().sequences, hinted.result().sequences)


BAD = {
    "no mapping": (["Patcher"], "AgentHints or a mapping, got list"),
    "unknown name": ({"agentid": "Patcher"}, "did you mean 'agent_id'"),
    "a name that is no string": ({1: "Patcher"}, "got 1"),
    "id is a number": ({"agent_id": 1}, "agent_id must be a string, got 1"),
    "id is None": ({"agent_id": None}, "agent_id must be a string, got None"),
    "id is long": ({"step_id": "x" * 257}, "step_id may have at most 256 characters, got 257"),
    "id with a lone surrogate": ({"workflow_id": "\ud800"}, "surrogates"),
    "duration is text": ({"expected_tool_duration_ms": "1"}, "number of at least 0, got '1'"),
    "duration is a truth value": ({"expected_tool_duration_ms": True}, "got True"),
    "duration is negative": ({"expected_tool_duration_ms": -1}, "got -1"),
    "duration is infinite": ({"expected_tool_duration_ms": float("inf")}, "got inf"),
    "duration is no number": ({"expected_tool_duration_ms": float("nan")}, "got nan"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_hints_raise_at_submission(engine: Engine, kind: str) -> None:
    hints, message = BAD[kind]
    with pytest.raises(ValueError, match=message) as raised:
        engine.submit(PROMPT, agent_hints=hints)
    assert "agent_hints" in str(raised.value)


class Recorder(RequestObserver):
    """Policy that records the hints of all requests."""

    def __init__(self) -> None:
        self.seen: list[AgentHints] = []

    def priority(self, node: Any) -> float:
        return node.last_used

    def on_end(self, request: Any, nodes: Any) -> None:
        self.seen.append(request.hints)


@pytest.mark.parametrize("given", [HINTS, {"agent_id": "Viewer", "step_id": None}, {}, None])
def test_a_policy_receives_the_hints_of_a_request_over_http(given: Any) -> None:
    for module in ("fastapi", "uvicorn", "prometheus_client", "httpx2", "llguidance"):
        pytest.importorskip(module)
    from serving import served, small_model

    recorder = Recorder()
    with Engine(*small_model(), policy=recorder) as engine, served(engine) as server:
        server.chat(agent_hints=given)
    expected = {name: value for name, value in (given or {}).items() if value is not None}
    assert recorder.seen == [AgentHints(**expected)]

"""`agent_hints` of `Engine.submit` and of the HTTP endpoint: what is accepted, and that policies receive it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
from ascii_tokenizer import AsciiTokenizer

from hf_parallel.engine import AgentHints, Engine, RequestObserver

HINTS = {"workflow_id": "repair-7", "agent_id": "Patcher"}
TOKENIZER: Any = AsciiTokenizer()
PROMPT = "Once upon a time"


BAD: list[tuple[Any, str]] = [
    (["Patcher"], "AgentHints or a mapping, got list"),
    ({"agentid": "Patcher"}, "did you mean 'agent_id'"),
    ({1: "Patcher"}, "got 1"),
    *(({"agent_id": value}, f"agent_id must be a string, got {value}") for value in (1, None)),
    ({"agent_id": "x" * 257}, "agent_id may have at most 256 characters, got 257"),
    ({"workflow_id": "\ud800"}, "surrogates"),
]


def test_bad_hints_raise_at_submission() -> None:
    with Engine(copy.deepcopy(tiny.build("llama")), TOKENIZER) as engine:
        for hints, message in BAD:
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


def test_a_policy_receives_the_hints_of_a_request_over_http() -> None:
    for module in ("fastapi", "uvicorn", "prometheus_client", "httpx2", "llguidance"):
        pytest.importorskip(module)
    from serving import served, small_model

    recorder = Recorder()
    with Engine(*small_model(), policy=recorder) as engine, served(engine) as server:
        for given in (HINTS, {"agent_id": "Viewer"}, {}, None):
            server.chat(agent_hints=given)
    assert recorder.seen == [AgentHints(**HINTS), AgentHints(agent_id="Viewer"), AgentHints(), AgentHints()]

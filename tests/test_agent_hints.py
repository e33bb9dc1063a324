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

from hf_parallel.engine import AgentHints, Engine

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

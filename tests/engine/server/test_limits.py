"""Limits of a request hold before its work is done, and each client has its share of what the server keeps."""

from __future__ import annotations

import json
import random
import subprocess
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from serving import MODEL, Served, check_error, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server import Limits  # noqa: E402
from hf_parallel.engine.server.errors import APIError  # noqa: E402
from hf_parallel.engine.server.openai import responses_api  # noqa: E402
from hf_parallel.engine.server.openai.responses_api import Conversations  # noqa: E402
from hf_parallel.engine.server.openai.schema import CompletionBody, ScoreBody  # noqa: E402
from hf_parallel.engine.server.structured.grammar import JSONProcessor  # noqa: E402
from hf_parallel.engine.server.structured.schema_check import first_error  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SCORE: dict[str, Any] = {"model": MODEL, "label_token_ids": [5]}


def test_sizes_of_prompts_are_known_before_they_are_built() -> None:
    draw = random.Random(0)
    texts = ["", "é", "a" * 9, "😀 b"]
    for _ in range(50):
        items: Any = draw.choices(texts, k=draw.randint(1, 5))
        query: Any = draw.choice(texts)
        if draw.random() < 0.5:
            query, items = [1] * len(query), [[2] * (1 + len(item)) for item in items]
        elif draw.random() < 0.3:
            items = items[0]
        for body in (
            ScoreBody(query=query or [3], items=items, item_first=draw.random() < 0.5, **SCORE)
            if isinstance(query, list)
            else ScoreBody(query=query, items=items, **SCORE),
            CompletionBody(model=MODEL, prompt=items),
        ):
            assert body.prompt_sizes == [len(prompt) for prompt in body.prompts]


def test_prompts_that_are_too_many_or_too_large_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(body: Any) -> Any:
        pytest.fail("built")

    with Engine(*small_model()) as engine, served(engine, Limits(body_bytes=1 << 14)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(ScoreBody, "prompts", property(build))
            for query, items, limit in (("q" * 2000, ["a"] * 60, 1 << 16), ("q", ["a"] * 65, 64)):
                error = check_error(server.post("/v1/score", query=query, items=items, label_token_ids=[5]), 400)
                assert error["param"] == "items"
                assert str(limit) in error["message"]
        assert server.post("/v1/score", query="q" * 900, items=["a"] * 60, label_token_ids=[5]).status_code == 200


def test_log_probabilities_of_a_response_are_counted_before_they_are_computed() -> None:
    prompt = {"prompt": [[5] * 10, [6] * 5], "temperature": 0}
    with Engine(*small_model()) as engine, served(engine, Limits(log_probs=60)) as server:
        allowed: list[dict[str, Any]] = [
            {"prompt_logprobs": 3, "max_tokens": 1},  # 15 tokens, 4 each
            {"logprobs": 5, "max_tokens": 5},  # 2 answers, 5 tokens, 6 each
            {"logprobs": 2, "echo": True, "max_tokens": 2},  # 3 x (15 + 4)
        ]
        for body in allowed:
            assert server.post("/v1/completions", **prompt, **body).status_code == 200
        before = engine.stats
        for body in ({"prompt_logprobs": 4}, {"logprobs": 5, "max_tokens": 6}, {"echo": True, "logprobs": 3}):
            error = check_error(server.post("/v1/completions", **prompt, **{"max_tokens": 2, **body}), 400)
            assert error["param"] == ("prompt_logprobs" if "prompt_logprobs" in body else "logprobs")
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5, "max_tokens": 6}
        assert server.post("/v1/chat/completions", **chat).status_code == 200
        check_error(server.post("/v1/chat/completions", **chat, n=2), 400)
        assert engine.stats.failed == before.failed


def test_the_schemas_of_a_request_are_checked_together_and_a_grammar_is_compiled_once(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    started, run = list[Any](), subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: started.append(given) or run(*given, **more))
    names = [f"f{number}" for number in range(4)]
    schema = {"type": "object", "properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    for _ in range(2):
        answer = server.chat(tools=tools, tool_choice="required", max_tokens=150)
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] in names
    assert len(started) == 1
    compiled, make = list[Any](), JSONProcessor.__init__
    monkeypatch.setattr(JSONProcessor, "__init__", lambda *given: compiled.append(given) or make(*given))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    settings = {"prompt": ["a", "Hello", "An apple"], "response_format": form, "temperature": 0, "max_tokens": 40}
    choices = server.post("/v1/completions", **settings).json()["choices"]
    assert [json.loads(choice["text"])["x"] in (1, 22) for choice in choices] == [True] * 3
    assert len(compiled) == 1
    assert len(started) == 2


@pytest.mark.slow
def test_schemas_that_are_too_costly_together_are_an_error_that_names_the_first_beyond_the_limit() -> None:
    pytest.importorskip("llguidance")

    def costly(number: int) -> str:
        options = [
            {"type": "object", "properties": {f"k{j}_{i}_{number}": {"type": "integer"} for j in range(10)}}
            for i in range(300)
        ]
        return json.dumps({"type": "object", "properties": {"q": {"anyOf": options}}, "required": ["q"]})

    assert first_error([costly(0)]) is None
    error = first_error([costly(number) for number in range(100)])
    assert error is not None
    assert 0 < error.index < 99
    assert "with those before it" in error.reason
    invalid = first_error(['{"type": "object"}', '{"type": "nothing"}'])
    assert invalid is not None
    assert invalid.index == 1
    assert "nothing" in invalid.reason


def test_a_key_keeps_its_share_of_stored_responses_whatever_others_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_api, "MAX_KEPT", 12)
    monkeypatch.setattr(responses_api, "MAX_CHARACTERS", 6000)
    draw, kept = random.Random(0), Conversations()
    owners = ["one", "two", "three"]
    stored: dict[str, list[str]] = {owner: [] for owner in owners}
    for number in range(400):
        owner = draw.choices(owners, [10, 1, 1])[0]
        name = f"resp_{number}"
        kept.add(owner, {"id": name}, [{"text": "x" * draw.choice([5, 100, 300])}])
        stored[owner].append(name)
        if draw.random() < 0.2:
            used = stored[owner][-1]
            kept.find(owner, used)
        found = {o: [name for name in names if is_kept(kept, o, name)] for o, names in stored.items()}
        assert sum(map(len, found.values())) <= 12
        for other, names in found.items():
            assert names == stored[other][len(stored[other]) - len(names) :], "older ones are dropped first"
            assert len(names) >= min(len(stored[other]), 4), "an equal share"
    with pytest.raises(APIError):
        kept.find("two", stored["one"][-1])


def is_kept(kept: Conversations, owner: str, name: str) -> bool:
    return name in kept._kept.get(owner, ())

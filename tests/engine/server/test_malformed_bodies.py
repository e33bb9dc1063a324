"""The server rejects malformed requests with an error of the client, and serves others as before."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")

from serving import MODEL, Served, check_error, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server import Limits  # noqa: E402
from hf_parallel.engine.server.openai.mode_settings import COMMON, UNSUPPORTED  # noqa: E402
from hf_parallel.engine.server.openai.responses_api import ResponseBody  # noqa: E402
from hf_parallel.engine.server.openai.schema import ChatBody, CompletionBody, ScoreBody  # noqa: E402
from hf_parallel.generation import MODES  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
LIMIT = 1 << 18
"""Bytes of a body."""
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/score": {"model": MODEL, "query": "a", "items": ["b"], "label_token_ids": [5]},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
"""Valid bodies of the other endpoints."""
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    torch.set_num_threads(1)
    with Engine(*small_model()) as engine, served(engine, Limits(body_bytes=LIMIT)) as running:
        yield running


@pytest.fixture
def unaffected(server: Served) -> Iterator[None]:
    """Before and after the test, a valid request gets the same tokens, and as many bytes of the cache are in use."""
    answer = server.chat(max_tokens=3)["choices"]
    assert server.wait_until(lambda stats: not stats.running)  # the answer arrives before its request is closed
    before = server.engine.stats
    yield
    after = server.engine.stats
    for name in ("decoded_tokens", "failed", "cancelled", "kv_bytes"):
        assert getattr(after, name) == getattr(before, name)
    assert server.chat(max_tokens=3)["choices"] == answer


def send(
    server: Served, content: bytes, path: str = CHAT, method: str = "POST", headers: Any = None
) -> tuple[int, dict[str, Any]]:
    """Send a request. Return the status and, if the request failed, its error in OpenAI's form."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
    connection.request(method, path, content, JSON if headers is None else headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    if response.status < 400:
        return response.status, {}
    error = json.loads(text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 1000
    return response.status, error


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**400, -1, 0, 1, 2**63, 1e300]),
        st.floats(),
        st.text(max_size=20),
        st.just("x" * 5000),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
SETTINGS = [(mode, name) for mode, cls in MODES.items() for name in cls.fields() if name not in COMMON]


PLACES = st.one_of(
    st.tuples(st.just(CHAT), st.sampled_from([*ChatBody.model_fields, *UNSUPPORTED, "unknown"]), st.none()),
    st.tuples(st.just(COMPLETION), st.sampled_from([*CompletionBody.model_fields, *UNSUPPORTED]), st.none()),
    st.sampled_from(SETTINGS).map(lambda place: (CHAT, place[1], place[0])),
    st.sampled_from([(path, name, None) for path, own in OTHERS.items() for name in (*own, "messages", "unknown")]),
    st.tuples(st.just("/v1/responses"), st.sampled_from([*ResponseBody.model_fields, *UNSUPPORTED]), st.none()),
    st.tuples(st.just("/v1/score"), st.sampled_from([*ScoreBody.model_fields, "unknown"]), st.none()),
)
"""An endpoint, a field of its body, and a mode or None."""
MANY = 2500
"""Bodies of a slow test."""


def check_field(server: Served, place: tuple[str, str, str | None], value: Any) -> None:
    path, name, mode = place
    body = {"model": MODEL, "max_tokens": 2, "messages" if path == CHAT else "prompt": HELLO if path == CHAT else "a"}
    body = OTHERS.get(path, body) | ({} if mode is None else {"generation_mode": mode})
    status, error = send(server, json.dumps({**body, name: value}).encode(), path)
    assert status < 500, error
    if error:
        is_elsewhere = "JSON" in error["message"] or error["code"] == "context_length_exceeded"
        assert is_elsewhere or error["param"] in (name, "generation_mode", "max_tokens", "items"), error


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=PLACES, value=VALUES)
def test_any_value_of_a_field_is_answered_or_is_an_error_that_names_the_field(
    server: Served, place: tuple[str, str, str | None], value: Any
) -> None:
    check_field(server, place, value)


@pytest.mark.slow
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=PLACES, value=VALUES)
def test_many_values_of_fields_are_answered_or_are_errors(
    server: Served, place: tuple[str, str, str | None], value: Any
) -> None:
    check_field(server, place, value)


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": [1, "a"]}}}}
FLAT = {"type": "function", **FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
NESTED: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "a"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
        ],
        "tools": [FLAT],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": FUNCTION["parameters"]}},
        "max_output_tokens": 2,
    },
    "/tokenize": {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]},
}
"""Bodies that hold objects in objects."""


def replaced(part: Any, value: Any, data: st.DataObject) -> Any:
    """Return a part of a body in which one place, at any depth, holds another value."""
    places = list(part) if isinstance(part, dict) else list(range(len(part))) if isinstance(part, list) else []
    if not places or data.draw(st.integers(0, 4)) == 0:
        return value
    place, copied = data.draw(st.sampled_from(places)), part.copy()
    copied[place] = replaced(part[place], value, data)
    return copied


NESTED_VALUES = VALUES | st.sampled_from(["f", "json_object", {"type": "text"}])


def check_place(server: Served, path: str, value: Any, data: Any) -> None:
    name = data.draw(st.sampled_from(list(NESTED[path])))
    body = {**NESTED[path], name: replaced(NESTED[path][name], value, data)}
    if data.draw(st.booleans()):
        body.pop("tool_choice", None)
    status, error = send(server, json.dumps({"model": MODEL, **body}).encode(), path)
    assert status < 500, (body, error)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(list(NESTED)), value=NESTED_VALUES, data=st.data())
def test_any_value_at_any_depth_is_answered_or_is_an_error(server: Served, path: str, value: Any, data: Any) -> None:
    check_place(server, path, value, data)


@pytest.mark.slow
@settings(max_examples=MANY, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(list(NESTED)), value=NESTED_VALUES, data=st.data())
def test_many_values_at_any_depth_are_answered_or_are_errors(server: Served, path: str, value: Any, data: Any) -> None:
    check_place(server, path, value, data)


FIELDS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    {"messages": [{"role": "nobody", "content": "Hello"}]},
    {"model": "../../etc/passwd"},
    *({"n": value} for value in (0, 65, 10**40)),
    {"n": 2, "temperature": 0},
    *({"stop": value} for value in ([""], ["a"] * 99, "x" * 999)),
    *({"logit_bias": value} for value in ({"a": 1}, {"1": 101}, {"99999999": 1}, {"²": 1}, {"01": 1})),
    {"top_logprobs": 2},
    {"no_repeat_ngram_size": 1, "max_tokens": 900},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"generation_mode": "nothing"},
    {"num_workers": 2},
    {"generation_mode": "hogwild", "num_workers": 10**12},
    {"generation_mode": "self_consistency", "num_answers": 1000},
    {"generation_mode": "hogwild", "num_workers": 65},
    {"generation_mode": "hogwild", "n": 64},
    {"generation_mode": "hogwild", "task_prompt": "{task.__class__.__mro__}"},
    {"generation_mode": "hogwild", "logprobs": True},
    {"generation_mode": "self_consistency", "answer_pattern": "(a+)+$"},
    {"chat_template": "{{ 1 }}"},
    {"trust_remote_code": True},
    {"x" * 200_000: 1},
    *({"prompt": prompt} for prompt in ([1, "a"], [10**6], [-1], [True], [[]], ["a"] * 65, "word " * 2000)),
    *({"prompt": "a", **more} for more in ({"best_of": 2}, {"echo": 1}, {"max_tokens": 0}, {"prompt_logprobs": 21})),
]
"""Fields of a chat, or of a completion if they have a prompt, that contradict each other or exceed a limit."""


@pytest.mark.usefixtures("unaffected")
def test_fields_that_contradict_each_other_or_exceed_a_limit_are_rejected(server: Served) -> None:
    for fields in FIELDS:
        path, prompt = (COMPLETION, {}) if "prompt" in fields else (CHAT, {"messages": HELLO})
        for more in ({}, {"stream": True}) if path == CHAT and "stream" not in fields else ({},):
            body = {"model": MODEL, "max_tokens": 4, **prompt, **more, **fields}
            status, error = send(server, json.dumps(body).encode(), path)
            assert status == (404 if "model" in fields else 400), (fields, error)
            assert error["param"] in {name[:1000] for name in (*fields, "max_tokens")}, (fields, error)
            assert "rows" not in error["message"] or error["param"] == list(fields)[-1], (fields, error)


VALID = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Größe"}]}, ensure_ascii=False)
BODIES: dict[str, bytes] = {
    "empty": b"",
    **{f"the value {value}": value.encode() for value in ("[]", "1", "null", '"small"', "[{}]", "NaN")},
    "two objects": b"{}{}",
    "a null byte in a text": b'{"model": "sm\x00all"}',
    "half a surrogate": b'{"model": "\\ud8"}',
    "bytes that are not UTF-8": b'{"model": "\xff\xfe"}',
    "half a character": VALID.encode().replace("ß".encode(), "ß".encode()[:1]),
    **{f"encoded as {name}": VALID.encode(name) for name in ("utf-16", "utf-32", "latin-1", "cp500")},
    "compressed": gzip.compress(VALID.encode()),
    "lists nested deeply": b'{"model": "small", "messages": ' + b"[" * 50_000,
    "objects nested deeply": b'{"model": ' * 20_000,
    "an integer of many digits": b'{"model": "small", "seed": ' + b"9" * 6000 + b"}",
    **{f"cut off at {at}": VALID.encode()[:at] for at in range(1, len(VALID) - 1, 9)},
    **{f"many of {part}": b'{"model": "small", "x": [%s1]}' % (part.encode() * 50_000) for part in ("[],", "{},")},
    **{f"text in {name}": b'{"model": "small", "%s": "%s"}' % (name, b"x" * (LIMIT - 99)) for name in (b"n", b"stop")},
}


@pytest.mark.usefixtures("unaffected")
def test_bodies_that_are_no_json_object_are_rejected(server: Served) -> None:
    for name, content in BODIES.items():
        for path in (CHAT, COMPLETION, *OTHERS):
            assert send(server, content, path)[0] == 400, name
    assert send(server, b" " * (LIMIT + 1))[0] == 413


@pytest.mark.usefixtures("unaffected")
def test_other_content_types_methods_and_paths_are_rejected(server: Served) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        assert send(server, VALID.encode(), headers={"Content-Type": media_type})[0] == 415
    for path in (CHAT, COMPLETION, *OTHERS):
        for method in ("GET", "PUT", "DELETE", "TRACE", "FETCH"):
            assert send(server, b"", path, method)[0] == 405
    for method in ("POST", "PUT"):
        assert send(server, b"{}", "/v1/responses/x", method)[0] == 405
    for method, name in (("GET", "x"), ("DELETE", "%00"), ("GET", "x" * 3000)):
        assert send(server, b"", f"/v1/responses/{name}", method)[0] == 404
    for path in ("/v1", "/v1//chat/completions", "/docs", "/v1/embeddings", "/%00", "/x" * 3000):
        assert send(server, VALID.encode(), path)[0] == 404
    for name in ("other", "..%2f..%2fetc%2fpasswd", "../../../etc/passwd", "x" * 3000):
        assert send(server, b"", f"/v1/models/{name}", "GET")[0] == 404


@pytest.mark.usefixtures("unaffected")
@pytest.mark.parametrize("field", ["messages", "prompt", "template", "many messages"])
def test_text_that_cannot_fit_into_the_context_is_not_tokenized(
    server: Served, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = server.engine.model.config.max_position_embeddings
    limit = positions * max(map(len, server.engine.tokenizer.get_vocab()))
    monkeypatch.setattr(server.engine.tokenizer, "_encode_plus", lambda *_, **__: pytest.fail("tokenized"))
    bodies: dict[str, dict[str, Any]] = {
        "messages": {"messages": [{"role": "user", "content": "x" * (limit // 2 + 1)}] * 2},
        "prompt": {"prompt": "x" * (limit + 1)},
        "template": {"prompt": "x" * (limit // 20), "generation_mode": "hogwild", "task_prompt": "{task}" * 30},
        "many messages": {"messages": [{"role": "user", "content": ""}] * (positions + 1)},
    }
    body = bodies[field]
    error = server.post(CHAT if "messages" in body else COMPLETION, **body).json()["error"]
    assert str(positions) in error["message"]
    assert (error["param"], error["code"]) == (next(iter(body)), "context_length_exceeded")


def test_a_field_of_another_mode_or_endpoint_names_it(server: Served) -> None:
    for path, body, message in (
        (CHAT, {"messages": HELLO, "num_workers": 2}, "a setting of the generation_mode hogwild or async_reasoning"),
        (CHAT, {"messages": HELLO, "generation_mode": "pdos", "num_workers": 2}, "generation_mode hogwild or async"),
        (CHAT, {"messages": HELLO, "max_token": 2}, "did you mean 'max_tokens'?"),
        (CHAT, {"messages": HELLO, "cuda_graph": False}, "cuda_graph is no field of this request"),
        ("/v1/responses", {"input": "a", "max_tokens": 2}, "use max_output_tokens"),
        ("/v1/responses", {"input": "a", "response_format": {"type": "json_object"}}, "use text.format"),
    ):
        error = check_error(server.post(path, **body), 400)
        assert message in error["message"]
        assert error["param"] == [*body][-1]

"""The server rejects malformed requests with an error of the client, and serves others as before."""

from __future__ import annotations

import difflib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("greenlet")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")

from malformed_bodies import (  # noqa: E402
    CHAT,
    COMPLETION,
    VALID,
    Malformed,
    large_bodies,
    malformed_fields,
    malformed_http,
    malformed_values,
)
from pydantic import ValidationError  # noqa: E402
from serving import MODEL, Served, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server import Limits  # noqa: E402
from hf_parallel.engine.server.errors import APIError  # noqa: E402
from hf_parallel.engine.server.fair_pool import FairPool  # noqa: E402
from hf_parallel.engine.server.json_body import MAX_PARTS, read_body  # noqa: E402
from hf_parallel.engine.server.schema import ChatBody, CompletionBody  # noqa: E402
from hf_parallel.engine.server.submission import Translator  # noqa: E402
from hf_parallel.generation.validation import suggestion  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 1 << 18
"""Bytes of a body."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    torch.set_num_threads(1)
    with Engine(*small_model()) as engine, served(engine, Limits(body_bytes=LIMIT)) as running:
        yield running


@pytest.fixture
def unaffected(server: Served) -> Iterator[None]:
    """Before and after the test, a valid request gets the same tokens, and as many bytes of the cache are in use."""
    answer, before = server.chat(max_tokens=3)["choices"], server.engine.stats
    yield
    after = server.engine.stats
    assert (after.decoded_tokens, after.failed, after.cancelled, after.kv_bytes) == (
        before.decoded_tokens,
        before.failed,
        before.cancelled,
        before.kv_bytes,
    )
    assert server.chat(max_tokens=3)["choices"] == answer


def send(server: Served, requests: Iterable[Malformed]) -> dict[str, str]:
    """Send requests. Return what is wrong with the responses, by request."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
    wrong = {}
    for request in requests:
        connection.request(request.method, request.path, request.content, dict(request.headers))
        response = connection.getresponse()
        text = response.read()
        try:
            check(request, response.status, json.loads(text)["error"])
        except (AssertionError, LookupError, ValueError) as error:
            wrong[request.name] = f"{error}: {response.status} {text[:200]!r}"
    connection.close()
    return wrong


def check(request: Malformed, status: int, error: dict[str, Any]) -> None:
    assert status == request.status
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 1000
    assert error["param"] in request.fields


KINDS: dict[str, Callable[[], Iterable[Malformed]]] = {
    "values": malformed_values,
    "fields": malformed_fields,
    "http": malformed_http,
    "large": lambda: large_bodies(LIMIT - 1000),
}


@pytest.mark.usefixtures("unaffected")
@pytest.mark.parametrize("kinds", KINDS)
def test_a_malformed_request_is_an_error_of_the_client_that_names_its_field(server: Served, kinds: str) -> None:
    assert not send(server, KINDS[kinds]())


def test_more_than_3000_kinds_of_malformed_requests_are_distinct() -> None:
    requests = [request for make in KINDS.values() for request in make()]
    sent = {(r.method, r.path, r.content, tuple(r.headers.items())) for r in requests}
    assert len({request.name for request in requests}) == len(requests)
    assert len(sent) > 3000


@pytest.mark.parametrize(("name", "value", "most"), [("logit_bias", "", 300), ("metadata", 1, 16)])
def test_of_an_object_with_too_many_entries_no_entry_is_validated(name: str, value: Any, most: int) -> None:
    """Errors about each would take seconds, in which the server answers no other request."""
    body = {"model": MODEL, "prompt": "Hello"}
    with pytest.raises(ValidationError, match=f"at most {most} entries is accepted, this one has {most + 1}") as raised:
        CompletionBody.model_validate({**body, name: {str(index): value for index in range(most + 1)}})
    assert raised.value.error_count() == 1
    valid = {str(index): 1 if name == "logit_bias" else "a" for index in range(most)}
    assert CompletionBody.model_validate({**body, name: valid})


def test_a_long_name_of_a_field_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing one of a megabyte takes a fifth of a second, in which no other request is submitted."""
    assert suggestion("seeed", ["seed", "stop"]) == "; did you mean 'seed'?"
    assert suggestion("max_new_tokens", ["max_tokens", "min_tokens"]) == "; did you mean 'max_tokens'?"
    monkeypatch.setattr(difflib, "get_close_matches", lambda *arguments, **settings: pytest.fail("compared"))
    assert suggestion("ab" * 500, ["seed", "stop"]) == ""


@pytest.mark.parametrize("item", [None, [], {}, 1.5])
def test_of_a_long_list_of_errors_only_the_first_is_reported(item: Any) -> None:
    """All of them would take seconds, in which the server answers no other request."""
    items = [item] * 1000
    chat = {"model": MODEL, "messages": items}
    parts = {"model": MODEL, "messages": [{"role": "user", "content": items}]}
    for kind, body in ((ChatBody, chat), (ChatBody, parts), (CompletionBody, {"model": MODEL, "prompt": items})):
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        assert raised.value.error_count() < 10


MESSAGES = {
    "stop: List should have at most 16 items": {"stop": list("abcdefghijklmnopq")},
    "stop.1: Input should be a valid string, got 5": {"stop": ["a", 5]},
    "stop: must be a text or a list of at most 16 texts, got 5": {"stop": 5},
    "prompt.0: Input should be greater than or equal to 0, got -1": {"prompt": [-1]},
    "prompt.1.0: Input should be greater than or equal to 0, got -2": {"prompt": [[1], [-2]]},
    "prompt.1: Input should be a valid string, got 5": {"prompt": ["a", 5]},
    "prompt.1: Input should be a valid list, got 5": {"prompt": [[1], 5]},
    "prompt.0: List should have at least 1 item": {"prompt": [[]]},
    "prompt: must be a text, token ids, or a list of texts or of lists of token ids, and not empty, got []": {
        "prompt": []
    },
    "messages.0.content: must be a text, or a list of parts of the type text, got 5": {"content": 5},
    "messages.0.content.0: image_url is not supported": {"content": [{"type": "image_url", "image_url": {}}]},
    "messages.0.content.0.type: Input should be 'text', got 'image'": {"content": [{"type": "image", "text": "a"}]},
    "messages.0: tool_calls is not supported": {"content": None, "tool_calls": [{"id": "1"}]},
}


@pytest.mark.parametrize("message", MESSAGES)
def test_an_error_is_about_the_kind_of_value_that_was_given(message: str) -> None:
    fields = MESSAGES[message]
    kind, body = CompletionBody, {"model": MODEL, "prompt": "a", **fields}
    if "content" in fields:
        kind, body = ChatBody, {"model": MODEL, "messages": [{"role": "user", **fields}]}
    with pytest.raises(APIError) as raised:
        read_body(kind, json.dumps(body).encode())
    assert str(raised.value).startswith(message)
    assert raised.value.param == message.partition(":")[0].partition(".")[0]


@pytest.mark.parametrize("parts", ["[[]]", "{}", '{"a": 1}', '["\\\\", {}]'])
def test_a_body_of_many_parts_is_not_parsed(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of Python for each would take a second, in which no other thread of Python runs."""
    field = f'"metadata": [{", ".join([parts] * MAX_PARTS)}]'.encode()
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(APIError, match=f"at most {MAX_PARTS} names, lists and objects, got") as raised:
        read_body(CompletionBody, b'{"model": "small", "prompt": "a", %b}' % field)
    assert raised.value.status == 400


def test_text_may_hold_any_number_of_brackets() -> None:
    text = '{"[\\:' * MAX_PARTS
    assert read_body(CompletionBody, json.dumps({"model": MODEL, "prompt": text}).encode()).prompts == [text]


@pytest.mark.usefixtures("unaffected")
@pytest.mark.parametrize("field", ["messages", "prompt", "template", "many messages"])
def test_text_that_cannot_fit_into_the_context_is_not_tokenized(
    server: Served, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = server.engine.model.config.max_position_embeddings
    limit = positions * max(map(len, server.engine.tokenizer.get_vocab()))
    monkeypatch.setattr(server.engine.tokenizer, "_encode_plus", lambda *_, **__: pytest.fail("tokenized"))
    chat = [{"role": "user", "content": "x" * (limit // 2)}, {"role": "user", "content": "x" * (limit // 2 + 1)}]
    body: dict[str, Any] = {"messages": chat}
    if field == "prompt":
        body = {"prompt": "x" * (limit + 1)}
    elif field == "template":
        text = "{task}" * 30
        body = {"prompt": "x" * (limit // 20), "generation_mode": "hogwild", "task_prompt": text}
    elif field == "many messages":
        body = {"messages": [{"role": "user", "content": ""}] * (positions + 1)}
    error = server.post(CHAT if "messages" in body else COMPLETION, **body).json()["error"]
    what = f"{positions} messages" if field == "many messages" else f"{limit} characters"
    assert f"may have at most {what}, as the context length is {positions} tokens, got" in error["message"]
    assert (error["param"], error["code"]) == (next(iter(body)), "context_length_exceeded")


def test_a_body_with_two_framings_closes_the_connection(server: Served) -> None:
    """Of Content-Length and Transfer-Encoding, a proxy may believe the other one: the rest could be another request."""
    address = urlsplit(server.url)
    sent = HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(1 << 16):  # until the server closes it
            received += part
    assert received.startswith(b"HTTP/1.1 400")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SENT: dict[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "null bytes": b"\0" * 100 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long header": b"GET /v1/x HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /v1/x HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    "a header without colon": b"GET /health HTTP/1.1\r\nHost: x\r\nabc\r\n\r\n",
    "a space before a colon": b"GET /health HTTP/1.1\r\nHost: x\r\nX : a\r\n\r\n",
    "a null byte in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: \0\r\n\r\n",
    "a folded header at first": b"GET /health HTTP/1.1\r\n X: a\r\nHost: x\r\n\r\n",
    "a space in the path": b"GET /a b c HTTP/1.1\r\nHost: x\r\n\r\n",
    **{
        f"a length of {length}": HEAD + b"Content-Length: %b\r\n\r\n{}" % length.encode()
        for length in ("abc", "-1", "1.5", "", "0x10", "+2", "9" * 30, str(LIMIT + 1))
    },
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "an unknown encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "a chunk without length": CHUNKED + b"{}\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "a chunk that is too long": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "a chunk of many digits": CHUNKED + b"f" * 100 + b"\r\n{}\r\n0\r\n\r\n",
    "a body that ends early": HEAD + b"Content-Length: 1000\r\n\r\n" + VALID.encode(),
    "chunks that end early": CHUNKED + b"%x\r\n%b\r\n" % (len(VALID.encode()), VALID.encode()),
}
"""Bytes that a client sends before it closes its side of the connection."""


@pytest.mark.usefixtures("unaffected")
@pytest.mark.parametrize("kind", SENT)
def test_what_is_no_http_is_rejected_or_closes_the_connection(server: Served, kind: str) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=600) as connection:
        try:
            connection.sendall(SENT[kind])
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1 << 16)
        except ConnectionError:  # closed before all was sent
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]


# Threads that read bodies


def test_a_pool_works_for_submitters_in_turn_and_for_each_in_order() -> None:
    done: list[str] = []
    begin = threading.Event()
    pool = FairPool(1)
    futures = [pool.submit("a", begin.wait)]
    futures += [pool.submit(name[0], partial(done.append, name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    assert futures[2].cancel()
    failing = pool.submit("c", lambda: 1 // 0)
    begin.set()
    assert isinstance(failing.exception(20), ZeroDivisionError)
    wait(futures, 20)
    assert done == ["b1", "c1", "a1", "b2", "a3"]
    pool.submit("a", begin.clear).result(20)
    waits = [pool.submit("a", partial(begin.wait, 20)), pool.submit("a", begin.wait)]
    threading.Timer(0.05, begin.set).start()
    pool.shutdown()
    assert waits[1].cancelled()


def test_a_submitter_occupies_one_thread_of_a_pool() -> None:
    pool, stop = FairPool(2), threading.Event()
    try:
        waiting = [pool.submit("a", partial(stop.wait, 20)) for _ in range(5)]
        assert pool.submit("b", lambda: 5).result(20) == 5
        assert not any(future.done() for future in waiting)
    finally:
        stop.set()
        pool.shutdown()


def test_large_bodies_delay_neither_small_ones_nor_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body is being tokenized until all other requests are answered."""
    stop, translate = threading.Event(), Translator.translate

    def blocking(self: Any, body: Any, prompt: Any, name: str) -> Any:
        if body.user == "slow":
            stop.wait(20)
        return translate(self, body, prompt, name)

    monkeypatch.setattr(Translator, "translate", blocking)
    large = {"prompt": "a", "max_tokens": 2, "metadata": {"a": "x" * 50_000}}
    with Engine(*small_model()) as engine, served(engine, api_keys=["one", "two"]) as running:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        with ThreadPoolExecutor(3) as clients:
            slow = [clients.submit(running.post, COMPLETION, one, **large, user="slow") for _ in range(3)]
            try:
                for headers, body in ((one, {"prompt": "a", "max_tokens": 2}), (two, large)):
                    assert running.post(COMPLETION, headers, **body).status_code == 200
                assert not any(future.done() for future in slow)
            finally:
                stop.set()
            assert {future.result().status_code for future in slow} == {200}

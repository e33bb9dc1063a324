"""Limits of connections and of unread answers, large answers in parts, and turns of threads."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx2")

from serving import MODEL, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server import DrainingServer, Limits, create_app  # noqa: E402
from hf_parallel.engine.server.app import FairPool  # noqa: E402
from hf_parallel.engine.server.connections import SMALL_CHUNKS, QuietFilter  # noqa: E402
from hf_parallel.engine.server.errors import PIECE_ITEMS, json_pieces  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def draining(engine: Engine, limits: Limits, **settings: Any) -> Iterator[tuple[str, int]]:
    """Serve an engine as the command does; yield the address."""
    app = create_app(engine, MODEL, limits, **settings)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = DrainingServer(app, engine, 60, limits)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join(600)


def post(address: tuple[str, int], path: str, **body: Any) -> socket.socket:
    """Send a request, and return the connection, from which nothing was read."""
    content = json.dumps({"model": MODEL, **body}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def check(connection: socket.socket) -> None:
    """Check that a connection is served."""
    connection.sendall(GET)
    received = b""
    while not received.endswith(b'{"status":"ok"}'):
        assert (more := connection.recv(4096)), received
        received += more


def test_a_connection_above_the_limit_closes_the_one_that_was_idle_longest(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(*small_model()) as engine, draining(engine, Limits(connections=4)) as address:
        opened = [socket.create_connection(address) for _ in range(4)]
        for one in (*opened[1:], opened[0]):  # the second one is idle longest
            check(one)
        new = socket.create_connection(address)
        check(new)
        opened[1].settimeout(600)
        assert opened[1].recv(4096) == b""
        for one in (opened[0], *opened[2:]):
            check(one)
        many = [socket.create_connection(address) for _ in range(50)]  # of nobody who sends anything
        assert httpx.get(f"http://127.0.0.1:{address[1]}/health", timeout=600).status_code == 200
        for one in (*opened, new, *many):
            one.close()
    assert len([record for record in caplog.records if "connections are open" in record.message]) <= 1


def received(connection: socket.socket, until: bytes = b"\0") -> bytes:
    """Return what a connection receives up to a text or its end."""
    connection.settimeout(600)
    found = b""
    with suppress(ConnectionError):
        while until not in found and (part := connection.recv(1 << 16)):
            found += part
    return found


def head(key: str, length: str) -> bytes:
    """Return the head of a request; `length` are the fields that say how long its body is."""
    fields = f"Host: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n{length}"
    return f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def test_no_client_takes_all_connections() -> None:
    """With requests whose bodies do not end."""
    limits = Limits(connections=4)
    with Engine(*small_model()) as engine, draining(engine, limits, api_keys=["one", "two"]) as address:
        slow = []
        for _ in range(limits.connections):
            connection = socket.create_connection(address)
            connection.sendall(head("one", "Content-Length: 100\r\nExpect: 100-continue"))
            assert b" 100 " in received(connection, until=b"\r\n\r\n")  # the server waits for the body
            slow.append(connection)
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        url = f"http://127.0.0.1:{address[1]}/v1/completions"
        answer = httpx.post(url, json=body, headers={"Authorization": "Bearer two"}, timeout=600)
        assert answer.status_code == 200
        assert not received(slow.pop())  # the newest
        for connection in slow:
            connection.sendall(b" " * 100)
            assert received(connection, until=b"}}").startswith(b"HTTP/1.1 400 ")


def test_a_body_of_many_small_chunks_ends_its_connection() -> None:
    """Each chunk takes as long as a read of many bytes."""
    chunked = "Transfer-Encoding: chunked\r\nConnection: close"
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1, "stop": ["x" * 99] * 9}).encode()
    byte = b"1\r\n \r\n"
    own, end = b"%x\r\n%s\r\n" % (len(body), body), b"0\r\n\r\n"
    with Engine(*small_model()) as engine, draining(engine, Limits(), api_keys=["one"]) as address:
        for key, chunks, status in (
            ("one", own + byte * SMALL_CHUNKS + end, b"200 "),
            ("one", own + byte * 2 * SMALL_CHUNKS + end, b"400 "),
            ("other", byte * 2 * SMALL_CHUNKS + end, b"400 "),
        ):
            connection = socket.create_connection(address)
            connection.sendall(head(key, chunked) + chunks)
            assert received(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("pause", [0.0, 0.2], ids=["at once", "after the answer"])
def test_a_client_that_breaks_the_protocol_writes_no_traceback_to_the_log(
    pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(*small_model()) as engine, draining(engine, Limits(), api_keys=["one"]) as address:
        for key in ("one", "other"):
            connection = socket.create_connection(address)
            connection.sendall(head(key, "Transfer-Encoding: chunked"))
            time.sleep(pause)
            with suppress(ConnectionError):
                connection.sendall(b"no size\r\n")
            assert received(connection).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_bodies_of_open_requests_share_a_limit_among_clients() -> None:
    limits = Limits(open_bytes=1000, body_bytes=600)
    with Engine(*small_model()) as engine, draining(engine, limits, api_keys=["one", "two"]) as address:
        open_requests = []
        for _ in range(2):
            connection = socket.create_connection(address)
            connection.sendall(head("one", "Content-Length: 600") + b" " * 550)
            check(other := socket.create_connection(address))
            other.close()
            open_requests.append(connection)
        url = f"http://127.0.0.1:{address[1]}/v1/completions"
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        answers = [
            httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=600).status_code
            for key in ("one", "two")
        ]
        assert answers == [429, 200]
        for connection, status in zip(open_requests, (b"429 ", b"400 "), strict=True):  # the first makes room
            connection.sendall(b" " * 50)
            assert received(connection, until=b"}}").startswith(b"HTTP/1.1 " + status)
        assert httpx.post(url, json=body, headers={"Authorization": "Bearer one"}, timeout=600).status_code == 200


def test_an_answer_that_nobody_reads_ends() -> None:
    """It is more than the buffers of the system hold."""
    limits = Limits(unread_seconds=0.3)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "logit_bias": {"2": -100}, "n": 2}
    body |= {"max_tokens": 900, "logprobs": True, "top_logprobs": 20, "stream": True}
    with Engine(*small_model()) as engine, draining(engine, limits) as address:
        connection = post(address, "/v1/chat/completions", **body)
        end = time.monotonic() + 600
        while not engine.stats.cancelled and time.monotonic() < end:
            time.sleep(0.02)
        assert engine.stats.cancelled == 1
        assert not engine.stats.finished
        connection.close()


def test_a_large_answer_is_written_in_parts_and_others_do_not_wait() -> None:
    with Engine(*small_model()) as engine, draining(engine, Limits()) as address:
        url = f"http://127.0.0.1:{address[1]}"
        body = {"model": MODEL, "prompt": ["ab" * 150] * 6, "max_tokens": 1, "prompt_logprobs": 20, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        assert "content-length" not in answer.headers
        assert len(answer.content) > 1 << 19
        choices = answer.json()["choices"]
        assert len(choices) == 6
        assert all(choice["prompt_logprobs"] == choices[0]["prompt_logprobs"] for choice in choices)
        small = httpx.post(
            f"{url}/v1/completions", json=body | {"prompt": "ab" * 150, "prompt_logprobs": 0}, timeout=600
        )
        assert int(small.headers["content-length"]) == len(small.content)
        pairs = zip(choices[0]["prompt_logprobs"], small.json()["choices"][0]["prompt_logprobs"], strict=True)
        for ranked, own in list(pairs)[1:]:
            ((token, entry),) = own.items()
            assert ranked[token]["rank"] == entry["rank"]
            assert ranked[token]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)


@pytest.mark.parametrize("length", [0, 1, PIECE_ITEMS, PIECE_ITEMS + 1, 3 * PIECE_ITEMS])
def test_pieces_of_json_are_the_json_of_lists(length: int) -> None:
    entries = [{"a": [index, None], "é\ud800": "\n"} for index in range(length)]
    whole = {
        "entries": entries,
        "numbers": [*range(length)],
        "choices": [{"x": entries}, {}],
        "none": [],
        "text": "\x7f",
    }
    lazy = whole | {"entries": iter(entries), "choices": [{"x": map(dict, entries)}, {}]}
    pieces = list(json_pieces(lazy))
    assert json.loads("".join(pieces)) == whole
    assert max(map(len, pieces)) <= max(len(json.dumps(entries[:PIECE_ITEMS])), len(json.dumps(whole["numbers"])), 12)


def test_a_job_whose_caller_has_left_keeps_its_turn() -> None:
    """One submitter never occupies two threads; another one is served at once."""

    async def check_turns() -> list[str]:
        pool, opened, order = FairPool(2), threading.Event(), list[str]()
        left = asyncio.ensure_future(pool.run("one", opened.wait, lambda _: order.append("abandoned")))
        await asyncio.sleep(0.05)
        left.cancel()
        next_job = asyncio.ensure_future(pool.run("one", lambda: order.append("next"), lambda _: None))
        await pool.run("other", lambda: order.append("other"), lambda _: None)
        await asyncio.sleep(0.05)
        opened.set()
        await next_job
        pool.shutdown()
        return order

    first, *later = asyncio.run(check_turns())
    assert first == "other"
    assert sorted(later) == ["abandoned", "next"]


def test_a_warning_is_logged_once_a_minute() -> None:
    quiet = QuietFilter()
    records = [logging.makeLogRecord({"msg": msg, "levelno": logging.WARNING}) for msg in ("a", "b", "a", "a")]
    assert [quiet.filter(record) for record in records] == [True, True, False, False]
    assert all(quiet.filter(logging.makeLogRecord({"msg": "a", "levelno": logging.ERROR})) for _ in range(2))


def test_a_line_is_logged_for_each_request_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_parallel.requests")
    with Engine(*small_model()) as engine, draining(engine, Limits(), api_keys=["secret"]) as address:
        url = f"http://127.0.0.1:{address[1]}"
        headers = {"Authorization": "Bearer secret"}
        body = {"model": MODEL, "prompt": "hidden", "max_tokens": 2, "logit_bias": {"2": -100}}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=600)
        httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=600)
        forged = {"X-Forwarded-For": "1.2.3.4 key 0 \x1b[2J" + "x" * 999}  # as behind a proxy on this machine
        httpx.get(f"{url}/a%0ab?secret", timeout=600, headers=forged)
    lines = [record.message for record in caplog.records if record.name == "hf_parallel.requests"]
    assert len(lines) == 3
    for line in lines[:2]:
        assert line.startswith("127.0.0.1 key 0 POST /v1/completions 200, ")
        assert line.endswith(" + 2 tokens")
    client, rest = lines[2].split(" ", 1)
    assert client.startswith("1.2.3.4%20key%200%20%1B%5B2Jxxx")
    assert len(client) == 200
    assert rest.startswith("without key GET /a%0Ab 401, ")
    assert not any("hidden" in line or "secret" in line for line in lines)

"""The server: OpenAI's API over an engine, as its clients see it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pages
import pytest
import torch
from forkserver import start

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from serving import MODEL, Served, check_error, served, small_model  # noqa: E402

from hf_parallel.cli.main import main  # noqa: E402
from hf_parallel.detokenizer import token_bytes  # noqa: E402
from hf_parallel.engine import Engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = [{"role": "user", "content": "Hello"}]
LONG = 900
"""New tokens of a request that is still running when a test looks."""


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    return small_model()


@pytest.fixture
def another() -> tuple[Any, Any]:
    """A copy of the model, for an engine of a test."""
    return small_model()


@pytest.fixture(scope="module")
def server(small: tuple[Any, Any]) -> Iterator[Served]:
    torch.set_num_threads(1)
    with Engine(*small) as engine, served(engine) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def generated(small: tuple[Any, Any], text: str, tokens: int) -> str:
    """Return the greedy answer to a chat of one message, by plain `generate`."""
    model, tokenizer = small
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(prompt["input_ids"], max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def events(response: Any) -> list[Any]:
    """Return the data of a stream; `[DONE]` as text."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def stream(server: Served, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    body = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": 12, **body}
    with httpx.stream("POST", server.url + path, json=body, timeout=600) as response:
        assert response.status_code == 200, response.read()
        return events(response)


# Answers


def test_the_clients_of_openai_get_and_stream_the_answers_of_generate(
    server: Served, client: Any, small: tuple[Any, Any]
) -> None:
    """The synchronous and the asynchronous one."""
    arguments = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 24}
    streaming = {**arguments, "stream": True, "stream_options": {"include_usage": True}}

    async def ask() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            answer, streamed = await asyncio.gather(
                other.chat.completions.create(**arguments), other.chat.completions.create(**streaming)
            )
            return answer, [chunk async for chunk in streamed]

    here = client.chat.completions.create(**arguments), list(client.chat.completions.create(**streaming))
    for answer, chunks in (here, asyncio.run(ask())):
        assert answer.choices[0].message.content == generated(small, "Hello", 24)
        assert answer.choices[0].message.role == "assistant"
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == answer.choices[0].message.content
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 24
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    completed = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4)
    assert completed.usage.total_tokens == completed.usage.prompt_tokens + 4


def test_clients_at_the_same_time_get_what_each_gets_alone(server: Served) -> None:
    """With different settings, and with seeds."""
    varied = [{"temperature": 0 if i % 2 else 1.2, "n": 1 + (i + 1) % 2, "max_tokens": 20 + i} for i in range(5)]
    requests = [{"text": f"Question {i % 4}", "seed": i, **more} for i, more in enumerate(varied)]
    alone = [server.chat(**request)["choices"] for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: server.chat(**request)["choices"], requests))
    assert together == alone
    assert alone[0][0]["message"] != alone[4][0]["message"], "another seed"


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(server: Served) -> None:
    whole = server.chat(max_tokens=60)["choices"][0]["message"]["content"]
    stop = whole[15:18]
    expected = whole[: whole.index(stop)]
    answer = server.chat(max_tokens=60, stop=["not there", stop])
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 60
    chunks = stream(server, messages=CHAT, max_tokens=60, stop=stop)[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected


def test_no_alternative_of_a_token_is_lost_or_changed_by_settings(server: Served, small: tuple[Any, Any]) -> None:
    """Tokens of one text and parts of characters have names of their own. A bias and penalties change no value."""
    model, tokenizer = small
    prompt = tokenizer("Hello")["input_ids"]
    bias = {str(token): 12 for token in tokenizer("é😀 東", add_special_tokens=False)["input_ids"]}
    bias[str(tokenizer.eos_token_id)] = -100
    settings = {"max_tokens": 12, "temperature": 2, "seed": 3, "logit_bias": bias, "repetition_penalty": 1.2}
    (choice,) = server.post("/v1/completions", prompt=prompt, logprobs=20, **settings).json()["choices"]
    found, ids = choice["logprobs"], list(prompt)
    of_name = {f"token_id:{token}": token for token in range(len(tokenizer))}
    for token in reversed(range(len(tokenizer))):
        (text,) = token_bytes(tokenizer, [token], tokenizer("a")["input_ids"])
        of_name[text.decode() if is_text(text) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)] = token
    for name, value, most in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        values = model(torch.tensor([ids])).logits[0, -1].detach().log_softmax(-1)
        ids.append(of_name[name])
        assert most[name] == value == pytest.approx(float(values[ids[-1]]), abs=1e-4)
        assert [*most.values()][:20] == pytest.approx(values.topk(20).values.tolist(), abs=1e-4)
        assert len(most) == 20 + (ids[-1] not in values.topk(20).indices)
    assert any(name.startswith("bytes:") for name in found["tokens"])
    settings |= {"logprobs": True, "top_logprobs": 20, "messages": CHAT}
    (choice,) = server.post("/v1/chat/completions", **settings).json()["choices"]
    own = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert own.decode(errors="replace") == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) == 20 for token in choice["logprobs"]["content"])


def is_text(own: bytes) -> bool:
    return "\ufffd" not in own.decode(errors="replace")


def test_a_prompt_that_was_seen_before_counts_as_cached(server: Served) -> None:
    text = "A prompt of its own."
    first, second = (server.chat(text)["usage"] for _ in range(2))
    assert second["prompt_tokens_details"]["cached_tokens"] > first["prompt_tokens_details"]["cached_tokens"]
    assert second["prompt_tokens"] == first["prompt_tokens"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_code_of_the_page_runs(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code = [block.replace("http://127.0.0.1:8000", server.url) for block in pages.blocks(pages.SERVE, "python")]
    pages.run(code, "serve.md")
    printed = capsys.readouterr().out
    assert "tokens were cached" in printed
    assert re.search("^Alice: '", printed, re.MULTILINE)
    assert re.search(r"Answer: \*\*(Alice|Bob)", printed)


# Modes


@pytest.mark.parametrize("mode", ["best_of", "shared_prefix", "self_consistency", "skeleton_of_thought"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mode_streams_its_answer_with_names_of_rows(server: Served, mode: str) -> None:
    settings = {"generation_mode": mode, "temperature": 1, "seed": 2, "max_tokens": 16}
    whole = server.chat(**settings)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(server, messages=CHAT, **settings)[:-1]]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    assert {chunk["row"] for chunk in chunks if "row_content" in chunk["delta"] or mode == "shared_prefix"}
    assert "mode_output" in whole


# JSON schemas

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 22, 333]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_each_of_several_answers_matches_the_json_schema(server: Served) -> None:
    pytest.importorskip("llguidance")
    settings = {"n": 4, "temperature": 1, "seed": 1, "max_tokens": 80, "response_format": response_format(SCHEMA)}
    choices = server.chat(**settings)["choices"]
    found = [json.loads(choice["message"]["content"]) for choice in choices if choice["finish_reason"] == "stop"]
    assert len(found) == 4
    assert all(value["size"] in (1, 22, 333) and value.keys() == {"name", "size"} for value in found)
    assert len({value["name"] for value in found}) > 1


# Limits


def test_a_request_needs_a_valid_key(another: tuple[Any, Any]) -> None:
    with Engine(*another) as engine, served(engine, api_keys=["one", "zwei ü"]) as running:
        body = {"messages": CHAT, "max_tokens": 2}
        for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
            error = check_error(running.post("/v1/chat/completions", headers, **body), 401)
            assert error["code"] == "invalid_api_key"
        for path in ("/metrics", "/v1/models", "/openapi.json"):
            check_error(httpx.get(running.url + path, timeout=600), 401)
        for key in (b"one", "zwei ü".encode()):
            assert running.post("/v1/chat/completions", {"Authorization": b"Bearer " + key}, **body).status_code == 200
        assert httpx.get(f"{running.url}/health", timeout=600).json() == {"status": "ok"}
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="two").models.list()


def test_a_key_or_salt_learns_nothing_about_prefixes_of_another(another: tuple[Any, Any]) -> None:
    secret = "The code of the vault in Oslo is 4711."

    def cached(key: str, prompt: str, **body: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        usage = running.post("/v1/completions", headers, prompt=prompt, max_tokens=1, **body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with Engine(*another) as engine:
        with served(engine, api_keys=["one", "two"]) as running:
            assert cached("one", secret) == cached("two", secret) == 0
            assert cached("one", secret) > 10
            assert cached("one", secret, cache_salt="0:") == cached("two", secret, cache_salt="0:") == 0
            assert cached("two", secret, cache_salt="0:") > 10
        with served(engine, api_keys=["three"]) as running:
            assert cached("three", secret) == cached("three", secret, cache_salt="mine") == 0
            assert cached("three", secret) > 10


def test_a_local_server_answers_for_its_own_names_only(another: tuple[Any, Any]) -> None:
    with Engine(*another) as engine, served(engine, hosts=["127.0.0.1", "localhost", "::1"]) as running:
        for host, status in (("localhost:1", 200), ("[::1]:8000", 200), ("127.0.0.1", 200), ("evil.com", 400)):
            assert httpx.get(f"{running.url}/v1/models", headers={"Host": host}, timeout=600).status_code == status


def test_a_full_queue_answers_429_with_retry_after(another: tuple[Any, Any]) -> None:
    opened = threading.Event()

    def hold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert opened.wait(600)
        return scores

    with (
        Engine(*another, max_rows=1, max_waiting=1) as engine,
        served(engine) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        engine.submit("Hello", max_new_tokens=1, logits_processor=[hold])
        assert running.wait_until(lambda stats: stats.running)
        waiting = pool.submit(running.chat)
        assert running.wait_until(lambda stats: stats.waiting)
        response = running.post("/v1/chat/completions", messages=CHAT)
        opened.set()
        check_error(response, 429)
        assert int(response.headers["Retry-After"]) >= 1
        assert waiting.result()["choices"]
        assert running.chat()["choices"]


def test_a_request_that_does_not_fit_the_memory_is_rejected(another: tuple[Any, Any]) -> None:
    with Engine(*another, max_kv_bytes=100_000) as engine, served(engine) as running:
        error = check_error(running.post("/v1/chat/completions", messages=CHAT, max_tokens=LONG), 400)
        assert error["code"] == "context_length_exceeded"
        assert running.chat()["choices"]


def test_an_engine_that_has_stopped_says_so(another: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(*another) as engine, served(engine) as running:
        monkeypatch.setattr(engine._scheduler, "next_batch", lambda *given: 1 / 0)
        for _ in range(2):
            response = running.post("/v1/chat/completions", messages=CHAT)
            assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_stopped")


# Clients that leave, are slow or fail


def idle(stats: Any) -> bool:
    return not stats.running and not stats.waiting


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("mode", [None, "hogwild"])
def test_a_client_that_disconnects_frees_its_memory(server: Served, streaming: bool, mode: str | None) -> None:
    assert server.wait_until(idle)
    before = server.engine.stats
    body = {"model": MODEL, "messages": CHAT, "max_tokens": LONG, "stream": streaming, "logit_bias": {"2": -100}}
    body |= {} if mode is None else {"generation_mode": mode, "max_tokens": 300}
    content = json.dumps(body).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        assert server.wait_until(lambda stats: stats.running and stats.decoded_tokens > before.decoded_tokens + 3)
    assert server.wait_until(idle)
    after = server.engine.stats
    assert after.cancelled == before.cancelled + 1
    assert after.decoded_tokens < before.decoded_tokens + LONG
    tokens = (after.kv_bytes - before.kv_bytes) // server.engine._storage.arena.bytes_per_token
    assert tokens < 1200, "keys and values of the answer are held"  # the prompt may stay cached


def test_an_error_in_the_midst_of_a_stream_is_sent_as_an_event(server: Served, small: tuple[Any, Any]) -> None:
    model, _ = small
    calls = []

    def fail(module: Any, args: Any, output: Any) -> Any:
        calls.append(1)
        return output * float("nan") if len(calls) > 6 else output

    hook = model.lm_head.register_forward_hook(fail)
    try:
        *chunks, last = stream(server, messages=CHAT, max_tokens=50)
    finally:
        hook.remove()
    assert len(chunks) > 1
    assert last["error"]["type"] == "server_error"
    assert server.chat()["choices"]


# Metrics


def test_metrics_count_requests_tokens_and_times(another: tuple[Any, Any]) -> None:
    with Engine(*another, max_kv_bytes=10**7) as engine, served(engine, max_kv_bytes=10**7) as running:
        for _ in range(2):
            running.chat(max_tokens=8)
        for name in ("responses/resp_none", "nothing"):
            httpx.get(f"{running.url}/v1/{name}", timeout=600)
        text = httpx.get(f"{running.url}/metrics", timeout=600).text
        values = dict(re.findall(r"^hf_parallel_(\S+) (\S+)$", text, re.MULTILINE))
        assert float(values["decoded_tokens_total"]) == 16
        assert float(values["finished_total"]) == 2
        assert float(values["time_to_first_token_seconds_count"]) == 2
        assert float(values["time_per_token_seconds_count"]) == 2
        assert 0 < float(values["hit_rate"]) < 1
        assert float(values["kv_bytes"]) > 0
        assert float(values["running"]) == float(values["waiting"]) == 0
        assert float(values['responses_total{path="/v1/chat/completions",status="200"}']) == 2
        for path in ("/v1/responses/{name}", "other"):
            assert float(values[f'responses_total{{path="{path}",status="404"}}']) == 1


# The command


@pytest.fixture
def folder(small: tuple[Any, Any], tmp_path: Path) -> Path:
    for part in small:
        part.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@contextmanager
def command(
    folder: Path, port: int = 0, options: Sequence[str] = (), output: list[str] | None = None
) -> Iterator[tuple[BaseProcess, str]]:
    """Run the command. Yield its process and the URL at which it serves; `output` gets what it prints afterwards."""
    arguments = ["serve", "--model", str(folder), "--port", str(port), *options]
    ours, theirs = os.pipe()
    process = start(main, arguments, environment={"HF_PARALLEL_API_KEY": "secret"}, files={2: theirs})
    os.close(theirs)
    try:
        lines = iter(os.fdopen(ours).readline, "")
        url = next(line.split()[-1] for line in lines if line.startswith("Serving tiny at http://127.0.0.1:"))
        printed = [] if output is None else output
        threading.Thread(target=lambda: printed.extend(lines), daemon=True).start()
        yield process, url
    finally:
        process.kill()
        process.join()


def send(process: BaseProcess, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def exit_status(process: BaseProcess) -> int | None:
    process.join(600)
    return process.exitcode


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish(folder: Path) -> None:
    with command(folder) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        arguments = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "logit_bias": {"2": -100}}
        running = iter(client.chat.completions.create(**arguments, stream=True))
        next(running)
        send(process, signal.SIGTERM)
        with pytest.raises(openai.APIConnectionError):  # noqa: PT012
            while True:
                client.models.list(extra_headers={"Connection": "close"})
        *_, last = running
        assert last.choices[0].finish_reason == "length"
        assert exit_status(process) == 0


def test_serve_names_a_port_that_is_taken_and_a_folder_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1 port" in (message := capsys.readouterr().err)
    assert "already in use" in message
    assert main(["serve", "--model", "./nothing"]) == 2
    assert "no such folder" in capsys.readouterr().err

"""`POST /v1/responses/{id}/inject`, and for chats: texts to workers that write, from clients with two keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving import Served, check_error, served, small_model

from hf_parallel.engine import Engine

httpx = pytest.importorskip("httpx2")
pytestmark = pytest.mark.usefixtures("one_thread")
KEYS = ["first", "second"]
PATHS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    model, tokenizer = small_model()
    # A run lasts until the test has spoken to it.
    model.config.max_position_embeddings = 2**14
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0
    model.register_forward_pre_hook(lambda *_: time.sleep(0.005))
    with Engine(model, tokenizer) as engine, served(engine, api_keys=KEYS) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def streaming(server: Served, path: str, **body: Any) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Begin a run that is streamed; yield its id, which the first chunk has, and its other chunks."""
    messages = [{"role": "user", "content": "Plan a day."}]
    given = {"generation_mode": "hogwild", "temperature": 0, PATHS[path]: messages, **body}
    body = {"model": "small", "stream": True, **given}
    with httpx.stream("POST", server.url + path, json=body, headers=bearer(KEYS[0]), timeout=600) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        chunks = (json.loads(line) for line in lines if line != "[DONE]")
        first = next(chunks)
        yield first["response"]["id"] if path == "/v1/responses" else first["id"], chunks


def inject(server: Served, path: str, name: str, key: str = KEYS[0], **body: Any) -> Any:
    headers = bearer(key) | {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}{path}/{name}/inject", content=json.dumps(body), headers=headers, timeout=600)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["hogwild", "async_reasoning"])
def test_running_workers_read_a_text(server: Served, path: str, mode: str) -> None:
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 150, "generation_mode": mode}
    with streaming(server, path, **limit) as (name, chunks):
        body = inject(server, path, name, text="It rains.").json()
        assert body == {"id": name, "object": "injection", "to": "all", "forward_pass": body["forward_pass"]}
        assert inject(server, path, name, text="Sure?", to=0).json()["forward_pass"] >= body["forward_pass"]
        worker = "Bob" if mode == "hogwild" else "Writer"
        assert inject(server, path, name, text="So:", to=worker).status_code == 200
        check_error(inject(server, path, name, KEYS[1], text="Hm."), 404)
        rest = list(chunks)
        error = check_error(inject(server, path, name, text="Too late."), 409)
        assert error["code"] == "not_running"
    check_error(inject(server, path, name, KEYS[1], text="Hm."), 404)
    if path == "/v1/responses":
        return
    said = [
        (choice["row"], choice["delta"]["row_content"])
        for chunk in rest
        for choice in chunk["choices"]
        if choice["delta"].get("row_event") == "inject" and "row_content" in choice["delta"]
    ]
    texts = [text.strip() for _, text in said]
    for expected in ("It rains.", "Sure?", "So:"):  # perhaps after a character that the row has left incomplete
        assert any(shown.endswith(expected) for shown in texts)
    assert dict(zip(texts, [row for row, _ in said], strict=True))["It rains."] == "common"
    (output,) = [chunk["choices"][0]["mode_output"] for chunk in rest if chunk["choices"][0].get("mode_output")]
    assert "It rains." in output["transcript"]


def test_openai_clients_can_speak_to_a_stream(server: Served) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0)
    stream = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        max_tokens=100,
        extra_body={"generation_mode": "hogwild"},
    )
    name = next(iter(stream)).id
    answer = client.post(f"/chat/completions/{name}/inject", cast_to=object, body={"text": "Now.", "to": "Alice"})
    assert answer["to"] == "Alice"
    stream.close()
    with pytest.raises(openai.NotFoundError):
        client.post("/responses/resp_none/inject", cast_to=object, body={"text": "Now."})


def test_malformed_texts_name_the_field(server: Served) -> None:
    path = "/v1/chat/completions"
    with streaming(server, path, max_tokens=2000) as (name, _):
        for body, field in [
            ({}, "text"),
            ({"text": ""}, "text"),
            ({"text": None}, "text"),
            ({"text": ["Hm."]}, "text"),
            ({"text": "Hm.", "to": "Zoe"}, "to"),
            ({"text": "Hm.", "to": 2}, "to"),
            ({"text": "Hm.", "to": -1}, "to"),
            ({"text": "Hm.", "to": True}, "to"),
            ({"text": "Hm.", "to": None}, "to"),
            ({"text": "Hm.", "to": ["Alice"]}, "to"),
            ({"text": "Hm.", "at": 1}, "at"),
            ({"text": "Hm. " * 20000}, "text"),
        ]:
            assert check_error(inject(server, path, name, **body), 400)["param"] == field, body
        whole = httpx.post(f"{server.url}{path}/{name}/inject", content="[", headers=bearer(KEYS[0]))
        check_error(whole, 415)
        assert inject(server, path, name, text="Hm.").status_code == 200
    with streaming(server, path, max_tokens=300, generation_mode="self_consistency", temperature=1) as (name, _):
        assert check_error(inject(server, path, name, text="Hm."), 400)["param"] == "generation_mode"
    assert server.wait_until(lambda stats: not stats.running)

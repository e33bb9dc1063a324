"""Clients of other projects get and stream the server's answers unchanged, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_server import MODEL, Served, events, served, small_model

from hf_parallel.engine import Engine

httpx = pytest.importorskip("httpx2")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
SETTINGS = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Engine(*small_model()) as engine, served(engine, api_keys=["key"]) as running:
        yield running


def smolagents(url: str) -> tuple[str, str]:
    library = pytest.importorskip("smolagents")
    model = library.OpenAIModel(model_id=MODEL, api_base=url, api_key="key", **SETTINGS)
    chat = [library.ChatMessage(one["role"], [{"type": "text", "text": one["content"]}]) for one in CHAT]
    return model.generate(chat).content, "".join(delta.content or "" for delta in model.generate_stream(chat))


def langchain(url: str) -> tuple[str, str]:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model=MODEL, base_url=url, api_key="key", **SETTINGS)
    return model.invoke(CHAT).content, "".join(chunk.content for chunk in model.stream(CHAT))


def open_webui(url: str) -> tuple[str, str]:
    """Send requests of the shape that Open WebUI sends: models, an answer for a title, and a streamed chat."""
    headers = {"Authorization": "Bearer key", "X-OpenWebUI-User-Name": "User"}
    model = httpx.get(f"{url}/models", headers=headers).json()["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "messages": CHAT, "stream": False, "temperature": 0}
    title = httpx.post(f"{url}/chat/completions", json=body | {"max_completion_tokens": 12}, headers=headers).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as response:
        *chunks, usage, done = events(response)
    assert usage["usage"]["completion_tokens"] <= 12
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return title["choices"][0]["message"]["content"], text


@pytest.mark.parametrize("client", [smolagents, langchain, open_webui])
def test_a_client_gets_and_streams_the_answer(server: Served, client: Callable[[str], tuple[str, str]]) -> None:
    headers = {"Authorization": "Bearer key"}
    response = server.post("/v1/chat/completions", headers, messages=CHAT, **SETTINGS).json()
    answer = response["choices"][0]["message"]["content"]
    assert answer
    assert client(f"{server.url}/v1") == (answer, answer)

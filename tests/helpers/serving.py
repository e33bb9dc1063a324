"""A server of a small random model, on a port of 127.0.0.1, in a thread of the test's process."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import torch
import uvicorn
from small_tokenizers import make, small_llama

from hf_parallel.engine import Engine
from hf_parallel.engine.server import Limits, create_app

MODEL = "small"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('role') }}"
    "{% endif %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def small_model() -> tuple[Any, Any]:
    """Return a random model, whose greedy text varies, and a tokenizer with a chat template."""
    tokenizer = copy.deepcopy(make("byte_level"))  # tests share it
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = small_llama(tokenizer, initializer_range=0.5, tie_word_embeddings=False)
    return model, tokenizer


@dataclass
class Served:
    """A running server."""

    url: str
    engine: Engine
    server: uvicorn.Server

    def post(self, path: str, headers: Any = None, **body: Any) -> httpx.Response:
        """Post a body with the model's name."""
        return httpx.post(self.url + path, json={"model": MODEL, **body}, headers=headers, timeout=600)

    def chat(self, text: str = "Hello", **body: Any) -> dict[str, Any]:
        """Return the answer to a chat of one message; greedy by default."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12, **body}
        response = self.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def wait_until(self, condition: Any, seconds: float = 600) -> bool:
        """Wait until `condition(engine.stats)` holds; return whether it does."""
        end = time.monotonic() + seconds
        while not (held := condition(self.engine.stats)) and time.monotonic() < end:
            time.sleep(0.01)
        return held


@contextmanager
def served(engine: Engine, limits: Limits | None = None, **settings: Any) -> Iterator[Served]:
    """Serve an engine that is open."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    app = create_app(engine, MODEL, limits, **settings)
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Served(f"http://127.0.0.1:{port}", engine, server)
    finally:
        server.should_exit = True
        thread.join(600)


def check_error(response: Any, *statuses: int) -> dict[str, Any]:
    """Check that a response is an error of the client in OpenAI's form, and return it."""
    assert 400 <= response.status_code < 500, response.text
    assert not statuses or response.status_code in statuses, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error

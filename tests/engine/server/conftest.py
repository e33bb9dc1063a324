"""A server of a small random model for the tests of a module, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A running server without keys."""
    from serving import served, small_model

    from hf_parallel.engine import Engine

    torch.set_num_threads(1)
    with Engine(*small_model()) as engine, served(engine) as running:
        yield running


@pytest.fixture
def client(server: Any) -> Any:
    """OpenAI's client of the server."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

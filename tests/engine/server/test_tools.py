"""What agent frameworks send: tools, penalties and reasoning, with OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, Served, served, small_model  # noqa: E402

from hf_parallel import OccurrencePenalty  # noqa: E402
from hf_parallel.engine import Engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    torch.set_num_threads(1)
    with Engine(*small_model()) as engine, served(engine) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_penalties_of_a_request_are_those_of_generate(client: Any) -> None:
    model, tokenizer = small_model()
    ids = tokenizer("A river", return_tensors="pt")["input_ids"]
    penalty = OccurrencePenalty(ids.shape[1], 0.9, -0.5)
    with torch.no_grad():
        out = model.generate(ids, logits_processor=[penalty], max_new_tokens=16, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    settings = {"model": MODEL, "prompt": "A river", "max_tokens": 16, "temperature": 0}
    answer = client.completions.create(**settings, frequency_penalty=0.9, presence_penalty=-0.5)
    assert answer.choices[0].text == expected
    with pytest.raises(openai.BadRequestError, match="presence_penalty.*less than or equal to 2"):
        client.completions.create(**settings, presence_penalty=2.5)

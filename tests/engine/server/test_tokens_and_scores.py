"""`/v1/score`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, Served, check_error, small_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = [60, 5, 61]


def ask(server: Served, path: str, **body: Any) -> Any:
    """Send a request as OpenAI's client sends one to an endpoint that it does not know."""
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    return client.post(path, body=body, cast_to=dict[str, Any])


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_probabilities_of_labels_after_query_and_item(server: Served, item_first: bool) -> None:
    query, items = "Is this a city? ", ["Rome", "Köln is", "Rome"]
    given = {"query": query, "items": items, "label_token_ids": LABELS, "item_first": item_first}
    answer = ask(server, "/v1/score", model=MODEL, **given)
    model, tokenizer = small_model()
    rows = []
    for item in items:
        ids = tokenizer(item + query if item_first else query + item, return_tensors="pt").input_ids
        with torch.no_grad():
            rows.append(model(ids).logits[0, -1].log_softmax(-1)[LABELS])
    expected = torch.stack(rows)
    torch.testing.assert_close(torch.tensor(answer["scores"]), expected.exp(), atol=1e-6, rtol=1e-4)
    among = ask(server, "/v1/score", model=MODEL, apply_softmax=True, **given)["scores"]
    torch.testing.assert_close(torch.tensor(among), expected.softmax(-1), atol=1e-5, rtol=1e-4)
    by_ids = {"query": tokenizer(query).input_ids, "items": [tokenizer(items[0]).input_ids]}
    assert len(ask(server, "/v1/score", model=MODEL, label_token_ids=[5], **by_ids)["scores"]) == 1
    before = server.engine.stats
    long = {"query": "x" * 200, "items": ["a", "b", "c", "d"], "label_token_ids": LABELS}
    assert ask(server, "/v1/score", model=MODEL, **long)["usage"]["prompt_tokens"] == 4 * 201
    assert server.engine.stats.prefilled_tokens - before.prefilled_tokens <= 200 + 4


def test_tokens_are_those_of_prompts_and_decode_to_them(server: Served) -> None:
    text = "Köln <s> 1"
    found = ask(server, "/tokenize", model=MODEL, prompt=text)
    assert found["tokens"] == server.engine.tokenizer(text)["input_ids"]
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == server.engine.model.config.max_position_embeddings
    assert ask(server, "/detokenize", tokens=found["tokens"]) == {"prompt": text}
    chat = [{"role": "user", "content": "Hello"}]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    called = [*chat, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "8", "tool_call_id": "1"}]
    tools = {"messages": called, "tools": [tool]}
    usage = server.chat(max_tokens=1, **tools)["usage"]
    assert ask(server, "/tokenize", **tools)["count"] == usage["prompt_tokens"]
    whole = ask(server, "/tokenize", messages=chat)["tokens"]
    assert len(whole) == server.chat(max_tokens=1)["usage"]["prompt_tokens"]
    assert whole[: len(ask(server, "/tokenize", messages=chat, add_generation_prompt=False)["tokens"])] != whole


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/tokenize", "prompt", {}),
        ("/tokenize", "prompt", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", "messages", {"messages": [{"role": "nobody", "content": "a"}]}),
        ("/tokenize", "tools", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/tokenize", "tools", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web"}]}),
        ("/tokenize", "model", {"prompt": "a", "model": "other"}),
        ("/detokenize", "tokens", {"tokens": [10**6]}),
        ("/v1/score", "items", {"query": [5], "items": ["a"], "label_token_ids": [5]}),
        ("/v1/score", "label_token_ids", {"query": "a", "items": ["a"], "label_token_ids": [10**6]}),
        ("/v1/score", "n", {"query": "a", "items": ["a"], "label_token_ids": [5], "n": 2}),
        ("/v1/score", "items", {"query": "a", "items": ["a"] * 65, "label_token_ids": [5]}),
    ],
)
def test_invalid_requests_name_the_field(server: Served, path: str, field: str, body: dict[str, Any]) -> None:
    assert check_error(server.post(path, **body), 400, 404)["param"] == field

"""`/v1/responses`, as OpenAI's client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, Served, check_error, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    torch.set_num_threads(1)
    with Engine(*small_model()) as engine, served(engine, api_keys=["key", "other"]) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def test_a_response_is_the_answer_to_the_same_chat(client: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=12)
    given = {"model": MODEL, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 12}
    answer = client.responses.create(input="Hello", **given)
    assert answer.output_text == expected.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == expected.usage.completion_tokens
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    assert client.responses.create(input=parts, **given).output_text == answer.output_text


@pytest.mark.parametrize("settings", [{"n": 2, "seed": 1}, {"generation_mode": "hogwild", "seed": 1}])
def test_events_add_up_to_the_response(client: Any, settings: dict[str, Any]) -> None:
    given = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "extra_body": settings}
    whole = client.responses.create(**given)
    events = list(client.responses.create(**given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text
    for index, item in enumerate(whole.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        text = "".join(event.delta for event in own if event.type == "response.output_text.delta")
        assert text == item.content[0].text
        assert [event.type.removeprefix("response.") for event in own if not event.type.endswith("delta")] == [
            *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done")
        ]
        assert own[-1].item.content[0].text == text
    with client.responses.stream(model=MODEL, input="Hello", temperature=0, max_output_tokens=5) as stream:
        assert list(stream)[-1].response.usage.output_tokens == 5


def test_a_previous_response_is_continued_from_the_cache(server: Served, client: Any) -> None:
    settings = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input="Hello " * 10, instructions="Be brief.", **settings)
    second = client.responses.create(input="More", previous_response_id=first.id, **settings)
    chat = [("user", "Hello " * 10), ("assistant", first.output_text), ("user", "More")]
    messages = [{"role": role, "content": text} for role, text in chat]
    assert client.responses.create(input=messages, **settings).output_text == second.output_text
    *_, last = client.responses.create(input="And", previous_response_id=second.id, stream=True, **settings)
    again = client.responses.create(input="Again", previous_response_id=last.response.id, **settings)
    assert again.usage.input_tokens_details.cached_tokens > second.usage.input_tokens
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
    unkept = client.responses.create(input="Hello", store=False, **settings)
    for asking, name in ((client, "resp_nothing"), (other, first.id), (client, unkept.id)):
        with pytest.raises(openai.NotFoundError) as raised:
            asking.responses.create(input="More", previous_response_id=name, **settings)
        assert raised.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("max_tokens", {"input": "a", "max_tokens": 5}),
        ("tools", {"input": "a", "tools": [{"type": "function", "name": "f"}]}),
        ("truncation", {"input": "a", "truncation": "auto"}),
        ("unknown", {"input": "a", "unknown": 1}),
    ],
)
def test_unsupported_fields_are_rejected(server: Served, field: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": "Bearer key"}
    assert check_error(server.post("/v1/responses", headers, **body), 400)["param"] == field

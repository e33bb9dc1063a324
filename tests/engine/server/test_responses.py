"""`/v1/responses`, as OpenAI's client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams  # noqa: E402
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams  # noqa: E402
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams  # noqa: E402
from serving import MODEL, Served, check_error, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server.openai.answers import Delta  # noqa: E402
from hf_parallel.engine.server.openai.replies import ToolCall  # noqa: E402
from hf_parallel.engine.server.openai.responses_api import Conversations, ResponseBody, ResponseWriter  # noqa: E402

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


def test_conversations_are_written_in_other_threads_than_the_event_loop_s(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop, add = list[bool](), Conversations.add

    def add_in(self: Conversations, *given: Any) -> None:
        in_loop.append(asyncio._get_running_loop() is not None)
        add(self, *given)

    monkeypatch.setattr(Conversations, "add", add_in)
    for stream in (False, True):
        list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=4, stream=stream))
    assert in_loop == [False, False]


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
    streamed = events[-1].response.output
    texts = [sorted(item.content[0].text for item in output) for output in (streamed, whole.output)]
    assert texts[0] == texts[1]  # answers are in the order in which they begin
    for index, item in enumerate(streamed):
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
    ("path", "params", "prompt"),
    [
        ("/v1/chat/completions", ChatParams, {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", CompletionParams, {"prompt": "Hello"}),
        ("/v1/responses", ResponseParams, {"input": "Hello"}),
    ],
)
def test_every_field_of_openai_is_in_the_table_and_answered(
    server: Served, path: str, params: Any, prompt: dict[str, Any]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "serve_api.md").read_text(encoding="utf-8")
    body = {ResponseParams: {"max_output_tokens": 1}}.get(params, {"max_tokens": 1})
    for name in get_type_hints(params):
        assert f"`{name}`" in page or f"`{name}." in page, name
        response = server.post(path, {"Authorization": "Bearer key"}, **{**body, **prompt, name: {"odd": 1}})
        assert check_error(response, 400)["param"] in (name, "max_tokens"), name


TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Köln", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASK: dict[str, Any] = {"model": MODEL, "input": "How is the weather?", "max_output_tokens": 100, "temperature": 0}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_streamed_and_its_output_is_sent_back(server: Served, client: Any, choice: Any) -> None:
    pytest.importorskip("llguidance")
    given = {**ASK, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.responses.create(**given)
    (call,) = answer.output
    assert (call.type, call.name, call.status, answer.output_text) == ("function_call", "weather", "completed", "")
    assert json.loads(call.arguments)["city"] in ("Köln", "Oslo")
    assert (answer.tool_choice, answer.tools[0].name) == (choice, "weather") or answer.tool_choice.name == "weather"
    with client.responses.stream(**given) as stream:
        events = list(stream)
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert events[3].snapshot == events[4].arguments == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}
    rest = {"tools": [TOOL], "store": False}
    after = client.responses.create(**{**ASK, "input": [output]}, previous_response_id=answer.id, **rest)
    said = {"type": "message", "role": "user", "content": ASK["input"]}
    again = client.responses.create(**{**ASK, "input": [said, call.to_dict(), output]}, **rest)
    assert (again.output_text, again.usage.input_tokens) == (after.output_text, after.usage.input_tokens)
    chat = [{"role": "user", "content": ASK["input"]}, {"role": "assistant", "content": None, "tool_calls": []}]
    chat[1]["tool_calls"] = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": call.arguments}}
    ]
    nested = {"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters", "strict")}}
    same = client.chat.completions.create(
        model=MODEL,
        messages=[*chat, {"role": "tool", "tool_call_id": "1", "content": "Snow."}],
        **{"tools": [nested], "max_tokens": 100, "temperature": 0},
    )
    assert same.choices[0].message.content == after.output_text


def test_text_has_the_format_of_a_schema(client: Any) -> None:
    pytest.importorskip("llguidance")
    definition = TOOL["parameters"]
    form = {"type": "json_schema", "name": "place", "schema": definition, "strict": True}
    answer = client.responses.create(**ASK, text={"format": form})
    assert json.loads(answer.output_text)["city"] in ("Köln", "Oslo")
    assert answer.text.format.schema_ == definition


def test_reasoning_text_and_calls_are_items_of_one_message(server: Served) -> None:
    kept: list[Any] = []
    body = ResponseBody(model=MODEL, input="a", tools=[TOOL])
    writer = ResponseWriter(MODEL, body, server.engine.tokenizer, lambda *given: kept.append(given))
    call = ToolCall(0, "weather", '{"city": "Oslo"}')
    deltas = [Delta(0, reasoning="I "), Delta(0, reasoning="ask."), Delta(0, "Wait."), Delta(0, calls=[call])]
    deltas.append(Delta(0, finish_reason="tool_calls"))
    events = [event for delta in deltas for event in writer.events(delta, delta is deltas[0])]
    usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
    usage |= {"prompt_tokens_details": {}, "completion_tokens_details": {}}
    response = writer.usage_chunk(usage)["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done
    assert [(item["type"], item["status"]) for item in done] == [
        *(("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"))
    ]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "I ask."}]
    tokens = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert tokens == len(server.engine.tokenizer("I ask.", add_special_tokens=False)["input_ids"])
    assert [event["delta"] for event in events if event["type"].endswith("text.delta")] == ["I ", "ask.", "Wait."]
    ((_, message),) = kept
    again = ResponseBody(
        model=MODEL, input=[*done, {"type": "function_call_output", "call_id": call.id, "output": "x"}]
    )
    assert again.conversation == [message, {"role": "tool", "tool_call_id": call.id, "content": "x"}]


def test_items_in_any_order_are_the_message_that_is_kept() -> None:
    call, output = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, "function_call_output"
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}
    said = [{"role": "assistant", "content": text} for text in "AB"]
    ask = {"type": output, "call_id": "1", "output": "x"}
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    for items, expected in (
        ([said[0], {**call, "role": "user"}, said[1]], {"content": "AB", "tool_calls": [called]}),
        ([thought, thought, call, call], {"content": "", "reasoning_content": "HmHm", "tool_calls": [called] * 2}),
        ([said[0], thought, said[1]], {"content": "AB", "reasoning_content": "Hm"}),
    ):
        tool = {"role": "tool", "content": "x", "tool_call_id": "1"}
        assert ResponseBody(model=MODEL, input=[*items, ask]).conversation == [{"role": "assistant", **expected}, tool]
    assert ResponseBody(model=MODEL, input=said).conversation == said
    pictured = {"role": "assistant", "content": [IMAGE]}
    roles = [
        message["role"] for message in ResponseBody(model=MODEL, input=[pictured, call, said[1], ask]).conversation
    ]
    assert roles == ["assistant", "assistant", "tool"]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("message", "item"),
    [
        ("needs the field output", {"type": "function_call_output", "call_id": "1"}),
        ("needs the field call_id", {"type": "function_call_output", "output": "x"}),
        ("needs the field call_id", {**CALL, "call_id": None}),
        ("needs the field name", {**CALL, "name": None}),
        ("input.0.arguments: Invalid JSON", {**CALL, "arguments": "{"}),
        ("type 'item_reference' is not supported", {"type": "item_reference", "id": "x"}),
        ("reads text only", {"type": "function_call_output", "call_id": "1", "output": [IMAGE]}),
        ("reads text only", {"role": "user", "content": [IMAGE]}),
    ],
)
def test_errors_name_the_fields_that_were_sent(server: Served, message: str, item: dict[str, Any]) -> None:
    error = check_error(server.post("/v1/responses", {"Authorization": "Bearer key"}, input=[item]), 400)
    assert message in error["message"]
    assert error["param"] == "input"


def test_tools_of_the_server_are_named_in_the_error(server: Served) -> None:
    given = {"input": "a", "tools": [{"type": "web_search", "search_context_size": "low"}]}
    error = check_error(server.post("/v1/responses", {"Authorization": "Bearer key"}, **given), 400)
    assert "tools.0: type 'web_search' is not supported, only function" in error["message"]


def test_kept_responses_are_found_and_deleted(server: Served, client: Any) -> None:
    answer = client.responses.create(**{**ASK, "max_output_tokens": 5}, instructions="Be brief.")
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
    for call in (other.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="without options"):
        client.responses.retrieve(answer.id, stream=True)
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("max_tokens", {"input": "a", "max_tokens": 5}),
        ("input", {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}]}),
        ("input", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]}),
        ("input", {"input": [{"type": "function_call_output", "call_id": "1"}]}),
        ("tools", {"input": "a", "tools": [{"type": "web_search"}]}),
        ("tools", {"input": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tool_choice", {"input": "a", "tool_choice": {"type": "function", "name": "f"}}),
        ("reasoning", {"input": "a", "reasoning": {"effort": "high"}}),
        ("text", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text", {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"$ref": "#/none"}}}}),
        ("text", {"input": "a", "text": {"verbosity": "low"}}),
        ("background", {"input": "a", "background": True}),
        ("reasoning_effort", {"input": "a", "reasoning_effort": "none"}),
        ("truncation", {"input": "a", "truncation": "auto"}),
        ("unknown", {"input": "a", "unknown": 1}),
    ],
)
def test_unsupported_fields_are_rejected(server: Served, field: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": "Bearer key"}
    assert check_error(server.post("/v1/responses", headers, **body), 400)["param"] == field

"""Marks of replies: which texts are marks, and which are only mentioned, in content, reasoning and arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, TEMPLATE, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server.openai.forced_calls import ForcedCalls  # noqa: E402
from hf_parallel.engine.server.openai.replies import Reply, ReplySpec  # noqa: E402
from hf_parallel.engine.server.openai.reply_formats import FORMATS, TEXT, around_arguments, reply_format  # noqa: E402
from hf_parallel.engine.server.openai.tool_messages import Calls, ToolMessages  # noqa: E402

MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|call|>", "<|python_tag|>"),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n```",
        '{"name": "f"}',
        "NAME",
        "ARGUMENTS",
        "\\",
        '"',
        "\x03",
        "é ",
    ),
)
NAMES = ("f", "ARGUMENTS", "get_NAME.ARGUMENTS", "function", "NAME")
MENTIONS = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)
WRITTEN = {mark: form for mark, form in {**FORMATS, "": TEXT}.items() if form.call}
SIZES = st.sampled_from([1, 2, 5, 10_000])


class Template:
    """A tokenizer whose chat template has a mark."""

    def __init__(self, mark: str) -> None:
        self.chat_template = f"{{# tools {mark} <think> #}}"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": {"x": {"type": "string"}}}}}


def read(reply: Any, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Return content, reasoning, and calls of a text that comes in pieces."""
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    parts = [*map(reply.add, pieces), reply.add("", ends=True)]
    calls = [(call.name, call.arguments) for part in parts for call in part.calls]
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


CALLS = st.lists(st.tuples(st.sampled_from(NAMES), MENTIONS), min_size=1, max_size=3)


def check_calls(mark: str, calls: list[tuple[str, str]], size: int) -> None:
    """The calls are those that were written, whether a grammar made the text or the model by itself."""
    form = reply_format(Template(mark))
    written = [(name, json.dumps({"x": text}, ensure_ascii=False)) for name, text in calls]
    text = form.between.join(arguments.join(around_arguments(form.call, name)) for name, arguments in written)
    tools = [tool(name) for name in NAMES]
    assert read(ForcedCalls(form.call, tools, form.between), text, size) == ("", "", written)
    assert read(Reply(ReplySpec(form, tools), ""), text, size) == ("", "", written)


@settings(max_examples=100)
@given(st.sampled_from(sorted(WRITTEN)), CALLS, SIZES)
def test_arguments_may_hold_any_mark(mark: str, calls: list[tuple[str, str]], size: int) -> None:
    check_calls(mark, calls, size)


@pytest.mark.slow
@settings(max_examples=3000)
@given(st.sampled_from(sorted(WRITTEN)), CALLS, SIZES)
def test_arguments_may_hold_any_mark_in_many_draws(mark: str, calls: list[tuple[str, str]], size: int) -> None:
    check_calls(mark, calls, size)


@settings(max_examples=100)
@given(st.sampled_from(["", "[ARGS]", "<function="]), MENTIONS, SIZES, st.booleans())
def test_reasoning_is_opened_by_the_prompt_or_the_beginning_alone(mark: str, text: str, size: int, opens: bool) -> None:
    form = reply_format(Template(mark))
    prompt = "<think> in the question\n<assistant>\n"
    thought = text.replace("</think>", "").strip()
    begun = f"{thought}</think>\n\nIt is" if opens else f"<think>{thought}</think>\n\nIt is"
    found = read(Reply(ReplySpec(form), prompt + "<think>\n" * opens), f"{begun} {text}", size)
    assert found == (f"It is {text}", thought, [])


MIXED = [
    ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"x": "1"}}] Then', "Then"),
    ("[ARGS]", '[TOOL_CALLS]g[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{"x": "1"}Then', '[TOOL_CALLS]g[ARGS]{"x": 1}Then'),
    ('"parameters": ', '{"name": "f", "parameters": {"x": "1"}}; {"name": "g"}', '; {"name": "g"}'),
    (
        '"parameters": ',
        '{"name": "g", "parameters": 1}; {"name": "f", "parameters": {"x": "1"}}',
        '{"name": "g", "parameters": 1}',
    ),
    ("", 'One. <tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>\nTwo.', "One. Two."),
    ("", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None),  # JSON has no infinity
]


PARTIAL = {"<|tool_call>": "<|tool_call>call:", "<function=": "<tool_call>\n<function="}


@pytest.mark.parametrize("mark", [*FORMATS, ""])
def test_little_text_is_held_back_that_may_become_a_mark(mark: str) -> None:
    """The parser reads it again with each character."""
    form = reply_format(Template(mark))
    whole = around_arguments(form.call, "")[0] if form.call else PARTIAL[mark]
    for end in range(len(whole) + 1):
        for filler in (" ", "\n", "a"):
            reply = Reply(ReplySpec(form, [tool("f")]), "")
            reply.add(whole[:end] + filler * 400)
            parser = reply._parser
            assert len(parser._buffer) - parser._pos < 250, (whole[:end], filler)


@pytest.mark.parametrize("size", [1, 1000])
def test_text_around_calls_is_neither_lost_nor_doubled(size: int) -> None:
    for mark, text, content in MIXED:
        calls = [] if content is None else [("f", '{"x": "1"}')]
        expected = (text if content is None else content, "", calls)
        assert read(Reply(ReplySpec(reply_format(Template(mark)), [tool("f")]), ""), text, size) == expected


def test_arguments_in_json_keep_their_types() -> None:
    """Only formats without JSON need the types of the schema."""
    types = {"properties": {"x": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": types}}]
    text = '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>'
    assert read(Reply(ReplySpec(TEXT, tools), ""), text, 1000)[2] == [("f", '{"x": "1"}')]
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    assert read(Reply(ReplySpec(FORMATS["<function="], tools), ""), text, 1000)[2] == [("f", '{"x": 1}')]


def test_a_call_that_is_cut_off_is_content() -> None:
    text = '{"x": "a"}'.join(around_arguments(TEXT.call, "f"))
    for end in range(len(text)):
        assert read(ForcedCalls(TEXT.call, [tool("f")], None), text[:end], 1000) == (text[:end], "", [])


@pytest.mark.parametrize("name", NAMES)
def test_names_of_functions_that_look_like_placeholders_are_written_as_they_are(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": {"x": "NAME, ARGUMENTS"}}}
    messages = ToolMessages(TEXT, reads_tools=False, calls=Calls.NONE)
    (message,), _ = messages.apply([{"role": "assistant", "content": "", "tool_calls": [call]}], [], {})
    assert read(Reply(ReplySpec(TEXT, [tool(name)]), ""), message["content"], 1000)[2] == [
        (name, '{"x": "NAME, ARGUMENTS"}')
    ]


# Answers that a grammar made

SAID = "<think>a</think></tool_call>[TOOL_CALLS]"
SCHEMA = {"type": "object", "properties": {"x": {"const": SAID}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """OpenAI's client of a server whose chat template opens reasoning."""
    pytest.importorskip("llguidance")
    model, tokenizer = small_model()
    tokenizer.chat_template = TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}{# tools #}")
    with Engine(model, tokenizer) as engine, served(engine) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_json_of_a_schema_is_the_content_whatever_it_holds(client: Any) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(**chat, response_format=form, tools=[tool("f")]).choices[0]
    assert json.loads(answer.message.content) == {"x": SAID}
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    stream = client.chat.completions.create(**chat, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.message.content
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 300}
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = client.responses.create(**asked, text=text)
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == answer.message.content


@pytest.mark.parametrize("name", ["f", "get_ARGUMENTS", "NAME"])
def test_a_forced_call_is_a_call_whatever_its_name_and_arguments_hold(client: Any, name: str) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300}
    function = {"name": name, "parameters": SCHEMA}
    given = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    given["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**chat, **given).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, {"x": SAID})
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    stream = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, **given, stream=True)]
    streamed = [one.function.arguments for chunk in stream for one in chunk.delta.tool_calls or ()]
    assert streamed == [call.function.arguments]
    flat = {**given, "tools": [{"type": "function", **function}]}
    (item,) = client.responses.create(model=MODEL, input="Hello", max_output_tokens=300, **flat).output
    assert (item.type, item.arguments) == ("function_call", call.function.arguments)

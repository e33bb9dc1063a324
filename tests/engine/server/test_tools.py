"""What agent frameworks send: tools, penalties and reasoning, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, Served, check_error, small_model  # noqa: E402

from hf_parallel import OccurrencePenalty  # noqa: E402
from hf_parallel.engine.server.openai.replies import Reply, ReplySpec  # noqa: E402
from hf_parallel.engine.server.openai.reply_formats import FORMATS, ReplyFormat, around_arguments, reply_format  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


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


# Tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Köln", "Oslo"]}, "days": {"enum": [1, 2]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "How is the weather?"}], "max_tokens": 150}


def check_call(call: Any, *names: str) -> None:
    assert (bool(call.id), call.type) == (True, "function")
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Köln", "Oslo")
    assert arguments["days"] in (1, 2)


def test_each_answer_calls_a_tool_if_it_must_and_streams_the_same_calls(client: Any) -> None:
    """The model is random and its chat template knows no tools."""
    pytest.importorskip("llguidance")
    one = {**ASK, "tools": TOOLS, "parallel_tool_calls": False, "seed": 3, "temperature": 1.0, "n": 3}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", ("weather", "population")), (named, ("weather",))):
        answer = client.chat.completions.create(**one, tool_choice=choice)
        calls = [(choice.message.tool_calls, choice.finish_reason, choice.message.content) for choice in answer.choices]
        for (call,), reason, content in calls:
            check_call(call, *names)
            assert (reason, content) == ("tool_calls", None)
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**one, tool_choice=choice, stream=True)]
        deltas = {chunk.index: chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls}
        streamed = [(deltas[index].function.name, deltas[index].function.arguments) for index in range(3)]
        assert streamed == [(call.function.name, call.function.arguments) for (call,), _, _ in calls]
        assert sorted(chunk.index for chunk in chunks if chunk.finish_reason == "tool_calls") == [0, 1, 2]
        assert not any(chunk.delta.content for chunk in chunks)


def test_a_conversation_goes_on_after_a_call(client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "Snow."})
    arguments = {**ASK, "max_tokens": 8, "temperature": 0, "tools": TOOLS}
    first = client.chat.completions.create(**arguments)
    second = client.chat.completions.create(**{**arguments, "messages": messages})
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert client.chat.completions.create(**arguments, tool_choice="none").usage.prompt_tokens < 100


def test_tools_that_cannot_be_called_are_named(client: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "needs a tool to call"),
        ({"tools": TOOLS, "tool_choice": other}, "'other' needs a tool to call"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "combined"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": BAD}]}]}, "arguments"),
        ({"messages": [{"role": "user"}]}, "content"),
    ]
    for body, match in bad:
        with pytest.raises(openai.BadRequestError, match=match):
            client.chat.completions.create(**{**ASK, **body})


CALL: dict[str, Any] = {"id": "call_1", "type": "function"}
BAD = {"name": "weather", "arguments": "[1]"}
WRITTEN = {
    "": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "<|channel|>": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "[ARGS]": '[TOOL_CALLS]f[ARGS]{"x": 1}',
    "[TOOL_CALLS]": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    "<|tool_call>": "<|tool_call>call:f{x:1}<tool_call|>",
    "<function=": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    '"parameters": ': '{"name": "f", "parameters": {"x": 1}}',
}
F = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}


class Template:
    """A tokenizer with a chat template."""

    def __init__(self, mark: str, thinking: str = "") -> None:
        self.chat_template = f"{{# tools {mark} {thinking} #}}"


@pytest.mark.parametrize("mark", [*FORMATS, ""])
def test_a_call_in_the_format_of_the_template_is_read_however_it_is_streamed(mark: str) -> None:
    found = reply_format(Template(mark))
    for size in (1, 3, 1000):
        text, reply = WRITTEN[mark], Reply(ReplySpec(found, [F]), "<s>assistant\n")
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        parts = [*map(reply.add, pieces), reply.add("", ends=True)]
        (call,) = [call for part in parts for call in part.calls]
        assert (call.name, call.arguments) == ("f", '{"x": 1}')
        assert not "".join(part.content + part.reasoning for part in parts)
    broken = WRITTEN[mark].replace("1", "#")
    for wrong in (WRITTEN[mark].replace("f", "g"), *([] if mark == "<function=" else [broken, broken[:-3]])):
        assert not Reply(ReplySpec(found, [F]), "").add(wrong, ends=True).calls
    if found.call:
        own = '{"x": 1}'.join(around_arguments(found.call, "f"))
        assert Reply(ReplySpec(found, [F]), "").add(own, ends=True).calls
        assert_calls(found, found.between.join([own, own]))


def assert_calls(found: ReplyFormat, text: str) -> None:
    """Two calls of f are read from a text, and nothing else, however it is streamed."""
    for size in (1, 3, 1000):
        reply = Reply(ReplySpec(found, [F]), "")
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        parts = [*map(reply.add, pieces), reply.add("", ends=True)]
        assert [(call.index, call.name, call.arguments) for part in parts for call in part.calls] == [
            *((0, "f", '{"x": 1}'), (1, "f", '{"x": 1}'))
        ]
        assert not "".join(part.content for part in parts)


SEVERAL = [
    (
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}, "id": "a"}]',
    ),
    ('"parameters": ', '{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}'),
    (
        '"parameters": ',
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}\n'
        '{"name": "f", "parameters": {"x": 1}}',
    ),
]


@pytest.mark.parametrize(("mark", "text"), SEVERAL)
def test_several_calls_of_one_reply_are_read(mark: str, text: str) -> None:
    assert_calls(reply_format(Template(mark)), text)


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f"</tool_call> <tool', "a <b> <tool_call>[]</tool_call>", "<"])
def test_what_is_no_call_stays_content(text: str) -> None:
    reply = Reply(ReplySpec(reply_format(Template("")), [F]), "")
    assert "".join(reply.add(character).content for character in text) + reply.add("", ends=True).content == text


def test_reasoning_is_separated_if_the_template_has_it() -> None:
    spec = ReplySpec(reply_format(Template("", "<think>")))
    for prompt, text in (("<s>assistant\n<think>\n", "1 < 2\n</think>\n\nYes."), ("", "<think>1 < 2\n</think>Yes.")):
        reply = Reply(spec, prompt)
        parts = [reply.add(character) for character in text] + [reply.add("", ends=True)]
        assert "".join(part.reasoning for part in parts) == "1 < 2\n"
        assert "".join(part.content for part in parts) == "Yes."


def test_reasoning_effort_is_a_variable_of_the_template(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, body = server.engine.tokenizer, {"model": MODEL, "max_tokens": 1, "reasoning_effort": "low"}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    for template, prompt in (("{{ reasoning_effort }}", "low"), ("{{ enable_thinking }}", "True"), ("Hello", None)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        response = server.post("/v1/chat/completions", **body)
        if prompt is None:
            assert check_error(response, 400)["param"] == "reasoning_effort"
        else:
            tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            assert response.json()["usage"]["prompt_tokens"] == len(tokens)


def test_what_is_no_call_of_a_tool_stays_content_whatever_it_holds() -> None:
    strange = (
        '{"name": {}, "arguments": {}}',
        '{"name": 3, "arguments": []}',
        "[" * 20_000,
        "[1]",
        '"x"',
        '{"name": "f"}',
    )
    for body in strange:
        text = f"a <tool_call>{body}</tool_call> b"
        assert Reply(ReplySpec(reply_format(Template("")), [F]), "").add(text, ends=True).content == text

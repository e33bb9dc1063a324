"""Tools and calls in conversations: written by the chat template, in the form that it expects, or else as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.openai.reply_formats import TEXT, ReplyFormat, around_arguments
from hf_parallel.generation.prompts import END_THINK, Chat, Message, apply_template, with_rules

INSTRUCTIONS = (
    "You may call functions to answer the user. These are the functions, with JSON schemas of their arguments:\n"
    "{tools}\nTo call one, write its name and arguments like this:\n{call}"
)
"""Instructions for a model whose chat template has none for tools."""
NAME = "probed_name"
KEY = "probed_key"
VALUE = "probed_value"
"""What the messages hold that show how a template writes tools and calls."""
ESCAPED = END_THINK.replace("/", "\\/")
"""The same in JSON: templates of reasoning models drop what stands before the mark in an answer."""


class Calls(Enum):
    """How a chat template writes calls: from arguments that are objects, or JSON as text; or not at all."""

    OBJECTS = "objects"
    TEXTS = "texts"
    NONE = "none"


@dataclass(frozen=True)
class ToolMessages:
    """How tools and calls reach a model.

    `reads_tools` says whether the chat template describes tools to the model. What the template does not write becomes
    text, with calls in the format of replies.
    """

    format: ReplyFormat
    reads_tools: bool
    calls: Calls

    @classmethod
    def of(cls, renderer: Any, format: ReplyFormat) -> ToolMessages:
        """Find out what the chat template of a tokenizer, or of a processor, writes, by rendering small chats."""
        if _writes_call(renderer, {KEY: VALUE}):
            calls = Calls.OBJECTS
        elif _writes_call(renderer, json.dumps({KEY: VALUE})):  # DeepSeek-V3.1's, for example
            calls = Calls.TEXTS
        else:
            calls = Calls.NONE
        return cls(format, _writes_tools(renderer), calls)

    def apply(
        self, chat: Chat, tools: Sequence[Mapping[str, Any]], template: Mapping[str, object]
    ) -> tuple[list[Any], dict[str, object]]:
        """Return a chat, and the variables of its template, with the tools that the answer may call."""
        messages: list[Any] = self._messages(chat)
        variables = dict(template)
        if tools and self.reads_tools:
            variables["tools"] = [*tools]
        elif tools:
            messages = list(with_rules(self.instructions(tools), messages, "system"))
        return messages, variables

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return a text that describes tools, and how to call them."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        return INSTRUCTIONS.format(tools=listed, call=self._write("function", "{}"))

    def _messages(self, chat: Chat) -> list[dict[str, Any]]:
        """Return a chat with calls in the form that the template writes."""
        if self.calls is Calls.NONE:
            return self._as_text(chat)
        messages = [dict(message) for message in chat]
        for message in messages:
            if self.calls is Calls.TEXTS and "tool_calls" in message:
                message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return messages

    def _as_text(self, chat: Chat) -> list[dict[str, Any]]:
        """Return a chat whose calls and their results are texts; results that follow each other are one message."""
        written: list[dict[str, Any]] = []
        follows_result = False
        for message in chat:
            is_result = message["role"] == "tool"
            new = self._result(message) if is_result else self._called(message)
            if is_result and follows_result:
                new["content"] = _joined(written.pop()["content"], "\n", new["content"])
            written.append(new)
            follows_result = is_result
        return written

    def _called(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with its calls in its content."""
        answer = dict(message)
        texts = []
        for call in answer.pop("tool_calls", ()):
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            arguments = arguments.replace(END_THINK, ESCAPED)
            texts.append(self._write(function["name"], arguments))
        answer["content"] = _joined(message["content"], "", self.format.between.join(texts))
        return answer

    def _result(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of a call as a message of the user."""
        content = _joined(_joined("<tool_response>\n", "", message["content"]), "", "\n</tool_response>")
        return {"role": "user", "content": content}

    def _write(self, name: str, arguments: str) -> str:
        """Return the text of a call."""
        return arguments.join(around_arguments(self.format.call or TEXT.call, name))


def with_ordered_results(chat: Chat, name: str) -> list[Message]:
    """Return a chat in which results follow the order of their calls, as many chat templates write no ids.

    Raises `APIError`, which names the field `name`, for the result of a call that the chat does not have.
    """
    ordered: list[Message] = []
    call_ids: set[object] = set()
    for is_result, group in groupby(chat, lambda message: message["role"] == "tool"):
        messages = list(group)
        if is_result:
            result_ids = {message.get("tool_call_id") for message in messages}
            unknown = result_ids - call_ids - {None}
            if unknown:
                raise APIError(400, f"{name}: there is no call before its result {unknown.pop()!r}", name)
            order: list[object] = []
            if ordered:
                order = [call.get("id") for call in ordered[-1].get("tool_calls", ())]
            if result_ids <= set(order):
                messages.sort(key=lambda message: order.index(message.get("tool_call_id")))
        else:
            for message in messages:
                call_ids |= {call.get("id") for call in message.get("tool_calls", ())}
        ordered += messages
    return ordered


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _joined(first: str | list[Any], between: str, second: str | list[Any]) -> str | list[Any]:
    """Join contents of messages: texts, or lists of parts, with images."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    parts: list[Any] = []
    for content in (first, between, second):
        if isinstance(content, str):
            if content:
                parts.append({"type": "text", "text": content})
        else:
            parts += content
    return parts


def _render(renderer: Any, chat: Sequence[Mapping[str, Any]], **template: Any) -> str:
    """Return the text of a chat; empty if the template cannot render it."""
    try:
        return apply_template(chat, renderer, add_generation_prompt=True, **template)
    except ValueError:
        return ""


def _writes_tools(renderer: Any) -> bool:
    """Whether a chat template writes the tools of a request."""
    parameters = {
        "type": "object",
        "properties": {KEY: {"type": "string", "description": VALUE}},
        "required": [KEY],
    }
    function = {"name": NAME, "description": VALUE, "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    chat = [{"role": "user", "content": "Hello"}]
    return NAME in _render(renderer, chat, tools=tools)


def _writes_call(renderer: Any, arguments: object) -> bool:
    """Whether a chat template writes a call with these arguments."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": NAME, "arguments": arguments}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Hello", "tool_call_id": call["id"]},
    ]
    text = _render(renderer, chat)
    return NAME in text and VALUE in text and repr(VALUE) not in text  # Python's text of a dict is no JSON

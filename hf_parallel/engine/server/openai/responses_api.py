"""`/v1/responses`: OpenAI's Responses over the same path as chats. The last responses are kept."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PrivateAttr, Tag, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from hf_parallel.engine.server.errors import APIError, to_json
from hf_parallel.engine.server.openai import schema
from hf_parallel.engine.server.openai.answers import Delta
from hf_parallel.engine.server.openai.responses import Writer
from hf_parallel.engine.server.openai.schema import Body, BodyObject, Count, Effort, Id, Items, Text
from hf_parallel.generation.arguments import encode

JSONObject: TypeAlias = dict[str, Any]
Keep: TypeAlias = Callable[[JSONObject, JSONObject], None]
MAX_KEPT = 256
"""Responses that are kept."""
MAX_CHARACTERS = 1 << 26
"""Characters of all of them and their conversations, as JSON: they hold images."""
PARTS = {**dict.fromkeys(("input_text", "output_text", "reasoning_text"), "text"), "input_image": "image_url"}
"""Types of parts in chats, by their type here."""
ITEMS: dict[str, tuple[str, str, JSONObject]] = {
    "message": ("msg", "output_text", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "reasoning": ("rs", "reasoning_text", {"type": "reasoning_text", "text": ""}),
    "function_call": ("fc", "function_call_arguments", {}),
}
"""By type of an item: the prefix of its id, the name of its events, and its content."""
CUT = ("length", "error")  # reasons for the end of an item that is not complete
NEEDED: dict[str, tuple[str, ...]] = {
    **{"message": ("role", "content"), "reasoning": ()},
    **{"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")},
}
"""Fields that an item needs, by its type."""
NAMES_IN_CHATS = {
    **{"max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "response_format": "text.format"},
    **dict.fromkeys(("prompt_logprobs", "transcript")),
}
"""Fields of chats that have another name here, with this name; None: that are not supported."""
ECHOED: JSONObject = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id")),
    **dict.fromkeys(("reasoning", "temperature", "top_p", "user")),
    **{"parallel_tool_calls": True, "store": True, "text": {"format": {"type": "text"}}},
    **{"tool_choice": "auto", "tools": [], "truncation": "disabled"},
}
"""Fields of a request that its response repeats, with their defaults."""


class Item(schema.Message):
    """Item of a conversation: a message, reasoning, a call or its output. `id` and `status` are not used."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Annotated[Text, Field(min_length=1, max_length=64)] = ""  # of a message
    call_id: Text | None = None
    arguments: schema.Arguments | None = None
    output: schema.Content | None = None
    id: Text | None = None
    status: Text | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Item:
        fields = self.model_dump(exclude_unset=True, exclude_none=True)
        for name in NEEDED[self.type]:
            if name not in fields:
                raise ValueError(f"an item of the type {self.type} needs the field {name}")
        return self

    @field_validator("content", "output", mode="before")
    @classmethod
    def _as_in_chats(cls, content: object) -> object:
        """Give parts the types and the form that they have in chats."""
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            kind = PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
            if kind:
                part = {**part, "type": kind}
                if "image_url" in part:
                    part["image_url"] = {"url": part["image_url"]}
            parts.append(part)
        return parts or None

    def to_chat(self) -> JSONObject:
        """See `Message.to_chat`."""
        if self.type == "function_call_output":
            return schema.Message(role="tool", content=self.output, tool_call_id=self.call_id).to_chat()
        chat = super().to_chat()
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": chat["content"]}
        return chat


class FlatTool(schema.Function):
    """A tool, or the choice of one."""

    type: Literal["function"]


class FlatFormat(schema.JSONSchema):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]


class Reasoning(BodyObject):
    """Options of the reasoning. There are no summaries: the response holds the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class TextOptions(BodyObject):
    """Options of the text."""

    format: FlatFormat | None = None


class ResponseBody(schema.ConversationBody):
    """Body of `/v1/responses`."""

    prompt_field: ClassVar = "input"
    format_field: ClassVar = "text"
    effort_field: ClassVar = "reasoning"
    input: Annotated[
        Annotated[Text, Tag("a text")] | Annotated[Items[Item], Tag("a list")],
        schema.one_of("a text or a list of items"),
    ]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None  # of tools that the server runs: it has none
    previous_response_id: Id | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: schema.Tools[FlatTool] | None = None
    tool_choice: schema.Choice[FlatTool] | None = None
    truncation: Literal["disabled"] | None = None
    _history: list[JSONObject] = PrivateAttr(default_factory=list)

    @property
    def new_messages(self) -> list[JSONObject]:
        """The conversation so far, but of a fork only what it adds.

        Instructions of earlier responses do not apply, and are not in it.

        Reasoning, text and calls that follow each other are one message of the assistant; two texts are two.
        """
        messages = list(self._history)
        if isinstance(self.input, str):
            added: list[JSONObject] = [{"role": "user", "content": self.input}]
        else:
            added = [item.to_chat() for item in self.input]
        previous: JSONObject = messages[-1] if messages else {"role": ""}
        for message in added:
            if _continues(previous, message) and type(messages[-1]["content"]) is type(message["content"]):
                messages[-1] = schema.merged_messages(messages[-1], message)
            else:
                messages.append(message)
            previous = message
        return messages

    @property
    def system(self) -> list[JSONObject]:
        """The instructions; of a fork, those of its parent."""
        if self._forked is not None:
            return self._forked.system
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]

    @property
    def budget(self) -> int | None:
        """See `Body.budget`. Raises `ValueError` for fields of chats that have another name here."""
        for name, other in NAMES_IN_CHATS.items():
            if name in self.model_fields_set:
                hint = f": use {other}" if other else ""
                raise ValueError(f"{name} is no field of /v1/responses{hint}")
        return self.max_output_tokens


def _continues(previous: JSONObject, message: JSONObject) -> bool:
    """Whether two messages are of one reply: both of the assistant, and not both plain text."""
    if previous["role"] != "assistant" or message["role"] != "assistant":
        return False
    fields = (previous.keys() | message.keys()) - {"name"}
    return fields > {"role", "content"}


class Conversations:
    """The last responses with their conversations, by id. Clients that share no cached prefixes share no responses.

    Beyond the limits, the client that keeps most loses its least recently used response: no client can evict the
    responses of others that keep less than an equal share.
    """

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, tuple[str, str]]] = {}  # by salt and id
        self._characters: Counter[str] = Counter()  # by salt
        self._lock = threading.Lock()

    def add(self, salt: str, response: JSONObject, messages: list[JSONObject]) -> None:
        """Keep a response."""
        entry = to_json(response), to_json(messages)
        with self._lock:
            self._put(salt, response["id"], entry)
            while sum(map(len, self._kept.values())) > MAX_KEPT:
                longest = max(self._kept, key=lambda other: len(self._kept[other]))
                self._drop_oldest(longest)
            while self._characters.total() > MAX_CHARACTERS:
                largest = max(self._characters, key=self._characters.__getitem__)
                self._drop_oldest(largest)

    def find(self, salt: str, name: str, field: str | None = None, keep: bool = True) -> tuple[str, str]:
        """Return a response and its conversation, as JSON. Raises an error of `field` if it is not kept."""
        with self._lock:
            if name not in self._kept.get(salt, ()):
                message = f"there is no response {name[:200]!r}: the server keeps the last {MAX_KEPT} of all clients"
                code = "previous_response_not_found" if field else "response_not_found"
                raise APIError(404, message, field, code)
            entry = self._take(salt, name)
            if keep:
                self._put(salt, name, entry)  # as the one used last
        return entry

    def has(self, salt: str, name: str) -> bool:
        """Return whether a response is kept."""
        with self._lock:
            return name in self._kept.get(salt, ())

    def _put(self, salt: str, name: str, entry: tuple[str, str]) -> None:
        self._kept.setdefault(salt, OrderedDict())[name] = entry
        self._characters[salt] += sum(map(len, entry))

    def _take(self, salt: str, name: str) -> tuple[str, str]:
        entry = self._kept[salt].pop(name)
        self._characters[salt] -= sum(map(len, entry))
        if not self._kept[salt]:
            del self._kept[salt], self._characters[salt]
        return entry

    def _drop_oldest(self, salt: str) -> None:
        self._take(salt, next(iter(self._kept[salt])))

    def resume(self, salt: str, body: Body) -> None:
        """Give a body the conversation that it continues."""
        if isinstance(body, ResponseBody) and body.previous_response_id is not None:
            history = self.find(salt, body.previous_response_id, "previous_response_id")[1]
            body._history = json.loads(history)
            body._size += len(history)


class ResponseWriter(Writer):
    """Writes a response, or its events. `keep` receives the response, and the first answer as a message of a chat."""

    wants_usage = True

    def __init__(self, model: str, body: ResponseBody, tokenizer: PreTrainedTokenizerBase, keep: Keep) -> None:
        super().__init__(model, True, tokenizer)
        self._keep = keep
        self._numbers = count()
        self._items = list[JSONObject]()
        self._answers = dict[int, Delta]()  # by choice
        self._open = dict[int, JSONObject]()  # by choice, the item that it writes
        self._id = str(self.head["id"]).replace("chatcmpl-", "resp_")
        self._body = {"id": self._id, "object": "response", "created_at": self.head["created"], "model": model}
        for name, value in body.model_dump(include={*ECHOED}, by_alias=True).items():
            self._body[name] = ECHOED[name] if value is None else value
        self._body |= {"error": None, "incomplete_details": None, "output": [], "usage": None}

    @property
    def id(self) -> str:
        return self._id

    def whole(self, choices: Sequence[Delta], usage: JSONObject) -> JSONObject:
        """Return the body of a response. `choices`: the choices that `events` has not received."""
        for choice in choices:
            for _ in self._write(choice):
                pass
        answers = [self._answers[index] for index in sorted(self._answers)]
        errors = [answer.error for answer in answers if answer.error is not None]
        is_cut = any(answer.finish_reason == "length" for answer in answers)
        response = {
            **self._body,
            "output": self._items,
            "usage": self._usage(answers, usage),
            "error": {"code": "server_error", "message": errors[0]} if errors else None,
            "status": "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }
        if errors:
            response["status"] = "failed"
        elif is_cut:
            response["status"] = "incomplete"
        self._keep(response, as_message(answers[0]))
        return response

    def _usage(self, answers: Sequence[Delta], usage: JSONObject) -> JSONObject:
        """Return the numbers of tokens under the names of this API."""
        reasoning_tokens = sum(len(encode(self.tokenizer, answer.reasoning)) for answer in answers if answer.reasoning)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {**usage["completion_tokens_details"], "reasoning_tokens": reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def events(self, delta: Delta, is_first: bool) -> list[JSONObject]:
        """Return the events for new text and calls of a choice; the first ones also begin the response."""
        events: list[JSONObject] = []
        if not self._answers:
            for kind in ("created", "in_progress"):
                events.append({"type": f"response.{kind}", "response": {**self._body, "status": "in_progress"}})
        events += self._write(delta)
        return [{**event, "sequence_number": next(self._numbers)} for event in events]

    def usage_chunk(self, usage: JSONObject) -> JSONObject:
        """Return the last event, which holds the whole response."""
        response = self.whole([], usage)
        name = f"response.{response['status']}"
        return {"type": name, "response": response, "sequence_number": next(self._numbers)}

    def _write(self, delta: Delta) -> Iterator[JSONObject]:
        """Add what is new to the items of a choice, and yield its events."""
        answer = self._answers.setdefault(delta.index, Delta(delta.index))
        answer.append(delta)
        is_empty = delta.finish_reason is not None and not (answer.text or answer.calls)
        if delta.reasoning:
            yield from self._add(delta.index, "reasoning", delta.reasoning, summary=[], content=[])
        if delta.text or is_empty:
            yield from self._add(delta.index, "message", delta.text, role="assistant", content=[])
        for call in delta.calls:
            yield from self._add(
                delta.index, "function_call", call.arguments, call_id=call.id, name=call.name, arguments=""
            )
        if delta.finish_reason is not None:
            status = "incomplete" if delta.finish_reason in CUT else "completed"
            yield from self._close(delta.index, status)

    def _add(self, choice: int, kind: str, text: str, **fields: object) -> Iterator[JSONObject]:
        """Append text to the item that a choice writes, or to a new one: of another kind, or a call."""
        prefix, streamed, part = ITEMS[kind]
        if choice not in self._open or self._open[choice]["type"] != kind or not part:
            yield from self._close(choice)
            name = f"{prefix}_{self._id}_{choice}_{len(self._items)}"
            item: JSONObject = {"id": name, "type": kind, "status": "in_progress", **fields}
            self._open[choice] = item
            self._items.append(item)
            yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": {**item}}
            if part:
                item["content"] = [{**part}]
                yield {"type": "response.content_part.added", "part": part, **self._location(item)}
        item = self._open[choice]
        if part:
            item["content"][0]["text"] += text
        else:
            item["arguments"] += text
        if text:
            yield {"type": f"response.{streamed}.delta", "delta": text, **self._location(item)}

    def _close(self, choice: int, status: str = "completed") -> Iterator[JSONObject]:
        """End the item that a choice writes."""
        item = self._open.pop(choice, None)
        if item is None:
            return
        item["status"] = status
        _, streamed, _ = ITEMS[item["type"]]
        location = self._location(item)
        for part in item.get("content", ()):
            yield {"type": f"response.{streamed}.done", "text": part["text"], **location}
            yield {"type": "response.content_part.done", "part": part, **location}
        if "arguments" in item:
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": f"response.{streamed}.done", **call, **location}
        yield {"type": "response.output_item.done", "output_index": location["output_index"], "item": item}

    def _location(self, item: JSONObject) -> JSONObject:
        """Return the fields of an event that say which item it is about."""
        location: JSONObject = {"output_index": self._items.index(item), "item_id": item["id"]}
        if "content" in item:
            location |= {"content_index": 0, "logprobs": []}
        return location


def as_message(answer: Delta) -> JSONObject:
    """Return an answer as a message of a chat."""
    message: JSONObject = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    calls = []
    for call in answer.calls:
        function = {"name": call.name, "arguments": json.loads(call.arguments)}
        calls.append({**call.to_dict(), "function": function})
    if calls:
        message["tool_calls"] = calls
    return message

"""`/v1/responses`: OpenAI's Responses over the same path as chats. Conversations of the last responses are kept."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PrivateAttr, Tag, field_validator
from transformers import PreTrainedTokenizerBase

from hf_parallel.engine.server.answers import Delta
from hf_parallel.engine.server.errors import APIError, to_json
from hf_parallel.engine.server.responses import Writer
from hf_parallel.engine.server.schema import Body, Count, Id, Items, Message, Prompt, Text, one_of

MAX_KEPT = 256
"""Conversations that are kept."""
MAX_CHARACTERS = 1 << 26
"""Characters of all of them, as JSON: they hold images."""


class InputMessage(Message):
    """Message of a conversation. Earlier answers bring an `id` and a `status`, which are not used."""

    type: Literal["message"] = "message"
    id: Text | None = None
    status: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_in_chats(cls, content: object) -> object:
        """Give parts of the types input_text, output_text and input_image the form that they have in chats."""
        parts = []
        for part in content if isinstance(content, list) else []:
            given = part if isinstance(part, dict) else {}
            kind = {"input_text": "text", "output_text": "text", "input_image": "image_url"}.get(str(given.get("type")))
            url = {"image_url": {"url": given["image_url"]}} if "image_url" in given else {}
            parts.append({**given, "type": kind, **url} if kind else part)
        return parts if isinstance(content, list) else content


class ResponseBody(Body):
    """Body of `/v1/responses`."""

    prompt_field: ClassVar = "input"
    input: Annotated[
        Annotated[Text, Tag("a text")] | Annotated[Items[InputMessage], Tag("a list")],
        one_of("a text or a list of messages"),
    ]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    previous_response_id: Id | None = None
    truncation: Literal["disabled"] | None = None
    _history: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far. Instructions of earlier responses do not apply, and are not in it."""
        given = self.input
        own = [{"role": "user", "content": given}] if isinstance(given, str) else [one.to_chat() for one in given]
        return [*self._history, *own]

    @property
    def prompts(self) -> list[Prompt]:
        """The conversation after the instructions."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [[*system, *self.messages]]

    @property
    def budget(self) -> int | None:
        """See `Body.budget`. Raises `ValueError` for fields of chats that have another name here."""
        for name in ("max_tokens", "stream_options", "prompt_logprobs", "response_format"):
            if name in self.model_fields_set:
                raise ValueError(f"{name} is no field of /v1/responses")
        return self.max_output_tokens


class Conversations:
    """Conversations of the last responses, by id. Clients that share no cached prefixes share no conversations."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()  # as JSON
        self._lock = threading.Lock()

    def add(self, salt: str, name: str, messages: list[dict[str, Any]]) -> None:
        """Keep a conversation, instead of those that were used least recently."""
        with self._lock:
            self._kept[salt, name] = to_json(messages)
            while len(self._kept) > MAX_KEPT or sum(map(len, self._kept.values())) > MAX_CHARACTERS:
                self._kept.popitem(last=False)

    def resume(self, salt: str, body: Body) -> None:
        """Give a body the conversation that it continues."""
        if isinstance(body, ResponseBody) and body.previous_response_id is not None:
            with self._lock:
                if (found := self._kept.get(key := (salt, body.previous_response_id))) is not None:
                    self._kept.move_to_end(key)
            if found is None:
                message = f"there is no response {body.previous_response_id!r}: the server keeps the last {MAX_KEPT}"
                raise APIError(404, message, "previous_response_id", "previous_response_not_found")
            body._history = json.loads(found)


class ResponseWriter(Writer):
    """Writes a response, or its events. Each answer is a message; `keep` receives the id and the first answer."""

    def __init__(
        self, model: str, body: ResponseBody, tokenizer: PreTrainedTokenizerBase, keep: Callable[[str, str], None]
    ) -> None:
        super().__init__(model, True, tokenizer)
        self._keep, self._number, self._found = keep, 0, dict[int, Delta]()
        self._id = str(self.head["id"]).replace("chatcmpl-", "resp_")
        names = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "metadata")
        own = {name: getattr(body, name) for name in names}
        fixed: dict[str, object] = {
            "error": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }
        self._body = {"id": self._id, "object": "response", "created_at": self.head["created"], "model": model}
        self._body |= {**own, **fixed, "store": body.store is not False, "output": [], "usage": None}

    def whole(self, choices: Sequence[Delta], usage: dict[str, object]) -> dict[str, object]:
        """Return the body of a response."""
        self._keep(self._id, choices[0].text)
        is_cut = any(choice.finish_reason == "length" for choice in choices)
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        status: dict[str, object] = {"status": "incomplete" if is_cut else "completed", "usage": counts}
        status["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return {**self._body, **status, "output": [self._item(choice) for choice in choices]}

    def events(self, delta: Delta, is_first: bool) -> list[dict[str, object]]:
        """Return the events of new text, after those that begin the response and the message."""
        place = {"output_index": delta.index, "content_index": 0, "item_id": f"msg_{self._id}_{delta.index}"}
        found: list[dict[str, object]] = []
        if not self._found:
            begun = {**self._body, "status": "in_progress"}
            found += [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        if is_first:
            self._found[delta.index] = Delta(delta.index)
            item = self._item(self._found[delta.index], [], "in_progress")
            found.append({"type": "response.output_item.added", "output_index": delta.index, "item": item})
            found.append({"type": "response.content_part.added", "part": _part(""), **place})
        whole = self._found[delta.index]
        whole.text += delta.text
        if delta.text:
            found.append({"type": "response.output_text.delta", "delta": delta.text, "logprobs": [], **place})
        if delta.finish_reason is not None:
            whole.finish_reason = delta.finish_reason
            found.append({"type": "response.output_text.done", "text": whole.text, "logprobs": [], **place})
            found.append({"type": "response.content_part.done", "part": _part(whole.text), **place})
            item = self._item(whole)
            found.append({"type": "response.output_item.done", "output_index": delta.index, "item": item})
        return [self._numbered(event) for event in found]

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, object]:
        """Return the last event, which holds the whole response."""
        response = self.whole([self._found[index] for index in sorted(self._found)], usage)
        return self._numbered({"type": f"response.{response['status']}", "response": response})

    def _numbered(self, event: dict[str, object]) -> dict[str, object]:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _item(self, choice: Delta, content: list[object] | None = None, status: str = "") -> dict[str, object]:
        status = status or ("incomplete" if choice.finish_reason == "length" else "completed")
        content = [_part(choice.text)] if content is None else content
        item = {"id": f"msg_{self._id}_{choice.index}", "type": "message", "role": "assistant", "status": status}
        return {**item, "content": content}


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""Forks over HTTP: requests that continue a finished or running response, or chat, of the same client.

A fork after a token continues the tokens of its parent, which are followed by what the chat template writes after an
answer. A fork after a message renders the conversation up to there again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, Tag

from hf_parallel.engine.forks import inherited, messages_after_answer
from hf_parallel.engine.server.errors import APIError, to_json
from hf_parallel.engine.server.leases import Kept, KeptTable
from hf_parallel.engine.server.limits import PROMPT_FACTOR, Limits
from hf_parallel.engine.server.openai import schema
from hf_parallel.engine.server.openai.answers import Answers, Delta
from hf_parallel.engine.server.openai.responses import Writer, usage_of
from hf_parallel.engine.server.openai.responses_api import Item, ResponseBody
from hf_parallel.engine.server.openai.schema import ChatBody, ConversationBody, Forked, Place, read_body
from hf_parallel.engine.server.openai.translator import Translator
from hf_parallel.generation.arguments import encode

JSONObject: TypeAlias = dict[str, Any]
NOT_INHERITED = {
    *("messages", "input", "instructions", "previous_response_id", "fork"),
    *("n", "stream", "stream_options", "store", "metadata", "user"),
}
"""Fields that forks do not have from their parents."""
OF_ALL = ("n", "stream", "stream_options", "fork", "at", "choice", "children")
"""Fields that all forks of a request share."""


class ForkedChatBody(ChatBody):
    """A fork of a chat; its messages follow."""

    messages: Annotated[list[schema.Message], Field(fail_fast=True)] = []


class ForkedResponseBody(ResponseBody):
    """A fork of a response; its input follows."""

    input: Annotated[
        Annotated[schema.Text, Tag("a text")] | Annotated[list[Item], Field(fail_fast=True), Tag("a list")],
        schema.one_of("a text or a list of items"),
    ] = []


FORKED: dict[type[schema.Body], type[ConversationBody]] = {ChatBody: ForkedChatBody, ResponseBody: ForkedResponseBody}
"""Bodies of forks, by those of their parents."""


class ForksBody(BaseModel):
    """Body of `/v1/responses/{id}/fork` and `/v1/chat/completions/{id}/fork`. Further fields are those of each fork."""

    model_config = ConfigDict(extra="allow")

    at: Place = "end"
    choice: schema.Token = 0
    n: schema.Count | None = None
    children: Annotated[list[dict[str, object]], Field(fail_fast=True, min_length=1)] | None = None
    stream: schema.Flag | None = None


class ForkReader:
    """Reads the bodies of forks. `tables` has the responses that can be forked, by the kind of their bodies."""

    def __init__(self, translator: Translator, tables: Mapping[type[schema.Body], KeptTable], limits: Limits) -> None:
        self._translator = translator
        self._tables = tables
        self._most = limits.rows
        self._most_bytes = PROMPT_FACTOR * limits.body_bytes

    def read_children(
        self, kind: type[schema.Body], content: bytes, name: str, salt: str
    ) -> tuple[list[ConversationBody], str]:
        """Return the bodies of the forks that a request asks for, and the field that says how many there are."""
        given = read_body(ForksBody, content)
        if "fork" in (given.model_extra or {}):
            raise APIError(400, "the path names the response that is forked: leave out fork", "fork")
        children: Sequence[Mapping[str, object]] = given.children or [{}] * (given.n or 1)
        if given.n is not None and given.n != len(children):
            raise APIError(400, f"n={given.n} differs from the {len(children)} children: give one of them", "n")
        count_field = "n" if given.children is None else "children"
        if len(children) > self._most:
            raise APIError(400, f"a request may have at most {self._most} forks, got {len(children)}", count_field)
        kept = self._tables[kind].find(salt, name)
        common = dict(given.model_extra or {})
        at: object = given.at if isinstance(given.at, str) else given.at.model_dump(exclude_none=True)
        common["fork"] = {"id": name, "at": at, "choice": given.choice}
        common["stream"] = given.stream
        seed = {**kept.fields, **common}.get("seed")
        num_bytes = 0
        bodies = []
        for index, child in enumerate(children):
            for field in OF_ALL:
                if field in child:
                    raise APIError(400, f"children.{index}.{field}: all forks of a request share {field}", "children")
            own_seed: JSONObject = {}
            if isinstance(seed, int) and len(children) > 1:
                own_seed["seed"] = seed + index
            raw = {**common, **own_seed, **child}
            try:
                bodies.append(self.read(kind, raw, salt, named=("at", "choice")))
            except APIError as error:
                if error.param not in child:
                    raise
                raise APIError(error.status, f"children.{index}.{error}", "children", error.code) from error
            num_bytes += bodies[-1]._size - kept.size
            if num_bytes > self._most_bytes:
                message = f"the bodies of the forks, with what they inherit, may have {self._most_bytes} bytes together"
                raise APIError(400, message, count_field)
        return bodies, count_field

    def read_one(self, kind: type[schema.Body], content: bytes, salt: str) -> ConversationBody:
        """Return the body of a fork whose field `fork` names its parent."""
        try:
            raw = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body cannot be read: {error}") from error
        return self.read(kind, raw, salt)

    def read(
        self, kind: type[schema.Body], raw: JSONObject, salt: str, named: tuple[str, str] = ("fork", "fork")
    ) -> ConversationBody:
        """Return the body of one fork, given its own fields as JSON; others are those of its parent.

        `named` are the fields that errors about the place and the choice name.
        """
        place = schema.ForkOf.model_validate(raw["fork"])
        kept = self._tables[kind].find(salt, place.id)
        try:
            content = to_json({"model": kept.model, **inherited(kept.fields, kept.mode_settings, raw), **raw}).encode()
        except (ValueError, RecursionError) as error:  # such as an int of thousands of digits
            raise APIError(400, f"the body cannot be read: {error}") from error
        body = read_body(FORKED[kind], content)
        if isinstance(body, ResponseBody) and body.previous_response_id is not None:
            message = "previous_response_id cannot be combined with fork, which continues a conversation by itself"
            raise APIError(400, message, "previous_response_id")
        body._size = kept.size + len(content)
        body._forked = self._forked(body, place, kept, named)
        self._tables[kind].touch(salt, place.id)
        return body

    def _forked(self, body: ConversationBody, place: schema.ForkOf, kept: Kept, named: tuple[str, str]) -> Forked:
        """Return what a fork continues."""
        suffix = body.new_messages
        if isinstance(body, ResponseBody) and body.instructions is not None:
            suffix = [{"role": "system", "content": body.instructions}, *suffix]
        at = place.at
        if place.choice >= kept.num_choices:
            message = f"the response has {kept.num_choices} choices, got choice {place.choice}"
            raise APIError(400, message, named[1])
        if not isinstance(at, str) and at.message is not None:
            return self._after_message(kept, at.message, place.choice, suffix, named[0])
        token = None if isinstance(at, str) else at.token
        if kept.has_tokens:
            return self._after_token(body, kept, token, place.choice, suffix, named[0])
        if token is not None:
            raise APIError(400, "a response in this mode, or after images, can be forked at messages only", named[0])
        if not kept.is_finished:
            message = "a response in this mode, or after images, can be forked at its end once it has ended"
            raise APIError(400, message, named[0])
        return self._after_message(kept, -1, place.choice, suffix, named[0])

    def _after_message(self, kept: Kept, index: int, choice: int, suffix: list[JSONObject], name: str) -> Forked:
        messages = kept.messages(choice)
        if not -len(messages) <= index < len(messages):
            message = f"the conversation has {len(messages)} messages, there is none with the index {index}"
            raise APIError(400, message, name)
        conversation = [*messages[: index % len(messages) + 1], *suffix]
        return Forked(
            prompt=[*kept.system, *conversation],
            continues=None,
            system=kept.system,
            conversation=conversation,
            partial=None,
            parent=None,
            size=kept.size,
        )

    def _after_token(
        self,
        body: ConversationBody,
        kept: Kept,
        token: int | None,
        choice: int,
        suffix: list[JSONObject],
        name: str,
    ) -> Forked:
        tokens = kept.row(choice)
        if token is None:
            token = len(tokens) - bool(tokens and tokens[-1] in kept.end_tokens)
        if token > len(tokens):
            so_far = "" if kept.is_finished else " so far"
            raise APIError(400, f"the answer has {len(tokens)} tokens{so_far}, got {token}", name)
        tools = body.callable_tools
        if tools and tools != kept.tools:
            suffix = _with_tools(suffix, self._translator.prompts.tool_messages.instructions(tools))
        prompt = [*kept.submission.prompt_of(choice), *tokens[:token]]
        conversation = [*kept.conversation]
        partial_message: JSONObject | None = kept.partial_message(tokens[:token], choice)
        if suffix:
            prompt += self._encode(suffix, body)
            conversation += [partial_message, *suffix] if partial_message is not None else suffix
            partial_message = None
        return Forked(
            prompt=prompt,
            continues=not suffix,
            system=kept.system,
            conversation=conversation,
            partial=partial_message,
            parent=kept.point(choice, token),
            size=kept.size,
        )

    def _encode(self, suffix: list[JSONObject], body: ConversationBody) -> list[int]:
        """Return the tokens of messages after an answer."""
        prompts = self._translator.prompts
        field = body.prompt_field
        for message in suffix:
            if not isinstance(message["content"], str):
                raise APIError(400, f"the images of {field} can be sent to forks at a message only", field)
        checked = prompts.checked_chat(suffix, field, after=True)
        messages, template = prompts.with_tools(checked, [], dict(body.chat_template_kwargs or {}))
        try:
            text = messages_after_answer(messages, self._translator.engine.tokenizer, template)
        except ValueError as error:
            raise APIError(400, f"{field}: {error}", field) from error
        return encode(self._translator.engine.tokenizer, text)


def _with_tools(suffix: list[JSONObject], text: str) -> list[JSONObject]:
    """Return messages that begin with a system message which describes tools."""
    if suffix and suffix[0]["role"] == "system":
        return [{**suffix[0], "content": f"{suffix[0]['content']}\n\n{text}"}, *suffix[1:]]
    return [{"role": "system", "content": text}, *suffix]


class ChildrenWriter(Writer):
    """Writes the responses of several forks as a list, or their events with the number of each in `child`."""

    def __init__(self, children: Sequence[tuple[Writer, Answers]]) -> None:
        self._children = children
        self._ended: list[set[int]] = [set() for _ in children]

    def whole(self, choices: Sequence[Delta], usage: JSONObject) -> JSONObject:
        """Return the list of responses."""
        data = []
        for number, (writer, answers) in enumerate(self._children):
            own = [self._own(choice)[1] for choice in choices if self._own(choice)[0] == number]
            data.append(writer.whole(own, usage_of([answers])))
        return {"object": "list", "data": data}

    def events(self, delta: Delta, is_first: bool) -> list[JSONObject]:
        """Return the events of one fork; the last ones report its usage if its body asks for that."""
        number, own = self._own(delta)
        writer, answers = self._children[number]
        events = writer.events(own, is_first)
        if own.finish_reason is not None:
            self._ended[number].add(own.index)
            if writer.wants_usage and len(self._ended[number]) == answers.submission.choices:
                events = [*events, writer.usage_chunk(usage_of([answers]))]
        return [{**event, "child": number} for event in events]

    def _own(self, delta: Delta) -> tuple[int, Delta]:
        """Return the number of a choice's fork, and the delta with its index in this."""
        for number, (_, answers) in enumerate(self._children):
            if answers.first <= delta.index < answers.first + answers.submission.choices:
                return number, replace(delta, index=delta.index - answers.first)
        raise IndexError(delta.index)


def keep(body: ConversationBody, answers: Answers) -> Kept:
    """Return the record of a response that can be forked while it runs, and afterward if it is kept."""
    submission = answers.submission
    fields = body.model_dump(mode="json", exclude_unset=True, by_alias=True, exclude=NOT_INHERITED)
    partial_message = None if body._forked is None else body._forked.partial
    tokens = {name: submission.prompt[name] for name in ("input_ids", "attention_mask")}
    return Kept(
        model=body.model,
        fields=fields,
        mode_settings=[*(body.model_extra or {})],
        tools=body.callable_tools,
        system=body.system,
        conversation=body.conversation,
        partial=partial_message,
        submission=replace(submission, prompt=tokens, arguments={}, log_probs=None, prompt_log_probs=None),
        has_tokens=submission.config.traits.rows_continue_prompts and len(submission.prompt) == len(tokens),
        answers=answers,
        end_tokens=answers.handle.end_tokens,
        lease=answers.lease,
        size=body._size,
    )

"""Bodies of requests, as OpenAI defines them. Further fields are settings of the mode, or rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from reprlib import repr as _shortened
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from hf_parallel.engine.hints import MAX_ID
from hf_parallel.engine.server.errors import APIError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
# Errors about each item of a long list or object would take seconds, in which the server answers no other request.
Items = Annotated[list[T], Field(fail_fast=True, min_length=1)]
Int = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Id = Annotated[str, Field(strict=True, max_length=MAX_ID)]
Prompt: TypeAlias = str | list[Any]  # a text, a chat or token ids
MAX_STOPS = 16  # texts in `stop`
MAX_STOP_BYTES = 128  # bytes of a stop text. At each step, as many tokens of each row are decoded
MAX_NGRAM = 32  # maximum of `no_repeat_ngram_size`: the work of each step grows with it times the length of a row
MAX_BIASES = 300  # tokens in `logit_bias`
MAX_TEMPLATE_KWARGS = 2**16  # characters of `chat_template_kwargs` as JSON: a template may write them into the prompt
MAX_TOOLS = 128  # tools of a request, and calls of a message
MAX_METADATA = 16  # entries of `metadata`


def _at_most(limit: int, words: str, size: Callable[[Any], int]) -> Callable[[T], T]:
    """Return a validator that raises `ValueError` for a value of a larger size."""

    def check(value: T) -> T:
        measured = size(value)
        if measured > limit:
            raise ValueError(f"at most {limit} {words} are accepted, this one has {measured}")
        return value

    return check


def _entries(most: int) -> BeforeValidator:
    """Return a validator of the number of entries of an object, before they are validated."""
    return BeforeValidator(_at_most(most, "entries", lambda value: len(value) if isinstance(value, dict) else 0))


def _kind(value: object) -> str | None:
    """Return whether a value is a text or a list. Errors are about this kind alone, and do not name it."""
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else None


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, list) and value:
        kinds = {str: "list of texts", int: "token ids", bool: "token ids", list: "lists of token ids"}
        return kinds.get(type(value[0]))
    return "a text" if isinstance(value, str) else None


def one_of(words: str, kind: Callable[[object], str | None] = _kind) -> Discriminator:
    """Return the discriminator of a union whose error says that the value must be `words`."""
    return Discriminator(kind, custom_error_type="kind", custom_error_message=f"must be {words}")


_check_stop = _at_most(MAX_STOP_BYTES, "bytes", lambda text: len(text.encode(errors="surrogatepass")))
_check_template_size = _at_most(MAX_TEMPLATE_KWARGS, "characters", lambda given: len(json.dumps(given)))
Stop = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_check_stop)]
Stops = Annotated[
    Annotated[Stop, Tag("a text")] | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS), Tag("a list")],
    one_of(f"a text or a list of at most {MAX_STOPS} texts"),
]


def _is_empty(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value == []


class BodyObject(BaseModel):
    """An object in a body. Names that it does not define may have no value: null, or a list or object without any."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _check_others(cls, body: object) -> object:
        """Raise an error for fields that the object does not have, unless they are empty."""
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        kinds = get_args(fields["type"].annotation) if "type" in fields else ()
        if kinds and body.get("type", kinds[0]) not in kinds:
            raise ValueError(f"type {_shortened(body['type'])} is not supported, only {', '.join(kinds)}")
        for name, value in body.items():
            if name not in fields and not _is_empty(value):
                raise ValueError(f"{name} is not supported")
        return body


class TextPart(BodyObject):
    """Text in a message's content."""

    type: Literal["text"]
    text: Text


class ImageURL(BodyObject):
    """URL of an image; `detail` is not used."""

    url: Text
    detail: Text | None = None


class ImagePart(BodyObject):
    """Image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageURL


class Function(BodyObject):
    """A function that a model may call; `parameters` is a JSON schema of its arguments."""

    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, object] | None = None
    strict: Flag | None = None  # not used: `required` and named tools are always strict


class Tool(BodyObject):
    """A tool of a request, or the choice of one."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("a text")] | Annotated[T, Tag("an object")],
    one_of("auto, none, required or a function", lambda value: _kind(value) or "an object"),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


Arguments = Annotated[
    Json[dict[str, object]],
    BeforeValidator(lambda value: "{}" if isinstance(value, str) and not value.strip() else value),
]
"""Arguments of a call; models and clients write no arguments as an empty text."""


class CalledFunction(BodyObject):
    """Name and arguments of a call."""

    name: Text
    arguments: Arguments


class MessageToolCall(BodyObject):
    """A call in a message of the assistant."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None  # of a streamed call; not used


Content = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Tag("a list")],
    one_of("a text, or a list of parts of the types text and image_url"),
]


class Message(BodyObject):
    """Message of a chat."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Content | None = None
    name: Text | None = None  # of the participant or tool
    tool_calls: Tools[MessageToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs the field content")
        return self

    def to_chat(self) -> dict[str, Any]:
        """Return the message as a chat template receives it, with URLs for images."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self._chat_content()}
        message |= self.model_dump(
            include={"name", "tool_calls", "tool_call_id", "reasoning_content"}, exclude_none=True
        )
        return message

    def _chat_content(self) -> Any:
        """Return the content as one text, or with images as a list of typed parts."""
        content = self.content or ""
        if isinstance(content, str):
            return content
        texts = [part.text for part in content if isinstance(part, TextPart)]
        if len(texts) == len(content):
            return "".join(texts)
        parts = []
        for part in content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            else:
                parts.append({"type": "image", "image": part.image_url.url})
        return parts


class StreamOptions(BodyObject):
    """Options of a streamed response."""

    include_usage: Flag = False
    include_obfuscation: Flag | None = None  # not used: the server adds no obfuscation


class JSONSchema(BodyObject):
    """A JSON schema, whose answer is to match it."""

    definition: dict[str, object] | None = Field(None, alias="schema")
    name: Text | None = None
    description: Text | None = None
    strict: Flag | None = None


class ResponseFormat(BodyObject):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class At(BodyObject):
    """A place in a response: after a number of new tokens, or after a message of its conversation."""

    token: Token | None = None
    message: Int | None = None

    @model_validator(mode="after")
    def _check_one(self) -> At:
        if (self.token is None) == (self.message is None):
            raise ValueError('give one of "token" and "message"')
        return self


def _kind_of_place(value: object) -> str | None:
    if isinstance(value, str):
        return "a text" if value == "end" else None
    return "an object" if isinstance(value, dict | At) else None


Place = Annotated[
    Annotated[Literal["end"], Tag("a text")] | Annotated[At, Tag("an object")],
    one_of('"end", {"token": N} or {"message": N}', _kind_of_place),
]


class ForkOf(BodyObject):
    """The response that a request continues: its id, a place in it, and one of its choices."""

    id: Annotated[Text, Field(max_length=MAX_ID)]
    at: Place = "end"
    choice: Token = 0


class Forked(NamedTuple):
    """What a request continues, and its own messages."""

    prompt: Prompt  # token ids, or a chat
    continues: bool | None  # whether the answer continues a text; None: as the prompt says
    system: list[dict[str, Any]]  # messages before the conversation
    conversation: list[dict[str, Any]]
    partial: dict[str, Any] | None  # the message of the assistant that the answer continues
    parent: Any  # a running request that has the beginning of the prompt
    size: int  # characters of the conversation


class Body(BaseModel):
    """Fields of all kinds of requests."""

    prompt_field: ClassVar[str]  # name of the field that holds the prompts
    format_field: ClassVar = "response_format"  # name of the field that holds the format of the answer
    model_config = ConfigDict(extra="allow")

    model: Text
    generation_mode: Annotated[Text, Field(max_length=200)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Count | None = None
    stop: Stops | None = None
    seed: Int | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None  # of vLLM
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], _entries(MAX_BIASES)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    epsilon_cutoff: Annotated[Number, Field(ge=0, lt=1)] | None = None
    eta_cutoff: Annotated[Number, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(strict=True, ge=0, le=MAX_NGRAM)] | None = None
    min_new_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    transcript: Flag | None = None  # whether a prompt's last choice holds the transcript of its run, a page
    agent_hints: dict[str, object] | None = None  # of `AgentHints`
    cache_salt: Annotated[Id, Field(min_length=1)] | None = None
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(_check_template_size)] | None = None
    # Fields of OpenAI that do not change an answer
    user: Text | None = None
    metadata: Annotated[dict[str, Text], _entries(MAX_METADATA)] | None = None
    store: Flag | None = None
    parallel_tool_calls: Flag | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts: chats, texts or token ids."""
        value: Any = getattr(self, self.prompt_field)
        if isinstance(value, str) or isinstance(value[0], int):
            return [value]
        if isinstance(value[0], Message):
            return [[message.to_chat() for message in value]]
        return list(value)

    @property
    def prompt_sizes(self) -> list[int]:
        """Characters or token ids of each of the `prompts`, without building them; 0 for chats."""
        value: Any = getattr(self, self.prompt_field)
        if isinstance(value, str) or isinstance(value[0], int):
            return [len(value)]
        if isinstance(value[0], Message):
            return [0]
        return [len(prompt) for prompt in value]

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def answer_format(self) -> Any:
        """Format of an answer, with the fields of `ResponseFormat`; None: any text."""
        value = getattr(self, self.format_field)
        return getattr(value, "format", value)

    @property
    def budget(self) -> int | None:
        """Maximum number of new tokens of an answer, if it is given."""
        return getattr(self, "max_completion_tokens", None) or self.max_tokens

    @property
    def label_tokens(self) -> list[int]:
        """Tokens whose log-probabilities are wanted instead of those of the most probable ones."""
        return []

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """Number of alternatives to each token of a prompt; None: no log-probabilities of prompts."""
        return self.prompt_logprobs

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of alternatives whose log-probabilities are wanted; None: no log-probabilities."""
        return getattr(self, "logprobs", None)


class ConversationBody(Body):
    """Fields of requests whose answers may reason and call tools."""

    effort_field: ClassVar = "reasoning_effort"  # name of the field that holds the effort
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None  # of vLLM
    tools: Any = None
    tool_choice: Any = None
    fork: ForkOf | None = None
    _forked: Forked | None = PrivateAttr(None)
    _size: int = PrivateAttr(0)  # characters of the conversation

    @property
    def new_messages(self) -> list[dict[str, Any]]:
        """The messages of this request alone."""
        raise NotImplementedError

    @property
    def system(self) -> list[dict[str, Any]]:
        """Messages before the conversation."""
        return [] if self._forked is None else self._forked.system

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        return self.new_messages if self._forked is None else self._forked.conversation

    def conversation_with(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the conversation with an answer, which may continue a message."""
        partial = None if self._forked is None else self._forked.partial
        return [*self.conversation, answer if partial is None else merged_messages(partial, answer)]

    @property
    def prompts(self) -> list[Prompt]:
        """See `Body.prompts`."""
        return [[*self.system, *self.conversation]] if self._forked is None else [self._forked.prompt]

    @property
    def prompt_sizes(self) -> list[int]:
        """See `Body.prompt_sizes`. What a fork continues was checked before."""
        return super().prompt_sizes if self._forked is None else [0]

    @property
    def effort(self) -> Any:
        """Effort of the reasoning, if it is given."""
        value = getattr(self, self.effort_field)
        return getattr(value, "effort", value)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Tools that the answer may call. Raises `ValueError` for a choice of tools that were not given."""
        functions = [getattr(tool, "function", tool) for tool in self.tools or ()]
        names = [function.name for function in functions]
        choice = self.tool_choice
        if not isinstance(choice, str | None):
            choice = getattr(choice, "function", choice).name
            functions = [function for function in functions if function.name == choice]
        tools = []
        for function in functions:
            definition = function.model_dump(exclude={"type"}, exclude_none=True)
            tools.append({"type": "function", "function": definition})
        if self.must_call and not tools:
            raise ValueError(f"tool_choice={choice!r:.200} needs a tool to call, tools has {names!r:.200}")
        return [] if choice == "none" else tools

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in (None, "none", "auto")


class ChatBody(ConversationBody):
    """Body of `/v1/chat/completions`."""

    prompt_field: ClassVar = "messages"
    messages: Items[Message]
    max_completion_tokens: Count | None = None

    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: Tools[Tool] | None = None
    tool_choice: Choice[Tool] | None = None

    @property
    def new_messages(self) -> list[dict[str, Any]]:
        """See `ConversationBody`."""
        return [message.to_chat() for message in self.messages]

    @property
    def top_logprobs_wanted(self) -> int | None:
        """See `Body.top_logprobs_wanted`. Raises `ValueError` for `top_logprobs` without `logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    prompt_field: ClassVar = "prompt"
    prompt: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[Items[Token], Tag("token ids")]
        | Annotated[Items[Text], Tag("list of texts")]
        | Annotated[Items[Items[Token]], Tag("lists of token ids")],
        one_of("a text, token ids, or a list of texts or of lists of token ids, and not empty", _prompt_kind),
    ]
    max_tokens: Annotated[int, Field(strict=True, ge=0, le=2**31)] | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    echo: Flag | None = None

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """See `Body.prompt_logprobs_wanted`."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max([top for top in wanted if top is not None], default=None)


class ScoreBody(Body):
    """Body of `/v1/score`, as in SGLang: the probabilities of tokens after a query with each of several items."""

    prompt_field: ClassVar = "items"
    model_config = ConfigDict(extra="forbid")
    query: Annotated[Annotated[Text, Tag("a text")] | Annotated[Items[Token], Tag("a list")], one_of("text or ids")]
    items: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[Items[Text], Tag("list of texts")]
        | Annotated[Items[Items[Token]], Tag("lists of token ids")],
        one_of("a text, a list of texts or of lists of token ids, and not empty", _prompt_kind),
    ]
    label_token_ids: Annotated[list[Token], Field(fail_fast=True, min_length=1, max_length=MAX_BIASES)]
    apply_softmax: Flag = False
    item_first: Flag = False
    max_tokens: Literal[1] = 1
    temperature: Literal[0] = 0

    @property
    def _items(self) -> list[Any]:
        return [self.items] if isinstance(self.items, str) else list(self.items)

    @property
    def prompt_sizes(self) -> list[int]:
        """See `Body.prompt_sizes`."""
        return [len(self.query) + len(item) for item in self._items]

    @property
    def prompts(self) -> list[Prompt]:
        """The query with each of the items."""
        items = self._items
        for item in items:
            if isinstance(item, str) != isinstance(self.query, str):
                raise ValueError("items must be texts if query is a text, else lists of token ids")
        if self.item_first:
            return [item + self.query for item in items]  # type: ignore[operator]
        return [self.query + item for item in items]  # type: ignore[operator]

    @property
    def label_tokens(self) -> list[int]:
        """See `Body.label_tokens`."""
        return self.label_token_ids

    @property
    def top_logprobs_wanted(self) -> int | None:
        """See `Body.top_logprobs_wanted`. Raises `ValueError` for fields of other requests."""
        own_fields = type(self).model_fields.keys() - Body.model_fields.keys()
        unsupported = self.model_fields_set - own_fields - {"model", "user", "cache_salt"}
        if unsupported:
            raise ValueError(f"{min(unsupported)} is no field of a request for scores")
        return len(self.label_token_ids)


def merged_messages(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one message with the fields of two; fields of both are joined."""
    message = {**first, **second}
    for name in first.keys() & second.keys() - {"role", "name"}:
        message[name] = first[name] + second[name]
    return message


def read_body(kind: type[M], content: bytes) -> M:
    """Return the body of a request. Raises `APIError` that names the field, its value and what is allowed."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as validation_error:
        error = validation_error.errors(include_url=False)[0]
        if error["type"] == "json_invalid" and not error["loc"]:
            raise APIError(400, f"the body is not valid JSON: {error['msg']}") from validation_error
        path = [str(key) for key in error["loc"] if isinstance(key, int) or str(key).isidentifier()]
        if not path:
            message = f"the body must be a JSON object, got {_shortened(error['input'])}"
            raise APIError(400, message) from validation_error
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] != "missing":
            message += f", got {_shortened(error['input'])}"
        field = next((key for key in path if key.isidentifier()), None)
        raise APIError(400, f"{'.'.join(path)}: {message}", field) from validation_error

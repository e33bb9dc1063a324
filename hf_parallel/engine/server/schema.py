"""Bodies of requests, as OpenAI defines them. Further fields are settings of the mode, or rejected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=256)]


class TextPart(BaseModel):
    """Part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """Message of a chat."""

    role: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    content: Text | list[TextPart]

    def to_chat(self) -> dict[str, str]:
        """Return the message as a chat template receives it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: Flag = False


class JSONSchema(BaseModel):
    """A JSON schema, whose answer is to match it."""

    model_config = ConfigDict(populate_by_name=True)
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class Body(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="allow")

    model: Text
    generation_mode: Text | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Int | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    epsilon_cutoff: Annotated[Number, Field(ge=0, lt=1)] | None = None
    eta_cutoff: Annotated[Number, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    min_new_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def others(self) -> dict[str, Any]:
        """Fields that the schema does not name."""
        return self.__pydantic_extra__ or {}

    @property
    def budget(self) -> int | None:
        """Maximum number of new tokens of an answer, if it is given."""
        return self.max_tokens

    @property
    def candidates(self) -> int:
        """Number of answers to generate."""
        return self.n or 1

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of alternatives whose log-probabilities are wanted; None: no log-probabilities."""
        return None


class ChatBody(Body):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    @property
    def budget(self) -> int | None:
        """See `Body.budget`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """See `Body.top_logprobs_wanted`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    )
    best_of: Count | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts or token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    @property
    def candidates(self) -> int:
        """See `Body.candidates`."""
        return self.best_of or self.n or 1

    @property
    def top_logprobs_wanted(self) -> int | None:
        """See `Body.top_logprobs_wanted`."""
        return self.logprobs

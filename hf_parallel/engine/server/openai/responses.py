"""Bodies of responses, as OpenAI defines them: whole ones, and the chunks of a stream.

Log-probabilities can take megabytes: their lists are iterators, which make each item when it is encoded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import token_bytes
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.openai.answers import Answers, Delta, LoggedToken
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.sampling.log_probs import TokenLogProbs


class Writer:
    """Writes the response to one request: a chat or a completion."""

    wants_usage = False
    """Whether a stream ends with its usage."""

    def __init__(self, model: str, is_chat: bool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.is_chat = is_chat
        self.tokenizer = tokenizer
        self._bytes: dict[tuple[int, bool], bytes] = {}  # by token, and whether the text begins with it
        kind = "text_completion"
        prefix = "cmpl"
        self._chunk_kind = kind
        if is_chat:
            kind = "chat.completion"
            prefix = "chatcmpl"
            self._chunk_kind = "chat.completion.chunk"
        self.head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self.head["id"])

    def whole(self, choices: Sequence[Delta], usage: dict[str, object]) -> dict[str, object]:
        """Return the body of a response that is not streamed."""
        body = {**self.head, "choices": [self._choice(choice) for choice in choices], "usage": usage}
        if self.is_chat:
            body |= self._prompt_log_probs(choices[0])
        return body

    def chunk(self, delta: Delta, is_first: bool) -> dict[str, object]:
        """Return a chunk of a stream; `is_first`: the first one of its choice."""
        choice: dict[str, Any] = {"index": delta.index}
        if self.is_chat:
            choice["delta"] = self._message_delta(delta, is_first)
        else:
            choice["text"] = delta.text
            choice |= _row_fields(delta)
        choice["logprobs"] = self._log_probs(delta)
        choice["finish_reason"] = delta.finish_reason
        choice |= _mode_fields(delta)
        return {**self.head, "object": self._chunk_kind, "choices": [choice]}

    def _message_delta(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Return what a chunk adds to the message of a chat."""
        message: dict[str, Any] = {}
        if is_first:
            message["role"] = "assistant"
        if delta.text or is_first:
            message["content"] = delta.text
        message |= _row_fields(delta)
        message |= _reply_fields(delta)
        for call, fields in zip(delta.calls, message.get("tool_calls", ()), strict=True):
            fields["index"] = call.index
        return message

    def events(self, delta: Delta, is_first: bool) -> list[dict[str, object]]:
        """Return the data of the events of a stream that new text causes."""
        return [self.chunk(delta, is_first)]

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, object]:
        """Return the last chunk of a stream that reports its usage."""
        return {**self.head, "object": self._chunk_kind, "choices": [], "usage": usage}

    def _choice(self, choice: Delta) -> dict[str, object]:
        fields: dict[str, object] = {"index": choice.index}
        if self.is_chat:
            text = None if choice.calls and not choice.text else choice.text
            fields["message"] = {"role": "assistant", "content": text, "refusal": None, **_reply_fields(choice)}
        else:
            fields["text"] = choice.text
        fields["logprobs"] = self._log_probs(choice)
        fields["finish_reason"] = choice.finish_reason
        if not self.is_chat:
            fields |= self._prompt_log_probs(choice)
        return fields | _mode_fields(choice)

    def _prompt_log_probs(self, choice: Delta) -> dict[str, object]:
        """Return the field `prompt_logprobs` as vLLM writes it: the most probable tokens and the prompt's, by id."""
        if choice.prompt is None:
            return {}
        tokens = (self._ranked(token, log_probs) for token, log_probs in choice.prompt)
        return {"prompt_logprobs": chain([None], tokens)}  # the first token has none

    def _ranked(self, token: int, log_probs: TokenLogProbs) -> dict[str, object]:
        """Return the most probable tokens and the prompt's, by id, with their ranks."""
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(log_probs.top, 1)}
        ranked[token] = log_probs.log_prob, log_probs.rank
        fields: dict[str, object] = {}
        for other, (value, rank) in ranked.items():
            name = self._name(other, is_first=False)
            fields[str(other)] = {"logprob": _finite(value), "rank": rank, "decoded_token": name}
        return fields

    def _log_probs(self, delta: Delta) -> dict[str, object] | None:
        if not (delta.logged or delta.has_log_probs):
            return None
        if self.is_chat:
            return {"content": map(self._content, delta.logged), "refusal": None}
        return {
            "tokens": (self._name(logged.token, logged.is_first) for logged in delta.logged),
            "token_logprobs": (logged.log_probs and _finite(logged.log_probs.log_prob) for logged in delta.logged),
            "top_logprobs": map(self._alternatives, delta.logged),
            "text_offset": (logged.begin for logged in delta.logged),
        }

    def _content(self, logged: LoggedToken) -> dict[str, object]:
        """Return a token of a chat with its most probable alternatives."""
        assert logged.log_probs is not None, "chats have no echo"
        fields = self._entry(logged.token, logged.log_probs.log_prob, logged.is_first)
        top = logged.log_probs.top
        fields["top_logprobs"] = [self._entry(token, value, logged.is_first) for token, value in top]
        return fields

    def _alternatives(self, logged: LoggedToken) -> dict[str, float] | None:
        """Return the most probable tokens and the sampled one by name; of tokens with one name, all but one by id."""
        if logged.log_probs is None:
            return None
        values = dict(logged.log_probs.top)
        values[logged.token] = logged.log_probs.log_prob
        names: dict[int, str] = {}
        for token in (logged.token, *values):
            if token in names:
                continue
            name = self._name(token, logged.is_first)
            if name in names.values():
                name = f"token_id:{token}"
            names[token] = name
        return {names[token]: _finite(value) for token, value in values.items()}

    def _entry(self, token: int, log_prob: float, is_first: bool) -> dict[str, object]:
        return {
            "token": self._name(token, is_first),
            "logprob": _finite(log_prob),
            "bytes": list(self._bytes_of(token, is_first)),
        }

    def _name(self, token: int, is_first: bool) -> str:
        """Return the text of a token, the bytes of a part of a character as OpenAI writes them, or the id if empty."""
        encoded = self._bytes_of(token, is_first)
        try:
            return encoded.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)

    def _bytes_of(self, token: int, is_first: bool) -> bytes:
        """Return the bytes of a token, which may differ at the beginning of a text."""
        key = (token, is_first)
        if key not in self._bytes:
            context = [] if is_first else encode(self.tokenizer, "a")[-1:]
            (self._bytes[key],) = token_bytes(self.tokenizer, [token], context)
        return self._bytes[key]


class ScoreWriter(Writer):
    """Writes the response to a request for scores."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, apply_softmax: bool) -> None:
        super().__init__(model, False, tokenizer)
        self._softmax = apply_softmax

    def whole(self, choices: Sequence[Delta], usage: dict[str, object]) -> dict[str, object]:
        """Return the body of the response: by item, the probability of each label among all tokens, or the labels."""
        log_probs = []
        for choice in choices:
            labels = choice.logged[0].log_probs
            if labels is not None:
                log_probs.append([value for _, value in labels.top])
        values = torch.tensor(log_probs)
        scores = values.softmax(-1) if self._softmax else values.exp()
        return {**self.head, "object": "scoring", "scores": scores.tolist(), "usage": usage}


def usage_of(answers: Sequence[Answers]) -> dict[str, object]:
    """Return the number of tokens of a response."""
    prompt_tokens = sum(answer.submission.prompt_tokens for answer in answers)
    stats = [answer.handle.stats for answer in answers]
    of_answers = [answer.handle.stats for answer in answers if not answer.submission.is_empty]
    new_tokens = sum(request.decoded_tokens for request in of_answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "forward_passes": sum(request.forward_passes for request in stats),
        "kv_bytes": sum(request.kv_bytes for request in stats),
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in stats)},
        "completion_tokens_details": {"replayed_tokens": sum(request.replayed_tokens for request in of_answers)},
    }


def _row_fields(delta: Delta) -> dict[str, object]:
    """Return the text and the event of a row that a chunk of a mode reports."""
    fields = {"row_content": delta.row_text, "row_event": delta.row_event}
    return {name: value for name, value in fields.items() if value}


def _reply_fields(delta: Delta) -> dict[str, Any]:
    """Return the reasoning and the calls of a message."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.calls:
        fields["tool_calls"] = [call.to_dict() for call in delta.calls]
    return fields


def _mode_fields(delta: Delta) -> dict[str, object]:
    """Return the fields that modes and errors add to a choice."""
    error = None
    if delta.error is not None:
        error = APIError(500, delta.error, "response_format").to_dict()["error"]
    fields = {
        "row": delta.row,
        "mode_output": delta.record,
        "error": error,
        "transcript": delta.transcript,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _finite(log_prob: float) -> float:
    return max(log_prob, -9999.0)  # as OpenAI reports very improbable tokens; JSON has no infinity

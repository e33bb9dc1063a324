"""Bodies of responses, as OpenAI defines them: whole ones, and the chunks of a stream.

Lists of log-probabilities in them are iterators, whose items are made as they are encoded: they can be megabytes.
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

    def __init__(self, model: str, is_chat: bool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.is_chat = is_chat
        self.tokenizer = tokenizer
        self._bytes: dict[tuple[int, bool], bytes] = {}  # by token, and whether the text begins with it
        kind = "chat.completion" if is_chat else "text_completion"
        self._chunk_kind = f"{kind}.chunk" if is_chat else kind
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Delta], usage: dict[str, object]) -> dict[str, object]:
        """Return the body of a response that is not streamed."""
        prompt = self._prompt_log_probs(choices[0]) if self.is_chat else {}
        return {**self.head, "choices": [self._choice(choice) for choice in choices], "usage": usage, **prompt}

    def chunk(self, delta: Delta, is_first: bool) -> dict[str, object]:
        """Return a chunk of a stream; `is_first`: the first one of its choice."""
        added = {"row_content": delta.row_text, "row_event": delta.row_event}
        added = {name: value for name, value in added.items() if value}
        choice: dict[str, Any] = {"index": delta.index}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta"] = role | ({"content": delta.text} if delta.text or is_first else {}) | added
            choice["delta"] |= _reply_fields(delta)
            for index, call in enumerate(choice["delta"].get("tool_calls", ())):
                call["index"] = delta.calls[index].index
        else:
            choice |= {"text": delta.text, **added}
        choice |= {"logprobs": self._log_probs(delta), "finish_reason": delta.finish_reason}
        return {**self.head, "object": self._chunk_kind, "choices": [choice | _mode_fields(delta)]}

    def events(self, delta: Delta, is_first: bool) -> list[dict[str, object]]:
        """Return the data of the events of a stream that new text causes."""
        return [self.chunk(delta, is_first)]

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, object]:
        """Return the last chunk of a stream that reports its usage."""
        return {**self.head, "object": self._chunk_kind, "choices": [], "usage": usage}

    def _choice(self, choice: Delta) -> dict[str, object]:
        content: dict[str, object] = {"text": choice.text}
        if self.is_chat:
            text = None if choice.calls and not choice.text else choice.text
            message = {"role": "assistant", "content": text, "refusal": None, **_reply_fields(choice)}
            content = {"message": message}
        ending = {"logprobs": self._log_probs(choice), "finish_reason": choice.finish_reason}
        prompt = {} if self.is_chat else self._prompt_log_probs(choice)
        return {"index": choice.index, **content, **ending, **prompt, **_mode_fields(choice)}

    def _prompt_log_probs(self, choice: Delta) -> dict[str, object]:
        """Return the field `prompt_logprobs` as vLLM writes it: the most probable tokens and the prompt's, by id."""
        if choice.prompt is None:
            return {}
        return {"prompt_logprobs": chain([None], (self._ranked(token, found) for token, found in choice.prompt))}

    def _ranked(self, token: int, found: TokenLogProbs) -> dict[str, object]:
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(found.top, 1)}
        ranked[token] = found.log_prob, found.rank
        known = {other: {"logprob": _finite(value), "rank": rank} for other, (value, rank) in ranked.items()}
        return {str(x): {**own, "decoded_token": self._name(x, False)} for x, own in known.items()}

    def _log_probs(self, delta: Delta) -> dict[str, object] | None:
        if not (delta.logged or delta.has_log_probs):
            return None
        if self.is_chat:
            return {"content": map(self._content, delta.logged), "refusal": None}
        return {
            "tokens": (self._name(logged.token, logged.is_first) for logged in delta.logged),
            "token_logprobs": (logged.found and _finite(logged.found.log_prob) for logged in delta.logged),
            "top_logprobs": map(self._alternatives, delta.logged),
            "text_offset": (logged.begin for logged in delta.logged),
        }

    def _content(self, logged: LoggedToken) -> dict[str, object]:
        assert logged.found is not None, "chats have no echo"
        top = [self._entry(token, value, logged.is_first) for token, value in logged.found.top]
        own = self._entry(logged.token, logged.found.log_prob, logged.is_first)
        return {**own, "top_logprobs": top}

    def _alternatives(self, logged: LoggedToken) -> dict[str, float] | None:
        """Return the most probable tokens and the sampled one by name; of tokens with one name, all but one by id."""
        if logged.found is None:
            return None
        values = {**dict(logged.found.top), logged.token: logged.found.log_prob}
        names: dict[int, str] = {}
        for token in (logged.token, *values):
            if token not in names:
                name = self._name(token, logged.is_first)
                names[token] = f"token_id:{token}" if name in names.values() else name
        return {names[token]: _finite(value) for token, value in values.items()}

    def _entry(self, token: int, log_prob: float, is_first: bool) -> dict[str, object]:
        own = list(self._bytes_of(token, is_first))
        return {"token": self._name(token, is_first), "logprob": _finite(log_prob), "bytes": own}

    def _name(self, token: int, is_first: bool) -> str:
        """Return the text of a token, the bytes of a part of a character as OpenAI writes them, or the id if empty."""
        own = self._bytes_of(token, is_first)
        try:
            return own.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def _bytes_of(self, token: int, is_first: bool) -> bytes:
        if (token, is_first) not in self._bytes:
            before = [] if is_first else encode(self.tokenizer, "a")[-1:]
            (self._bytes[token, is_first],) = token_bytes(self.tokenizer, [token], before)
        return self._bytes[token, is_first]


class ScoreWriter(Writer):
    """Writes the response to a request for scores."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, apply_softmax: bool) -> None:
        super().__init__(model, False, tokenizer)
        self._softmax = apply_softmax

    def whole(self, choices: Sequence[Delta], usage: dict[str, object]) -> dict[str, object]:
        """Return the body of the response: by item, the probability of each label among all tokens, or the labels."""
        found = [choice.logged[0].found for choice in choices]
        values = torch.tensor([[value for _, value in one.top] for one in found if one is not None])
        scores = values.softmax(-1) if self._softmax else values.exp()
        return {**self.head, "object": "scoring", "scores": scores.tolist(), "usage": usage}


def usage_of(answers: Sequence[Answers]) -> dict[str, object]:
    """Return the number of tokens of a response."""
    prompt = sum(one.submission.prompt_tokens for one in answers)
    generated = sum(one.handle.stats.decoded_tokens for one in answers if not one.submission.is_empty)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "forward_passes": sum(one.handle.stats.forward_passes for one in answers),
        "kv_bytes": sum(one.handle.stats.kv_bytes for one in answers),
        "prompt_tokens_details": {"cached_tokens": sum(one.handle.stats.cached_tokens for one in answers)},
    }


def _reply_fields(delta: Delta) -> dict[str, Any]:
    """Return the reasoning and the calls of a message."""
    reasoning = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    return reasoning | ({"tool_calls": [call.to_dict() for call in delta.calls]} if delta.calls else {})


def _mode_fields(delta: Delta) -> dict[str, object]:
    """Return the fields that modes and errors add to a choice."""
    error = None if delta.error is None else APIError(500, delta.error, "response_format").to_dict()["error"]
    fields = {"row": delta.row, "mode_output": delta.record, "error": error, "transcript": delta.transcript}
    return {name: value for name, value in fields.items() if value is not None}


def _finite(log_prob: float) -> float:
    return max(log_prob, -9999.0)  # as OpenAI reports very improbable tokens; JSON has no infinity

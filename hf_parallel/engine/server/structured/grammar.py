"""Answers that match a JSON schema or consist of tool calls: a logits processor over llguidance.

The state of the grammar belongs to the tokens of a row, so that rows may end, fork and be processed in any order.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from hf_parallel.engine.server.openai.reply_formats import around_arguments
from hf_parallel.engine.server.structured.schema_check import first_error
from hf_parallel.engine.server.structured.tool_schemas import arguments_schema


class JSONProcessor(LogitsProcessor):
    """Restricts rows to texts that match a JSON schema, without whitespace between its parts, or a grammar.

    `schema` is the schema, or a text: a grammar of `call_grammar`. `vocabulary` is the size of the model's vocabulary,
    `begin` the length of the prompt, `field` the name of the request's field in errors. A row ends if its text does not
    match yet and no token can continue it; `error_of` says why. Raises `ValueError` if the schema is invalid, not
    supported or too costly, or the tokenizer is not a fast one, and `ImportError` without llguidance.
    """

    keeps_rows = False

    def __init__(
        self,
        schema: dict[str, object] | str,
        tokenizer: PreTrainedTokenizerFast,
        vocabulary: int,
        eos_token_ids: list[int],
        begin: int,
        field: str = "response_format",
    ) -> None:
        from llguidance import LLMatcher

        if isinstance(schema, str):
            grammar = LLMatcher.grammar_from_lark(schema)
        else:
            text = json.dumps(schema)
            error = first_error([text])
            if error is not None:
                raise ValueError(f"{field} holds a schema that is not supported: {error.reason}")
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        self._field = field
        self.begin = begin
        self.ends = [token for token in eos_token_ids if token < vocabulary]
        # Without log: it would print a line for each row whose answer exceeds a limit of llguidance.
        grammar_tokenizer = _grammar_tokenizer(tokenizer, vocabulary, tuple(eos_token_ids))
        self._first = LLMatcher(grammar_tokenizer, grammar, log_level=0)
        self._matchers: dict[tuple[int, ...], Any] = {}  # by the new tokens of a row
        self._errors: dict[tuple[int, ...], str] = {}  # by the new tokens of a row that ended with an error

    def for_prompt(self, begin: int) -> JSONProcessor:
        """Return a processor for another prompt, of the length `begin`, with the same compiled grammar."""
        other = copy.copy(self)
        other.begin = begin
        other._matchers = {}
        other._errors = {}
        return other

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[rows, vocabulary]`, -inf for tokens that do not match."""
        rows = [tuple(row) for row in input_ids[:, self.begin :].tolist()]
        if len(self._matchers) > 4 * max(len(rows), 64):
            parents = {row: row[:-1] for row in rows}
            self._matchers = {
                row: self._matchers[parent] for row, parent in parents.items() if parent in self._matchers
            }
        allowed = np.stack([self._allowed(row, scores.shape[1]) for row in rows])
        is_excluded = ~torch.from_numpy(allowed).to(scores.device)
        masked = scores.masked_fill(is_excluded, -torch.inf)
        has_no_token = masked.amax(-1) == -torch.inf
        for index in has_no_token.nonzero()[:, 0].tolist():
            self._errors.setdefault(rows[index], "other settings exclude all tokens that the schema allows")
            masked[index, self.ends] = 0.0
        return masked

    def error_of(self, tokens: list[int]) -> str | None:
        """Return why a row with these tokens, prompt included, ended before its text matched; None: it did not."""
        if not self._errors:
            return None
        new_tokens = tuple(tokens[self.begin :])
        for end in range(len(new_tokens)):
            error = self._errors.get(new_tokens[:end])
            if error:
                return error
        return None

    def _allowed(self, row: tuple[int, ...], vocabulary: int) -> np.ndarray:
        """Return the tokens that may follow the new tokens of a row, bool `[vocabulary]`."""
        if row not in self._matchers:
            self._matchers[row] = self._matcher(row)
        matcher = self._matchers[row]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:vocabulary].astype(bool)
        can_continue = allowed.sum() > allowed[self.ends].sum()
        if matcher.is_error() or not (can_continue or matcher.is_accepting()):
            reason = matcher.get_error().partition("\n")[0] or "no further token matches"
            self._errors[row] = f"the answer cannot match the schema of {self._field}: {reason}"
            allowed[:] = False
            allowed[self.ends] = True
        return allowed

    def _matcher(self, row: tuple[int, ...]) -> Any:
        """Return the matcher after the new tokens of a row: a copy of its parent's, a token further."""
        new_tokens = row[-1:]
        parent = self._matchers.get(row[:-1])
        if parent is None:
            new_tokens = row
            parent = self._first
        if parent.is_stopped():  # it ends, or has ended
            return parent
        matcher = parent.deep_copy()
        matcher.consume_tokens(list(new_tokens))
        return matcher


def call_grammar(
    call: str, tools: Sequence[Mapping[str, Any]], between: str | None, tokenizer: PreTrainedTokenizerFast
) -> str:
    """Return the grammar of replies that consist of one tool call, or of any number with a text `between` them.

    `call` is the text of a call, with `NAME` and `ARGUMENTS` in their places. Raises `ValueError` for parameters that
    are no supported JSON schema or too costly.
    """
    specials = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    functions = [tool["function"] for tool in tools]
    schemas = [arguments_schema(function) for function in functions]
    error = first_error([json.dumps(schema) for schema in schemas])
    if error is not None:
        name = functions[error.index]["name"]
        raise ValueError(f"tools: the parameters of {name!r} are not supported: {error.reason}")
    further_calls = "" if between is None else f" ({_literal(between, specials)} call)*"
    alternatives = " | ".join(f"tool{index}" for index in range(len(tools)))
    rules = [f"start: call{further_calls}", f"call: {alternatives}"]
    for index, (function, parameters) in enumerate(zip(functions, schemas, strict=True)):
        opening, closing = around_arguments(call, function["name"])
        schema = json.dumps({**parameters, "x-guidance": {"whitespace_flexible": False}})
        begin = _literal(opening, specials)
        end = _literal(closing, specials)
        rules.append(f"tool{index}: {begin} %json {schema} {end}")
    return "\n".join(rules)


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """Return a text as a grammar writes it, with the ids of its special tokens."""
    marks = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    parts = re.split(f"({marks})", text) if marks else [text]
    literals = []
    for part in parts:
        if part in specials:
            literals.append(f"<[{specials[part]}]>")
        elif part:
            literals.append(json.dumps(part, ensure_ascii=False))
    return " ".join(literals)


@lru_cache(maxsize=4)
def _grammar_tokenizer(tokenizer: PreTrainedTokenizerFast, vocabulary: int, eos_token_ids: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos_token_ids))

"""Answers that match a JSON schema, by llguidance: a processor that allows the tokens with which the answer can go on.

The state of the grammar belongs to the tokens of a row, so that rows may end, fork and be processed in any order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from hf_parallel.engine.server.schema_size import check_schema


class JSONProcessor(LogitsProcessor):
    """Restricts rows to texts that match a JSON schema.

    Parameters
    ----------
    schema : dict
        Of the answer; without whitespace between its parts.
    tokenizer : PreTrainedTokenizerFast
    vocabulary : int
        Size of the model's vocabulary.
    eos_token_ids : list of int
        Tokens that end an answer.
    begin : int
        Length of the prompt.

    Raises
    ------
    ValueError
        If the schema is invalid, not supported or too large, or the tokenizer is not a fast one.
    ImportError
        If llguidance is not installed.
    """

    keeps_rows = False

    def __init__(
        self, schema: dict[str, Any], tokenizer: Any, vocabulary: int, eos_token_ids: list[int], begin: int
    ) -> None:
        from llguidance import LLMatcher

        text = check_schema(schema)
        self.begin = begin
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        except ValueError as error:
            raise ValueError(f"response_format holds a schema that is not supported: {error}") from error
        self._first = LLMatcher(_grammar_tokenizer(tokenizer, vocabulary, tuple(eos_token_ids)), grammar)
        if self._first.is_error():
            raise ValueError(f"response_format holds a schema that is not supported: {self._first.get_error()}")
        self._matchers: dict[tuple[int, ...], Any] = {}  # by the new tokens of a row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[rows, vocabulary]`, -inf for tokens that do not match."""
        rows = [tuple(row) for row in input_ids[:, self.begin :].tolist()]
        if len(self._matchers) > 4 * max(len(rows), 64):
            self._matchers = {row: self._matchers[row[:-1]] for row in rows if row[:-1] in self._matchers}
        allowed = np.stack([self._allowed(row, scores.shape[1]) for row in rows])
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _allowed(self, row: tuple[int, ...], vocabulary: int) -> np.ndarray:
        """Return the tokens that may follow the new tokens of a row, bool `[vocabulary]`."""
        if row not in self._matchers:
            before, new = self._matchers.get(row[:-1]), row[-1:]
            if before is None:
                before, new = self._first, row
            matcher = before.deep_copy()
            matcher.consume_tokens(list(new))
            self._matchers[row] = matcher
        bits = np.frombuffer(self._matchers[row].compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[:vocabulary].astype(bool)


@lru_cache(maxsize=4)
def _grammar_tokenizer(tokenizer: Any, vocabulary: int, eos_token_ids: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos_token_ids))

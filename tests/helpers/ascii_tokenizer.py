"""A tokenizer for the tiny models: one token per ASCII character, and a few that contain separators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tiny

SPECIAL = {tiny.PAD: "<pad>", tiny.BOS: "<bos>", tiny.EOS: "<eos>"}
MERGED = {3: "\n\n", 4: ".\n\n", 5: "\n\n\n", 6: "```", 7: ",\n\nso.\n\n"}
"""Tokens of several characters, which a model may generate but encoding never uses."""


class AsciiTokenizer:
    """The parts of a tokenizer that modes use."""

    bos_token_id = None
    all_special_ids = tuple(SPECIAL)

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, list[int]]:
        tokens = [ord(character) for character in text]
        assert all(token < tiny.VOCAB_SIZE and token not in SPECIAL | MERGED for token in tokens), text
        return {"input_ids": [tiny.BOS] * add_special_tokens + tokens}

    def decode(self, tokens: int | Sequence[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        tokens = [tokens] if isinstance(tokens, int) else tokens
        texts = MERGED if skip_special_tokens else SPECIAL | MERGED
        return "".join(texts.get(token, chr(token)) for token in tokens)

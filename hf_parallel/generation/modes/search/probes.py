"""Probes: ask unfinished candidates for their final answer, greedily, in rows that nobody else sees.

Parallel-Probe (arXiv 2602.03845) ends a set of samples once their probes agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import visible_text
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.final_answers import first_answer


class Probe:
    """The continuation of a candidate by the probe's prompt and what the model has written after it."""

    def __init__(self, row: Row, prompt: Sequence[int]) -> None:
        self.row = row
        self.prompt = list(prompt)
        self.written: list[int] = []
        self.answer: str | None = None
        self.is_over = False
        self._num_needed = 0  # written tokens that hold the answer

    @property
    def tokens(self) -> list[int]:
        """The prompt, and what was written up to the end of the answer."""
        return [*self.prompt, *self.written[: self._num_needed]]

    def add(self, token: int, loop: DecodeLoop, prompt: str, pattern: str) -> None:
        """Append a token. The probe is over once no further text can change its answer."""
        call = loop.call
        self.written.append(token)
        text = prompt + visible_text(call.tokenizer, self.written, call.hidden_tokens)
        found = first_answer(pattern, text, begin=len(prompt))
        self.is_over = token in call.eos_token_ids
        if found is None:
            return
        if found.text != self.answer:
            self._num_needed = len(self.written)
        self.answer = found.text
        self.is_over |= not found.may_change


def probe(loop: DecodeLoop, rows: Sequence[Row], prompt: str, max_tokens: int, pattern: str) -> Steps[dict[Row, Probe]]:
    """Return the probe of each candidate, which itself is as before.

    The keys and values that a candidate has computed become part of the prefix tree, where its probe sees them.
    """
    prompt_tokens = encode(loop.call.tokenizer, prompt)
    for row in rows:
        loop.keep_block(row)
    probes = [Probe(row, prompt_tokens) for row in rows]
    asking = {probe: Row(probe.row.index, ()) for probe in probes}
    leaves = [_leaf(row) for row in rows]
    loop.start(list(asking.values()), leaves, capacity=len(prompt_tokens) + max_tokens + 1)
    for each in probes:
        asking[each].pending = [*each.row.pending, *prompt_tokens]
    active = list(probes)
    try:
        for _ in range(max_tokens):
            logits = yield from loop.runner.step([asking[each] for each in active])
            assert isinstance(logits, torch.Tensor), "nothing was asked to be sampled"
            tokens = logits.argmax(dim=-1).tolist()
            loop.stats.decoded_tokens += len(tokens)
            for each, token in zip(active, tokens, strict=True):
                asking[each].pending = [token]
                each.add(token, loop, prompt, pattern)
            active = [each for each in active if not each.is_over]
            if not active:
                break
    finally:
        for row in asking.values():
            loop.cache.pool.free(row.view[-1])
    return {each.row: each for each in probes}


def _leaf(row: Row) -> Node:
    assert row.leaf is not None, "candidates follow a leaf of the tree"
    return row.leaf

"""Pdos runs in which every token is known beforehand: each trunk and each branch writes what a script says.

A tiny model writes one token per ASCII character, so that a test reads like the answer that it is about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor
from workers import TOKENIZER, Script, encode, small_model

from hf_parallel import PDOSOutput
from hf_parallel.generation.sampling import Sampler

FILLER = "x"
"""What a row goes on writing when its script is at its end."""


class Scripted(LogitsProcessor):
    """Forces trunks and branches to write their scripts.

    Rows of the batch are the trunks, those after them branches in the order in which they opened. A row without a
    script, or one that is None, writes what the model likes best.
    """

    keeps_rows = False

    def __init__(self, trunks: Sequence[Script | None], branches: Sequence[Script | None] = ()) -> None:
        self.scripts = [None if script is None else encode(script) for script in (*trunks, *branches)]
        self.drawn: dict[int, list[int]] = defaultdict(list)
        self.sampler: Any = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced, rows = scores.clone(), self.sampler.rows
        lines = forced if len(forced) == len(rows) else [forced[row] for row in rows]  # or the whole batch is asked
        for row, line in zip(rows, lines, strict=True):
            script = self.scripts[row] if row < len(self.scripts) else None
            if script is not None:
                at = len(self.drawn[row])
                line.fill_(-100.0)[script[at] if at < len(script) else ord(FILLER)] = 100.0
        return forced

    @contextmanager
    def following(self) -> Iterator[None]:
        """Learn from the sampler which rows a call is about, and what they draw."""
        draw = Sampler.draw

        def noted(sampler: Sampler, rows: Sequence[int], logits: torch.Tensor) -> Any:
            self.sampler = sampler
            drawn = draw(sampler, rows, logits)
            for row, token in zip(rows, drawn[0].tolist(), strict=True):
                self.drawn[row].append(token)
            return drawn

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampler, "draw", noted)
            yield


def tell(
    *trunks: Script | None,
    branches: Sequence[Script | None] = (),
    prompts: Sequence[str] = ("Tell: ",),
    model: Any = None,
    **settings: Any,
) -> Any:
    """Let a model write answers by their scripts (or by a `script` given as such), 200 tokens unless told otherwise."""
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {
        "tokenizer": TOKENIZER,
        "max_new_tokens": 200,
        "return_dict_in_generate": True,
        "do_sample": False,
        "parallel_hint": False,
        **settings,
    }
    script = given.pop("script", None) or Scripted(trunks, branches)
    processors = [script, *given.pop("logits_processor", [])]
    with script.following():
        return (model or small_model()).generate(
            ids, attention_mask=mask, generation_mode="pdos", logits_processor=processors, **given
        )


def answer(out: PDOSOutput, row: int = 0, prompts: Sequence[str] = ("Tell: ",)) -> list[int]:
    """The tokens of an answer."""
    tokens = out.sequences[row, max(map(len, prompts)) :].tolist()
    while tokens[-1] == tiny.PAD:
        tokens.pop()
    return tokens


def behind_blocks(out: PDOSOutput, row: int = 0) -> list[range]:
    """The places in an answer of the sequential text behind each block."""
    assert out.blocks is not None
    starts = [block.start for block in out.blocks[row]]
    ends = [block.end for block in out.blocks[row]]
    return [range(end, start) for end, start in zip(ends, [*starts[1:], len(answer(out, row))], strict=True)]

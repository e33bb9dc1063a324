"""Hogwild! runs in which every token is known beforehand, and what their forward passes did.

A tiny model writes what a script says, one token per ASCII character, so that a test reads like the story it tells.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from transformers import LogitsProcessor, PreTrainedModel

import hf_parallel
from hf_parallel.cache import Block, BlockCache
from hf_parallel.generation.decode import DecodeLoop

TOKENIZER = AsciiTokenizer()
SETTINGS: dict[str, Any] = {
    "tokenizer": TOKENIZER,
    "history_header": "[DONE]",
    "others_header": "[OTHERS]",
    "own_header": "[ME]",
    "step_gap": "|",
    "step_prefix": "{name} {step}: ",
    "finisher_prompt": "So \\boxed{",
}
"""Short texts, so that what a worker sees can be written out in a test."""
FILLER = "x"
"""What a worker goes on writing when its script is at its end."""

Script = str | Sequence[str | int]
"""What a row writes: text, and tokens that have no text of their own."""


def encode(script: Script) -> list[int]:
    parts = [script] if isinstance(script, str) else script
    return [t for part in parts for t in ([part] if isinstance(part, int) else map(ord, part))]


class Scripted(LogitsProcessor):
    """Forces each row of the batch to write its script.

    The early finisher's rows are one per prompt, in a batch of their own: they write `finisher`.
    """

    def __init__(self, scripts: Sequence[Script], finisher: Script = "") -> None:
        self.scripts, self.finisher = [encode(script) for script in scripts], encode(finisher)
        self.calls = {True: 0, False: 0}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        workers = len(scores) == len(self.scripts)
        call = self.calls[workers]
        self.calls[workers] += 1
        scripts = self.scripts if workers else [self.finisher] * len(scores)
        tokens = [script[call] if call < len(script) else ord(FILLER) for script in scripts]
        return torch.full_like(scores, -100.0).index_put_(
            (torch.arange(len(scores)), torch.tensor(tokens)), scores.new_tensor(100.0)
        )


@cache
def small_model() -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def write(*scripts: Script, prompts: Sequence[str] = ("P",), finisher: Script = "", **settings: Any) -> Any:
    """Let workers write; as many new tokens as the longest script has, unless `max_new_tokens` is given."""
    ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in prompts])
    given = {
        "num_workers": len(scripts) // len(prompts),
        "max_new_tokens": max(len(encode(script)) for script in scripts),
        "finisher_tokens": len(encode(finisher)),
        "return_dict_in_generate": True,
        "do_sample": False,
        **SETTINGS,
        **settings,
    }
    processor = [Scripted(scripts, finisher)]
    return small_model().generate(
        ids, attention_mask=mask, generation_mode="hogwild", logits_processor=processor, **given
    )


class Recording:
    """What the forward passes of a call do, in order: steps that move, and passes with the logits that they gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Callable[[Any], None]] = []
        forward, move = DecodeLoop.forward, BlockCache.move

        def noted_forward(loop: DecodeLoop, brought: Any, ends: Sequence[int]) -> torch.Tensor:
            views = [([*segment.view], list(tokens)) for segment, tokens in brought]
            logits = forward(loop, brought, ends)
            self.events.append(lambda replay: replay.forward(views, list(ends), logits))
            return logits

        def noted_move(cache: BlockCache, source: Block, target: Block) -> None:
            self.events.append(lambda replay: replay.move(source, target))
            move(cache, source, target)

        monkeypatch.setattr(DecodeLoop, "forward", noted_forward)
        monkeypatch.setattr(BlockCache, "move", noted_move)

    def read(self) -> list[Pass]:
        reader = _Reader()
        for event in self.events:
            event(reader)
        return reader.passes


@dataclass
class Pass:
    """One forward pass: for each segment all text that its last token sees, and the tokens that it brought."""

    seen: list[str]
    brought: list[str]
    num_tokens: int


class _Reader:
    def __init__(self) -> None:
        self.texts: dict[Block, str] = defaultdict(str)
        self.passes: list[Pass] = []

    def move(self, source: Block, target: Block) -> None:
        self.texts[target] += self.texts.pop(source)

    def forward(self, views: Any, ends: list[int], logits: torch.Tensor) -> None:
        for view, tokens in views:
            self.texts[view[-1]] += TOKENIZER.decode(tokens)
        seen = ["".join(self.texts[block] for block in view) for view, _ in views]
        brought = [TOKENIZER.decode(tokens) for _, tokens in views]
        self.passes.append(Pass(seen, brought, sum(len(tokens) for _, tokens in views)))

"""Submission: arguments of `Engine.submit`, and what is needed to read the output as choices of a response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_parallel.detokenizer import decode
from hf_parallel.engine import AgentHints, Engine
from hf_parallel.engine.server.openai.forced_calls import ForcedCalls
from hf_parallel.engine.server.openai.replies import Reply, ReplySpec
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.sampling.log_probs import TopLogProbs

MAX_PREFIX = 4096  # tokens at the end of a prompt that may be the beginning of the reply


@dataclass
class Submission:
    """Arguments of `Engine.submit` for one prompt, or several at once, and what is needed to read its output."""

    engine: Engine
    config: ParallelConfig
    prompt: Mapping[str, torch.Tensor]
    arguments: dict[str, Any]
    prompts: int  # copies of the prompts: answers of the mode
    stops: list[str] = field(default_factory=list)
    log_probs: TopLogProbs | None = None
    prompt_log_probs: TopLogProbs | None = None  # the same, if log-probabilities of prompts are wanted
    echo: bool = False
    continues: bool = False  # whether the answer continues the text of the prompt
    is_empty: bool = False  # whether the token that it generates is not part of the answer
    has_mode: bool = False
    has_transcript: bool = False
    hints: AgentHints = field(default_factory=AgentHints)
    reply: ReplySpec | None = None  # None: the answer is its text
    is_constrained: bool = False  # whether a grammar begins with the answer, without reasoning
    forced_calls: Callable[[], ForcedCalls] | None = None  # makes the reader of an answer whose grammar is of calls
    hidden: frozenset[int] = frozenset()  # tokens that the text leaves out, besides those that end a row
    marks: set[int] = field(default_factory=set)  # special tokens that the text keeps for the reply's parser

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompts."""
        return int(self.prompt["attention_mask"].sum())

    def prompt_of(self, choice: int) -> list[int]:
        """Return the tokens of the prompt of a choice."""
        row = choice * len(self.prompt["input_ids"]) // self.choices
        tokens = self.prompt["input_ids"][row]
        mask = self.prompt["attention_mask"][row].bool()
        return tokens[mask].tolist()  # type: ignore[no-any-return]

    def make_reply(self, choice: int) -> Reply | ForcedCalls | None:
        """Return the parser of a choice; None: its text is its content."""
        if self.forced_calls is not None:
            return self.forced_calls()
        if self.reply is None or self.is_constrained:  # JSON of a schema has no marks
            return None
        end = []
        traits = self.config.traits
        is_continued = traits.streams_tokens == "when_final"  # by an answer that its branches are parts of
        if traits.rows_continue_prompts or is_continued:
            end = self.prompt_of(choice)[-MAX_PREFIX:]
        prefix = decode(self.engine.tokenizer, end, skip_special_tokens=False)
        return Reply(self.reply, prefix)

    @property
    def rows_per_prompt(self) -> int:
        """Number of choices of each answer of the mode."""
        return 1 if self.config.traits.merges_rows else self.config.rows_per_prompt

    @property
    def choices(self) -> int:
        """Number of choices: one per row, or per prompt whose rows are merged."""
        return self.prompts * self.rows_per_prompt

    def choice(self, row: int) -> int:
        """Return the index of a row's choice; rows that are no choices belong to the first of their prompt."""
        position = self.config.rows.place(row, self.prompts)
        first = position.prompt * self.rows_per_prompt
        if position.column is None or position.index >= self.rows_per_prompt:
            return first
        return first + position.index

    def row_name(self, row: int) -> str:
        """Return the name of a row."""
        if self.config.traits.rows_continue_prompts and self.rows_per_prompt == 1:
            return self.config.rows.name(row)
        position = self.config.rows.place(row, self.prompts)
        return self.config.rows.name(position.index)

"""Stages of a mode: all completions of a stage decode in the same forward passes, each after its own prompt.

The runs of modes with several stages (self-consistency, Skeleton-of-Thought) derive from `StagedRun`. The prompts of
all stages share prefixes with each other and with earlier completions, in one tree (Hydragen, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache.logits_key import LogitsKey
from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import (
    SUFFIX_CAPACITY,
    initial_capacity,
    insert_prompt,
    prefill_leaves,
    prefix_cache_of,
)
from hf_parallel.generation.decoding.replay.config import ReplayConfig, replaying
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.sampling.log_probs import padded_log_probs
from hf_parallel.generation.sampling.token_table import TokenTable

_PROMPT_RELATIVE = (
    "min_new_tokens",  # before `min_length`, which transformers sets from it
    "min_length",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "watermarking_config",
)
"""Settings of `generate` whose effect depends on the prompt of the call."""


class CompletionRow(Row):
    """One completion of its own prompt, int64 `[length]`.

    `prefix` is the end of the prompt, which is streamed with the text. `is_complete` receives the text after each
    token; True ends the row. `truncated`: `max_new_tokens` ended it.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        gaps: Mapping[int, int],  # see `GenerationCall`
        max_new_tokens: int,
        text: IncrementalDetokenizer,
        output_row: int,
        prefix: str = "",
        is_complete: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(-1, ())
        self.prompt = prompt
        self.gaps = gaps
        self.max_new_tokens = max_new_tokens
        self.output_row = output_row
        self.prefix = prefix
        self.is_complete = is_complete
        self.tokens: list[int] = []
        self.log_probs: list[float] = []  # of the tokens under the model; known when the stage has ended
        self.truncated = False
        self.leaf: Node
        self.detokenizer = text

    @property
    def text(self) -> str:
        """Generated text, without hidden tokens."""
        return self.detokenizer.text

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and generated tokens, int64."""
        return np.concatenate((self.prompt, np.array(self.tokens, np.int64)))

    def tokens_left(self) -> int:
        return self.max_new_tokens - len(self.tokens)


class _Stage:
    """Generates the completions of one stage; see `StagedRun.run_stage`."""

    def __init__(
        self,
        run: StagedRun,
        rows: Sequence[CompletionRow],
        input_ids: torch.Tensor | None,
        seed: Any,
    ) -> None:
        self.call = run.call
        self.cache = run.cache
        self.rows = rows
        for index, row in enumerate(rows):
            row.index = index
        longest = max(row.max_new_tokens for row in rows)
        self.capacity = initial_capacity(longest - 1, len(rows))
        call = run.call
        ids = _left_padded(run.call, self.rows) if input_ids is None else input_ids
        # Each row has its own budget, which MaxLengthCriteria cannot check.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        table = TokenTable(ids, call.pad_token_id, min(longest, SUFFIX_CAPACITY))
        padding = []
        for row in self.rows:
            num_masked = 0 if input_ids is None else sum(row.gaps.values())  # inside the prompt
            padding.append(ids.shape[1] - len(row.prompt) - num_masked)
        padded_call = _with_padding(call, torch.tensor(padding))
        self.loop = DecodeLoop(padded_call, run.cache, table, criteria, seed, stream=False)

    def generate(self, config: ReplayConfig) -> Steps[DecodeLoop]:
        prompts = [LogitsKey.of_prompt(row.prompt, row.gaps) for row in self.rows]
        with self.loop.running(), replaying(self.loop, config, prompts):
            active = yield from self.loop.replay(self.rows, self._on_token)
            if active:
                yield from self._decode(active)
        if self.loop.replayer is not None:
            output_rows = {row.index: row.output_row for row in self.rows}
            self.call.record.add_origins(self.loop.replayer.origins, output_rows)
        drawn = self.loop.sampler.log_probs_of_rows(by_draw=True).tolist()
        for row, values in zip(self.rows, drawn, strict=True):
            log_probs = values[: len(row.tokens)]
            missing = len(row.tokens) - len(log_probs)  # none were asked for
            row.log_probs = log_probs + [math.nan] * missing
        return self.loop

    def _decode(self, rows: Sequence[CompletionRow]) -> Steps[None]:
        """Prefill prompts and replayed tokens of rows, then decode."""
        for row in rows:
            row.leaf = yield from insert_prompt(self.cache, row.sequence, row.gaps)
        leaves = [row.leaf for row in rows]
        logits = yield from prefill_leaves(self.loop, self.cache, leaves)
        self.loop.start(rows, leaves, self.capacity)
        yield from self.loop.decode(rows, logits, self._on_token)
        self.loop.keep(rows)

    def _on_token(self, row: CompletionRow, token: int, ended: bool) -> bool:
        if not row.tokens:
            self.call.show(row.output_row, row.prefix, "begin")
        row.tokens.append(token)
        row.pending = [token]
        self.call.show(row.output_row, row.detokenizer.add([token]), "token")
        ended = ended or (row.is_complete is not None and row.is_complete(row.text))
        if not ended and len(row.tokens) >= row.max_new_tokens:
            ended = True
            row.truncated = True
            self.call.record.truncated.add(row.output_row)
        if ended:
            self.call.show(row.output_row, "", "end")
        return not ended


class StagedRun:
    """Run of a mode that generates in stages."""

    def __init__(self, config: ReplayConfig, call: GenerationCall) -> None:
        self.call = call
        self.cache = prefix_cache_of(call)
        self.stats = call.stats
        self._replay_config = config

    def completion(
        self,
        prompt: int,
        output_row: int,
        suffix: Sequence[int] = (),
        max_new_tokens: int | None = None,
        prefix: str = "",
        is_complete: Callable[[str], bool] | None = None,
    ) -> CompletionRow:
        """Return a completion of a prompt of the call, followed by the tokens of `suffix`; see `CompletionRow`."""
        suffix_tokens = np.array(suffix, np.int64)
        tokens = np.concatenate((self.call.prompts[prompt], suffix_tokens))
        budget = self.call.max_new_tokens if max_new_tokens is None else max_new_tokens
        gaps = self.call.gaps[prompt]
        return CompletionRow(tokens, gaps, budget, self.call.new_text(), output_row, prefix, is_complete)

    def run_stage(
        self,
        rows: Sequence[CompletionRow],
        input_ids: torch.Tensor | None = None,
        seed: Any = None,
    ) -> Steps[DecodeLoop]:
        """Generate completions, at least one. Return the decode loop, with its table and scores.

        Logits processors see `input_ids`, int64 `[rows, length]`, as prompts (default: left-padded prompts of the
        rows). For errors see `Capabilities.check_length`.
        """
        longest = max(len(row.prompt) + row.max_new_tokens for row in rows)
        self.call.capabilities.check_length(self.call.model, longest)
        return (yield from _Stage(self, rows, input_ids, seed).generate(self._replay_config))

    def output(
        self,
        cls: type[ParallelOutput],
        answers: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        /,
        **fields: Any,
    ) -> Any:
        """Return the result of `generate`, given the tokens and `log_probs` of each prompt's answer.

        With `return_dict_in_generate`, that is a `cls` with further `fields`; see `ParallelOutput`.
        """
        fields["log_probs"] = padded_log_probs(log_probs)
        call = self.call
        table = TokenTable(call.input_ids, call.pad_token_id, max(map(len, answers)))
        for row, tokens in enumerate(answers):
            table.extend(row, tokens)
        return DecodeLoop(call, self.cache, table, stream=False).output(cls, **fields)


def _left_padded(call: GenerationCall, rows: Sequence[CompletionRow]) -> torch.Tensor:
    longest = max(len(row.prompt) for row in rows)
    ids = call.input_ids.new_full((len(rows), longest), call.pad_token_id)
    for row in rows:
        begin = longest - len(row.prompt)
        ids[row.index, begin:] = torch.from_numpy(call.token_ids(row.prompt))
    return ids


def _with_padding(call: GenerationCall, padding: torch.Tensor) -> GenerationCall:
    """Return the call with a repetition penalty that ignores the padding, whose length per row is int64 `[rows]`."""
    processors = LogitsProcessorList()
    for processor in call.logits_processor:
        plain = type(processor) is RepetitionPenaltyLogitsProcessor
        if plain and not isinstance(processor.prompt_ignore_length, int):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty)
            processor.prompt_ignore_length = padding  # some versions of transformers do not take a tensor
        processors.append(processor)
    return replace(call, logits_processor=processors)


def check_vocabulary(call: GenerationCall, texts: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Raise a `ValueError` unless the tokens of a mode's own texts are in the model's vocabulary.

    Texts in `needed` must have at least one token, from which the next is predicted.
    """
    vocabulary = vocabulary_size(call.model)
    for text in filter(None, (*texts, *needed)):
        tokens = encode(call.tokenizer, text)
        if text in needed and not tokens:
            raise ValueError(f"tokenizer must return at least one token for {text!r}, got none")
        if max(tokens, default=0) >= vocabulary:
            raise ValueError(f"tokenizer returns tokens outside the model's vocabulary of {vocabulary} for {text!r}")


def check_no_prompt_relative_settings(call: GenerationCall, mode: str) -> None:
    """Raise a `ValueError` for settings that depend on the call's prompts: completions have other prompts."""
    for name in _PROMPT_RELATIVE:
        value = getattr(call.generation_config, name, None)
        if value not in (None, 0):
            raise ValueError(f"{name}={value!r} cannot be honored by {mode}: its completions have other prompts")

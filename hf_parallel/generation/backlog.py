"""Backlog: inputs of forward passes that replay has skipped. Also the protocols of replay and speculative decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, TypeVar

import torch

from hf_parallel.generation.call import Executor
from hf_parallel.generation.log_probs import LogProbs
from hf_parallel.generation.rows import PassInputs, Row, RowGroup, collect_inputs
from hf_parallel.generation.runner import ModelRunner

R = TypeVar("R", bound=Row)


class TokenReplayer(Protocol):
    """Samples tokens from cached logits where there are any; see `hf_parallel.generation.replay.replay`."""

    @property
    def origins(self) -> dict[int, list[str]]:
        """Origin of each token by row, see `Record`."""

    def replayable(self, rows: Sequence[int]) -> list[int]:
        """Return the rows whose next logits are cached."""

    def skip_pass(self, rows: Sequence[int], keys: Sequence[int]) -> bool:
        """Move the cursors of rows to the trie nodes of `keys`. Return whether the logits of all rows are cached."""

    def sample(
        self, rows: Sequence[int], logits: torch.Tensor | None = None, drafted: bool = False
    ) -> tuple[list[int], list[bool], LogProbs | None]:
        """Sample the next token of each row. Return tokens, whether each row has ended, and log-probabilities."""

    def is_computed_by_other(self, row: int, executor: Executor) -> bool:
        """Return whether another call computes the next logits of a row now."""

    def start_computing(self, rows: Sequence[int], executor: Executor) -> None:
        """Note that a call computes the logits of rows from now on."""

    def stop_computing(self, rows: Sequence[int]) -> None:
        """Note that rows have ended."""

    def start_prefetch(self) -> None:
        """Start precomputing in the background."""


class SpeculativeDecoding(Protocol):
    """Appends several tokens per forward pass; see `hf_parallel.generation.replay.speculative`."""

    def start(self) -> bool:
        """Prepare for a decode loop. Return whether to use draft tokens."""

    def step(self, rows: Sequence[R]) -> list[R]:
        """Verify drafts until no row has one. Return the active rows."""


class Backlog:
    """Runs forward passes, including those that were skipped while the tokens of a row group were replayed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def forward(self, rows: Sequence[Row], replayer: TokenReplayer | None) -> torch.Tensor:
        """Run one forward pass over the inputs of rows and the backlogs of their groups.

        Inputs whose next logits are cached join the backlog. Return the logits `[n, vocabulary]` of the n other rows.
        """
        inputs: PassInputs = []
        ends: list[int] = []
        groups: list[RowGroup] = []
        inserted = 0
        for group, members in groupby(rows, key=lambda row: row.group):
            of_group = list(members)
            own, own_ends = collect_inputs(of_group)
            if group is not None:
                new, group.inserted_tokens = group.inserted_tokens, 0
                if replayer is not None:
                    keys = group.advance(own, own_ends)
                    if replayer.skip_pass([row.index for row in of_group], keys):
                        group.backlog.append(own)
                        continue
                groups.append(group)
                inserted += new
            ends += [len(inputs) + end for end in own_ends]
            inputs += own
        if not ends:
            return torch.empty(0, 0, device=self.runner.device)
        self._fill_prompts(groups)
        backlog = [skipped for group in groups for skipped in group.backlog]
        logits = self._run([*backlog, inputs], ends) if backlog else self.runner.forward(inputs, ends=ends)
        self.runner.stats.prefilled_tokens += inserted
        for group in groups:
            group.backlog.clear()
        return logits

    def skip(self, group: RowGroup, rows: Sequence[Row]) -> None:
        """Append the next inputs of a group's rows to its backlog."""
        group.inserted_tokens = 0
        group.backlog.append(collect_inputs(rows)[0])

    def compute(self, groups: Sequence[RowGroup]) -> None:
        """Run the forward passes in the backlogs of groups."""
        backlog = [skipped for group in groups for skipped in group.backlog]
        if backlog:
            self._fill_prompts(groups)
            self._run(backlog, [])
            self.runner.stats.prefilled_tokens += sum(len(tokens) for _, tokens in backlog[-1])
        for group in groups:
            group.backlog.clear()

    def _fill_prompts(self, groups: Sequence[RowGroup]) -> None:
        unfilled = {
            segment.view[-1]: (segment, tokens) for group in groups for segment, tokens in group.unfilled_prompt()
        }
        if unfilled:
            self.runner.prefill(list(unfilled.values()))

    def _run(self, passes: Sequence[PassInputs], ends: Sequence[int]) -> torch.Tensor:
        """Compute consecutive passes in as few forward passes as the chunk size allows; return logits of the last."""
        began, runner = time.perf_counter(), self.runner
        chunk: list[PassInputs] = []
        free = runner.chunk_size
        for inputs in passes:
            size = sum(len(tokens) for _, tokens in inputs)
            if chunk and size > free:
                runner.forward(*chunk, ends=[len(chunk[-1]) - 1])
                chunk, free = [], runner.chunk_size
            chunk.append(inputs)
            free -= size
        logits = runner.forward(*chunk, ends=ends)
        runner.stats.prefilled_tokens += sum(len(tokens) for inputs in passes[:-1] for _, tokens in inputs)
        runner.stats.prefill_seconds += time.perf_counter() - began
        return logits

"""Passes on trial: forward passes that compute what rows may write next, behind the tokens that they bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.resampling.drafts import NgramDrafter
from hf_parallel.generation.resampling.replay import Replayer
from hf_parallel.generation.rows import PassInputs, Row
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import to_device

R = TypeVar("R", bound=Row)


@dataclass(eq=False)
class SpeculativeDecoder:
    """Lets the rows of a decode loop take several tokens in one pass, as far as their drafts turn out to be drawn.

    Parameters
    ----------
    drafts : NgramDrafter
    call : GenerationCall
    recall : Replayer
        Chooses tokens and remembers logits, for each token as if the rows had come to it step by step.
    cache : BlockCache
    stats : GenerationStats
    room : callable (row) -> int
        Tokens that a row may still take.
    compute : callable (brought) -> [tokens, vocabulary]
        One forward pass, with the logits of all its tokens.
    hand_out : callable (rows, tokens, ended) -> rows
        Gives rows their tokens; returns those that go on.
    """

    drafts: NgramDrafter
    call: GenerationCall
    recall: Replayer
    cache: BlockCache
    stats: GenerationStats
    room: Callable[[Row], int]
    compute: Callable[[PassInputs], torch.Tensor]
    hand_out: Callable[[Sequence[Row], Sequence[int], Sequence[bool]], list[Row]]

    def take(self, rows: Sequence[R]) -> list[R]:
        """Let rows take tokens as long as one has a draft; returns those that go on, and bring what they brought."""
        going = list(rows)
        for row in going:
            self.drafts.see(row.index, self.replayer.state(row.index))
        while going:
            states = [self.replayer.state(row.index) for row in going]
            found = [
                self.drafts.find(row.index, state, len(going), self.room(row) - 1)
                for row, state in zip(going, states, strict=True)
            ]
            for state in states:
                self.drafts.note(state)
            if not any(found):
                break
            going = self._try(going, found)
        return going

    def _try(self, rows: Sequence[R], found: Sequence[list[int]]) -> list[R]:
        """One pass over what rows bring and a draft behind it, then the tokens that it serves for."""
        begins = [row.view[-1].length for row in rows]
        brought: PassInputs = [
            (Segment(row.view, 1 + len(draft)), [*row.pending, *draft]) for row, draft in zip(rows, found, strict=True)
        ]
        logits = self.compute(brought)
        self.call.record.passes += 1
        places = [0, *accumulate(len(tokens) for _, tokens in brought)]
        trying, going, step = list(range(len(rows))), [], 0
        while trying:
            at = to_device([places[i] + step for i in trying], logits.device)
            tokens, ended = self.replayer.choose([rows[i].index for i in trying], logits.index_select(0, at), step > 0)
            staying = set(self.hand_out([rows[i] for i in trying], tokens, ended))
            agreeing = []
            for i, token in zip(trying, tokens, strict=True):
                row, state = rows[i], self.replayer.state(rows[i].index)
                self.drafts.see(row.index, state)
                if row in staying and found[i][step : step + 1] == [token]:
                    self.drafts.note(state)
                    agreeing.append(i)
                    continue
                self.cache.truncate(row.view[-1], begins[i] + 1 + step)
                self.stats.drafted_tokens += len(found[i])
                self.stats.accepted_tokens += step
                if row in staying:
                    going.append(i)
            trying, step = agreeing, step + 1
        return [rows[i] for i in sorted(going)]

"""RowCriteria: the stopping criteria of `generate`, over rows of unequal length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_parallel.generation.processors import needs_batch
from hf_parallel.generation.token_table import TokenTable, group_by
from hf_parallel.kernels import to_device


class RowCriteria:
    """Criteria of the rows in a table.

    If `is_row_wise`, rows end by a token in `end_tokens` or at a maximum length. Else the criteria are called with the
    rows in groups of equal length, or with the whole batch if one of them may keep state per row.
    """

    def __init__(self, criteria: StoppingCriteriaList, table: TokenTable) -> None:
        self.criteria, self.table = criteria, table
        self.needs_batch = any(needs_batch(criterion) for criterion in criteria)
        self.is_row_wise = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
        self._limits = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        ends = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
        self.end_tokens = frozenset(token for tokens in ends for token in tokens)

    def full(self, rows: Sequence[int]) -> list[int]:
        """Return the indices of rows that have the maximum length."""
        found, lengths = [], self.table.lengths
        for criterion in self._limits:
            limit, warned = criterion.max_length, criterion.max_position_embeddings
            for index, row in enumerate(rows):
                if lengths[row] >= limit:
                    found.append(index)
                elif warned is not None and lengths[row] > warned:
                    criterion(self.table.ids[:1, : lengths[row]], None)  # logs a warning
        return found

    def ended(self, rows: Sequence[int], scores: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        """Return whether the criteria end each row, `bool [len(rows)]`; `scores` as `generate` passes them."""
        lengths = [self.table.lengths[row] for row in rows]
        if len(set(lengths)) == 1:
            if not self.needs_batch:
                return self._judge(self.table.left_padded(rows), scores)
            return self._judge(self.table.whole_batch(rows), scores)[self.table.index(rows)]
        ended = torch.empty(len(rows), dtype=torch.bool, device=self.table.device)
        for same in group_by(range(len(rows)) if self.needs_batch else lengths):
            index = to_device(same, ended.device)  # a list would be copied while the host waits
            ended[index] = self._judge(self.table.left_padded([rows[i] for i in same]), scores)
        return ended

    def _judge(self, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            result: object = criterion(ids, scores)
            if isinstance(result, bool):
                result = torch.full_like(ended, result)
            if not isinstance(result, torch.Tensor) or result.shape not in ((), ended.shape):
                got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(f"stopping_criteria must return one bool per row ({len(ids)}), got {got}")
            ended = ended | result.bool()
        return ended

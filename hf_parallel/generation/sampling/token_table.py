"""TokenTable: the tokens of all rows, as logits processors and stopping criteria receive them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_parallel.generation.sampling.parts import Part, join
from hf_parallel.kernels import to_device

_UNWRITTEN = 64
"""Most appended tokens of a row that are not in the table yet."""


class TokenTable:
    """Tokens of each row with its left-padded prompt: `ids` is `int64 [rows, capacity]`, row i has `lengths[i]` tokens.

    The first `begin` tokens are the prompt. `changes[i]` counts how often tokens of row i were removed.
    It is reallocated if a row gets more than `capacity` new tokens. Appended tokens are written when `ids` is read.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int, capacity: int) -> None:
        rows, length = input_ids.shape
        self.pad_token_id = pad_token_id
        with torch.inference_mode(False):  # a session may go on outside of inference mode
            self._ids = input_ids.new_full((rows, length + max(capacity, 1)), pad_token_id)
            self._ids[:, :length] = input_ids
        self.device = input_ids.device
        self.begin = length
        self.lengths = [length] * rows
        self.changes = [0] * rows
        self._unwritten: list[tuple[Sequence[int], list[int], Part]] = []  # rows, columns and tokens of each step
        self._known: list[int] = []  # tokens of several steps, after `_unwritten`
        self._known_rows: Sequence[int] = ()
        self._known_columns: list[int] = []  # of the first of these steps
        self._indexed: tuple[list[int], torch.Tensor] | None = None

    def index(self, rows: Sequence[int]) -> torch.Tensor:
        """Return row indices on the device; the last result is cached, so that decode steps do not wait for a copy."""
        if self._indexed is None or self._indexed[0] != list(rows):
            self._indexed = (list(rows), to_device(rows, self.device))
        _, indices = self._indexed
        return indices

    def append(self, rows: Sequence[int], tokens: Part) -> None:
        """Append one token `int64 [len(rows)]` to each of `rows`."""
        if self._known:
            self._write_known()
        columns = []
        for row in rows:
            columns.append(self.lengths[row])
            self.lengths[row] += 1
        self._unwritten.append((rows, columns, tokens))
        if len(self._unwritten) >= _UNWRITTEN:
            self._write_parts()

    @property
    def ids(self) -> torch.Tensor:
        """Tokens `int64 [rows, capacity]`."""
        if self._unwritten or self._known:
            self._write()
        return self._ids

    def _write(self) -> None:
        """Write all tokens that were appended."""
        if self._unwritten:
            self._write_parts()
        if self._known:
            self._write_known()

    def _write_parts(self) -> None:
        """Write what `append` has appended."""
        steps = self._unwritten
        self._unwritten = []
        last_columns = [max(columns) for _, columns, _ in steps]
        self._reserve(1 + max(last_columns))
        rows, columns, tokens = steps[0]
        if len(steps) > 1:
            all_rows: list[int] = []
            all_columns: list[int] = []
            parts = []
            for of_rows, of_columns, part in steps:
                all_rows += of_rows
                all_columns += of_columns
                parts.append(part)
            row_index = to_device(all_rows, self.device)
            column_index = to_device(all_columns, self.device)
            self._ids[row_index, column_index] = join(parts)
        elif min(columns) < max(columns):
            self._ids[self.index(rows), to_device(columns, self.device)] = tokens.tensor
        elif len(rows) == len(self.lengths):
            self._ids[:, columns[0]] = tokens.tensor
        else:
            self._ids[self.index(rows), columns[0]] = tokens.tensor

    def append_known(self, rows: Sequence[int], steps: Sequence[Sequence[int]]) -> None:
        """Append a token to each of `rows` in each step, known on the host.

        Those of the same `rows` are written at once.
        """
        if rows is not self._known_rows:
            self._write()
            self._known_rows = rows
            self._known_columns = [self.lengths[row] for row in rows]
        for tokens in steps:
            self._known += tokens
        for row in rows:
            self.lengths[row] += len(steps)

    def _write_known(self) -> None:
        """Write what `append_known` has appended."""
        rows = self._known_rows
        steps = to_device(self._known, self.device).view(-1, len(rows))
        self._known = []
        self._known_rows = ()
        begin = min(self._known_columns)
        end = max(self._known_columns)
        self._reserve(end + len(steps))
        if begin == end:
            self._ids[to_device(rows, self.device), begin : begin + len(steps)] = steps.T
            return
        step = torch.arange(len(steps), device=self.device)[:, None]
        columns = to_device(self._known_columns, self.device) + step
        row_indices = to_device(rows, self.device).expand_as(columns)
        self._ids[row_indices, columns] = steps

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled to a row."""
        length = self.lengths[row]
        self._reserve(length + len(tokens))
        self.ids[row, length : length + len(tokens)] = to_device(tokens, self.device)
        self.lengths[row] += len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens of a row from index `length` on."""
        self.ids[row, length:] = self.pad_token_id
        self.lengths[row] = length
        self.changes[row] += 1

    def fork(self, row: int, count: int) -> list[int]:
        """Append `count` copies of a row; return their indices."""
        first = len(self.lengths)
        with torch.inference_mode(False):
            ids = self.ids
            copies = ids[row].expand(count, -1)
            self._ids = torch.cat((ids, copies))
        self.lengths += [self.lengths[row]] * count
        self.changes += [0] * count
        return list(range(first, first + count))

    def left_padded(self, rows: Sequence[int]) -> torch.Tensor:
        """Return rows as one matrix `int64 [len(rows), longest]`, padded on the left."""
        lengths = [self.lengths[row] for row in rows]
        longest = max(lengths)
        ids = self.ids
        if len(rows) != len(self.lengths):
            ids = ids[self.index(rows)]
        if min(lengths) == longest:
            return ids[:, :longest]
        shift = longest - to_device(lengths, ids.device)[:, None]
        column = torch.arange(longest, device=ids.device) - shift
        return ids.gather(1, column.clamp(min=0)).masked_fill(column < 0, self.pad_token_id)

    def whole_batch(self, rows: Sequence[int]) -> torch.Tensor:
        """Return all rows, padded on the right if `rows` are the longest of them, else on the left."""
        longest = max(self.lengths)
        if all(self.lengths[row] == longest for row in rows):
            return self.ids[:, :longest]
        return self.left_padded(range(len(self.lengths)))

    def padded(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return a copy of `rows` in their order (default: all), right-padded, as `generate` returns sequences."""
        if rows is None:
            return self.ids[:, : max(self.lengths)].clone()
        return self.ids[list(rows), : max(self.lengths[row] for row in rows)]

    def _reserve(self, length: int) -> None:
        rows, capacity = self._ids.shape
        if length <= capacity:
            return
        with torch.inference_mode(False):
            ids = self._ids.new_full((rows, max(length, 2 * capacity)), self.pad_token_id)
            ids[:, :capacity] = self._ids
        self._ids = ids


def group_by(keys: Iterable[int]) -> list[list[int]]:
    """Return the indices of equal keys."""
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())

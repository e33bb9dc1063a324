"""TokenTable: the tokens of all rows, as logits processors and stopping criteria receive them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_parallel.kernels import to_device


class TokenTable:
    """Tokens of each row with its left-padded prompt: `ids` is `int64 [rows, capacity]`, row i has `lengths[i]` tokens.

    It is reallocated if a row gets more than `capacity` new tokens.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int, capacity: int) -> None:
        rows, length = input_ids.shape
        self.pad_token_id = pad_token_id
        with torch.inference_mode(False):  # a session may go on outside of inference mode
            self.ids = input_ids.new_full((rows, length + max(capacity, 1)), pad_token_id)
            self.ids[:, :length] = input_ids
        self.lengths = [length] * rows
        self._indexed: tuple[list[int], torch.Tensor] | None = None

    def index(self, rows: Sequence[int]) -> torch.Tensor:
        """Return row indices on the device; the last result is cached, so that decode steps do not wait for a copy."""
        if self._indexed is None or self._indexed[0] != list(rows):
            self._indexed = list(rows), to_device(rows, self.ids.device)
        return self._indexed[1]

    def append(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Append one token `int64 [len(rows)]` to each of `rows`."""
        lengths = []
        for row in rows:
            lengths.append(self.lengths[row])
        longest = max(lengths)
        if longest >= self.ids.shape[1]:
            self._reserve(longest + 1)
        if min(lengths) < longest:
            self.ids[self.index(rows), to_device(lengths, self.ids.device)] = tokens
        elif len(rows) == len(self.lengths):
            self.ids[:, longest] = tokens
        else:
            self.ids[self.index(rows), longest] = tokens
        for row in rows:
            self.lengths[row] += 1

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled to a row."""
        length = self.lengths[row]
        self._reserve(length + len(tokens))
        self.ids[row, length : length + len(tokens)] = to_device(tokens, self.ids.device)
        self.lengths[row] += len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens of a row from index `length` on."""
        self.ids[row, length:] = self.pad_token_id
        self.lengths[row] = length

    def fork(self, row: int, count: int) -> list[int]:
        """Append `count` copies of a row; return their indices."""
        first = len(self.lengths)
        with torch.inference_mode(False):
            self.ids = torch.cat((self.ids, self.ids[row].expand(count, -1)))
        self.lengths += [self.lengths[row]] * count
        return list(range(first, first + count))

    def left_padded(self, rows: Sequence[int]) -> torch.Tensor:
        """Return rows as one matrix `int64 [len(rows), longest]`, padded on the left."""
        lengths = [self.lengths[row] for row in rows]
        longest = max(lengths)
        ids = self.ids if len(rows) == len(self.lengths) else self.ids[self.index(rows)]
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
        if length > self.ids.shape[1]:
            with torch.inference_mode(False):
                ids = self.ids.new_full((self.ids.shape[0], max(length, 2 * self.ids.shape[1])), self.pad_token_id)
                ids[:, : self.ids.shape[1]] = self.ids
            self.ids = ids


def group_by(keys: Iterable[int]) -> list[list[int]]:
    """Return the indices of equal keys."""
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())

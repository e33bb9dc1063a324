"""Checksums of tensors: equal to their definition in every implementation, and other ones after any change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_parallel.kernels import checksum, native

ROW, SPAN = 4 * checksum.WIDTH, 256  # bytes of a row, rows of a span


@pytest.mark.parametrize("kind", ["C", "torch"])
@pytest.mark.parametrize("rows", [1, 300])
def test_sums_of_rows_equal_their_definition(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "C" and not native.is_available():
        pytest.skip("needs the compiled kernels")
    if kind == "torch":
        monkeypatch.setattr(native, "is_available", lambda: False)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (rows, checksum.WIDTH), dtype=np.int64)
    words[0, :2] = -(2**31), 2**31 - 1
    numbers = checksum._multipliers(torch.device("cpu")).numpy()
    assert (numbers % 2 == 1).all()
    out = torch.empty(rows, checksum.COLUMNS, dtype=torch.int64)
    checksum.row_sums(torch.from_numpy(words.astype(np.int32)), out)
    with np.errstate(over="ignore"):
        assert (out.numpy() == words @ numbers.T).all()


def flip(values: np.ndarray, rng: np.random.Generator) -> None:
    """The highest bit of two words: in a sum of 64-bit words, two such flips cancel."""
    values.reshape(-1)[rng.choice(values.size // 4, 2, replace=False) * 4 + 3] ^= 0x80


def swap(values: np.ndarray, rng: np.random.Generator) -> None:
    rows = values.reshape(-1, 64)
    first, second = rng.choice(len(rows), 2, replace=False)
    rows[[first, second]] = rows[[second, first]]


def move(values: np.ndarray, rng: np.random.Generator) -> None:
    values[:] = np.roll(values, 4 * int(rng.integers(1, values.size // 4)))


def increment(values: np.ndarray, rng: np.random.Generator) -> None:
    values[int(rng.integers(values.size))] += 1


def negate(values: np.ndarray, rng: np.random.Generator) -> None:
    """Of float32 columns."""
    values.reshape(-1, 64)[:, 4 * int(rng.integers(16)) + 3] ^= 0x80


@settings(max_examples=60)
@given(
    edit=st.sampled_from([flip, swap, move, increment, negate]),
    size=st.sampled_from([64 * 2, ROW, ROW + 64, 5 * ROW - 64, SPAN * ROW + 64]),
    seed=st.integers(0, 2**32),
)
def test_every_edit_changes_the_checksum(edit: Any, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, size, dtype=np.uint8)
    before = checksum.checksums([torch.from_numpy(values)])
    edited = values.copy()
    edit(edited, rng)
    assert checksum.checksums([torch.from_numpy(edited)]) != before
    assert checksum.checksums([torch.from_numpy(values.copy())]) == before

"""Checksums of the bytes of tensors, which detect any change of a model's weights.

Bytes are read as rows of 1024 words of 32 bits. A row has two sums, each of its words times random odd 64-bit numbers,
modulo 2^64 (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). A row with one
changed word always has other sums, as odd numbers are invertible; with several, it has equal sums with a probability of
at most 2^-64, whatever changed. The sums of a tensor's rows are summed once more in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.kernels import native

WIDTH = 1024
COLUMNS = 2
_ROW = 4 * WIDTH  # bytes
_SPAN = WIDTH // (2 * COLUMNS)  # number of rows whose sums fill a row
_CHUNK = 4096  # rows whose products PyTorch computes at a time


def checksums(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return a checksum of the values of each tensor, equal for equal values in any memory layout and on any device.

    Tensors are dense. Reads each once, on its device, and copies 1/65536 of it to the CPU, at least 16 bytes. A tensor
    that is not contiguous is copied first.
    """
    by_index: dict[int, bytes] = {}
    for device in {tensor.device for tensor in tensors}:
        on_this = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        digests = _of_device([tensors[index] for index in on_this], device)
        by_index.update(zip(on_this, digests, strict=True))
    return [by_index[index] for index in range(len(tensors))]


@torch.no_grad()
def _of_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[bytes]:
    """Return the checksums of tensors on one device."""
    spans = []  # of the rows of each tensor, rounded up
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        spans.append(-(-num_bytes // (_ROW * _SPAN)))
    sums = torch.zeros(sum(spans) * _SPAN, COLUMNS, dtype=torch.int64, device=device)
    remainders: list[torch.Tensor] = []  # the bytes of each tensor after its last whole row
    remainder_rows: list[int] = []
    begin = 0
    for tensor, span in zip(tensors, spans, strict=True):
        values = _bytes(tensor)
        num_rows = len(values) // _ROW
        whole = values[: num_rows * _ROW]
        if num_rows:
            words = whole.view(torch.int32).view(num_rows, WIDTH)
            row_sums(words, sums[begin : begin + num_rows])
        if len(values) > len(whole):
            remainders.append(values[len(whole) :].clone())
            remainder_rows.append(begin + num_rows)
        begin += span * _SPAN
    if remainders:
        whole_row = remainders[0].new_zeros(_ROW)  # the length to which all are padded
        padded = pad_sequence([*remainders, whole_row], batch_first=True)[:-1]
        remainder_sums = sums.new_empty(len(remainders), COLUMNS)
        row_sums(padded.view(torch.int32), remainder_sums)
        sums[torch.tensor(remainder_rows, device=device)] = remainder_sums
    total = sums.new_empty(sum(spans), COLUMNS)
    row_sums(sums.view(torch.int32).view(-1, WIDTH), total)
    parts = np.split(total.cpu().numpy(), np.cumsum(spans)[:-1])
    return [part.astype("<i8").tobytes() for part in parts]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 `[n]`, a view if possible."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return values.clone() if values.storage_offset() % 4 else values  # words need an aligned offset


def row_sums(words: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sums of words, int32 `[rows, 1024]`, to `out`, int64 `[rows, 2]`; both contiguous."""
    device = words.device
    numbers = _multipliers(words.device)
    if device.type == "cpu" and native.is_available():
        native.row_sums(words, numbers, out)
    else:
        for part, sums in zip(words.split(_CHUNK), out.split(_CHUNK), strict=True):
            for column in range(COLUMNS):
                sums[:, column] = (part * numbers[column]).sum(1)


@lru_cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Random odd numbers, int64 `[2, 1024]`: the same in every process, as checksums are stored in files."""
    random = hashlib.shake_256(b"hf_parallel.kernels.checksum").digest(COLUMNS * WIDTH * 8)
    return torch.from_numpy(np.frombuffer(random, "<i8").reshape(COLUMNS, WIDTH) | 1).to(device)

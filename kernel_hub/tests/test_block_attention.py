"""The kernel equals dense attention over each row's keys, rotated to their positions in the row.

On a GPU, or on a CPU with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from pathlib import Path

import kernels
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel = kernels.get_local_kernel(Path(__file__).parents[1])
BLOCKS = [kernel.Block(0, 37), kernel.Block(37, 20, base=5), kernel.Block(57, 9), kernel.Block(66, 16, base=40)]
ROWS = [kernel.Row((0, 1, 2), 3), kernel.Row((0, 2, 1), 1), kernel.Row((0, 3), 16), kernel.Row((3,), 2)]
ROTARY = kernel.RotarySpec((1.0, 0.3, 0.1, 0.02))


def rotated(x: torch.Tensor, positions: int) -> torch.Tensor:
    """Rotate vectors `[.., head_dim]` by `positions`; the two of a pair lie half of the rotated dimensions apart."""
    angles = positions * torch.tensor(ROTARY.inv_freq, dtype=x.dtype, device=x.device)
    first, second, rest = x.split((4, 4, x.shape[-1] - 8), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def dense(query, keys, values, kv_heads, rotary, softcap, sinks, window):
    """Attention of one query at a time, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    outputs = []
    token = 0
    for row in ROWS:
        blocks = [BLOCKS[index] for index in row.blocks]
        last = blocks[-1]
        length = sum(block.length for block in blocks)
        for offset in range(last.length - row.num_queries, last.length):
            row_keys, row_values, start = [], [], 0
            position = length - last.length + offset
            for block in blocks:
                stored = slice(block.slot * kv_heads, (block.slot + block.length) * kv_heads)
                block_keys = keys[stored].view(kv_heads, block.length, -1)
                if rotary:  # the query is at the position of the last block's keys: move the others there
                    block_keys = rotated(block_keys, (start - block.base) - (position - offset - last.base))
                row_keys.append(block_keys)
                row_values.append(values[stored].view(kv_heads, block.length, -1))
                start += block.length
            k, v = (torch.cat(parts, dim=1)[:, : position + 1] for parts in (row_keys, row_values))
            groups = query.shape[1] // kv_heads
            k, v = (part.repeat_interleave(groups, dim=0) for part in (k, v))
            scores = torch.einsum("hd,hnd->hn", query[token], k) * k.shape[-1] ** -0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if window is not None:
                scores[:, : max(0, position - window + 1)] = -torch.inf
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            outputs.append(torch.einsum("hn,hnd->hd", scores.softmax(-1)[:, : k.shape[1]], v))
            token += 1
    return torch.stack(outputs)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"rotary": ROTARY}, {"rotary": ROTARY, "softcap": 3.0}, {"window": 11}, {"has_sinks": True}],
    ids=str,
)
def test_the_kernel_equals_dense_attention(dtype, options):
    torch.manual_seed(0)
    heads, kv_heads, dim = 6, 2, 16
    tokens = sum(row.num_queries for row in ROWS)
    query = torch.randn(tokens, heads, dim, dtype=dtype, device=DEVICE)
    keys, values = torch.randn(2, 82 * kv_heads, dim, dtype=dtype, device=DEVICE)
    options = {"rotary": None, "softcap": None, "sinks": None, "window": None} | options
    if options.pop("has_sinks", False):
        options["sinks"] = torch.randn(heads, device=DEVICE)
    plan = kernel.make_plan(BLOCKS, ROWS)
    out = kernel.block_attention(query, keys, values, plan, kv_heads, **options)
    expected = dense(query, keys, values, kv_heads, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.kernels_ci
def test_contradictions_raise():
    with pytest.raises(ValueError, match="num_queries of row 0 must be 1 to 9, got 10"):
        kernel.make_plan(BLOCKS, [kernel.Row((0, 2), 10)])
    with pytest.raises(ValueError, match="blocks of row 0 must be different"):
        kernel.make_plan(BLOCKS, [kernel.Row((2, 2))])
    plan = kernel.make_plan(BLOCKS, [kernel.Row((0,))])
    stored = torch.zeros(164, 16, device=DEVICE)
    with pytest.raises(ValueError, match="num_kv_heads must divide the 3 heads"):
        kernel.block_attention(torch.zeros(1, 3, 16, device=DEVICE), stored, stored, plan, 2)
    with pytest.raises(ValueError, match="do not fit"):
        kernel.block_attention(torch.zeros(2, 2, 16, device=DEVICE), stored, stored, plan, 2)

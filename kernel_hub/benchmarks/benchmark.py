"""`kernels benchmark`: rows over a shared prefix, beside dense attention with a copy of the prefix for each row."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark

HEADS, KV_HEADS, DIM = 32, 8, 128
OWN = 64  # tokens of each row after the prefix


class SharedPrefix(Benchmark):
    seed = 0

    def _set_up(self, num_rows: int, prefix: int) -> None:
        blocks = [self.kernel.Block(0, prefix)]
        blocks += [self.kernel.Block(prefix + OWN * row, OWN, base=prefix) for row in range(num_rows)]
        rows = [self.kernel.Row((0, 1 + row)) for row in range(num_rows)]
        self.plan = self.kernel.make_plan(blocks, rows)
        made = {"dtype": torch.bfloat16, "device": self.device}
        self.query = torch.randn(num_rows, HEADS, DIM, **made)
        self.keys, self.values = torch.randn(2, (prefix + OWN * num_rows) * KV_HEADS, DIM, **made)
        self.copies = [self._copied(stored, num_rows, prefix) for stored in (self.keys, self.values)]

    def _copied(self, stored: torch.Tensor, num_rows: int, prefix: int) -> torch.Tensor:
        """Return `[rows, kv_heads, prefix + own, dim]`."""
        shared = stored[: prefix * KV_HEADS].view(1, KV_HEADS, prefix, DIM).expand(num_rows, -1, -1, -1)
        own = stored[prefix * KV_HEADS :].view(num_rows, KV_HEADS, OWN, DIM)
        return torch.cat((shared, own), dim=2)

    def _run(self) -> None:
        self.out = self.kernel.block_attention(self.query, self.keys, self.values, self.plan, KV_HEADS)

    def _reference(self) -> torch.Tensor:
        query = self.query[:, :, None]
        return torch.nn.functional.scaled_dot_product_attention(query, *self.copies, enable_gqa=True)[:, :, 0]

    def setup_short(self) -> None:
        self._set_up(32, 1024)

    def benchmark_short(self) -> None:
        self._run()

    def verify_short(self) -> torch.Tensor:
        return self._reference()

    def setup_long(self) -> None:
        self._set_up(32, 16384)

    def benchmark_long(self) -> None:
        self._run()

    def verify_long(self) -> torch.Tensor:
        return self._reference()

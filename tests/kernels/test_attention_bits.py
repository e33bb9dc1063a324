"""Attention of a row by the C kernel has the same bits alone, in any tree of blocks, in any chunks, on any threads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_trees import Pieces, RandomTree

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import AttentionParams, AttentionPlan, LayerStorage, RotarySpec, native, torch_attention

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None, reason="needs a C compiler, as the kernel itself does"
)
CASES: dict[str, dict[str, Any]] = {
    "narrow and wide": {},
    "one row of three heads": {"heads": 9, "kv_heads": 3, "dim": 64},
    "a head each": {"heads": 4, "kv_heads": 4, "dim": 24},
    "half precision": {"heads": 8, "kv_heads": 1, "dim": 32, "dtype": torch.bfloat16},
    "soft-capping": {"softcap": 3.0},
    "window": {"window": 50},
    "long window, sinks": {"heads": 14, "window": 200, "has_sinks": True},
    "sinks": {"has_sinks": True},
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Case:
    """A random tree of blocks, with random queries, keys and values of all tokens."""

    def __init__(
        self,
        seed: int,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        has_sinks: bool = False,
        softcap: float | None = None,
        tree: RandomTree | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tree = tree or RandomTree(seed)

        def normal(first: int, second: int) -> torch.Tensor:
            return torch.randn(first, second, dim, generator=generator).to(dtype)

        self.queries = [normal(length, heads) * 2 for length in self.tree.lengths]
        self.stored = [normal(2 * kv_heads, length) for length in self.tree.lengths]
        sinks = torch.randn(heads, generator=generator) if has_sinks else None
        self.params = AttentionParams(kv_heads, 0.3, softcap=softcap, window=window, sinks=sinks)

    def compute(self, query: torch.Tensor, layer: LayerStorage, plan: AttentionPlan) -> torch.Tensor:
        """Return the attention of a pass."""
        return by_kernel(query, layer, plan, self.params)

    def attend(self, cache: BlockCache, segments: list[Segment], pieces: Pieces) -> torch.Tensor:
        """Run a pass over the tokens of `pieces`."""
        plan = cache.prepare(segments).plan
        new = torch.cat([self.stored[block][:, first:end] for block, first, end in pieces], dim=1)
        keys, values = new.chunk(2)
        cache.pool.arena.write(0, keys, values, plan)
        query = torch.cat([self.queries[block][first:end] for block, first, end in pieces])
        out = self.compute(query, cache.pool.arena.layers[0], plan)
        cache.commit()
        return out

    def alone(self, leaf: int) -> torch.Tensor:
        """Results of a row in one pass over one block."""
        torch.set_num_threads(1)
        pieces = self.tree.alone(leaf)
        total = sum(end for _, _, end in pieces)
        cache = BlockCache()
        return self.attend(cache, [Segment([cache.pool.new_block(total)], total)], pieces)

    def scheduled(self) -> list[torch.Tensor]:
        """Results of each block's tokens, in passes of random chunks of random blocks, with changing threads."""
        cache = BlockCache()
        parts: list[list[torch.Tensor]] = [[] for _ in self.tree.lengths]
        for segments, pieces in self.tree.passes(cache):
            torch.set_num_threads(self.tree.random.randint(1, 3))
            out = self.attend(cache, segments, pieces)
            sizes = [end - first for _, first, end in pieces]
            for part, (block, _, _) in zip(out.split(sizes), pieces, strict=True):
                parts[block].append(part)
        return [torch.cat(of_block) for of_block in parts]


def by_kernel(query: torch.Tensor, layer: LayerStorage, plan: AttentionPlan, params: AttentionParams) -> torch.Tensor:
    """Return the attention of a pass by the C kernel."""
    out = torch_attention.TorchBackend().attend(query, layer.keys, layer.values, plan, params)
    assert is_native(plan.windowed(params.window))
    return out


def is_native(plan: AttentionPlan) -> bool:
    return any(isinstance(getattr(value, "native", None), native.NativePlan) for value in plan.derived.values())


def num_different(case: Case) -> int:
    """Number of tokens of rows whose results differ from those of the row alone."""
    scheduled = case.scheduled()
    different = 0
    for leaf in case.tree.leaves:
        row = torch.cat([scheduled[block] for block in case.tree.path(leaf)])
        different += int((row != case.alone(leaf)).flatten(1).any(dim=1).sum())
    return different


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_in_any_schedule(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_bfloat16", lambda: False)  # PyTorch would compute it
    for seed in range(12):
        assert num_different(Case(seed, **CASES[case])) == 0, f"tree {seed}"


class Workers:
    """Workers see each other's blocks in different orders, and rotate their queries for each of them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        rotary = RotarySpec((1.0, 0.3, 0.1))
        self.params = AttentionParams(2, 0.3, rotary)
        self.cache = BlockCache({0: rotary})
        lengths = torch.randint(1, 200, (4,)).tolist()
        blocks = [self.cache.pool.new_block(length, base=100 * number) for number, length in enumerate(lengths)]
        for block, length in zip(blocks, lengths, strict=True):
            plan = self.cache.prepare([Segment([block], length)]).plan
            keys, values = torch.randn(2, 2, length, 16)
            self.cache.pool.arena.write(0, keys, values, plan)
            self.cache.commit()
        prompt, *own = blocks
        self.views = [[prompt, *own[k + 1 :], *own[:k], mine] for k, mine in enumerate(own)]
        self.query = torch.randn(len(own), 6, 16)

    def compute(self, query: torch.Tensor, layer: LayerStorage, plan: AttentionPlan) -> torch.Tensor:
        """Return the attention of a pass."""
        return by_kernel(query, layer, plan, self.params)

    def attend(self, workers: list[int]) -> torch.Tensor:
        """Attention of the last tokens of some workers."""
        plan = self.cache.prepare([Segment(self.views[worker], 1, write=False) for worker in workers]).plan
        out = self.compute(self.query[workers], self.cache.pool.arena.layers[0], plan)
        self.cache.rollback()
        return out


def test_a_worker_has_the_same_bits_with_and_without_the_others() -> None:
    for seed in range(8):
        workers = Workers(seed)
        together = workers.attend([0, 1, 2])
        for some in ([0], [1], [2], [2, 0], [1, 2]):
            assert torch.equal(workers.attend(some), together[some]), f"seed {seed}, workers {some}"


def test_this_would_find_tiles_at_the_boundaries_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schedules, where tiles begin with blocks, as they did: results differ in the last bits."""
    from hf_parallel.kernels import tiles

    def one_run_per_block(plan: AttentionPlan, order: object) -> object:
        return torch.arange(len(plan.pair_query)).numpy()

    monkeypatch.setattr(tiles, "_first_of_runs", one_run_per_block)
    assert sum(num_different(Case(seed)) for seed in range(6)) > 100

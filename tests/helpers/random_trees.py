"""Random trees of blocks, and random schedules in which passes append to them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from hf_parallel.cache import Block, BlockCache, Segment

LENGTHS = (1, 3, 63, 64, 65)  # at the boundaries of tiles
Pieces = Sequence[tuple[int, int, int]]
"""Block, first token and end of each segment of a pass."""


class RandomTree:
    """Blocks with a parent each, but for the first. `longest`: of the blocks that have none of the given `lengths`."""

    def __init__(self, seed: int, longest: int = 300, lengths: Sequence[int] = LENGTHS) -> None:
        self.random = random.Random(seed)
        count = self.random.randint(1, 7)
        self.parents = [-1]
        for block in range(1, count):
            self.parents.append(self.random.randint(0, block - 1))
        self.lengths = [self.random.choice((*lengths, self.random.randint(1, longest))) for _ in range(count)]

    def path(self, block: int) -> list[int]:
        """The blocks from the root to `block`."""
        return [*self.path(self.parents[block]), block] if block >= 0 else []

    @property
    def leaves(self) -> list[int]:
        return [block for block in range(len(self.lengths)) if block not in self.parents]

    def alone(self, leaf: int) -> Pieces:
        """The tokens of a row, as pieces of its blocks."""
        return [(block, 0, self.lengths[block]) for block in self.path(leaf)]

    def passes(self, cache: BlockCache) -> Iterator[tuple[list[Segment], Pieces]]:
        """Passes of random chunks of random blocks, whose parents are complete."""
        blocks: list[Block] = []
        for number, length in enumerate(self.lengths):
            base = sum(self.lengths[earlier] for earlier in self.path(number)[:-1])
            blocks.append(cache.pool.new_block(length + self.random.randint(0, 9), base=base))
        done = [0] * len(blocks)
        while done != self.lengths:
            ready = [n for n in range(len(blocks)) if done[n] < self.lengths[n] and self._has_parents(n, done)]
            segments, pieces = [], []
            for number in self.random.sample(ready, self.random.randint(1, len(ready))):
                left = self.lengths[number] - done[number]
                count = min(left, self.random.choice((1, 2, left, self.random.randint(1, left))))
                segments.append(Segment([blocks[n] for n in self.path(number)], count))
                pieces.append((number, done[number], done[number] + count))
            yield segments, pieces
            for number, _, end in pieces:
                done[number] = end

    def _has_parents(self, block: int, done: list[int]) -> bool:
        return all(done[earlier] == self.lengths[earlier] for earlier in self.path(block)[:-1])

"""Pool: blocks of keys and values in an arena.

A block is a run of tokens stored once, however many rows see it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.arena import Arena, Extent
from hf_parallel.cache.images import ImageTable
from hf_parallel.cache.states import StateArena
from hf_parallel.kernels import RotarySpec, TokenRange

MIN_GROWTH = 16
"""Least capacity to which a block of an engine's pool grows, in tokens."""


@dataclass(eq=False)
class Block:
    """A run of `length` tokens from index `first` of an extent. Its first key is rotated to position `base`."""

    extent: Extent
    base: int = 0
    first: int = 0
    length: int = 0
    gap: int = 0  # masked tokens before the first one; sliding windows count them, positions do not
    shift: int = 0  # by how much the positions after the block differ from its number of tokens, after an image
    parts: tuple[Block, Block] | None = None  # which hold its tokens, if it was divided while rows see it
    state: int = -1  # slot of a recurrent state; -1: none
    state_at: int = -1  # number of the block's tokens that the state includes; `length` if it is that of its end
    age: int = field(default_factory=itertools.count().__next__, init=False)  # blocks that were made before it

    @property
    def free_slots(self) -> int:
        """Number of tokens that can be appended without growing the extent."""
        return self.extent.capacity - self.first - self.length

    @property
    def has_state(self) -> bool:
        """Whether the state at its end is kept."""
        return self.state_at == self.length

    @property
    def tokens(self) -> TokenRange:
        """Location of the block's tokens in every layer's storage."""
        return self.extent.range(self.first, self.length)

    def __repr__(self) -> str:
        return f"Block(length={self.length}, base={self.base}, at={self.extent.origin}+{self.first})"


Wanted = Sequence[tuple[Block, int]]
"""Blocks, each with the number of tokens that it must have capacity for. They get a state if the model keeps states."""


@dataclass(frozen=True)
class Budget:
    """Bytes that keys, values and states may take together, and the bytes of a token and of a state."""

    bytes: int
    token_bytes: int
    state_bytes: int
    quantized_bytes: int = 0  # of a token in 8 bits

    def cost(self, tokens: int, states: int, quantized: int = 0) -> int:
        """Return the bytes of the keys and values of some tokens, of some states, and of tokens in 8 bits."""
        return tokens * self.token_bytes + states * self.state_bytes + quantized * self.quantized_bytes

    def held(self, blocks: Collection[Block]) -> int:
        """Return the bytes of the keys, values and states of blocks."""
        tokens = 0
        quantized = 0
        states = 0
        for block in blocks:
            if block.extent.is_quantized:
                quantized += block.length
            else:
                tokens += block.length
            if block.state >= 0:
                states += 1
        return self.cost(tokens, states, quantized)

    def max_tokens(self, states: int, quantized: int = 0) -> int:
        """Return how many tokens fit beside some states and tokens in 8 bits."""
        if not self.token_bytes:
            return sys.maxsize
        free = self.bytes - self.cost(0, states, quantized)
        return free // self.token_bytes


class Pool:
    """Blocks of keys and values in one arena.

    `version` changes with every change after which a decode step does not follow from the step before.

    Parameters
    ----------
    rotary : mapping of int to RotarySpec or None, optional
        Rotary embedding by layer index (None: the layer has none).
    parent : Pool, optional
        Pool in whose arena the blocks are, and to which they belong as well. They get memory when tokens are appended.
    """

    def __init__(self, rotary: Mapping[int, RotarySpec | None] | None = None, parent: Pool | None = None) -> None:
        self.rotary = dict(rotary) if rotary is not None else None
        self.on_copy: Callable[[Block, int, int, Block, int], None] | None = None
        """Records that tokens `start <= j < stop` of a block were copied, or moved, to another one, at index `at`."""
        self.on_full: Callable[[Wanted, int], None] | None = None
        """Frees memory for blocks that grow, given the number of slots, or raises. Set by an engine."""
        self.blocks: set[Block] = set()
        self._version = 0
        self._parent = parent  # a pool that referred to itself would keep its arena until a garbage collection
        self.arena: Arena = Arena() if parent is None else parent.arena
        self.states: StateArena = StateArena() if parent is None else parent.states
        self.budget: Budget | None = None
        self.images: ImageTable = ImageTable() if parent is None else parent.images

    @property
    def _root(self) -> Pool:
        return self if self._parent is None else self._parent

    @property
    def version(self) -> int:
        """Number that changes with every change after which a decode step does not follow from the step before."""
        return self._version if self._parent is None else self._parent._version

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"on_copy": None}

    def clear(self) -> None:
        """Delete all blocks and release their memory."""
        if self._root is self:
            self.blocks.clear()
            self.arena.clear()
            self.states.clear()
            self.touch()
        for block in list(self.blocks):
            self.free(block)

    def touch(self) -> None:
        """Register a change to blocks, after which a decode step does not follow from the step before."""
        self._root._version += 1

    def new_block(self, capacity: int = 0, base: int = 0) -> Block:
        """Allocate an empty block for `capacity` tokens; it grows when more are appended."""
        return self.new_blocks(1, capacity, base)[0]

    def new_blocks(self, count: int, capacity: int = 0, base: int = 0) -> list[Block]:
        """Allocate empty blocks evenly spaced in memory, so that attention can read them in one call."""
        extents = self.arena.allocate([capacity if self._root is self else 0] * count)
        blocks = [Block(extent, base) for extent in extents]
        self.blocks.update(blocks)
        self._root.blocks.update(blocks)
        return blocks

    def free(self, block: Block) -> None:
        """Delete a block and release its memory."""
        self.check_owned(block)
        self.touch()
        self.disown(block)
        self._root.blocks.remove(block)
        self.arena.release(block.extent)
        self.forget_state(block)

    def quantize(self, block: Block) -> bool:
        """Round a block that no row writes any more to 8 bits. Return whether there was memory in the budget for it."""
        arena = self.arena
        quantized = self.arena.quantized
        size = block.length
        assert quantized is not None, "no dtype was chosen"
        if self.budget is not None and not quantized.fits(size):
            slots = quantized.num_slots + max(size, quantized.num_slots // 2)
            limit = self.budget.max_tokens(self.states.max_slots or 0, slots)
            if limit < arena.num_slots:
                return False
            arena.limit(limit)
            quantized.max_slots = slots
        (extent,) = quantized.allocate([size])
        try:
            arena.quantize(block.tokens, extent.range(0, size))
        except BaseException:
            arena.release(extent)
            raise
        arena.release(block.extent)
        block.extent = extent
        block.first = 0
        self.touch()
        return True

    def disown(self, block: Block) -> None:
        """Leave a block to the parent."""
        if self._root is not self:
            self.blocks.discard(block)

    def release(self, block: Block) -> None:
        """Release the memory of a block, which becomes empty but is not deleted."""
        self.touch()
        self.arena.release(block.extent)
        block.extent = Extent(0, 0)
        block.first = 0
        block.length = 0
        self.forget_state(block)

    def continues(self, block: Block, length: int) -> bool:
        """Return whether rows can continue after the first `length` tokens of a block: no state is missing there."""
        return not (length and self.states.in_use) or block.state_at == length

    def forget_state(self, block: Block) -> None:
        """Free the state of a block, if it has one."""
        if block.state >= 0:
            self.states.release(block.state)
        block.state = block.state_at = -1

    def move_state(self, source: Block, target: Block) -> None:
        """Make the state at the end of `source` that of `target`, to whose end its tokens were copied.

        At other positions than its own, or if it has none, `target` has no state afterward.
        """
        if source.has_state and source.base + source.length == target.base + target.length:
            source.state, target.state = target.state, source.state
            target.state_at = target.length
        elif source.length:
            target.state_at = -1

    def truncate(self, block: Block, length: int) -> None:
        """Remove a block's tokens from index `length` on; raises `ValueError` unless `0 <= length <= block.length`."""
        self.check_owned(block)
        if not 0 <= length <= block.length:
            raise ValueError(f"length must be between 0 and the block's {block.length}, got {length}")
        if length < block.length:
            self.touch()
            block.length = length
            block.shift = 0
            block.state_at = -1

    def split(self, block: Block, at: int) -> Block:
        """Split a block in two without copying: it keeps `at` tokens, the returned block holds the others."""
        self.check_owned(block)
        if not 0 < at < block.length:
            raise ValueError(f"at must lie inside the block's {block.length} tokens, got {at}")
        tail = self._tail(block, at)
        block.length = at
        return tail

    def divide(self, block: Block, at: int) -> tuple[Block, Block]:
        """Replace a block by two new ones without copying, the first for `at` tokens.

        Rows that see the block find them as its `parts`. Tokens that it does not hold yet belong to the second one.
        """
        head_length = min(at, block.length)
        head = Block(block.extent, block.base, block.first, head_length, block.gap)
        if block.length > at:
            tail = self._tail(block, at)
        else:
            tail = self.new_block(base=block.base + at)
            tail.shift = block.shift
        if block.state_at <= head_length:
            head.state = block.state
            head.state_at = block.state_at
            block.state = -1
            block.state_at = -1
        self._log_copy(block, 0, head_length, head, 0)
        self.blocks.add(head)
        self.blocks.remove(block)
        self.touch()
        block.parts = head, tail
        return head, tail

    def _tail(self, block: Block, at: int) -> Block:
        """Return a new block of the tokens of another one from index `at` on, in the same extent."""
        tail = Block(
            block.extent,
            base=block.base + at,
            first=block.first + at,
            length=block.length - at,
            shift=block.shift,
        )
        block.shift = 0
        block.extent.owners += 1
        if block.state_at > at:
            tail.state = block.state
            tail.state_at = block.state_at - at
            block.state = -1
            block.state_at = -1
        self.blocks.add(tail)
        self._root.blocks.add(tail)
        self.touch()
        self._log_copy(block, at, block.length, tail, 0)
        return tail

    def copy(self, block: Block, extra_capacity: int = 0, length: int | None = None) -> Block:
        """Copy the first `length` tokens of a block (default: all) into a new one.

        It has capacity for `extra_capacity` more tokens.
        """
        self.check_owned(block)
        length = block.length if length is None else length
        copy = self.new_block(length + extra_capacity, block.base)
        copy.gap = block.gap
        copy.shift = block.shift if length == block.length else 0
        try:
            self.reserve([(copy, length)])  # blocks of a child begin without memory
            self.arena.copy(block.extent.range(block.first, length), copy.extent.range(0, length), 0, self.rotary)
            self._log_copy(block, 0, length, copy, 0)
            copy.length = length
            if block.state >= 0 and block.state_at == length:
                (copy.state,) = self.states.allocate(1)
                copy.state_at = length
                self.states.copy(block.state, copy.state)
        except BaseException:
            self.free(copy)
            raise
        return copy

    def move(self, source: Block, target: Block) -> None:
        """Move all tokens of `source` to the end of `target`, with keys rotated to their new positions.

        Copies only these tokens; `source` is empty afterward. If it has followed `target`, its state is from now on
        that of `target`. Raises `ValueError` if the blocks are the same, or if positions change and the rotary
        embedding is unknown.
        """
        self.check_owned(source)
        self.check_owned(target)
        if source is target:
            raise ValueError("a block cannot be moved into itself")
        delta = target.base + target.length - source.base
        if delta and self.rotary is None:
            raise ValueError("moving a block to other positions needs the rotary embedding of the model's layers")
        self.reserve([(target, target.length + source.length)])
        end = target.extent.range(target.first + target.length, source.length)
        self.arena.copy(source.tokens, end, delta, self.rotary)
        self._log_copy(source, 0, source.length, target, target.length)
        self.touch()
        target.length += source.length
        self.move_state(source, target)
        source.length = 0
        source.state_at = -1

    def append_all(self, moves: Sequence[tuple[Block, Block]]) -> None:
        """Move all tokens of each source to the end of its target, which they continue at their own positions.

        `moves` are pairs (source, target), in order. As `move`, but all tokens are copied at once. Raises `ValueError`
        if a block is both a source and a target, or if tokens do not continue their target.
        """
        lengths = {target: target.length for _, target in moves}
        for source, target in moves:
            self.check_owned(source, target)
            if source in lengths:
                raise ValueError(f"{source!r} cannot be moved and receive tokens")
            if source.base != target.base + lengths[target]:
                raise ValueError(f"{source!r} does not continue {target!r}")
            lengths[target] += source.length
        self.reserve(list(lengths.items()))
        sources = [source.tokens for source, _ in moves]
        ends = {target: target.length for target in lengths}
        places = []
        for source, target in moves:
            places.append(target.extent.range(target.first + ends[target], source.length))
            ends[target] += source.length
        self.arena.copy_many(sources, places)
        self.touch()
        for source, target in moves:
            self._log_copy(source, 0, source.length, target, target.length)
            target.length += source.length
            self.move_state(source, target)
            source.length = 0
            source.state_at = -1

    def reserve(self, wanted: Wanted) -> None:
        """Ensure capacity for `length` tokens in each `(block, length)`.

        A block that must grow moves to an extent of at least twice the capacity, so that growth copies each token
        O(1) times (amortized). Blocks of equal capacity that grow together stay evenly spaced. In an
        engine, each has its own size, and `on_full` is called until there is memory, also for new states. Where there
        is, blocks that are half full grow as well: after each growth, the next pass is planned from scratch.
        """
        while True:
            growing = [(block, length) for block, length in wanted if _outgrows(block, length)]
            on_full = self._root.on_full
            if on_full is not None and self.new_states(wanted) > self.states.free_slots:
                on_full(wanted, sum(_grown_sizes(growing)))
                continue
            if not growing:
                return
            if on_full is None:
                sizes = _doubled_sizes(growing)
            else:
                soon = [(block, length) for block, length in wanted if _outgrows(block, length + _slack(block))]
                if self.arena.fits(sum(_grown_sizes(soon))):
                    growing = soon
                sizes = _grown_sizes(growing)
                if not self.arena.fits(sum(sizes)):
                    on_full(wanted, sum(sizes))
                    continue
            order = sorted(range(len(sizes)), key=sizes.__getitem__)  # blocks of one size side by side
            blocks = [growing[index][0] for index in order]
            self._grow(blocks, [sizes[index] for index in order])

    def new_states(self, wanted: Wanted) -> int:
        """Return the number of states to allocate for blocks that grow."""
        return sum(block.state < 0 for block, _ in wanted) if self.states.in_use else 0

    def set_budget(self, budget: Budget) -> None:
        """Limit the memory of an empty pool. All of it is for keys and values, until `defragment` divides it."""
        self.budget = budget
        self.states.limit(0)
        self.arena.limit(budget.max_tokens(states=0))
        if self.arena.quantized is not None:
            self.arena.quantized.max_slots = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are not allocated, contiguous or not."""
        assert self.budget is not None
        quantized = 0 if self.arena.quantized is None else self.arena.quantized.used_slots
        return self.budget.bytes - self.budget.cost(self.arena.used_slots, self.states.num_used, quantized)

    def exceed(self, wanted: Wanted, slots: int) -> None:
        """Allow `slots` more slots, and new states, than the budget has; `defragment` divides the budget again."""
        assert self.arena.max_slots is not None, "there is a budget"
        self.arena.limit(self.arena.num_slots + slots)
        if self.states.in_use:
            needed = self.states.num_used + self.new_states(wanted)
            self.states.limit(max(self.states.num_slots, needed))

    def defragment(self, wanted: Wanted) -> bool:
        """Remove all holes and unused capacity, and reserve the wanted lengths; return whether they fit.

        Divides the rest of the budget between states, and keys and values.
        """
        lengths = dict(wanted)
        budget = self.budget
        quantized = self.arena.quantized
        filled = [block for block in self.blocks if block.length]
        filled.sort(key=lambda block: (block.extent.origin, block.first))
        rounded = [block for block in filled if block.extent.is_quantized]
        blocks = [block for block in filled if not block.extent.is_quantized]
        blocks += [block for block in lengths if not block.length]
        needed = sum(lengths.get(block, block.length) for block in blocks)
        states = self.states.num_used + self.new_states(wanted)
        tokens = sum(block.length for block in rounded)
        if budget is None:
            return False
        left = budget.bytes - budget.cost(needed, states, tokens)
        if left < 0:
            return False
        for block in self.blocks - {*blocks, *rounded}:
            self.release(block)
        if rounded:
            self._grow(rounded, [block.length for block in rounded], quantized)
        if quantized is not None:
            quantized.limit(tokens)
        if self.states.in_use:
            states += left // 2 // budget.state_bytes
            slots = [block.state for block in self.blocks if block.state >= 0]
            moved = self.states.defragment(slots)
            for block in self.blocks:
                block.state = moved.get(block.state, block.state)
            self.states.limit(states)
        limit = budget.max_tokens(states, tokens)
        self.arena.max_slots = limit
        slack = min(MIN_GROWTH, (limit - needed) // len(lengths))
        capacities = []
        for block in blocks:
            capacities.append(lengths[block] + slack if block in lengths else block.length)
        self._grow(blocks, capacities)
        self.arena.limit(limit)
        return True

    def _grow(self, blocks: Sequence[Block], capacities: Sequence[int], arena: Arena | None = None) -> None:
        """Move blocks to new extents, adjacent in memory."""
        self.touch()
        tokens = [(block.extent, block.first, block.length) for block in blocks]
        extents = (arena or self.arena).relocate(tokens, capacities)
        for block, extent in zip(blocks, extents, strict=True):
            block.extent = extent
            block.first = 0

    def clear_unused(self) -> None:
        """Overwrite all unused memory with zeros: attention may read it with weight 0, which does not hide a NaN."""
        for arena in filter(None, (self.arena, self.arena.quantized)):
            is_quantized = arena is not self.arena
            arena.clear_unused([block.tokens for block in self.blocks if block.extent.is_quantized == is_quantized])

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all unique tokens."""
        return sum(map(self.bytes_of, list(self.blocks)))  # another thread may change them

    def bytes_of(self, block: Block) -> int:
        """Return the bytes of the keys and values of a block."""
        quantized = self.arena.quantized if block.extent.is_quantized else None
        return block.length * (quantized or self.arena).bytes_per_token

    def bytes_with_state(self, block: Block) -> int:
        """Return the bytes of the keys, values and state of a block."""
        return self.bytes_of(block) + (self.states.bytes_per_slot if block.state >= 0 else 0)

    def check_owned(self, *blocks: Block) -> None:
        """Raise `ValueError` unless blocks are of this pool, or of its parent."""
        owned = self._root.blocks
        if not owned.issuperset(blocks):
            other = next(block for block in blocks if block not in owned)
            raise ValueError(f"{other!r} is not (or no longer) a block of this cache")

    def _log_copy(self, source: Block, start: int, stop: int, target: Block, at: int) -> None:
        if self.on_copy is not None:
            self.on_copy(source, start, stop, target, at)


def _grown(block: Block, length: int) -> int:
    return max(2 * block.extent.capacity, length, MIN_GROWTH)


def _slack(block: Block) -> int:
    """Return the number of free slots below which a block of an engine grows together with others."""
    return max(block.extent.capacity, MIN_GROWTH) // 2


def _grown_sizes(growing: Wanted) -> list[int]:
    """Return the capacities of blocks that grow in an engine."""
    return [_grown(block, length) for block, length in growing]


def _doubled_sizes(growing: Wanted) -> list[int]:
    """Return capacities of at least twice the present ones, equal for blocks of equal capacity."""
    longest: dict[int, int] = {}  # wanted length, by present capacity
    for block, length in growing:
        capacity = block.extent.capacity
        longest[capacity] = max(longest.get(capacity, 1), length)
    sizes = []
    for block, _ in growing:
        capacity = block.extent.capacity
        sizes.append(max(2 * capacity, longest[capacity]))
    return sizes


def _outgrows(block: Block, length: int) -> bool:
    is_shared = (block.extent.owners > 1 or block.extent.is_quantized) and length > block.length
    return block.first + length > block.extent.capacity or is_shared


def parts_of(view: Iterable[Block]) -> Iterator[Block]:
    """Yield the blocks of a view, with each divided block replaced by its parts."""
    for block in view:
        if block.parts:
            yield from parts_of(block.parts)
        else:
            yield block

"""Rows of a batch, groups of rows that share state, and pending KV writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hf_parallel.cache import Block, Segment, View
from hf_parallel.cache.logits_key import state_step
from hf_parallel.cache.tree import Node

PassInputs = list[tuple[Segment, Sequence[int]]]
"""Inputs of one forward pass: segments with their tokens."""


@dataclass(eq=False)
class Row:
    """One sequence being generated: its index in the batch, the blocks it attends to, and the tokens that the next
    forward pass appends to the last of them."""

    index: int
    view: View
    pending: list[int] = field(default_factory=list)
    last_segment: Segment | None = None  # of the last pass that it took part in
    output_row: int = -1  # as `ParallelStreamer.write_row` numbers the rows; default: the index
    dropped: bool = False  # by `DecodeLoop.drop`
    group: RowGroup | None = None  # the group that the row belongs to
    writes: PendingWrites | None = None  # KV writes pending besides the row's own, which it may share with other rows
    leaf: Node | None = None  # of the cache's tree, after which its own block is kept; None: it is not

    def __post_init__(self) -> None:
        if self.output_row < 0:
            self.output_row = self.index

    def current_view(self) -> View:
        """Return the blocks that the row attends to now, of which it appends to the last."""
        return self.view

    def segments(self) -> PassInputs:
        """Return the row's inputs of the next pass; its next token follows the last of them.

        A class that overrides it overrides `continues` to match.
        """
        segment = Segment(self.current_view(), len(self.pending))
        inputs: PassInputs = [(segment, self.pending)]
        if self.writes is not None and self.writes.pending:
            inputs = [*self.writes.take(), *inputs]
        return inputs

    def continues(self, segment: Segment, token: int) -> bool:
        """Whether the row's inputs of the next pass are `token` in `segment` and nothing else."""
        if self.pending != [token] or (self.writes is not None and self.writes.pending):
            return False
        view = self.current_view()
        return view is segment.view or view == segment.view

    def tokens_left(self) -> int | None:
        """Maximum number of tokens that the row may still generate; None: as many as `max_length` allows."""
        return None

    def is_active(self) -> bool:
        """Whether the row generates further tokens; checked once all rows of a pass have their tokens."""
        return not self.dropped


def collect_inputs(rows: Iterable[Row]) -> tuple[PassInputs, list[int]]:
    """Return the inputs of rows in their next pass, and for each row the index of its last segment."""
    inputs: PassInputs = []
    ends = []
    for row in rows:
        inputs += row.segments()
        row.last_segment = inputs[-1][0]
        ends.append(len(inputs) - 1)
    return inputs, ends


class PendingWrites:
    """KV writes pending for the next forward pass, besides the rows' own; the first row that calls `take` adds them.

    `view_of` returns the view of a block at the time of that pass.
    """

    def __init__(self, view_of: Callable[[Block], View]) -> None:
        self._view_of = view_of
        self.pending: list[tuple[Block, list[int]]] = []

    def add(self, block: Block, tokens: Sequence[int]) -> None:
        """Schedule tokens to be appended to a block; an empty sequence is ignored."""
        if tokens:
            self.pending.append((block, list(tokens)))

    def take(self) -> PassInputs:
        """Return the pending segments, each with the view of its block, and clear them."""
        writes = self.pending
        self.pending = []
        return [(Segment(self._view_of(block), len(tokens)), tokens) for block, tokens in writes]

    def __contains__(self, block: object) -> bool:
        return any(other is block for other, _ in self.pending)


class RowGroup:
    """Rows that attend to each other's tokens, so that each pass is computed for all of them or for none.

    The next logits of a row depend on all earlier inputs of the group and on nothing else. A digest of these inputs is
    the key under which the logits are cached. The `repr` of `key` identifies the initial state.
    """

    def __init__(self, key: object) -> None:
        self.backlog: list[PassInputs] = []  # inputs of skipped passes, oldest first
        self.inserted_tokens = 0  # number of inputs of the next pass that were not generated
        self._digest = _digest(b"", key)

    def unfilled_prompt(self) -> PassInputs:
        """Return the uncomputed part of the prompt. Groups that share a prompt may return the same segments."""
        return []

    def describe(self, inputs: PassInputs) -> tuple[list[str], object]:
        """Return for each segment the name of its block, the same in every call, and any other change of state."""
        raise NotImplementedError

    def advance(self, inputs: PassInputs, ends: Sequence[int]) -> list[int]:
        """Add a pass to the digest. Return the step of each row to its new `LogitsKey`; `ends` are the indices of the
        rows' last segments."""
        positions, changed = self.describe(inputs)
        appended = []
        for position, (_, tokens) in zip(positions, inputs, strict=True):
            appended.append((position, *map(int, tokens)))
        self._digest = _digest(self._digest, (appended, changed))
        return [state_step(_digest(self._digest, positions[end])) for end in ends]


def _digest(previous: bytes, state: object) -> bytes:
    return hashlib.sha256(previous + repr(state).encode()).digest()

"""Rows, and groups of rows that see each other's tokens: who brings what to a forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_parallel.cache import Block, Segment, View

PassInputs = list[tuple[Segment, Sequence[int]]]
"""What goes into a forward pass: segments with their tokens."""


@dataclass(eq=False)
class Row:
    """One sequence that is being written.

    `index` is its place in the batch, `view` the blocks that it sees, `pending` the tokens that it brings to the
    next forward pass.
    """

    index: int
    view: View
    pending: list[int] = field(default_factory=list)

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """What the row brings to the next pass, with the tokens; its next token follows from the last of them."""
        return [(Segment(self.view, len(self.pending)), self.pending)]

    def wanted(self) -> bool:
        """Whether the row should go on; asked when all rows have taken their tokens."""
        return True

    @property
    def group(self) -> Group | None:
        """The rows, if any, with which it is computed together."""
        return None


class PendingWrites:
    """Tokens whose keys and values the next forward pass must compute before, or beside, what the rows append.

    Several rows may share one object: the first whose segments are collected appends the pending tokens too.
    """

    def __init__(self) -> None:
        self._writes: list[tuple[Block, list[int]]] = []

    def add(self, block: Block, tokens: Sequence[int]) -> None:
        """Add tokens to be appended to a block; none is no error."""
        if tokens:
            self._writes.append((block, list(tokens)))

    def discard(self, block: Block) -> None:
        """Drop what is pending for a block."""
        self._writes = [(other, tokens) for other, tokens in self._writes if other is not block]

    def take(self, view_of: Callable[[Block], View]) -> PassInputs:
        """Return the pending segments, each with the view of its block, and forget them."""
        writes, self._writes = self._writes, []
        return [(Segment(view_of(block), len(tokens)), tokens) for block, tokens in writes]

    def __contains__(self, block: object) -> bool:
        return any(other is block for other, _ in self._writes)

    @property
    def num_tokens(self) -> int:
        """Pending tokens of all blocks."""
        return sum(len(tokens) for _, tokens in self._writes)


class Group:
    """Rows that are computed together, or not at all where it is remembered what follows all of them.

    What follows one of them hangs on all that they have brought together, pass by pass. A digest of that names a state
    of the group: whatever decided on the tokens (settings, tokenizer, criteria) need not be known to know it again.

    Parameters
    ----------
    beginning
        What tells the group from others before it brings anything; its `repr` is taken.

    Attributes
    ----------
    backlog : list of PassInputs
        What its rows brought to passes that were not computed, oldest first.
    given : int
        Tokens of its next pass that nobody has generated.
    """

    def __init__(self, beginning: object) -> None:
        self.backlog: list[PassInputs] = []
        self.given = 0
        self._trace = _digest(b"", beginning)

    def unread(self) -> PassInputs:
        """What must be computed before anything that the rows bring; other groups may bring the same."""
        return []

    def describe(self, brought: PassInputs) -> tuple[list[str], object]:
        """A name of where each segment's tokens go, the same for whoever does the same, and what else has changed."""
        raise NotImplementedError

    def visit(self, brought: PassInputs, ends: Sequence[int]) -> list[int]:
        """Go on to the state behind a pass; returns its name for each row, whose segments are at `ends`.

        Names are negative, which no token is.
        """
        places, changed = self.describe(brought)
        told = [(place, *map(int, tokens)) for place, (_, tokens) in zip(places, brought, strict=True)]
        self._trace = _digest(self._trace, (told, changed))
        return [-1 - (int.from_bytes(_digest(self._trace, places[end])[:8], "big") >> 1) for end in ends]


@dataclass(eq=False)
class Part:
    """What the rows of a group bring to a pass, or all rows that are in none.

    The tokens of row `rows[i]` end with segment `ends[i]`; `given` of them all nobody has generated.
    """

    group: Group | None
    rows: list[Row]
    brought: PassInputs
    ends: list[int]
    given: int

    @classmethod
    def of(cls, group: Group | None, rows: list[Row]) -> Part:
        """Ask rows for what they bring."""
        brought: PassInputs = []
        ends = []
        for row in rows:
            brought += row.segments()
            ends.append(len(brought) - 1)
        given = 0
        if group is not None:
            given, group.given = group.given, 0
        return cls(group, rows, brought, ends, given)


def _digest(before: bytes, what: object) -> bytes:
    return hashlib.sha256(before + repr(what).encode()).digest()

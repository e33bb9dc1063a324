"""TreeNode: a tree of alternatives, and its cells on a page: the states of an agent's search, or forked candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OPEN_CELLS = 60
"""Trees of up to this number of nodes are shown without a click."""


@dataclass(eq=False)
class TreeNode:
    """A node of a tree of alternatives.

    Attributes
    ----------
    id
        Its name, such as `0.2.1`.
    outcome
        `selected`: on the path that was chosen. `continued`: another node with children. `pruned`: given up. `ended`:
        the end of a path that was not chosen. `failed`: its code raised an error. `start`: the beginning, without a
        value.
    value
        Its score, None without one.
    text
        The text with which it continues its parent.
    """

    id: str
    outcome: str = "start"
    value: float | None = None
    text: str = ""
    children: list[TreeNode] = field(default_factory=list)

    @property
    def num_leaves(self) -> int:
        """Number of paths through this node."""
        return sum(not node.children for node in self.walk())

    def walk(self) -> Iterator[TreeNode]:
        """Yield this node and all below it, each before its children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


def tree_cells(root: TreeNode) -> dict[str, Any]:
    """Return a tree as plain data for `tree.html`: a column for each depth, and a row for each path."""
    cells = []
    row = 1
    waiting = [(root, 1)]
    while waiting:
        node, column = waiting.pop()
        cells.append(
            {
                "place": f"grid-column:{column};grid-row:{row} / span {node.num_leaves}",
                "id": node.id,
                "outcome": node.outcome,
                "value": None if node.value is None else f"{node.value:.4g}",
                "text": node.text.strip(),
            }
        )
        row += not node.children
        waiting += [(child, column + 1) for child in reversed(node.children)]
    counted = len(cells) - 1
    pruned = sum(cell["outcome"] == "pruned" for cell in cells)
    return {"cells": cells, "counted": counted, "pruned": pruned, "is_open": counted <= OPEN_CELLS}

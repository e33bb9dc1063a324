"""Pins of prefixes: whatever an owner gives up or keeps, nothing is pinned once all owners have ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.engine.leases import Lease, LeaseTerms


def owner_of(tree: Any) -> tuple[Lease, Any]:
    lease = Lease("holder", LeaseTerms())
    return lease, tree.add_owner(lease)


def test_a_node_that_was_split_while_it_was_pinned_can_be_given_up() -> None:
    tree = SharedPrefixCache().tree
    first, root = owner_of(tree)
    other, _ = owner_of(tree)
    prompt = tree.insert(np.arange(1, 4), root)
    tree.pin(prompt, first)
    leaf = tree.insert(np.arange(4, 14), prompt)
    tree.pin(leaf, first)
    head = tree.insert(np.arange(4, 9), prompt)
    tree.pin(head, other)
    assert head is leaf.parent
    tree.unpin_nodes([leaf], first)
    assert set(tree.pins) == {prompt, head}
    assert tree.pins[head] == {other}
    assert tree.pins[prompt] == {first, other}
    tree.unpin(first)
    tree.unpin(other)
    assert not tree.pins
    assert not tree.leaves

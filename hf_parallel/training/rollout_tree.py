"""Rollouts as trees: branches of a prompt that continue each other, rewards of leaves, and advantages of nodes.

A node is tokens that the model sampled, or others, such as an answer of a tool. The children of a node are samples from
the same distribution. An estimator is a function of the tree, which returns the advantage of each node. The estimators
here give unbiased gradients of the expected reward, because the baseline of a node is the value of nodes that do not
depend on it: siblings of the node, or of one of its ancestors. None divides by a standard deviation, as GRPO does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.engine import Engine, RequestHandle
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.generation.validation import check_int
from hf_parallel.training.example import as_ids
from hf_parallel.training.requests import as_they_end, rollout_settings, sampled_row
from hf_parallel.training.tree import tree_logprobs

Branching: TypeAlias = Callable[[int, Sequence[float]], int]
"""Returns how many children a node gets, given its depth and the log-probabilities of its tokens."""


@dataclass(eq=False)
class RolloutTree:
    """Branches of a prompt.

    Attributes
    ----------
    prompt : list of int
    parents : list of int
        Parent of each node, which is an earlier node; -1 for nodes that continue the prompt.
    tokens : list of list of int
        Tokens of each node.
    sampled : list of bool
        Whether the model sampled the tokens of a node. Other nodes have no siblings.
    log_probs : list of list of float, optional
        Log-probabilities of the tokens of each node under the sampled distribution.
    """

    prompt: list[int]
    parents: list[int]
    tokens: list[list[int]]
    sampled: list[bool]
    log_probs: list[list[float]] | None = None

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents must be earlier nodes or -1, got {parent} for node {node}")
        for node, sampled in enumerate(self.sampled):
            if not sampled and len(self.siblings(node)) > 1:
                raise ValueError(f"sampled: node {node} was not sampled, but has siblings")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of each node, followed by the children of the prompt."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent].append(node)
        return children

    @property
    def leaves(self) -> list[int]:
        """Nodes without children."""
        return [node for node in range(len(self)) if not self.children[node]]

    def siblings(self, node: int) -> list[int]:
        """Return the children of a node's parent, itself included."""
        return self.children[self.parents[node]]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the prompt to a node."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def ids(self, node: int) -> list[int]:
        """Return the tokens from the first of the prompt to the last of a node; -1: the prompt."""
        return [*self.prompt, *(token for part in self.path(node) for token in self.tokens[part])]

    def above(self, leaves: Iterable[int]) -> tuple[RolloutTree, list[int]]:
        """Return the part of the tree from the prompt to some of its leaves, and the number here of each node there."""
        nodes = sorted({node for leaf in leaves for node in self.path(leaf)})
        number = {node: index for index, node in enumerate(nodes)}
        part = RolloutTree(
            self.prompt,
            [number.get(self.parents[node], -1) for node in nodes],
            [self.tokens[node] for node in nodes],
            [self.sampled[node] for node in nodes],
        )
        return part, nodes

    @cached_property
    def weights(self) -> np.ndarray:
        """Weight of each node in the loss, float64: children divide the weight of their parent equally."""
        weights = np.ones(len(self))
        for node, parent in enumerate(self.parents):
            above = 1.0 if parent < 0 else weights[parent]
            weights[node] = above / len(self.siblings(node))
        return weights

    def values(self, rewards: Mapping[int, float]) -> np.ndarray:
        """Return the value of each node, float64: the reward of a leaf, or the mean value of the children.

        Raises `ValueError` unless exactly the leaves have rewards.
        """
        if not isinstance(rewards, Mapping):
            raise ValueError(f"rewards must be a mapping from leaves to their rewards, got {type(rewards).__name__}")
        if set(rewards) != set(self.leaves):
            raise ValueError(f"rewards must have the leaves {self.leaves}, got {sorted(rewards)}")
        values = np.zeros(len(self))
        for node in reversed(range(len(self))):
            below = self.children[node]
            values[node] = np.mean(values[below]) if below else rewards[node]
        return values


Estimator: TypeAlias = Callable[[RolloutTree, Mapping[int, float]], np.ndarray]
"""Returns the advantage of each node, given the rewards of leaves."""


def outcome_advantages(tree: RolloutTree, rewards: Mapping[int, float]) -> np.ndarray:
    """Compare the value of a node with the other branches of the prompt (RLOO, arXiv 2402.14740)."""
    return _advantages(tree, rewards, lambda baselines: baselines[0])


def sibling_advantages(tree: RolloutTree, rewards: Mapping[int, float]) -> np.ndarray:
    """Compare the value of a node with its siblings (TreeRPO, arXiv 2506.05183).

    An only child gets the baseline of its parent.
    """
    return _advantages(tree, rewards, lambda baselines: baselines[-1])


def ancestor_advantages(tree: RolloutTree, rewards: Mapping[int, float]) -> np.ndarray:
    """Compare with the siblings of the node and of each ancestor, and average (as TreePO, arXiv 2508.17445)."""
    return _advantages(tree, rewards, lambda baselines: float(np.mean(baselines)))


def two_level_advantages(tree: RolloutTree, rewards: Mapping[int, float]) -> np.ndarray:
    """Average the comparisons within the tree and across trees (as Tree-GRPO, arXiv 2509.21240)."""
    return (outcome_advantages(tree, rewards) + sibling_advantages(tree, rewards)) / 2


def _advantages(
    tree: RolloutTree, rewards: Mapping[int, float], baseline: Callable[[list[float]], float]
) -> np.ndarray:
    """Return values less a baseline, which is chosen from those at the levels that have siblings, from the prompt on.

    A node without any has its value as its advantage.
    """
    values = tree.values(rewards)
    advantages = values.copy()
    for node in range(len(tree)):
        baselines = []
        for ancestor in tree.path(node):
            others = [sibling for sibling in tree.siblings(ancestor) if sibling != ancestor]
            if others:
                baselines.append(float(values[others].mean()))
        if baselines:
            advantages[node] -= baseline(baselines)
    return advantages


def tree_loss(
    model: PreTrainedModel, tree: RolloutTree, advantages: Sequence[float] | np.ndarray, temperature: float = 1.0
) -> torch.Tensor:
    """Return the policy-gradient loss of a tree, a scalar with the same gradient as all of its rows together.

    The loss is `-sum(weight * advantage * log_probability)` over the sampled nodes, each computed once. Separate rows
    from the prompt to each leaf have the same sum, with the weights of their leaves and the advantages of their nodes.

    Parameters
    ----------
    model : PreTrainedModel
    tree : RolloutTree
    advantages : [nodes]
        Such as an estimator returns.
    temperature : float
        Temperature of sampling. The loss uses the full distribution: sample with `top_k=0`.
    """
    if len(advantages) != len(tree):
        raise ValueError(f"advantages must have one value for each of the {len(tree)} nodes, got {len(advantages)}")
    nodes = [node for node in range(len(tree)) if tree.sampled[node]]
    prompts = [tree.ids(tree.parents[node]) for node in nodes]
    log_probs = tree_logprobs(model, prompts, [tree.tokens[node] for node in nodes], temperature)
    terms = []
    for node, of_node in zip(nodes, log_probs, strict=True):
        terms.append(-float(tree.weights[node] * advantages[node]) * of_node.sum())
    return torch.stack(terms).sum()


@dataclass(eq=False)
class GrowingNode:
    """A node that is sampled after its prompt."""

    prompt: list[int]
    depth: int
    """Number of segments of its row, itself included."""
    num_before: int
    """Number of tokens that were sampled before it in its row."""
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    has_ended: bool = False
    """Whether its row has ended, so that nothing continues it."""
    children: list[GrowingNode] = field(default_factory=list)

    def branch(self, number: int) -> list[GrowingNode]:
        """Add a number of children, and return them."""
        ids = [*self.prompt, *self.tokens]
        num_before = self.num_before + len(self.tokens)
        for index in range(number):
            self.children.append(GrowingNode(ids, self.depth + 1, num_before, mix(self.seed, index)))
        return self.children


class GrowingTree:
    """A tree that is sampled: says which nodes follow, each time that one has been sampled.

    With `num_leaves`, the tree has that many leaves, or fewer if all its rows end early. All nodes of a level are
    sampled before the next level begins. Then the nodes whose rows have not ended share the remaining leaves evenly: a
    share limits the number of a node's children, and in the last level it is this number. So the numbers of children
    depend on the tokens of earlier levels alone, and the estimators stay unbiased.

    Parameters
    ----------
    prompt : list of int
    branching : callable
        See `sample_tree`.
    max_depth : int
        Number of levels.
    seed : int
    num_leaves : int, optional
        None: nodes do not wait for each other, and `branching` alone decides.
    """

    def __init__(
        self, prompt: Sequence[int], branching: Branching, max_depth: int, seed: int, num_leaves: int | None = None
    ) -> None:
        self.root = GrowingNode([*prompt], 0, 0, seed)
        self._branching = branching
        self._max_depth = max_depth
        self._num_leaves = num_leaves
        self._level = [self.root]
        self._num_sampling = 1  # nodes of the level that are not sampled yet
        self._num_ended = 0  # leaves of earlier levels

    def begin(self) -> list[GrowingNode]:
        """Return the first nodes. Raises `ValueError` if there is none."""
        first = self.after(self.root)
        if not first:
            raise ValueError("branching must give the prompt at least one child")
        return first

    def after(self, node: GrowingNode) -> list[GrowingNode]:
        """Return the nodes to be sampled next, now that a node has been."""
        if self._num_leaves is None:
            return node.branch(self._wanted(node))
        self._num_sampling -= 1
        if self._num_sampling:
            return []
        self._level = self._next_level(self._num_leaves)
        self._num_sampling = len(self._level)
        return [*self._level]

    def _wanted(self, node: GrowingNode) -> int:
        """Return how many children `branching` gives a node."""
        if node.has_ended or node.depth == self._max_depth:
            return 0
        number = self._branching(node.depth, node.log_probs)
        check_int("branching", number, at_least=0)
        return number

    def _next_level(self, num_leaves: int) -> list[GrowingNode]:
        """Return the nodes after those of the level, which share the remaining leaves."""
        wanted = [self._wanted(node) for node in self._level]
        num_parents = len(wanted) - wanted.count(0)
        self._num_ended += wanted.count(0)
        if not num_parents:
            return []
        share, num_larger = divmod(num_leaves - self._num_ended, num_parents)
        level: list[GrowingNode] = []
        parents = [(node, number) for node, number in zip(self._level, wanted, strict=True) if number]
        for index, (node, number) in enumerate(parents):
            most = share + (index < num_larger)
            is_last = node.depth + 1 == self._max_depth
            level += node.branch(most if is_last else min(number, most))
        return level

    def finish(self) -> RolloutTree:
        """Return the tree, once no node is being sampled."""
        parents: list[int] = []
        nodes: list[GrowingNode] = []
        stack = [(child, -1) for child in reversed(self.root.children)]
        while stack:
            node, parent = stack.pop()
            stack += [(child, len(nodes)) for child in reversed(node.children)]
            parents.append(parent)
            nodes.append(node)
        return RolloutTree(
            prompt=self.root.prompt,
            parents=parents,
            tokens=[node.tokens for node in nodes],
            sampled=[True] * len(nodes),
            log_probs=[node.log_probs for node in nodes],
        )


def grow(
    engine: Engine, trees: Sequence[GrowingTree], settings: Callable[[GrowingNode], Mapping[str, Any]]
) -> list[RolloutTree]:
    """Sample trees in an open engine, all at the same time. `settings` returns those of a node, for `Engine.submit`.

    If a request fails, or a tree raises an error, the other requests are canceled.
    """
    engine.check_blocking()
    waiting: dict[Future[None], tuple[GrowingTree, GrowingNode, RequestHandle]] = {}

    def sample(nodes: Sequence[tuple[GrowingTree, GrowingNode]]) -> None:
        requests = [engine.prepare(node.prompt, seed=node.seed, **settings(node)) for _, node in nodes]
        for (tree, node), handle in zip(nodes, engine.submit_together(requests), strict=True):
            waiting[handle.ended()] = tree, node, handle

    try:
        sample([(tree, node) for tree in trees for node in tree.begin()])
        for ended in as_they_end(waiting):
            new: list[tuple[GrowingTree, GrowingNode]] = []
            for tree, node, handle in ended:
                node.tokens, node.log_probs = sampled_row(handle.result())
                node.has_ended = node.tokens[-1] in handle.end_tokens
                new += [(tree, child) for child in tree.after(node)]
            sample(new)
    finally:  # after an error
        for _, _, handle in waiting.values():
            handle.cancel()
    return [tree.finish() for tree in trees]


def of_widths(widths: Sequence[int]) -> Branching:
    """Return the branching in which all nodes of a depth have equally many children."""
    return lambda depth, log_probs: widths[depth]


def check_branching(branching: Sequence[int] | Branching, max_depth: int | None) -> tuple[Branching, int]:
    """Return the numbers of children as a function, and the maximum number of segments of a row.

    Raises `ValueError` for numbers of children below 1, and for a `max_depth` that is missing or superfluous.
    """
    if callable(branching):
        if max_depth is None:
            raise ValueError("max_depth must be given for a callable branching, got None")
        check_int("max_depth", max_depth, at_least=1)
        return branching, max_depth
    if isinstance(branching, str) or not isinstance(branching, Iterable):
        raise ValueError(f"branching must be a list of int or a callable, got {branching!r}")
    widths = tuple(branching)
    if not widths:
        raise ValueError("branching must have at least one number of children, got none")
    for width in widths:
        check_int("branching", width, at_least=1)
    if max_depth is not None:
        raise ValueError(f"max_depth must be None for a list of numbers of children, got {max_depth!r}")
    return of_widths(widths), len(widths)


def sample_tree(
    engine: Engine,
    prompt: Sequence[int],
    branching: Sequence[int] | Branching,
    *,
    segment_tokens: int,
    max_depth: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> RolloutTree:
    """Sample a tree whose nodes are segments of tokens. Children continue their parent's segment.

    A segment ends after `segment_tokens` tokens, at one of the `stop_strings`, or when its row ends. Nodes do not wait
    for each other, and the engine computes each token once. The tree depends only on the seed.

    Parameters
    ----------
    engine : Engine
        Open.
    prompt : list of int
    branching : list of int, or callable
        Numbers of children of the prompt, of its children, and so on. A callable gets the depth of a node (0: the
        prompt) and the log-probabilities of its tokens, for example to branch where they are low. It returns the number
        of children, 0 for a leaf. It sees only tokens before the children, so gradients stay unbiased.
    segment_tokens : int
        Maximum number of tokens of a segment.
    max_depth : int, optional
        Maximum number of segments of a row. Only for a callable, which needs it.
    seed : int
    **settings
        Of `Engine.submit`, such as `temperature` and `stop_strings`. Each node is one sampled row.

    Raises
    ------
    ValueError
        For numbers that are too small, including numbers that a callable returns, for a `max_depth` that is missing or
        superfluous, and for settings that do not sample, or sample several rows.
    """
    check_int("segment_tokens", segment_tokens, at_least=1)
    number_of_children, num_levels = check_branching(branching, max_depth)
    tree = GrowingTree(as_ids(prompt), number_of_children, num_levels, seed)
    of_nodes = rollout_settings(settings, max_new_tokens="segment_tokens limits each segment")
    of_nodes["max_new_tokens"] = segment_tokens
    (sampled,) = grow(engine, [tree], lambda node: of_nodes)
    return sampled

"""Rollouts as trees: branches of a prompt that continue each other, rewards of leaves, and advantages of nodes.

A node is tokens that the model sampled, or others, such as an answer of a tool. The children of a node are samples from
the same distribution. An estimator is a function of the tree, which returns the advantage of each node. The estimators
here give unbiased gradients of the expected reward, because the baseline of a node is the value of nodes that do not
depend on it: siblings of the node, or of one of its ancestors. None divides by a standard deviation, as GRPO does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.engine import Engine, RequestHandle
from hf_parallel.generation.modes import PLAIN_MODE
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.generation.validation import check_int
from hf_parallel.training.requests import as_they_end, sampled_row
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
    """

    prompt: list[int]
    parents: list[int]
    tokens: list[list[int]]
    sampled: list[bool]

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
        Temperature of sampling.
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
class _Growing:
    """A node that is sampled."""

    ids: list[int]  # of its prompt
    depth: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    children: list[_Growing] = field(default_factory=list)


def sample_tree(
    engine: Engine,
    prompt: Sequence[int],
    branching: Sequence[int] | Branching,
    *,
    segment_tokens: int,
    max_depth: int = 8,
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
    max_depth : int
        Maximum number of segments of a row.
    seed : int
    **settings
        Of `Engine.submit`, such as `temperature` and `stop_strings`.
    """
    check_int("segment_tokens", segment_tokens, at_least=1)
    check_int("max_depth", max_depth, at_least=1)
    settings = {"generation_mode": PLAIN_MODE, "do_sample": True, "max_new_tokens": segment_tokens, **settings}
    if callable(branching):
        count = branching
    else:
        widths = [*branching]
        max_depth = min(max_depth, len(widths))

        def count(depth: int, log_probs: Sequence[float]) -> int:
            return widths[depth]

    waiting: dict[Future[None], tuple[_Growing, RequestHandle]] = {}

    def grow(node: _Growing, log_probs: Sequence[float]) -> None:
        number = count(node.depth, log_probs) if node.depth < max_depth else 0
        for index in range(number):
            child = _Growing([*node.ids, *node.tokens], node.depth + 1, mix(node.seed, index))
            node.children.append(child)
            handle = engine.submit(child.ids, seed=child.seed, **settings)
            waiting[handle.ended()] = child, handle

    root = _Growing([*prompt], 0, seed)
    grow(root, ())
    if not root.children:
        raise ValueError("branching must give the prompt at least one child")
    for ended in as_they_end(waiting):
        for node, handle in ended:
            node.tokens, log_probs = sampled_row(handle.result())
            if node.tokens[-1] not in handle.end_tokens:
                grow(node, log_probs)
    parents: list[int] = []
    tokens: list[list[int]] = []
    stack = [(child, -1) for child in reversed(root.children)]
    while stack:
        node, parent = stack.pop()
        stack += [(child, len(parents)) for child in reversed(node.children)]
        parents.append(parent)
        tokens.append(node.tokens)
    return RolloutTree([*prompt], parents, tokens, [True] * len(parents))

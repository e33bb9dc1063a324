"""Trees as rollouts of TRL's GRPOTrainer.

Rows are the paths from the prompt to the leaves. Tokens have the advantages of their nodes, weighted as in `tree_loss`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from hf_parallel.generation.modes import PLAIN_MODE
from hf_parallel.generation.prompts import Chat
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.generation.validation import check_int, check_texts
from hf_parallel.training.requests import check_no_seed, check_one_sampled_row
from hf_parallel.training.rollout_tree import (
    Branching,
    Estimator,
    GrowingNode,
    GrowingTree,
    RolloutTree,
    check_branching,
    grow,
    sibling_advantages,
)
from hf_parallel.training.rollouts import rollout_engine

TREES = "parallel_trees"
"""Field of the dictionary that a `rollout_func` returns: the `TreeRows` of each prompt."""
NEEDED = {
    "scale_rewards": ("none", "estimators divide by no standard deviation"),
    "multi_objective_aggregation": (
        "sum_then_normalize",
        "the other one divides each reward by its standard deviation",
    ),
    "importance_sampling_level": ("token", "tokens of a row have advantages of their own"),
}
"""Settings of the trainer that trees need, with the reason."""
OF_WHOLE_ROWS = {
    "begin_suppress_tokens": None,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
"""Settings of `generate` that count from the ends of a request, which is a segment; with the values that do nothing."""


@dataclass(frozen=True)
class TreeRows:
    """Rows of a tree for a trainer: paths to its leaves, each at least once."""

    tree: RolloutTree
    leaves: Sequence[int]
    """Leaf of each row. The rows of a leaf share its weight."""
    estimator: Estimator

    @classmethod
    def of(cls, tree: RolloutTree, num_rows: int, estimator: Estimator) -> TreeRows:
        """Return a number of rows. Some leaves are repeated if there are fewer."""
        leaves = tree.leaves
        return cls(tree, [leaves[row % len(leaves)] for row in range(num_rows)], estimator)

    def completions(self) -> list[list[int]]:
        """Return the tokens of each row."""
        return [self._along(leaf, self.tree.tokens) for leaf in self.leaves]

    def log_probs(self) -> list[list[float]]:
        """Return the log-probabilities of the tokens of each row under the sampled distribution."""
        assert self.tree.log_probs is not None
        return [self._along(leaf, self.tree.log_probs) for leaf in self.leaves]

    def advantages(self, rewards: Sequence[float]) -> list[np.ndarray]:
        """Return the advantages of the tokens of each row, float64 `[length]`, given the rewards of rows.

        An advantage is that of the token's node, times the weight of the row, whose mean over all rows is 1. So the sum
        over all rows is that of `tree_loss`, times the number of rows. Leaves whose rewards are NaN are left out of the
        tree, and their rows have the advantage 0. Rewards of rows with the same leaf are averaged.
        """
        of_leaf: dict[int, list[float]] = {}
        for leaf, reward in zip(self.leaves, rewards, strict=True):
            if not math.isnan(reward):
                of_leaf.setdefault(leaf, []).append(reward)
        weights = np.zeros(len(self.tree))
        of_node = np.zeros(len(self.tree))
        if of_leaf:
            scored, nodes = self.tree.above(of_leaf)
            means = {nodes.index(leaf): float(np.mean(given)) for leaf, given in of_leaf.items()}
            estimated = np.asarray(self.estimator(scored, means))
            if estimated.shape != (len(scored),):
                raise ValueError(f"estimator must return an advantage for each of {len(scored)} nodes, got {estimated}")
            weights[nodes] = scored.weights
            of_node[nodes] = estimated
        lengths = [len(tokens) for tokens in self.tree.tokens]
        of_tokens = [np.full(length, advantage) for length, advantage in zip(lengths, of_node, strict=True)]
        num_rows = Counter(self.leaves)
        rows = []
        for leaf in self.leaves:
            weight = len(self.leaves) * weights[leaf] / num_rows[leaf]
            rows.append(weight * np.concatenate([of_tokens[node] for node in self.tree.path(leaf)]))
        return rows

    def _along(self, leaf: int, of_nodes: Sequence[Sequence[Any]]) -> list[Any]:
        """Return what belongs to the tokens of the path to a leaf."""
        return [value for node in self.tree.path(leaf) for value in of_nodes[node]]


@dataclass(frozen=True)
class TreeRollouts:
    """A `rollout_func` whose rollouts are trees; see `make_tree_rollout_func`."""

    branching: Branching
    widths: tuple[int, ...] | None
    """Numbers of children by depth, if these are fixed."""
    segment_tokens: int
    max_depth: int
    estimator: Estimator
    stop_strings: tuple[str, ...]

    def check(self, trainer: Any) -> None:
        """Raise `ValueError` if settings of a trainer contradict those of the trees."""
        for name, (needed, reason) in NEEDED.items():
            value = getattr(trainer, name)
            if value != needed:
                raise ValueError(f"{name} must be {needed!r} for rollouts of trees: {reason}; got {value!r}")
        if trainer.tools:
            raise ValueError("tools cannot be used in rollouts of trees: pass no tools, or no make_tree_rollout_func")
        num_rows = trainer.num_generations
        if self.widths is not None and math.prod(self.widths) != num_rows:
            product = " x ".join(map(str, self.widths))
            raise ValueError(
                f"branching must give num_generations={num_rows} leaves, got {product} = {math.prod(self.widths)}"
            )
        num_tokens = (self.max_depth - 1) * self.segment_tokens
        if num_tokens >= trainer.max_completion_length:
            raise ValueError(
                f"segment_tokens must leave the last of {self.max_depth} segments at least one of "
                f"max_completion_length={trainer.max_completion_length} tokens, got {self.segment_tokens}"
            )
        self._check_generation(trainer.generation_config)

    def _check_generation(self, config: GenerationConfig) -> None:
        """Raise `ValueError` if arguments of `generate` contradict those of the trees."""
        check_one_sampled_row(vars(config))
        if config.stop_strings:
            raise ValueError(
                "stop_strings in generation_kwargs would end segments and rows: pass them to make_tree_rollout_func"
            )
        check_no_seed(config)
        for name, neutral in OF_WHOLE_ROWS.items():
            value = getattr(config, name)
            if value is not None and value != neutral:
                raise ValueError(f"{name} in generation_kwargs would apply to each segment of a tree, got {value!r}")

    def __call__(self, prompts: Sequence[str | Chat], trainer: Any) -> dict[str, list[object]]:
        """Sample a tree for each group of equal prompts; see `trl.GRPOTrainer`."""
        if not getattr(trainer, "computes_layouts", False):
            raise ValueError(f"trees need a SharedPrefixGRPOTrainer, got {type(trainer).__name__}")
        num_rows = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        groups = [prompts[first : first + num_rows] for first in range(0, len(prompts), num_rows)]
        for group in groups:
            if len(group) < num_rows or any(prompt != group[0] for prompt in group):
                raise ValueError(
                    f"the rows of a tree must be in one process: the batch of each must be a multiple of the "
                    f"{num_rows} generations of a prompt, got {len(prompts)} rows"
                )
        prompt_ids, images, _ = trainer._tokenize_prompts([group[0] for group in groups])
        if images:
            raise ValueError("rollouts of trees read text only, but prompts have images")
        seed = int(torch.randint(2**62, ()))
        growing = []
        for index, ids in enumerate(prompt_ids):
            growing.append(GrowingTree(ids, self.branching, self.max_depth, mix(seed, index), num_rows))
        with rollout_engine(trainer, len(prompts)) as engine:
            trees = grow(engine, growing, lambda node: self._settings(trainer, node))
        rows = [TreeRows.of(tree, num_rows, self.estimator) for tree in trees]
        return {
            "prompt_ids": [tree.prompt for tree in trees for _ in range(num_rows)],
            "completion_ids": [completion for of_tree in rows for completion in of_tree.completions()],
            "logprobs": [log_probs for of_tree in rows for log_probs in of_tree.log_probs()],
            TREES: [*rows],
        }

    def _settings(self, trainer: Any, node: GrowingNode) -> Mapping[str, Any]:
        """Return the settings of a segment. The last one of a row is as long as the trainer allows."""
        config = copy.copy(trainer.generation_config)
        if node.depth == self.max_depth:
            config.max_new_tokens = trainer.max_completion_length - node.num_before
        else:
            config.max_new_tokens = self.segment_tokens
            config.stop_strings = list(self.stop_strings) or None
        if config.min_new_tokens is not None:  # of the row
            config.min_new_tokens = min(max(config.min_new_tokens - node.num_before, 0), config.max_new_tokens)
        return {"generation_mode": PLAIN_MODE, "generation_config": config}


def make_tree_rollout_func(
    branching: Sequence[int] | Branching,
    *,
    segment_tokens: int,
    estimator: Estimator = sibling_advantages,
    max_depth: int | None = None,
    stop_strings: str | Sequence[str] = (),
) -> TreeRollouts:
    """Return a `rollout_func` for `SharedPrefixGRPOTrainer` whose rollouts are trees, one for each prompt.

    The rows of a prompt are the paths to the leaves of its tree. Reward functions score rows, and the estimator turns
    the rewards into advantages of nodes, which their tokens have in the loss. Each row has the weight of its leaf: with
    one optimizer step per batch, the gradient is that of `tree_loss`, times a factor, if the trainer's `loss_type`
    divides by one number for all rows, as `dapo` and `dr_grpo` do. `grpo` and `sapo` divide each row by its own length,
    and `bnpo` each micro-batch by its own number of tokens. All trees of a batch are sampled at the same time in one
    engine, which is open meanwhile.

    A tree has `num_generations` rows. If some end before their last segment, the others branch more often: all nodes of
    a level are sampled before the next level begins, and those whose rows have not ended share the remaining leaves
    evenly. The number of a node's children depends on earlier levels alone, so that gradients stay unbiased. If all
    rows of a tree end before the last segment, some are repeated, and share the weight of their leaf.

    The trainer sets all other arguments of `generate`. It needs `scale_rewards="none"`, because the estimators do not
    divide by a standard deviation.

    Parameters
    ----------
    branching : list of int, or callable
        Numbers of children of the prompt, of its children, and so on, whose product is `num_generations`. Or a function
        of the depth of a node and the log-probabilities of its tokens, as in `sample_tree`. It
        cannot give more than the remaining leaves, all of which branch off before the last segment.
    segment_tokens : int
        Maximum number of tokens of a segment. The last one of a row may extend up to `max_completion_length`.
    estimator : callable
        Returns the advantages of nodes, given the tree and the rewards of its leaves; see `sample_tree`.
    max_depth : int, optional
        Maximum number of segments of a row. Only for a callable, which needs it.
    stop_strings : str or list of str
        Texts that also end a segment, except the last segment of a row.

    Raises
    ------
    ValueError
        For numbers below 1, empty `stop_strings`, and a `max_depth` that is missing or superfluous. The trainer raises
        one for settings that contradict the settings of the trees.
    """
    check_int("segment_tokens", segment_tokens, at_least=1)
    texts = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    check_texts("stop_strings", texts)
    number_of_children, num_levels = check_branching(branching, max_depth)
    widths = None if callable(branching) else tuple(branching)
    return TreeRollouts(number_of_children, widths, segment_tokens, num_levels, estimator, texts)

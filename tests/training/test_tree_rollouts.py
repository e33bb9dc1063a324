"""Trees as rollouts of SharedPrefixGRPOTrainer: a step has the gradient of `tree_loss`."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from grpo_trainers import first_batch, grpo_arguments
from test_rollout_tree import ESTIMATORS, random_tree
from tool_tokenizer import make_tool_model, make_tool_tokenizer

import hf_parallel
from hf_parallel.training.rollout_tree import Estimator, RolloutTree, ancestor_advantages, tree_loss

trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))

from hf_parallel.training import SharedPrefixGRPOTrainer, make_tree_rollout_func  # noqa: E402
from hf_parallel.training.tree_rollouts import TreeRows  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

TOKENIZER = make_tool_tokenizer()
END = TOKENIZER.eos_token_id
ENDS_OFTEN = {"eos_token_id": [END, *range(60, 80)]}
"""So many end tokens that rows end early."""
NEVER_ENDS = {"suppress_tokens": [END]}


class Recorded:
    """An estimator that keeps the trees and their advantages."""

    def __init__(self, estimator: Estimator = ancestor_advantages) -> None:
        self.estimator = estimator
        self.trees: list[tuple[RolloutTree, np.ndarray]] = []

    def __call__(self, tree: RolloutTree, rewards: Mapping[int, float]) -> np.ndarray:
        advantages = self.estimator(tree, rewards)
        self.trees.append((tree, advantages))
        return advantages


def variety(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(set(ids)) % 5) for ids in completion_ids]


def last_token(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Return a reward of most rows."""
    return [None if ids[-1] % 5 == 0 else float(ids[-1] % 7) for ids in completion_ids]


def make_trainer(folder: Any, model: Any = None, cls: Any = SharedPrefixGRPOTrainer, **given: Any) -> Any:
    """Return a trainer of two prompts with eight rows each."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 12,
        "scale_rewards": "none",
        "reward_funcs": variety,
    }
    if "rollout_func" not in given:
        settings["rollout_func"] = make_tree_rollout_func((2, 2, 2), segment_tokens=3)
    prompts = [[{"role": "user", "content": text}] for text in ("what", "why not", "go", "say it")]
    dataset = datasets.Dataset.from_dict({"prompt": prompts})
    return cls(
        model=hf_parallel.enable(model or make_tool_model(TOKENIZER).double()),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=make_tool_tokenizer(),
        **grpo_arguments(folder, trl.GRPOConfig, **settings | given),
    )


def where_unsure(depth: int, log_probs: Sequence[float]) -> int:
    return 3 if not depth or min(log_probs) < -4.0 else 1


BATCHES: dict[str, dict[str, Any]] = {
    "balanced": {"generation_kwargs": NEVER_ENDS},
    "unbalanced": {"generation_kwargs": ENDS_OFTEN, "loss_type": "dr_grpo", "temperature": 0.8},
    "micro-batches": {
        "generation_kwargs": ENDS_OFTEN,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "reward_funcs": [variety, last_token],
        "reward_weights": [1.0, 0.5],
    },
    "branching by log-probabilities": {"branching": where_unsure, "max_depth": 3, "generation_kwargs": ENDS_OFTEN},
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_step_has_the_gradient_of_the_loss_of_trees(name: str, tmp_path: Any) -> None:
    """In a training run of TRL in float64; each token of a tree is computed once in a batch of all rows."""
    settings = dict(BATCHES[name])
    estimator = Recorded()
    branching = settings.pop("branching", (2, 2, 2))
    func = make_tree_rollout_func(
        branching, segment_tokens=3, estimator=estimator, max_depth=settings.pop("max_depth", None)
    )
    given = {"learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, **settings}
    model = make_tool_model(TOKENIZER).double()
    reference = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, model, rollout_func=func, **given)
    computed: list[int] = []
    batches: list[dict[str, Any]] = []
    compute_loss = trainer._compute_loss

    def counted(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        handle = model.model.embed_tokens.register_forward_hook(lambda m, args, out: computed.append(args[0].numel()))
        batches.append(inputs)
        loss: torch.Tensor = compute_loss(model, inputs)
        handle.remove()
        return loss

    trainer._compute_loss = counted
    trainer.train()

    trees = estimator.trees
    assert len(trees) == 2
    lengths = {len(tree.path(leaf)) for tree, _ in trees for leaf in tree.leaves}
    assert lengths == {3} if name == "balanced" else lengths > {3}
    terms = [tree_loss(reference, tree, advantages, settings.get("temperature", 1.0)) for tree, advantages in trees]
    num_tokens = sum(int(inputs["completion_mask"].sum()) for inputs in batches)
    factor = 1 / (2 * 12) if settings.get("loss_type") == "dr_grpo" else 8 / num_tokens
    (factor * torch.stack(terms).sum()).backward()
    for before, after in zip(reference.parameters(), model.parameters(), strict=True):
        gradient = before.detach() - after.detach()
        scale = float(before.grad.abs().max())
        torch.testing.assert_close(gradient, before.grad, rtol=1e-6, atol=1e-6 * max(scale, 1e-3))
    if len(batches) == 1:
        sizes = []
        for tree, _ in trees:
            rows = [tree.ids(leaf)[:-1] for leaf in tree.leaves]
            sizes.append(len({tuple(ids[: end + 1]) for ids in rows for end in range(len(ids))}))
        assert computed == [2 * max(sizes)]
        assert max(sizes) < sum(map(len, rows)) / 2


def test_rows_have_the_weights_of_their_leaves() -> None:
    """Rows of one leaf share its weight; leaves without a reward are left out of the tree."""
    rng = random.Random(0)
    for number in range(60):
        tree = random_tree(rng)
        rows = TreeRows.of(tree, len(tree.leaves) + rng.randrange(4), ESTIMATORS[number % 4])
        rewards = [rng.random() for _ in rows.leaves]
        unscored = rng.choice(tree.leaves) if number % 3 == 0 and len(tree.leaves) > 1 else None
        rewards = [
            float("nan") if leaf == unscored else value for leaf, value in zip(rows.leaves, rewards, strict=True)
        ]
        scored, nodes = tree.above(leaf for leaf in tree.leaves if leaf != unscored)
        means = {}
        for leaf in scored.leaves:
            of_leaf = [r for at, r in zip(rows.leaves, rewards, strict=True) if at == nodes[leaf]]
            means[leaf] = float(np.mean(of_leaf))
        expected = np.zeros(len(tree))
        expected[nodes] = len(rows.leaves) * scored.weights * ESTIMATORS[number % 4](scored, means)
        found = np.zeros(len(tree))
        for leaf, advantages in zip(rows.leaves, rows.advantages(rewards), strict=True):
            ends = np.cumsum([len(tree.tokens[node]) for node in tree.path(leaf)])
            found[tree.path(leaf)] += advantages[ends - 1]
            assert len(advantages) == ends[-1]
        np.testing.assert_allclose(found, expected, atol=1e-12)
    assert not any(advantages.any() for advantages in rows.advantages([float("nan")] * len(rows.leaves)))


def test_trees_have_as_many_rows_as_the_trainer_wants(tmp_path: Any) -> None:
    """Rows branch more often where others end, and are repeated if all have ended. The seed decides."""
    estimator = Recorded()
    func = make_tree_rollout_func((2, 2, 2), segment_tokens=2, estimator=estimator)
    given = {"rollout_func": func, "generation_kwargs": ENDS_OFTEN, "num_generations_eval": 4}
    other = make_trainer(tmp_path, **given)
    other.model.train()
    first = first_batch(other)
    trainer = make_trainer(tmp_path, **given)
    trainer.model.train()
    assert torch.equal(first["completion_ids"], first_batch(trainer)["completion_ids"])
    widths = set()
    for _ in range(4):
        trainer._buffered_inputs = None
        inputs = first_batch(trainer)
        assert inputs["advantages"].shape == inputs["completion_ids"].shape
    for tree, _ in estimator.trees:
        depths = [len(tree.path(leaf)) for leaf in tree.leaves]
        assert len(depths) == 8 or len(depths) < 8 and 3 not in depths
        widths |= {len(children) for children in tree.children}
    assert max(widths) > 2
    estimator.trees.clear()
    assert "eval_reward" in trainer.evaluate()
    assert {len(tree.leaves) for tree, _ in estimator.trees} <= {1, 2, 3, 4}


def test_first_ratios_of_trees_are_exactly_one(tmp_path: Any) -> None:
    """And the head computes each token of a tree once, though several rows have it."""
    trainer = make_trainer(
        tmp_path,
        make_tool_model(TOKENIZER),
        sampled_log_probs=True,
        num_iterations=2,
        temperature=0.8,
        top_k=30,
        generation_kwargs=ENDS_OFTEN,
    )
    inputs = first_batch(trainer)
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    is_token = inputs["completion_mask"].bool()
    computed: list[int] = []
    handle = trainer.model.lm_head.register_forward_hook(lambda m, args, out: computed.append(args[0].shape[1]))
    log_probs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, is_token.shape[1])
    handle.remove()
    ratios = torch.exp(log_probs - inputs["old_per_token_logps"])[is_token]
    assert len(ratios) > 60
    assert (ratios == 1).all()
    prefixes = set()
    for row, of_row, sampled in zip(ids.tolist(), mask.bool(), is_token, strict=True):
        tokens = [token for token, is_seen in zip(row, of_row, strict=True) if is_seen]
        num_sampled = int(sampled.sum())
        prefixes |= {tuple(tokens[: len(tokens) - left]) for left in range(num_sampled)}
    assert computed == [len(prefixes)]
    assert len(prefixes) < len(ratios)


def test_segments_end_at_texts(tmp_path: Any) -> None:
    """But the last one of a row, and rows have at most `max_completion_length` tokens."""
    estimator = Recorded()
    func = make_tree_rollout_func((4, 2), segment_tokens=20, estimator=estimator, stop_strings=[*"0123456789"])
    trainer = make_trainer(tmp_path, rollout_func=func, max_completion_length=40, generation_kwargs=NEVER_ENDS)
    first_batch(trainer)
    lengths = set()
    for tree, _ in estimator.trees:
        for leaf in tree.leaves:
            first, last = tree.path(leaf)
            lengths.add(len(tree.tokens[first]))
            text = TOKENIZER.decode(tree.tokens[first])
            assert len(tree.tokens[first]) == 20 or text[-1] in "0123456789"
            assert len(tree.tokens[first]) + len(tree.tokens[last]) == 40
    assert len(lengths) > 2


def test_the_least_number_of_tokens_is_that_of_rows(tmp_path: Any) -> None:
    """Not of each segment."""
    estimator = Recorded()
    func = make_tree_rollout_func((2, 2, 2), segment_tokens=3, estimator=estimator)
    settings = {**ENDS_OFTEN, "min_new_tokens": 5}
    trainer = make_trainer(tmp_path, rollout_func=func, generation_kwargs=settings, max_completion_length=24)
    lengths = set()
    for _ in range(4):
        trainer._buffered_inputs = None
        lengths |= {*first_batch(trainer)["completion_mask"].sum(1).tolist()}
    assert min(lengths) == 6, "of five tokens, and one that ends the row"


CONTRADICTIONS = {
    "scale_rewards must be 'none'": {"scale_rewards": "group"},
    "multi_objective_aggregation must be 'sum_then_normalize'": {"multi_objective_aggregation": "normalize_then_sum"},
    "importance_sampling_level must be 'token'": {"importance_sampling_level": "sequence"},
    "branching must give num_generations=8 leaves, got 3 x 2 = 6": {"branching": (3, 2)},
    "segment_tokens must leave the last of 3 segments at least one of max_completion_length=12": {"segment_tokens": 6},
    "num_beams must be 1": {"generation_kwargs": {"num_beams": 2}},
    "seed in generation_kwargs must be None": {"generation_kwargs": {"seed": 1}},
    "forced_eos_token_id in generation_kwargs would apply to each segment": {
        "generation_kwargs": {"forced_eos_token_id": END}
    },
    "do_sample must be True": {"generation_kwargs": {"do_sample": False}},
    "pass them to make_tree_rollout_func": {"generation_kwargs": {"stop_strings": ["a"]}},
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_settings_that_contradict_raise(message: str, tmp_path: Any) -> None:
    settings = dict(CONTRADICTIONS[message])
    func = make_tree_rollout_func(
        settings.pop("branching", (2, 2, 2)), segment_tokens=settings.pop("segment_tokens", 3)
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(tmp_path, rollout_func=func, **settings)


def test_trees_that_cannot_be_raise(tmp_path: Any) -> None:
    for branching, settings, message in (
        ((), {}, "at least one number of children"),
        ((2, 0), {}, "branching must be an int of at least 1, got 0"),
        ((2, 2), {"max_depth": 2}, "max_depth must be None for a list"),
        (where_unsure, {}, "max_depth must be given for a callable"),
        ((2,), {"segment_tokens": 0}, "segment_tokens must be an int of at least 1"),
        (2, {}, "branching must be a list of int or a callable, got 2"),
        ((2,), {"stop_strings": [".", ""]}, "stop_strings must be a list of non-empty strings"),
    ):
        with pytest.raises(ValueError, match=message):
            make_tree_rollout_func(branching, **{"segment_tokens": 3, **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trees need a SharedPrefixGRPOTrainer, got GRPOTrainer"):
        make_trainer(tmp_path, cls=trl.GRPOTrainer).train()
    func = make_tree_rollout_func((2, 2, 2), segment_tokens=3, estimator=lambda tree, rewards: np.zeros(2))
    with pytest.raises(ValueError, match="estimator must return an advantage for each of"):
        make_trainer(tmp_path, rollout_func=func).train()

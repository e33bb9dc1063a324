"""Rollouts as trees: estimators are unbiased on a problem with a known gradient; the loss is that of all rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from tool_tokenizer import make_tool_model, make_tool_tokenizer

from hf_parallel.engine import Engine
from hf_parallel.training.rollout_tree import (
    Branching,
    Estimator,
    GrowingTree,
    RolloutTree,
    ancestor_advantages,
    of_widths,
    outcome_advantages,
    sample_tree,
    sibling_advantages,
    tree_loss,
    two_level_advantages,
)

ESTIMATORS = [outcome_advantages, sibling_advantages, ancestor_advantages, two_level_advantages]
TOKENIZER = make_tool_tokenizer()

# A problem with a known gradient: rows of tokens 0 and 1, whose probabilities depend on all tokens before.
DEPTH = 3
LOGITS = torch.linspace(-1.5, 1.0, 2**DEPTH - 1, dtype=torch.float64)
REWARDS = dict(zip(product((0, 1), repeat=DEPTH), (3.0, -1.0, 0.5, 2.0, -2.0, 4.0, 1.0, 0.0), strict=True))


def log_prob(logits: torch.Tensor, before: Sequence[int], token: int) -> torch.Tensor:
    """Return the log-probability of a token: each sequence of tokens before it has a logit of its own."""
    index = 2 ** len(before) - 1 + sum(bit << place for place, bit in enumerate(before))
    sign = 1.0 if token else -1.0
    return torch.nn.functional.logsigmoid(sign * logits[index])


def exact_gradient() -> torch.Tensor:
    """Return the gradient of the expected reward of a row."""
    logits = LOGITS.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, reward in REWARDS.items():
        log_probs = [log_prob(logits, row[:i], row[i]) for i in range(DEPTH)]
        total = total + reward * torch.stack(log_probs).sum().exp()
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


def all_trees(widths: Any) -> Iterator[RolloutTree]:
    """Yield every tree whose nodes have one token; `widths` returns the number of children of a row."""

    def grow(trees: list[tuple[list[int], list[list[int]]]], open_nodes: list[int]) -> Iterator[Any]:
        for parents, tokens in trees:
            if not open_nodes:
                yield parents, tokens
                continue
            node, *later = open_nodes
            row = RolloutTree([], parents, tokens, [True] * len(parents)).ids(node)
            number = widths(row) if len(row) < DEPTH else 0
            first = len(parents)
            added = [first + index for index in range(number)]
            for bits in product((0, 1), repeat=number):
                grown = parents + [node] * number, tokens + [[bit] for bit in bits]
                yield from grow([grown], later + added)

    for parents, tokens in grow([([], [])], [-1]):
        yield RolloutTree([], parents, tokens, [True] * len(parents))


BRANCHING = {
    "at the prompt": lambda row: 3 if not row else 1,
    "later": lambda row: 2 if len(row) == 1 else 1,
    "twice": lambda row: 2 if len(row) < 2 else 1,
    "where tokens say so": lambda row: 2 if not row or (row[-1] and len(row) < 3) else 1,
}


@pytest.mark.parametrize(
    "branching", [pytest.param(n, marks=pytest.mark.slow) if n.startswith("where") else n for n in BRANCHING]
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_are_unbiased(estimator: Estimator, branching: str) -> None:
    """The expectation over all trees, computed exactly, is the gradient of the expected reward of a row."""
    logits = LOGITS.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    mass = 0.0
    for tree in all_trees(BRANCHING[branching]):
        log_probs = [log_prob(logits, tree.ids(parent), tree.tokens[n][0]) for n, parent in enumerate(tree.parents)]
        advantages = estimator(tree, {leaf: REWARDS[tuple(tree.ids(leaf))] for leaf in tree.leaves})
        coefficients = torch.from_numpy(tree.weights * advantages)
        probability = float(torch.stack(log_probs).sum().exp())
        mass += probability
        total = total + probability * (coefficients * torch.stack(log_probs)).sum()
    assert mass == pytest.approx(1)
    (gradient,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(gradient, exact_gradient(), rtol=1e-9, atol=1e-12)


def test_baselines_that_see_the_node_are_biased() -> None:
    """The control: the mean of all leaves, as in GRPO, scales the gradient."""
    logits = LOGITS.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for tree in all_trees(BRANCHING["at the prompt"]):
        log_probs = [log_prob(logits, tree.ids(parent), tree.tokens[n][0]) for n, parent in enumerate(tree.parents)]
        values = tree.values({leaf: REWARDS[tuple(tree.ids(leaf))] for leaf in tree.leaves})
        advantages = torch.from_numpy(tree.weights * (values - values[tree.leaves].mean()))
        total = total + float(torch.stack(log_probs).sum().exp()) * (advantages * torch.stack(log_probs)).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(gradient, exact_gradient() * 2 / 3, rtol=1e-9, atol=1e-12)


ENDED = {(1,): 2.5, (0, 1): -1.5}
"""Rows that end early, with their rewards."""


def where_ones_are(depth: int, log_probs: Sequence[float]) -> int:
    """Branch after ones, which are the log-probabilities here."""
    return 2 if not depth or log_probs[-1] else 1


def sampled_trees(branching: Branching, num_leaves: int) -> Iterator[RolloutTree]:
    """Yield every tree of a number of leaves: nodes have one token, and rows may end early."""
    stack: list[list[int]] = [[]]
    while stack:
        bits = stack.pop()
        tree = GrowingTree([], branching, DEPTH, 0, num_leaves)
        waiting = tree.begin()
        for bit in bits:
            node = waiting.pop(0)
            node.tokens = [bit]
            node.log_probs = [float(bit)]
            node.has_ended = (*node.prompt, bit) in ENDED
            waiting += tree.after(node)
        if waiting:
            stack += [[*bits, 0], [*bits, 1]]
        else:
            yield tree.finish()


@pytest.mark.parametrize(
    "branching",
    [
        pytest.param(of_widths((2, 2, 1)), id="2 x 2 x 1"),
        pytest.param(of_widths((1, 2, 2)), id="1 x 2 x 2", marks=pytest.mark.slow),
        pytest.param(where_ones_are, id="where tokens say so"),
    ],
)
def test_estimators_are_unbiased_if_nodes_share_the_leaves_of_rows_that_end(branching: Branching) -> None:
    """The expectation over all trees is the gradient of the expected reward, though cousins are not independent."""
    rewards = REWARDS | ENDED
    logits = LOGITS.clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for row in [*ENDED, (0, 0, 0), (0, 0, 1)]:
        row_log_prob = torch.stack([log_prob(logits, row[:i], row[i]) for i in range(len(row))]).sum()
        expected = expected + rewards[row] * row_log_prob.exp()
    (exact,) = torch.autograd.grad(expected, logits)
    totals = [torch.zeros((), dtype=torch.float64) for _ in ESTIMATORS]
    mass = 0.0
    numbers = set()
    for tree in sampled_trees(branching, 4):
        parts = [log_prob(logits, tree.ids(parent), tree.tokens[n][0]) for n, parent in enumerate(tree.parents)]
        log_probs = torch.stack(parts)
        of_leaves = {leaf: rewards[tuple(tree.ids(leaf))] for leaf in tree.leaves}
        probability = float(log_probs.detach().sum().exp())
        mass += probability
        numbers.add(len(of_leaves))
        for index, estimator in enumerate(ESTIMATORS):
            coefficients = torch.from_numpy(tree.weights * estimator(tree, of_leaves))
            totals[index] = totals[index] + probability * (coefficients * log_probs).sum()
    assert mass == pytest.approx(1)
    assert max(numbers) == 4
    for total in totals:
        (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
        torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-12)


def random_tree(rng: random.Random) -> RolloutTree:
    """Return a tree of an agent: branches, and answers of tools after some of them."""
    parents: list[int] = []
    tokens: list[list[int]] = []
    sampled: list[bool] = []
    open_nodes = [-1]
    while open_nodes and len(parents) < 12:
        node = open_nodes.pop(rng.randrange(len(open_nodes)))
        is_tool = node >= 0 and sampled[node] and rng.random() < 0.3
        for _ in range(1 if is_tool else rng.choice([1, 2, 3])):
            open_nodes.append(len(parents))
            parents.append(node)
            tokens.append([rng.randrange(8, len(TOKENIZER)) for _ in range(rng.randint(1, 5))])
            sampled.append(not is_tool)
    return RolloutTree([rng.randrange(8, 20) for _ in range(rng.randint(1, 6))], parents, tokens, sampled)


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_loss_is_the_sum_over_rows_of_random_agent_trees(count: int) -> None:
    """With the weights of leaves and the advantages of nodes; tokens of tools have no part in it."""
    model = make_tool_model(TOKENIZER).double()
    rng = random.Random(count)
    for number in range(count):
        tree = random_tree(rng)
        advantages = ESTIMATORS[number % 4](tree, {leaf: rng.random() for leaf in tree.leaves})
        loss = tree_loss(model, tree, advantages, temperature=0.8)
        loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        terms = []
        for leaf in tree.leaves:
            ids = tree.ids(leaf)
            log_probs = (model(input_ids=torch.tensor([ids[:-1]])).logits[0] / 0.8).log_softmax(-1)
            chosen = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            place = len(tree.prompt) - 1
            for node in tree.path(leaf):
                length = len(tree.tokens[node])
                if tree.sampled[node]:
                    terms.append(-tree.weights[leaf] * advantages[node] * chosen[place : place + length].sum())
                place += length
        expected = torch.stack(terms).sum()
        expected.backward()
        assert float(loss) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6 * max(scale, 1e-3))
        model.zero_grad()


def test_sampled_trees_branch_as_asked_and_depend_on_the_seed_alone() -> None:
    """Rows that branch where log-probabilities are low; the engine computes each token once."""
    model = make_tool_model(TOKENIZER)
    prompt = TOKENIZER("<user>go<end>\n<assistant>").input_ids

    def branching(depth: int, log_probs: Sequence[float]) -> int:
        return 3 if not depth else 2 if min(log_probs) < -4.0 else 1

    with Engine(model, TOKENIZER) as engine:
        given = {"segment_tokens": 5, "max_depth": 3, "seed": 4, "temperature": 0.9}
        tree = sample_tree(engine, prompt, branching, **given)
        stats = engine.stats
        again = sample_tree(engine, prompt, branching, **given)
        fixed = sample_tree(engine, prompt, (2, 2), segment_tokens=5)
    assert (tree.parents, tree.tokens) == (again.parents, again.tokens)
    assert len(tree.children[-1]) == 3
    widths = {len(tree.children[node]) for node in range(len(tree)) if len(tree.path(node)) < 3}
    assert widths >= {1, 2}
    assert len(fixed) == 6
    assert stats.decoded_tokens == sum(map(len, tree.tokens))
    assert stats.prefilled_tokens <= len(prompt) + len(tree)


def test_invalid_branching_raises() -> None:
    model = make_tool_model(TOKENIZER)
    with Engine(model, TOKENIZER) as engine:
        for branching, settings, message in (
            (2, {}, "branching must be a list of int or a callable, got 2"),
            ((2, 0), {}, "branching must be an int of at least 1, got 0"),
            ((2, 2), {"max_depth": 1}, "max_depth must be None for a list"),
            (lambda depth, log_probs: 2, {}, "max_depth must be given for a callable"),
            (lambda depth, log_probs: 1.5, {"max_depth": 2}, "branching must be an int of at least 0, got 1.5"),
            ((2,), {"max_new_tokens": 9}, "max_new_tokens cannot be given: segment_tokens"),
            ((2,), {"num_beams": 2}, "num_beams must be 1"),
        ):
            with pytest.raises(ValueError, match=message):
                sample_tree(engine, [9, 10], branching, segment_tokens=2, **settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lists of token ids, got text, 'go'"):
            sample_tree(engine, "go", (2,), segment_tokens=2)  # type: ignore[arg-type]


def test_an_error_cancels_the_requests_of_its_tree() -> None:
    """Here of one node, while the others are sampled."""
    model = make_tool_model(TOKENIZER)
    calls: list[int] = []

    def fail_once(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(len(input_ids))
        if len(calls) == 20:
            raise KeyError("a processor")
        return scores

    with Engine(model, TOKENIZER) as engine:
        settings = {"segment_tokens": 300, "logits_processor": [fail_once], "suppress_tokens": [TOKENIZER.eos_token_id]}
        with pytest.raises(KeyError):
            sample_tree(engine, [9, 10], (6,), **settings)
    stats = engine.stats
    assert (stats.failed, stats.cancelled, stats.finished) == (1, 5, 0)


def test_trees_that_cannot_be_raise() -> None:
    with pytest.raises(ValueError, match="parents must be earlier nodes"):
        RolloutTree([1], [0], [[2]], [True])
    with pytest.raises(ValueError, match="was not sampled, but has siblings"):
        RolloutTree([1], [-1, -1], [[2], [3]], [False, True])
    tree = RolloutTree([1], [-1, -1], [[2], [3]], [True, True])
    with pytest.raises(ValueError, match=r"rewards must have the leaves \[0, 1\], got \[0\]"):
        tree.values({0: 1.0})
    with pytest.raises(ValueError, match="rewards must be a mapping from leaves to their rewards, got list"):
        tree.values([1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one value for each of the 2 nodes"):
        tree_loss(make_tool_model(TOKENIZER), tree, [1.0])

"""Log-likelihoods over a tree of shared prefixes equal those of plain forward passes, and cost fewer tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import hf_parallel
from hf_parallel import GenerationStats
from hf_parallel.evaluation.scoring import loglikelihoods

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTIONS, SHOTS = 3, 40
NAMES = ["llama", "mistral", "qwen3", "phi3", "gemma2", "gpt_oss", "gpt2", "olmo3", "qwen3_moe", "llama-dynamic"]
"""With and without windows shorter than the few-shot prefix, sinks, soft-capping, experts, learned positions."""

Rows = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def plain(model: Any, contexts: Sequence[Any], continuations: Sequence[Any]) -> list[tuple[float, bool]]:
    """Score each row in a forward pass of its own."""
    scores = []
    for context, continuation in zip(contexts, continuations, strict=True):
        row = torch.tensor([[*context, *continuation]])
        with torch.no_grad():
            logits = model(row[:, :-1], use_cache=False).logits[0, len(context) - 1 :]
        ids = row[0, len(context) :]
        chosen = F.log_softmax(logits.double(), dim=-1).gather(1, ids[:, None])
        scores.append((float(chosen.sum()), bool((logits.argmax(-1) == ids).all())))
    return scores


def assert_equal(found: Sequence[tuple[float, bool]], expected: Sequence[tuple[float, bool]], error: float) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=error, abs=error)


def few_shot(lengths: Sequence[int] = (1, 2, 3, 5)) -> Rows:
    """Questions of unequal length after the same examples, each with choices of the given lengths."""
    shots, *questions = (prompt.tolist() for prompt in tiny.make_prompts([SHOTS, *range(5, 5 + 2 * QUESTIONS, 2)]))
    choices = [prompt.tolist() for prompt in tiny.make_prompts(lengths, seed=1)]
    pairs = [(shots + question, choice) for question in questions for choice in choices]
    return [context for context, _ in pairs], [choice for _, choice in pairs]


def unique_inputs(contexts: Sequence[Any], continuations: Sequence[Any]) -> int:
    """Return the number of distinct prefixes of the rows without their last token."""
    rows = [[*a, *b][:-1] for a, b in zip(contexts, continuations, strict=True)]
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


@contextmanager
def forward_sizes(model: Any) -> Iterator[list[int]]:
    """Record the number of tokens of each forward pass."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        hook.remove()


@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_those_of_plain_forward_passes(name: str) -> None:
    model: Any = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    assert_equal(loglikelihoods(model, *few_shot()), plain(model, *few_shot()), 1e-5)


def test_shared_tokens_are_computed_once_and_in_one_pass(llama: Any) -> None:
    rows = few_shot()
    stats = GenerationStats()
    with forward_sizes(llama) as sizes:
        loglikelihoods(llama, *rows, stats=stats)
    assert sizes == [unique_inputs(*rows)]
    assert (stats.forward_passes, stats.prefilled_tokens) == (1, sizes[0])
    inputs = sum(len(a) + len(b) - 1 for a, b in zip(*rows, strict=True))
    assert stats.reused_tokens == inputs - sizes[0]


@pytest.mark.parametrize("limit", [7, 60])
def test_passes_and_memory_are_bounded_and_scores_the_same(llama: Any, limit: int) -> None:
    contexts, continuations = few_shot((1, 2, 3, 30))
    rows = contexts * 2, continuations + [tokens[::-1] for tokens in continuations]
    whole, stats = GenerationStats(), GenerationStats()
    expected = loglikelihoods(llama, *rows, stats=whole)
    with forward_sizes(llama) as sizes:
        found = loglikelihoods(llama, *rows, max_batch_tokens=limit, stats=stats)
    assert_equal(found, expected, 1e-6)
    assert max(sizes) <= limit
    token_bytes = whole.kv_bytes / unique_inputs(*rows)
    longest = max(len(a) + len(b) - 1 for a, b in zip(*rows, strict=True))
    assert stats.kv_bytes <= (longest + limit) * token_bytes
    assert stats.kv_bytes < whole.kv_bytes
    # The last token of a context is computed again where its choices are in several batches.
    assert stats.prefilled_tokens <= whole.prefilled_tokens + len(contexts) * 2


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_batches_equal_plain_passes(llama: Any, data: st.DataObject) -> None:
    tokens = st.integers(3, 5)
    pairs = data.draw(
        st.lists(
            st.tuples(st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, min_size=1, max_size=6)),
            min_size=1,
            max_size=12,
        )
    )
    contexts, continuations = [context for context, _ in pairs], [continuation for _, continuation in pairs]
    found = loglikelihoods(llama, contexts, continuations, max_batch_tokens=data.draw(st.integers(1, 40)))
    assert_equal(found, plain(llama, contexts, continuations), 1e-5)

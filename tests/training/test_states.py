"""Layers with a state compute trees as they compute rows: log-probabilities and gradients."""

from __future__ import annotations

import copy
from typing import Any

import hybrids
import numpy as np
import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from torch import nn

from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.mixers import Mixer, MixerStates
from hf_parallel.training import (
    ParallelExample,
    stock_mask,
    tree_logprobs,
)
from hf_parallel.training.states import WHOLE_ROWS, MixerPass, RowTree, mixers_of, previous_tokens, states_branched
from hf_parallel.training.tree import tree_batch

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("qwen3_5_text", "jamba")
"""A layer that continues from states with several tokens, and one that cannot."""
DOUBLE = ("lfm2", "lfm3", "mamba", "falcon_mamba")
"""Models that keep float64; the states of others are in float32, and most experts have no kernel in float64."""

PROMPT = tiny.make_prompts([25], seed=1)[0]
COMPLETIONS = tiny.make_prompts([6, 1, 19, 4, 30], seed=2)
COMPLETIONS += [torch.cat((COMPLETIONS[2][:n], COMPLETIONS[3])) for n in (1, 12)]  # a short and a long trunk


def build(name: str) -> tuple[Any, float]:
    """Return a model, and the error allowed in its dtype."""
    model = copy.deepcopy(tiny.build(name))
    return (model.double(), 1e-6) if name in DOUBLE else (model, 1e-4)


def row_logprobs(model: Any, prompt: torch.Tensor, completion: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=torch.cat((prompt, completion))[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]


def gradients(model: Any, log_probs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    sum((p * torch.linspace(0.5, 1.5, len(p))).sum() for p in log_probs).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *[(name, False) for name in QUICK],
        *[pytest.param(n, False, marks=pytest.mark.slow) for n in hybrids.SETTINGS if n not in QUICK],
        ("lfm2", "non-reentrant"),
        pytest.param("qwen3_5_text", "reentrant", marks=pytest.mark.slow),
        pytest.param("jamba", "non-reentrant", marks=pytest.mark.slow),
    ],
)
def test_a_tree_gives_the_log_probabilities_and_gradients_of_rows(name: str, checkpointing: str | bool) -> None:
    model, tolerance = build(name)
    rows = [row_logprobs(model, PROMPT, completion) for completion in COMPLETIONS]
    expected = gradients(model, rows)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    tree = tree_logprobs(model, PROMPT, COMPLETIONS)
    torch.testing.assert_close(tree, rows, rtol=0, atol=tolerance)
    found = gradients(model, tree)
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for parameter, gradient in expected.items():
        error = (found[parameter] - gradient).abs().max()
        # Sums in float32 differ by processor: three times the tolerance of log-probabilities.
        assert error <= 3 * tolerance * max(gradient.abs().max(), 1e-3 * largest), parameter


@torch.no_grad()
def test_padded_and_packed_trees_give_the_logits_of_rows() -> None:
    model, _ = build("qwen3_5_text")
    trees = [
        ParallelExample.from_tree([prompt.tolist()] * len(COMPLETIONS), [c.tolist() for c in COMPLETIONS])
        for prompt in (PROMPT, PROMPT[:7])
    ]
    expected = [row_logprobs(model, prompt, c) for prompt in (PROMPT, PROMPT[:7]) for c in COMPLETIONS]
    for examples in (trees, [ParallelExample.pack(trees)], [ParallelExample.pack(trees).with_one_target_each()]):
        batch = tree_batch(examples, model.config, torch.float32, "cpu")
        with states_branched(model, examples):
            logits = model(**batch, use_cache=False).logits.log_softmax(-1)
        found = torch.cat([logits[i, e.target_queries, e.target_ids] for i, e in enumerate(examples)])
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("name", "shared"), [("qwen3_5_text", True), ("jamba", False)])
def test_a_layer_that_continues_from_states_computes_a_prompt_once(name: str, shared: bool) -> None:
    model, _ = build(name)
    computed: list[int] = []
    tree_logprobs(model, PROMPT, COMPLETIONS)  # finds out what the layers can do
    module = model.get_submodule(mixers_of(model)[0].name)
    handle = module.register_forward_hook(lambda module, args, output: computed.append(output.shape[:2].numel()))
    tree_logprobs(model, PROMPT, COMPLETIONS)
    handle.remove()
    assert (sum(computed) < 2 * sum(map(len, COMPLETIONS)) + len(PROMPT)) == shared
    assert (sum(computed) >= len(PROMPT) * len(COMPLETIONS)) != shared


@torch.no_grad()
@pytest.mark.parametrize(("prompt", "completion"), [(1, 4), (3, 2)])
def test_a_state_among_the_outputs_of_a_layer_is_never_taken_for_values_of_tokens(prompt: int, completion: int) -> None:
    """MiniMax's layers also return their state, `[rows, heads, ...]`: four heads, and a row of four tokens here."""
    model, tolerance = build("minimax")
    completions = [COMPLETIONS[4][:completion], COMPLETIONS[2][:9]]
    tree = tree_logprobs(model, PROMPT[:prompt], completions)
    rows = [row_logprobs(model, PROMPT[:prompt], one) for one in completions]
    torch.testing.assert_close(tree, rows, rtol=0, atol=tolerance)


class Decay(nn.Module):
    """`y[t] = x[t] + 0.9 y[t - 1]`, with the last `y` as state."""

    def forward(self, x: torch.Tensor, cache: MixerStates | None = None) -> torch.Tensor:
        state = None if cache is None else cache.get_recurrent_state(0)
        out = []
        for t in range(x.shape[1]):
            out.append(x[:, t] if not out and state is None else x[:, t] + 0.9 * (out[-1] if out else state))
        if cache is not None:
            cache.update_recurrent_state(out[-1], 0)
        return torch.stack(out, dim=1)


def test_random_trees_are_computed_from_the_states_of_their_trunks() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        size = int(random.integers(1, 40))
        previous = np.array(
            [-1, *(t if random.random() < 0.7 else random.integers(-1, t + 1) for t in range(size - 1))]
        )
        x = torch.from_numpy(random.normal(size=(size, 2)))
        expected: list[torch.Tensor] = []
        for token, before in enumerate(previous.tolist()):
            expected.append(x[token] if before < 0 else x[token] + 0.9 * expected[before])
        for shortest in (2, 5, WHOLE_ROWS):
            call = MixerPass(Mixer("", 0, "cache"), Decay(), (x[None],), {})
            torch.testing.assert_close(call.compute(RowTree(previous), shortest), torch.stack(expected))


PDOS = "Two cities.\n####Rome: It is old.\n####Oslo: It is cold.\n####%%%%\nBoth."
MULTIVERSE = (
    "<Parallel><Goal><Outline>1: a</Outline><Outline>2: b</Outline></Goal>"
    "<Path>1: yes</Path><Path>2: no</Path><Conclusion>so</Conclusion></Parallel>"
)


@torch.no_grad()
def test_a_text_of_pdos_gives_the_logits_of_its_rows() -> None:
    model, _ = build("qwen3_5_text")
    example = ParallelExample.from_text(PDOS, AsciiTokenizer(), "pdos", prompt="Compare:")
    with states_branched(model, [example]):
        logits = model(**tree_batch([example], model.config, torch.float32, "cpu"), use_cache=False).logits[0]
    previous = previous_tokens(example)
    ends = sorted(set(range(len(example))) - set(previous.tolist()))
    assert len(ends) >= 3
    for end in ends:
        row = [end]
        while previous[row[0]] >= 0:
            row.insert(0, int(previous[row[0]]))
        ids, positions = (torch.from_numpy(values[row])[None] for values in (example.input_ids, example.position_ids))
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-4)


def test_tokens_that_see_other_rows_raise() -> None:
    model, _ = build("qwen3_5_text")
    joined = ParallelExample.from_text(MULTIVERSE, AsciiTokenizer(), "multiverse", prompt="Hi")
    message = r"Qwen3_5ForCausalLM has layers with a state \(model.layers.0.lin.*but this example has tokens that move"
    with pytest.raises(UnsupportedModelError, match=message), states_branched(model, [joined]):
        pass
    with pytest.raises(ValueError, match=r"has layers with a state \(linear_attention\).*use tree_logprobs"):
        stock_mask(joined, model.config, torch.float32)

"""`shared_prefix` equals `generate` token by token, and computes each unique token once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from tiny import REPRESENTATIVE, SLIDING_WINDOW
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateOutput

import hf_parallel
from hf_parallel import ParallelOutput, SharedPrefixCache

EVERY_SETTING: dict[str, Any] = {
    "seed": 5,
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "keep_completions": False,
    "replay": "hotspot",
    "prefetch": True,
    "draft_tokens": 4,
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {}
"""Arguments of a short call with a tiny model."""

SOME = ["llama", "gemma3_text", "gpt2", "gemma4_text-e2b", "llama4_text"]
"""One rotary table, two of them and windows, learned positions, shared keys, chunks."""
NEW = 12
CLEAR = 5e-4
"""Margin of the best logit over the second from which rounding cannot change the choice."""

Enable = Callable[[str], PreTrainedModel]


@pytest.fixture
def enabled() -> Iterator[Enable]:
    """Makes a shared tiny model generate in parallel, until the test ends."""
    models = []

    def enable(name: str) -> PreTrainedModel:
        models.append(hf_parallel.enable(tiny.build(name)))
        return models[-1]

    yield enable
    for model in models:
        hf_parallel.disable(model)


class Batch(NamedTuple):
    """Left-padded prompts, and their greedy completions by plain `generate`."""

    rows: list[torch.Tensor]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    expected: torch.Tensor  # [rows, length + NEW]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def new_tokens(self) -> torch.Tensor:
        return self.expected[:, self.input_ids.shape[1] :]


def three_levels(seed: int) -> list[torch.Tensor]:
    """A root longer than the window, two groups below it, tails below those; twins, bare levels and a stranger too."""
    root, a, b, *tails, stranger = tiny.make_prompts([21, 9, 6, 5, 6, 3, 11, 8], seed=seed)
    assert len(root) > SLIDING_WINDOW
    parts = [[root, a, tails[0]], [root, a, tails[1]], [root, b, tails[2]], [root, a, tails[0]]]
    parts += [[root, b], [root, b, tails[3]], [stranger], [root]]
    return [torch.cat(part) for part in parts]


@cache
def clear_batch(name: str) -> Batch:
    """A batch of three levels on which every greedy token of a model wins clearly."""
    model = tiny.build(name)
    for seed in range(20):
        rows = three_levels(seed)
        input_ids, attention_mask = tiny.left_pad(rows)
        output = plainly(model, input_ids, attention_mask=attention_mask, output_logits=True)
        assert output.logits is not None
        best = torch.stack(output.logits).topk(2).values
        if (best[..., 0] - best[..., 1]).min() > CLEAR:
            return Batch(rows, input_ids, attention_mask, output.sequences)
    raise AssertionError(f"no clear batch for {name} among 20")


def plainly(model: PreTrainedModel, input_ids: torch.Tensor, **settings: Any) -> GenerateOutput:
    """Greedy output of `generate`."""
    settings = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True} | settings
    return model.generate(input_ids, **settings)  # type: ignore[operator]


def shared(model: PreTrainedModel, input_ids: torch.Tensor | None, **settings: Any) -> ParallelOutput:
    """Greedy output of the mode."""
    settings = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True} | settings
    output = model.generate(input_ids, generation_mode="shared_prefix", **settings)  # type: ignore[operator]
    assert isinstance(output, ParallelOutput)
    return output


def unique_tokens(rows: list[torch.Tensor]) -> int:
    """Nodes of the tree of prefixes, one token each."""
    return len({tuple(row[: i + 1].tolist()) for row in rows for i in range(len(row))})


@torch.no_grad()
def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values in transformers' own cache."""
    layers = model(torch.tensor([[5]]), use_cache=True).past_key_values.layers
    return sum(t.nbytes for layer in layers for t in (layer.keys, layer.values) if t is not None)


class TokenCount:
    """Counts the tokens that a model reads in each forward pass, while it is entered."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.passes: list[int] = []

    def __enter__(self) -> TokenCount:
        self.hook = self.model.get_input_embeddings().register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()

    @property
    def tokens(self) -> int:
        return sum(self.passes)

    def _count(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.passes.append(args[0].numel())


# Equal to generate


@pytest.mark.parametrize("name", tiny.each())
def test_greedy_shared_prefix_equals_generate(name: str, enabled: Enable) -> None:
    batch, model = clear_batch(name), enabled(name)
    output = shared(model, **batch.inputs)
    assert torch.equal(output.sequences, batch.expected)
    assert output.stats.prefilled_tokens == unique_tokens(batch.rows) < batch.attention_mask.sum()
    assert output.stats.forward_passes == NEW  # one prefill, one pass for each new token but the last
    held = unique_tokens(batch.rows) + len(batch.rows) * (NEW - 1)
    assert output.stats.kv_bytes == held * bytes_per_token(model)
    assert output.stats.decoded_tokens == len(batch.rows) * NEW


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_sixteen_completions_of_one_prompt_equal_generate(name: str, enabled: Enable) -> None:
    batch, model = clear_batch(name), enabled(name)
    greedy = {"do_sample": True, "top_k": 1, "num_return_sequences": 16}  # generate refuses to be greedy sixteen times
    output = shared(model, batch.rows[0][None], **greedy)
    assert torch.equal(output.sequences, plainly(model, batch.rows[0][None], **greedy).sequences)
    assert output.sequences.shape == (16, len(batch.rows[0]) + NEW)
    assert output.stats.prefilled_tokens == len(batch.rows[0])
    assert output.stats.kv_bytes == (len(batch.rows[0]) + 16 * (NEW - 1)) * bytes_per_token(model)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_rows_that_end_at_different_times_equal_generate(name: str, enabled: Enable) -> None:
    """Small prefill chunks besides, which cut levels in two."""
    batch, model = clear_batch(name), enabled(name)
    ends = [int(batch.new_tokens[0, 3]), int(batch.new_tokens[6, 8])]
    expected = plainly(model, **batch.inputs, eos_token_id=ends).sequences
    output = shared(model, **batch.inputs, eos_token_id=ends, prefill_chunk_size=5)
    assert torch.equal(output.sequences, expected)
    steps = 1 + torch.isin(expected[:, batch.input_ids.shape[1] :], torch.tensor(ends)).int().argmax(dim=1)
    assert len(steps.unique()) > 1, "the rows of this batch end together"
    assert output.stats.prefilled_tokens == unique_tokens(batch.rows)


def test_ended_row_costs_nothing(enabled: Enable) -> None:
    """Where steps run ahead of their tokens, it is in one more pass: see `test_run_ahead.py`."""
    batch, model = clear_batch("llama"), enabled("llama")
    end = int(batch.new_tokens[0, 3])
    with TokenCount(model) as count:
        output = shared(model, **batch.inputs, eos_token_id=end)
    new = batch.new_tokens
    lengths = [next((i + 1 for i, t in enumerate(row) if t == end), NEW) for row in new.tolist()]
    going = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert count.passes == [unique_tokens(batch.rows), *going]
    assert going[-1] < len(lengths)
    assert output.stats.decoded_tokens == sum(lengths) < new.numel()


# A cache that is kept


@pytest.mark.parametrize("name", SOME)
def test_continued_chat_equals_generate(name: str, enabled: Enable) -> None:
    batch, model, held = clear_batch(name), enabled(name), SharedPrefixCache()
    for prefilled in (unique_tokens(batch.rows), len({tuple(row.tolist()) for row in batch.rows})):
        output = shared(model, **batch.inputs, past_key_values=held)
        assert torch.equal(output.sequences, batch.expected)
        assert output.past_key_values is held
        assert output.stats.prefilled_tokens == prefilled, "the second time, the last token of each prompt"
    turns = tiny.make_prompts([4] * len(batch.rows), seed=3)
    chats = [torch.cat((row, *more)) for row, *more in zip(batch.rows, batch.new_tokens, turns, strict=True)]
    input_ids, attention_mask = tiny.left_pad(chats)
    before = unique_tokens(batch.rows) + len(batch.rows) * (NEW - 1)
    output = shared(model, input_ids, attention_mask=attention_mask, past_key_values=held)
    assert torch.equal(output.sequences, plainly(model, input_ids, attention_mask=attention_mask).sequences)
    # The last token of a completion was never computed; equal completions are stored once.
    twin = NEW - 1
    assert output.stats.prefilled_tokens == unique_tokens(chats) - (before - twin)

"""A cache kept between calls: copies, budget, reuse after `reset`, and errors where it would be wrong."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from test_fingerprint import with_config, with_module
from test_malformed import failing
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_parallel
from hf_parallel import LogitsCache, SharedPrefixCache

IDS = tiny.make_prompts([30], seed=2)[0][None]


@pytest.fixture
def model() -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def generate(model: Any, cache: SharedPrefixCache | None, ids: torch.Tensor = IDS, **settings: Any) -> Any:
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True} | settings
    return model.generate(ids, generation_mode="shared_prefix", past_key_values=cache, **settings)


@pytest.fixture
def cache(model: PreTrainedModel) -> SharedPrefixCache:
    """Filled by a prefill and decode steps."""
    cache = SharedPrefixCache()
    generate(model, cache)
    return cache


def test_eviction_deletes_parents_after_their_children(model: PreTrainedModel, cache: SharedPrefixCache) -> None:
    other = torch.cat((IDS[:, :20], IDS[:, :5]), dim=1)  # splits the first prompt
    generate(model, cache, ids=other)
    nodes = list(cache.tree.nodes())
    assert any(node.all_children() for node in nodes)
    lengths, held = sorted(node.num_cached for node in nodes), cache.kv_bytes + cache.state_bytes
    evicted = list(cache.tree.evict(lambda node: node.last_used))
    assert sorted(tokens for tokens, _ in evicted) == lengths
    assert sum(size for _, size in evicted) == held
    assert not list(cache.tree.nodes())
    assert cache.kv_bytes == 0


@pytest.mark.parametrize("common", [0, 12], ids=["distinct", "shared start"])
def test_max_bytes_limits_the_memory_kept_between_calls(common: int, model: PreTrainedModel) -> None:
    """The least recently used prompt is evicted; a prompt that every other call uses stays."""
    system, new = tiny.make_prompts([common], seed=6)[0], 6
    prompts = [
        torch.cat((system, torch.tensor([10 + i]), prompt)) for i, prompt in enumerate(tiny.make_prompts([17] * 7))
    ]
    per_token = generate(model, None).past_key_values.pool.arena.bytes_per_token
    whole, cache = SharedPrefixCache(), SharedPrefixCache(max_bytes=80 * per_token)
    frequent, *others = prompts

    def prefilled(prompt: torch.Tensor) -> list[int]:
        """Number of prefilled tokens, with a budget and without."""
        outputs = [generate(model, held, ids=prompt[None], max_new_tokens=new) for held in (cache, whole)]
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        assert cache.kv_bytes <= (80 + len(prompt) + new) * per_token
        return [output.stats.prefilled_tokens for output in outputs]

    prefilled(frequent)
    for other in others:
        prefilled(other)
        assert prefilled(frequent) == [1, 1]
    assert prefilled(others[-1]) == [1, 1]
    assert prefilled(others[0]) == [18, 1]


@torch.no_grad()
def written(model: PreTrainedModel) -> None:
    next(model.parameters()).mul_(1.5)


def exchanged(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 1.5)


def other_frequencies(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("change", [written, exchanged, other_frequencies])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
def test_a_cache_of_earlier_weights_raises(
    change: Callable[[PreTrainedModel], None], copied: bool, model: PreTrainedModel, cache: SharedPrefixCache
) -> None:
    held = copy.deepcopy(cache) if copied else cache
    change(model)
    with pytest.raises(ValueError, match="or before the model's weights changed"):
        generate(model, held)
    held.reset()
    assert torch.equal(generate(model, held).sequences, generate(model, None).sequences)


@pytest.mark.parametrize("prepare", [with_module(torch.nn.Dropout(0.5)), with_config], ids=["module", "config"])
def test_calls_with_dropout_neither_fill_nor_read_a_cache(
    prepare: Callable[[Any], None], model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(model)
    cache, logits, expected = SharedPrefixCache(), LogitsCache(), generate(model, None).sequences
    model.train()
    returned = generate(model, cache).past_key_values
    assert generate(model, None, logits_cache=logits).stats.decoded_tokens
    assert not cache.pool.blocks
    assert not len(logits)
    assert "past_key_values is neither read nor filled, as dropout is active" in caplog.text
    model.eval()
    assert torch.equal(generate(model, cache, logits_cache=logits).sequences, expected)
    with pytest.raises(ValueError, match="weights changed"):
        generate(model, returned)
    model.train()
    again = generate(model, cache, logits_cache=logits).stats
    assert (again.reused_tokens, again.replayed_tokens) == (0, 0)


def test_a_cache_serves_one_call_at_a_time(model: PreTrainedModel) -> None:
    """Also of two models, which do not exclude each other."""
    cache, other = SharedPrefixCache(), hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    errors = []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.ndim > 1:
                return  # the prompt: the call has not begun yet
            with pytest.raises(RuntimeError, match="in use by another call") as raised:
                generate(other, cache)
            errors.append(raised)

        def end(self) -> None:
            pass

    expected = generate(model, None).sequences
    assert torch.equal(generate(model, cache, streamer=Streamer()).sequences, expected)
    assert len(errors) > 3
    assert torch.equal(generate(model, cache).sequences, expected)
    cache.reset()
    assert torch.equal(generate(other, cache).sequences, expected)


@pytest.mark.parametrize("module", ["lm_head", "model.layers.0.mlp", "model.layers.1.self_attn.k_proj"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("at", [0, 2])
def test_what_a_transient_nan_computed_is_not_kept(
    model: PreTrainedModel, module: str, do_sample: bool, at: int
) -> None:
    """Neither keys and values nor logits, whether the call raises or not."""
    settings: dict[str, Any] = {"do_sample": do_sample, "seed": 3}
    expected = generate(model, None, **settings).sequences
    cache, logits, passes = SharedPrefixCache(), LogitsCache(), 0

    def fail(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal passes
        passes += 1
        return torch.full_like(output, torch.nan) if passes == at + 1 else None

    handle = model.get_submodule(module).register_forward_hook(fail)
    with contextlib.suppress(RuntimeError):
        generate(model, cache, logits_cache=logits, **settings)
    handle.remove()
    assert torch.equal(generate(model, cache, **settings).sequences, expected)
    assert torch.equal(generate(model, None, logits_cache=logits, **settings).sequences, expected)


class Leak(LogitsProcessor):
    """Creates blocks that nobody frees and prompts that nobody computes, as a careless mode would."""

    def __init__(self, cache: SharedPrefixCache) -> None:
        self.cache = cache

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.cache.pool.new_block(7)
        self.cache.insert(np.array([3, 1, 4, len(self.cache.pool.blocks)]))
        return scores


@pytest.mark.parametrize("at", [0, 1, 2, 5], ids=lambda at: f"interrupted in pass {at}" if at else "complete")
@pytest.mark.parametrize("mode", BUILT_IN)
def test_after_every_call_the_blocks_of_a_kept_cache_are_those_of_its_tree(
    mode: str, at: int, model: PreTrainedModel
) -> None:
    cache = SharedPrefixCache()

    def call(*processors: LogitsProcessor) -> None:
        given = small_call(mode) | {"tokenizer": AsciiTokenizer(), "past_key_values": cache, "eos_token_id": None}
        model.generate(IDS, logits_processor=[*processors], **given)

    try:
        call()
    except ValueError:  # the mode makes its own cache
        with pytest.raises(ValueError, match="past_key_values cannot be given"):
            call()
        return
    for processors in ([Leak(cache)], []):
        interrupted = failing(model, at, KeyboardInterrupt()) if at else contextlib.nullcontext()
        with contextlib.suppress(KeyboardInterrupt), interrupted:
            call(*processors)
        assert cache.pool.blocks == {node.block for node in cache.tree.nodes()}
        assert not any(len(node.uncached) for node in cache.tree.nodes())

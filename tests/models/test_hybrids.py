"""Models whose layers keep a state, or whose own attention runs: greedy tokens equal those of `generate` per row."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import hybrids
import pytest
import tiny
import torch
from tiny_tokenizer import TOKENIZER
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel import LogitsCache, SharedPrefixCache, UnsupportedModelError
from hf_parallel.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")
EACH = [("lfm2", 1), ("qwen3_5_text", 1)] + [pytest.param(name, 4, marks=pytest.mark.slow) for name in hybrids.SETTINGS]
EACH += [("bloom", 1)] + [
    pytest.param(n, 4, marks=pytest.mark.slow)
    for n in ("gptj", "falcon", "trocr", "jetmoe", "deepseek_v32", "inkling_text")
]
"""Families, each with a number of random calls."""
NUM_TOKENS = 12
NEVER = 10_000  # a token that no model generates


@cache
def enabled(name: str) -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)))


class Alone:
    """Greedy tokens of each prompt alone, from the model's own `generate`."""

    def __init__(self, name: str) -> None:
        self.model, self._known = tiny.build(name), dict[tuple[int, ...], list[int]]()

    def tokens(self, prompt: Sequence[int], eos: Sequence[int] = ()) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            for module in self.model.modules():  # a prompt of one token would continue the call before it
                if hasattr(module, "conv1d_state"):
                    module.conv1d_state = None
            out = self.model.generate(
                torch.tensor([key]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=NEVER
            )
            self._known[key] = out[0, len(key) :].tolist()
        tokens = self._known[key]
        ends = [index + 1 for index, token in enumerate(tokens) if token in eos]
        return tokens[: min(ends, default=len(tokens))]


def completions(model: Any, prompts: Sequence[Sequence[int]], **settings: Any) -> tuple[list[list[int]], Any]:
    ids, mask = tiny.left_pad([torch.tensor(prompt) for prompt in prompts])
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "return_dict_in_generate": True} | settings
    output = model.generate(ids, attention_mask=mask, generation_mode="shared_prefix", **settings)
    begin = ids.shape[1]
    rows = [row[begin:length] for row, length in zip(output.sequences.tolist(), output.record.lengths, strict=True)]
    return rows, output


def random_prompts(rng: random.Random, known: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Return prompts that begin alike, or like a known sequence."""
    pool = [list(one) for one in known] or [[]]
    prompts = []
    for _ in range(rng.randint(1, 4)):
        start = rng.choice(pool)
        start = start[: rng.choice([len(start), rng.randint(0, len(start))])]
        prompts.append(
            start + [rng.randrange(3, tiny.VOCAB_SIZE) for _ in range(rng.choice([1, 2, rng.randint(1, 20)]))]
        )
        pool += [prompts[-1]] * rng.randint(0, 2)
    return prompts + rng.choices(prompts, k=rng.randint(0, 2))


@pytest.mark.parametrize(("name", "num_calls"), EACH)
def test_random_calls_equal_generate(name: str, num_calls: int) -> None:
    model, alone, rng = enabled(name), Alone(name), random.Random(name)
    for _ in range(num_calls):
        kept, known = SharedPrefixCache(), list[list[int]]()
        for _ in range(3):
            prompts = random_prompts(rng, known)
            some = [token for prompt in prompts for token in alone.tokens(prompt)]
            eos = rng.choice([[NEVER], rng.choices(some, k=2)])
            chunk = rng.choice([1, 7, 64, None])
            rows, _ = completions(model, prompts, past_key_values=kept, eos_token_id=eos, prefill_chunk_size=chunk)
            assert rows == [alone.tokens(prompt, eos) for prompt in prompts]
            known += [prompt + row for prompt, row in zip(prompts, rows, strict=True)]


@pytest.mark.parametrize(("name", "num_calls"), EACH)
def test_seeded_samples_equal_the_row_alone_and_replay(name: str, num_calls: int) -> None:
    model, rng = enabled(name), random.Random(name)
    settings = {"do_sample": True, "top_k": 20}
    logits, kept = LogitsCache(), SharedPrefixCache()
    for _ in range(num_calls):
        prompts = random_prompts(rng)[:3]
        seeds = [rng.randint(0, 2) for _ in prompts]
        alone = [completions(model, [one], seed=[s], **settings)[0][0] for one, s in zip(prompts, seeds, strict=True)]
        for more in ({}, {"logits_cache": logits}, {"logits_cache": logits, "past_key_values": kept}):
            rows, output = completions(model, prompts, seed=seeds, **settings, **more)
            assert rows == alone
        shorter = {**settings, "max_new_tokens": NUM_TOKENS + 6}
        rows, output = completions(model, prompts, seed=seeds, **shorter, logits_cache=logits, past_key_values=kept)
        assert rows == completions(model, prompts, seed=seeds, **shorter)[0]
        assert output.stats.replayed_tokens >= NUM_TOKENS


def fail_sometimes(engine: Engine, rng: random.Random, num_segments: int) -> None:
    """Let an engine run out of memory in some of its larger passes, so that it preempts one of several requests."""
    plan, running = engine._storage.cache.prepare_run, engine._scheduler.running

    def sometimes(passes: Any) -> Any:
        several = sum(not request.preempted for request in running) > 1
        if several and len(passes[0]) > num_segments and rng.random() < 0.2:
            raise torch.OutOfMemoryError("injected")
        return plan(passes)

    engine._storage.cache.prepare_run = sometimes  # type: ignore[method-assign]


def check_preempted_and_idle(engine: Engine) -> None:
    """Check that requests were preempted, and that only nodes of the tree still have states."""
    assert engine.stats.preemptions > 0
    kept = [node for node in engine._storage.tree.nodes() if node.block is not None and node.block.state >= 0]
    assert engine._storage.pool.states.num_used == len(kept)


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_5_text", "trocr"))]
)
def test_an_engine_forks_and_rebuilds_states(name: str) -> None:
    model, alone, rng, known = enabled(name), Alone(name), random.Random(name), list[list[int]]()
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": NEVER}
    with Engine(model, max_batch_tokens=64) as engine:
        fail_sometimes(engine, rng, 4)
        for _ in range(2):
            batches = [random_prompts(rng, known)[:3] for _ in range(5)]
            expected = [[alone.tokens(prompt) for prompt in prompts] for prompts in batches]
            handles = []
            for prompts in batches:
                ids, mask = tiny.left_pad([torch.tensor(prompt) for prompt in prompts])
                handles.append(engine.submit(ids, attention_mask=mask, generation_mode="shared_prefix", **settings))
            engine.submit(ids, attention_mask=mask, generation_mode="shared_prefix", **settings).cancel()
            for prompts, tokens, handle in zip(batches, expected, handles, strict=True):
                rows = handle.result(timeout=600).sequences[:, max(map(len, prompts)) :].tolist()
                assert rows == tokens
                known += [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
        check_preempted_and_idle(engine)


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_prompts_whose_states_a_failed_pass_has_half_written_are_computed_again(name: str) -> None:
    model, alone, rng, broken = enabled(name), Alone(name), random.Random(name), list[Any]()
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": NEVER}
    shared = [rng.randrange(3, tiny.VOCAB_SIZE) for _ in range(30)]
    prompts = [shared[: 6 * i] + [rng.randrange(3, tiny.VOCAB_SIZE) for _ in range(20)] for i in range(6)]
    expected = [alone.tokens(prompt) for prompt in prompts]
    with Engine(model, max_batch_tokens=16) as engine:  # prompts are computed in several passes
        compute, fit = engine._forward, engine._fit
        batches: list[list[Any]] = []

        def note(batch: list[Any]) -> Any:
            batches.append(batch)
            return fit(batch)

        def fail(joined: Any, forward: Any, adapter: str | None) -> torch.Tensor:
            if len(batches[-1]) > 1 and len(broken) < 6 and rng.random() < 0.3:
                broken.append(engine._cached_model.logits(forward, joined.ids, joined.logits_to_keep))
                raise RuntimeError("a kernel failed")
            return compute(joined, forward, adapter)

        engine._fit = note  # type: ignore[method-assign]
        engine._forward = fail  # type: ignore[method-assign]
        handles = [engine.submit(prompt, **settings) for prompt in prompts]
        rows = [
            handle.result(timeout=600).sequences[0, len(p) :].tolist()
            for handle, p in zip(handles, prompts, strict=False)
        ]
        assert len(broken) == 6
        assert rows == expected
        check_preempted_and_idle(engine)
        assert all(node.block is not None and node.block.has_state for node in engine._storage.tree.nodes())


def test_modes_without_one_sequence_per_row_raise() -> None:
    model, ids = enabled("lfm2"), torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedModelError, match=r"hogwild .* model\.layers\.0\.conv: modes that work are"):
        model.generate(ids, generation_mode="hogwild", max_new_tokens=4, num_workers=2, tokenizer=TOKENIZER)
    with pytest.raises(UnsupportedModelError, match=r"rotates keys .* model\.layers\.0\.conv.*: use 'reencode'"):
        model.generate(ids, generation_mode="pdos", max_new_tokens=4, join="rotate", tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="keep a state cannot use this cache in a plain forward pass"):
        model(ids, past_key_values=SharedPrefixCache(), use_cache=True)


def test_a_prompt_has_one_state_however_many_rows_start_from_it() -> None:
    model, kept = enabled("lfm2"), SharedPrefixCache()
    completions(model, [list(range(3, 40))] * 5, past_key_values=kept, keep_completions=False)
    assert kept.pool.states.num_used == 2  # at its end and before its last token, whose logits a later call needs
    assert kept.state_bytes == 2 * 3 * 64 * 3 * 4  # three layers, 64 channels, kernel of 3, float32

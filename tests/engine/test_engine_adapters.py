"""Requests of different LoRA adapters in one engine get the bits that they get alone, and share no prefixes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import TOKENIZER, Case, assert_nothing_is_held, random_case, random_prefixes
from test_engine import enabled

from hf_parallel import LogitsCache
from hf_parallel.engine import Engine, KVBudgetError

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTERS = ("__base__", "first", "second")
MODES = ("shared_prefix", "hogwild", "pdos", "resample", None)
BUDGET = 480 * 512  # bytes of 480 tokens
PROMPT = torch.arange(40, 100)[None]


def adapted(**settings: Any) -> Any:
    """Return a tiny PEFT model with two random adapters of the decoder, whose greedy texts differ."""
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=32, **settings)
    model = peft.get_peft_model(enabled("llama"), lora, "first")
    model.add_adapter(
        "second", peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules="all-linear")
    )
    return model.eval()


@contextmanager
def only(model: Any, adapter: str) -> Iterator[Any]:
    """Set an adapter of a PEFT model, or none."""
    if adapter == "__base__":
        with model.disable_adapter():
            yield model
    else:
        model.set_adapter(adapter)
        yield model


@pytest.mark.parametrize("count", [5, pytest.param(24, marks=pytest.mark.slow)])
def test_interleaved_requests_get_the_bits_of_their_adapter(count: int) -> None:
    """They have the same prompts, modes and logits caches, are canceled, and are preempted in a small memory."""
    rng, model = random.Random(count), adapted()
    prefixes = random_prefixes(rng, 3, 40)
    cases = [random_case(rng, prefixes, MODES[index % len(MODES) :][:1]) for index in range(count)]
    jobs = [(case, adapter) for case in cases for adapter in ADAPTERS]
    caches = {id(case): {"logits_cache": LogitsCache()} for case in cases if "logits_cache" in case.settings}
    rng.shuffle(jobs)
    handles: list[Any] = [None] * len(jobs)
    outputs: list[Any] = [None] * len(jobs)
    with Engine(model, TOKENIZER, max_kv_bytes=BUDGET, max_batch_tokens=64) as engine:
        for index, (case, adapter) in enumerate(jobs):
            settings = case.settings | caches.get(id(case), {})
            with suppress(KVBudgetError):
                handles[index] = engine.submit(case.prompt, case.mode, adapter=adapter, **settings)
        for index, handle in enumerate(handles):
            if handle is not None and index % 9 == 0:
                handle.cancel()
            elif handle is not None:
                with suppress(KVBudgetError):  # workers may write more than a request reserves
                    outputs[index] = handle.result(600)
        stats = engine.stats
        assert_nothing_is_held(engine)
    assert stats.preemptions
    assert stats.evicted_tokens
    assert outputs.count(None) < len(outputs) // 3
    found: dict[int, list[Any]] = {}
    for (case, adapter), output in zip(jobs, outputs, strict=True):
        if output is not None:
            with only(model, adapter):
                expected = case.output_alone(model)
            assert torch.equal(output.sequences, expected.sequences), (case, adapter)
            if "logits_cache" not in case.settings:  # whose replays are rounded otherwise
                (_, values), (_, of_call) = output.record.sampled_log_probs(), expected.record.sampled_log_probs()
                np.testing.assert_array_equal(values, of_call, str((case, adapter)))
            found.setdefault(id(case), []).append(output.sequences.tolist())
    assert any(a != b for a, b, *_ in (same for same in found.values() if len(same) > 1))


def test_prefixes_are_shared_within_an_adapter_only() -> None:
    model, reused = adapted(), []
    with Engine(model) as engine:
        for adapter in (*ADAPTERS, None, *ADAPTERS):
            reused.append(engine.submit(PROMPT, max_new_tokens=4, adapter=adapter).result(600).stats.reused_tokens)
    assert reused[:4] == [0] * 4
    assert min(reused[4:]) == max(reused[4:]) >= PROMPT.numel() - 1
    assert model.active_adapters == ["first"]


def test_adapters_take_turns() -> None:
    """A short request waits for one step of each of the other adapters, not for their end."""
    with Engine(adapted()) as engine:
        long = [engine.submit(PROMPT, max_new_tokens=60, min_new_tokens=60, adapter=name) for name in ADAPTERS[:2]]
        assert next(iter(long[1])) is not None
        short = engine.submit(PROMPT, max_new_tokens=3, adapter="second").result(600)
        assert short.sequences.shape[1] <= PROMPT.shape[1] + 3
        assert not any(handle.done for handle in long)


def test_adapters_that_are_added_while_an_engine_is_open_change_their_own_requests_only() -> None:
    model, more = adapted(target_modules=["q_proj"]), {"init_lora_weights": False, "lora_alpha": 64}
    with Engine(model) as engine:
        first = [engine.submit(PROMPT, max_new_tokens=8, adapter="first").result(600).sequences.tolist()]
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"], **more)
        model.add_adapter("third", lora)
        model.eval()
        third = engine.submit(PROMPT, max_new_tokens=8, adapter="third").result(600).sequences.tolist()
        first.append(engine.submit(PROMPT, max_new_tokens=8, adapter="first").result(600).sequences.tolist())
    case = Case(PROMPT, None, {"max_new_tokens": 8})
    for adapter, found in (("first", first[0]), ("first", first[1]), ("third", third)):
        with only(model, adapter):
            assert found == case.alone(model)


def test_without_a_name_the_active_adapter_computes() -> None:
    model, case = adapted(), Case(PROMPT, None, {"max_new_tokens": 8})
    model.set_adapter("second")
    alone = case.alone(model)
    with Engine(model) as engine:
        assert engine.submit(PROMPT, adapter="first", max_new_tokens=8).result(600).sequences.tolist() != alone
        assert engine.submit(PROMPT, max_new_tokens=8).result(600).sequences.tolist() == alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"bias": "all"}, "bias"),
        (
            {"target_modules": ["embed_tokens"]},
            "decoder only, but one changes model.embed_tokens",
        ),
        ({"target_modules": ["lm_head"]}, "but one changes lm_head"),
    ],
)
def test_adapters_that_change_more_than_linear_layers_raise(settings: dict[str, Any], message: str) -> None:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **settings})
    with Engine(peft.get_peft_model(enabled("llama"), lora)) as engine:
        for name in ("default", "__base__"):
            with pytest.raises(ValueError, match=message):
                engine.submit(PROMPT, adapter=name)


def test_adapters_that_no_pass_can_use_raise() -> None:
    model = adapted()
    with Engine(model) as engine:
        for name in ("third", "", 5):
            with pytest.raises(ValueError, match=r"adapter must be one of \['__base__', 'first', 'second'\], got"):
                engine.submit(PROMPT, adapter=name)
        assert engine.submit(PROMPT, max_new_tokens=2, adapter="second").result(600)
        model.delete_adapter("second")
        with pytest.raises(ValueError, match="adapter must be one of"):
            engine.submit(PROMPT, max_new_tokens=2, adapter="second").result(600)
    model.merge_adapter()
    with Engine(model) as engine, pytest.raises(ValueError, match="unmerge_adapter"):
        engine.submit(PROMPT, adapter="first")
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="virtual tokens"):
        Engine(peft.get_peft_model(enabled("llama"), tuning))

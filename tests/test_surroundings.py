"""Calls under autocast, in inference mode, through wrappers and with another default device work as in `generate`."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel.generation import MODES

PROMPTS = tiny.make_prompts([9, 9, 9])
GREEDY = {"max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": tiny.PAD}


@pytest.fixture(params=["llama", "gpt_neox"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model = tiny.build(request.param)
    hf_parallel.enable(model)
    yield model
    hf_parallel.disable(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_shared_prefix_equals_generate_under_autocast(dtype: torch.dtype, held: torch.dtype) -> None:
    model = tiny.build("llama", dtype=held)
    ids = torch.stack(PROMPTS)
    with torch.autocast("cpu", dtype):
        hf_parallel.enable(model)
        try:
            plain = model.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
            ours = model.generate(
                ids, generation_mode="shared_prefix", **GREEDY, output_logits=True, return_dict_in_generate=True
            )
        finally:
            hf_parallel.disable(model)
    assert ours.past_key_values.pool.arena.layers[0].keys.dtype == dtype
    spread = plain.logits[0].float().std()
    torch.testing.assert_close(ours.logits[0].float(), plain.logits[0].float(), rtol=0, atol=0.2 * float(spread))


def test_a_model_whose_forward_is_wrapped_in_autocast_can_be_enabled(model: PreTrainedModel) -> None:
    """As Accelerate and Trainer do: computed in bfloat16, with logits in float32."""
    hf_parallel.disable(model)
    forward = type(model).forward

    def wrapped(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(self, *args, **kwargs)
        output.logits = output.logits.float()
        return output

    wrapped.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    kind = type(model)
    kind.forward = wrapped
    try:
        hf_parallel.enable(model)
        out = model.generate(torch.stack(PROMPTS), generation_mode="shared_prefix", **GREEDY)
        assert out.shape == (3, 21)
    finally:
        kind.forward = forward


class Adapted(torch.nn.Module):
    """A wrapper like those of PEFT."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = torch.nn.ModuleDict({"model": model})

    def get_base_model(self) -> torch.nn.Module:
        return self.base_model["model"]

    def generate(self, **kwargs: Any) -> Any:
        return self.get_base_model().generate(**kwargs)


@pytest.mark.parametrize(
    "wrap", [torch.compile, Adapted, lambda model: torch.compile(Adapted(model))], ids=["compiled", "adapted", "both"]
)
def test_enabling_a_wrapper_enables_its_model(wrap: Callable[[Any], Any]) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    expected, wrapped = model.generate(torch.stack(PROMPTS), **GREEDY), wrap(model)
    call = {"input_ids": torch.stack(PROMPTS), "generation_mode": "shared_prefix", **GREEDY}
    assert not hf_parallel.is_enabled(wrapped)
    assert hf_parallel.enable(wrapped) is wrapped
    assert hf_parallel.is_enabled(wrapped)
    assert hf_parallel.is_enabled(model)
    assert torch.equal(wrapped.generate(**call), expected)
    with hf_parallel.HogwildSession(wrapped, AsciiTokenizer(), PROMPTS[0][None], **small_call("hogwild")) as session:
        session.run(3)
    assert hf_parallel.disable(wrapped) is wrapped
    assert not hf_parallel.is_enabled(model)


def test_a_model_whose_input_preparation_was_replaced_raises(model: PreTrainedModel) -> None:
    """As PEFT's prompt tuning does, to add virtual tokens."""
    own = model.prepare_inputs_for_generation
    call = {"generation_mode": "shared_prefix", **GREEDY}
    expected = model.generate(torch.stack(PROMPTS), **call)
    try:
        model.prepare_inputs_for_generation = lambda *args, **kwargs: own(*args, **kwargs)
        with pytest.raises(ValueError, match="prepare_inputs_for_generation, but .* was replaced by .* virtual tokens"):
            model.generate(torch.stack(PROMPTS), **call)
        for harmless in (own, functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))):
            model.prepare_inputs_for_generation = harmless  # PEFT restores the model's own
            assert torch.equal(model.generate(torch.stack(PROMPTS), **call), expected)
    finally:
        del model.prepare_inputs_for_generation


COMPILE_IN_PLACE: dict[str, Callable[[Any], None]] = {
    "compile": lambda model: model.compile(backend="eager"),
    "forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "layer": lambda model: model.model.layers[1].compile(backend="eager"),
}


@pytest.mark.parametrize("part", COMPILE_IN_PLACE)
def test_a_model_compiled_in_place_raises_with_a_way_out(part: str) -> None:
    fresh, enabled = copy.deepcopy(tiny.build("llama")), hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    for model in (fresh, enabled):
        COMPILE_IN_PLACE[part](model)
    way_out = r"compiled in place: load it again, and use torch.compile\(model\).* or compile=True"
    with pytest.raises(hf_parallel.UnsupportedModelError, match=way_out):
        hf_parallel.enable(fresh)
    assert not hf_parallel.is_enabled(fresh)
    with pytest.raises(hf_parallel.UnsupportedModelError, match=way_out):
        enabled.generate(torch.stack(PROMPTS), generation_mode="shared_prefix", **GREEDY)


def test_a_copy_whose_forward_computes_the_original_raises() -> None:
    """TRL's trainers replace `forward` like this. A copy of the model would silently give other tokens."""
    call = {"generation_mode": "shared_prefix", **GREEDY}
    model: Any = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    expected = model.generate(torch.stack(PROMPTS), **call)
    forward = model.forward

    @functools.wraps(type(model).forward)
    def replaced(self: Any, *args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    model.forward = replaced.__get__(model)
    assert torch.equal(model.generate(torch.stack(PROMPTS), **call), expected)
    with pytest.raises(ValueError, match="this model is a copy, and its forward"):
        copy.deepcopy(model).generate(torch.stack(PROMPTS), **call)


@pytest.mark.parametrize("name", ["generate", "_sample"])
def test_a_model_with_a_method_of_its_own_that_hides_modes_raises(name: str) -> None:
    model: Any = copy.deepcopy(tiny.build("llama"))
    setattr(model, name, lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=rf"LlamaForCausalLM has its own {name} .*del model.{name}"):
        hf_parallel.enable(model)
    delattr(model, name)
    assert hf_parallel.is_enabled(hf_parallel.enable(model))


# The tokenizer of an enabled model


class Shifted(AsciiTokenizer):
    """Another tokenizer: it decodes another text."""

    def decode(self, tokens: Any, **kwargs: Any) -> str:
        return super().decode([(int(token) + 1) % tiny.VOCAB_SIZE for token in tokens], **kwargs)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("mode", BUILT_IN)
def test_modes_use_the_tokenizer_of_enable_unless_the_call_has_one(model: PreTrainedModel, mode: str) -> None:
    def texts(**arguments: Any) -> Any:
        torch.manual_seed(0)
        settings = {**GREEDY, **small_call(mode), "return_dict_in_generate": True, **arguments}
        out = model.generate(torch.stack(PROMPTS), **settings)
        return out.sequences.tolist(), [event.text for event in out.record.events]

    one, other = texts(tokenizer=AsciiTokenizer()), texts(tokenizer=Shifted())
    assert (one == other) == (not MODES[mode].traits.streams_text)  # those read no text
    hf_parallel.enable(model, tokenizer=AsciiTokenizer())
    assert texts() == one
    assert texts(tokenizer=Shifted()) == other
    hf_parallel.enable(model)
    assert texts() == one
    hf_parallel.enable(model, tokenizer=Shifted())
    assert texts() == other


def test_copies_share_the_tokenizer_and_pickles_do_not_hold_it(model: PreTrainedModel) -> None:
    tokenizer: Any = AsciiTokenizer()
    tokenizer.lock = threading.Lock()  # which cannot be copied
    call = {**GREEDY, **small_call("hogwild")}
    twin = copy.deepcopy(hf_parallel.enable(model, tokenizer=tokenizer))
    assert torch.equal(twin.generate(torch.stack(PROMPTS), **call), model.generate(torch.stack(PROMPTS), **call))
    with pytest.raises(ValueError, match=r"or enable\(model, tokenizer="):
        pickle.loads(pickle.dumps(model)).generate(torch.stack(PROMPTS), **call)

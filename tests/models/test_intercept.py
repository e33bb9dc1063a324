"""What takes the place of a model's own code is restored: at the end of the pass or call, or by `disable`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from torch import nn
from torch._dynamo import config as dynamo_config

import hf_parallel
from hf_parallel.engine import Engine
from hf_parallel.models.decode import compiled
from hf_parallel.training import prepare_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
PROMPT = torch.arange(5, 25)[None]


def attributes(model: nn.Module) -> dict[str, Any]:
    """Return all attributes of a model's modules and configs, and the classes of these."""
    objects: dict[str, Any] = dict(model.named_modules())
    for name, module in [*objects.items()]:
        if "config" in vars(module):
            config = module.config
            objects[f"{name}.config"] = config
            objects |= {f"{name}.config.{inner}": getattr(config, inner) for inner in config.sub_configs}
    values: dict[str, Any] = {}
    for name, item in objects.items():
        values[f"{name}.__class__"] = type(item)
        for attribute, value in vars(item).items():
            values[f"{name}.{attribute}"] = dict(value) if isinstance(value, dict) else value
    for name, parameter in model.named_parameters():
        values[f"{name}: bytes of the storage"] = parameter.untyped_storage().nbytes()
    return values


def assert_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    assert after.keys() == before.keys()
    assert [name for name, value in before.items() if not is_same(after[name], value)] == []


def is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value is other
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(is_same(value[key], other[key]) for key in value)
    return bool(value is other or value == other)


def generate(model: Any) -> None:
    model.generate(PROMPT, generation_mode="shared_prefix", **GREEDY)


def work_together(model: Any) -> None:
    """Let two workers see each other at rotated positions."""
    ids = torch.tensor([AsciiTokenizer()("Two workers think. ")["input_ids"]])
    settings: dict[str, Any] = {"tokenizer": AsciiTokenizer(), "num_workers": 2, "pad_token_id": 0}
    model.generate(ids, generation_mode="hogwild", **settings, **GREEDY)


def generate_compiled(model: Any) -> None:
    """Run compiled layers whose projections are fused."""
    model.generate(PROMPT, generation_mode="shared_prefix", compile=True, **GREEDY)
    assert compiled.num_moves(model)


def serve(model: Any) -> None:
    with Engine(model) as engine:
        engine.submit(PROMPT, **GREEDY).result(600)


def fail(model: Any) -> None:
    """Let a pass raise an error in its last layer."""

    def raise_error(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.get_output_embeddings().register_forward_pre_hook(raise_error)
    try:
        with pytest.raises(ZeroDivisionError):
            model.generate(PROMPT, generation_mode="shared_prefix", **GREEDY)
    finally:
        handle.remove()


def train(model: Any) -> None:
    prepare_model(model.train())
    with torch.no_grad():
        model(PROMPT)
    model.eval()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("llama", work_together),
        ("llama", generate_compiled),
        ("llama", serve),
        ("llama", fail),
        ("llama", train),
        ("gemma3_text", generate),
        ("qwen3_5_text", generate),  # mixers
        ("recurrent_gemma", generate),  # whose attributes hold the states
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_was_enabled_is_what_it_was(
    name: str, use: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "FUSING_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    torch._dynamo.reset()
    fresh: Any = tiny.build(name)
    model = copy.deepcopy(fresh)
    before = attributes(model)
    settings = dynamo_config.get_config_copy()
    hf_parallel.enable(model)
    use(model)
    hf_parallel.disable(model)
    assert_same(attributes(model), before)
    assert dynamo_config.get_config_copy() == settings
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, fresh(PROMPT).logits)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_an_engine_are_those_that_were_active() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    model: Any = peft.get_peft_model(copy.deepcopy(tiny.build("llama")), lora, "first").eval()
    before = attributes(model)
    hf_parallel.enable(model)
    with Engine(model) as engine:
        for adapter in ("first", "__base__"):
            engine.submit(PROMPT, adapter=adapter, **GREEDY).result(600)
    hf_parallel.disable(model)
    assert_same(attributes(model), before)

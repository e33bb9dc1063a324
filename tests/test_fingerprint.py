"""Fingerprints of models: adapters, autocast, dtypes and memory layouts (weights: test_resample.py)."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.cache.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tiny.make_prompts([16])[0][None]


class LowRank(nn.Module):
    """A layer with two adapters that are switched by attributes, as in PEFT, without changing a weight."""

    merged_adapters: tuple[str, ...] = ()

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.disable_adapters = base, ["one"], False
        self.scaling = {"one": 1.0, "two": 1.0}
        ranks = {name: nn.Linear(base.in_features, base.out_features, bias=False) for name in self.scaling}
        self.adapters = nn.ModuleDict(ranks)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(states)
        for name in () if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * self.adapters[name](states)
        return out


SWITCHES: dict[str, dict[str, Any]] = {
    "another": {"active_adapters": ["two"]},
    "both": {"active_adapters": ["one", "two"]},
    "none": {"disable_adapters": True},
    "stronger": {"scaling": {"one": 2.0, "two": 1.0}},
}


def adapted_model(layer: int) -> tuple[Any, LowRank]:
    """Return an enabled model and the adapters of the values of one of its layers."""
    model = copy.deepcopy(tiny.build("llama"))
    attention = model.model.layers[layer].self_attn
    attention.v_proj = adapters = LowRank(attention.v_proj)
    return hf_parallel.enable(model), adapters


@pytest.mark.parametrize("switch", SWITCHES)
def test_logits_of_another_adapter_are_not_replayed(switch: str) -> None:
    model, layer = adapted_model(1)

    def sample(**more: Any) -> Any:
        given = {"do_sample": True, "seed": 0, "max_new_tokens": 8, "return_dict_in_generate": True} | more
        return model.generate(PROMPT, generation_mode="shared_prefix", **given)

    cache = LogitsCache()
    before, weights = sample(logits_cache=cache), copy.deepcopy(model.state_dict())
    first = dict(vars(layer))
    for name, value in SWITCHES[switch].items():
        setattr(layer, name, value)
    out = sample(logits_cache=cache)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert out.stats.replayed_tokens == 0
    assert torch.equal(out.sequences, sample().sequences)
    for name in SWITCHES[switch]:
        setattr(layer, name, first[name])
    again = sample(logits_cache=cache)
    assert again.stats.forward_passes == 0
    assert torch.equal(again.sequences, before.sequences)


def test_autocast_changes_the_fingerprint() -> None:
    model = tiny.build("llama")
    names = {fingerprint(model)}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            names.add(fingerprint(model))
    assert len(names) == 3
    assert fingerprint(model) in names


def test_an_upgrade_of_transformers_keeps_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    name = fingerprint(model)
    monkeypatch.setattr(transformers.configuration_utils, "__version__", "5.99.0")
    assert model.config.to_dict()["transformers_version"] == "5.99.0"
    assert fingerprint(model) == name


def test_a_logits_cache_of_another_transformers_version_warns_and_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    given = {"do_sample": True, "seed": 0, "max_new_tokens": 8, "return_dict_in_generate": True}
    before = model.generate(PROMPT, generation_mode="shared_prefix", logits_cache=(cache := LogitsCache()), **given)
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.0.1")
        cache.save(tmp_path / "cache")
    loaded = LogitsCache.load(tmp_path / "cache")
    said = f"cache was saved under transformers 5.0.1, this is {transformers.__version__}"
    assert [said in record.getMessage() for record in caplog.records] == [True]
    out = model.generate(PROMPT, generation_mode="shared_prefix", logits_cache=loaded, **given)
    assert out.stats.forward_passes == 0
    assert torch.equal(out.sequences, before.sequences)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8])
def test_values_of_every_dtype_count(dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    values = torch.zeros(8).to(dtype)
    model.register_buffer("more", values)
    name = fingerprint(model)
    model.more = torch.ones(8).to(dtype) if dtype != torch.complex64 else torch.full((8,), 1j)
    assert fingerprint(model) != name


@pytest.mark.parametrize(
    "view",
    [
        lambda values: torch.cat((torch.zeros(5), values.flatten()))[5:].view_as(values),
        lambda values: values.T.contiguous().T,
        lambda values: values.repeat_interleave(2, dim=1)[:, ::2],
    ],
    ids=["with an offset", "transposed", "with gaps"],
)
@pytest.mark.parametrize("shape", [(6, 7), (1, 3), (0, 4), (40, 1)], ids=str)
def test_the_memory_layout_does_not_change_the_fingerprint(view: Any, shape: tuple[int, int]) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    values = torch.arange(float(math.prod(shape))).view(shape)
    model.register_buffer("more", values)
    name = fingerprint(model)
    model.more = view(values)
    assert torch.equal(model.more, values)
    assert fingerprint(model) == name


def test_offloaded_weights_raise() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.to("meta"))
    with pytest.raises(
        ValueError, match=r"logits_cache identifies models .*layers\.1\.mlp\.up_proj\.weight is offloaded"
    ):
        fingerprint(model)

"""Compiled decoder layers generate the tokens of the layers as they are, and are compiled once for all layers."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel.models.decode import compiled
from hf_parallel.models.decode.compiled import CompiledLayers, compiled_layers

(PROMPT,) = tiny.make_prompts([9], seed=8)
SHAPES = ("gemma3n_text", "gemma4_text-26b", "llama4_text", "phimoe")
ARCHITECTURES = [
    "llama",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "qwen3", "gemma2", "gpt_oss", "mixtral", *SHAPES)),
]


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo alone: one test runs Inductor, which takes ten times as long."""
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    yield
    torch.compiler.reset()


def enabled(name: str = "llama") -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)))


def generate(model: PreTrainedModel, rows: int = 3, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"generation_mode": "shared_prefix", "do_sample": True, "seed": 3, "pad_token_id": 0}
    defaults |= {"num_return_sequences": rows, "max_new_tokens": 5, "return_dict_in_generate": True}
    return model.generate(PROMPT[None], **(defaults | settings))  # type: ignore[operator]


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_layers_generate_the_same_tokens(name: str) -> None:
    model = enabled(name)
    for rows in (1, 3):
        expected = generate(model, rows, compile=False)
        out = generate(model, rows, compile=True)
        assert torch.equal(out.sequences, expected.sequences)
        assert (out.stats.compiled_passes, expected.stats.compiled_passes) == (4, 0)


@pytest.mark.slow
def test_inductor_generates_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILER", "inductor")
    model = enabled()
    assert torch.equal(generate(model, compile=True).sequences, generate(model, compile=False).sequences)


def test_all_layers_share_a_graph_for_several_rows_and_one_for_a_single_row() -> None:
    model = enabled()
    before = num_graphs()
    for rows in (4, 3, 2, 4):
        generate(model, rows, compile=True)
    assert num_graphs() == before + 1
    generate(model, 1, compile=True)
    assert num_graphs() == before + 2


def test_a_model_that_cannot_be_compiled_runs_as_it_is_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    class Uncompilable(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.inner(x)

    model = enabled()
    expected = generate(model, compile=False).sequences
    model.model.layers[1].mlp = Uncompilable(model.model.layers[1].mlp)  # type: ignore[union-attr,index]
    with caplog.at_level(logging.WARNING):
        outs = [generate(model, compile=True) for _ in range(2)]
    assert all(torch.equal(out.sequences, expected) for out in outs)
    assert [out.stats.compiled_passes for out in outs] == [0, 0]
    assert [r.message for r in caplog.records if "without compiled layers" in r.message][1:] == []
    assert "without compiled layers" in caplog.text


def test_the_default_compiles_on_a_gpu_only_and_if_the_steps_pay_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled()
    assert compiled_layers(model, None, math.inf) is None  # on a CPU
    monkeypatch.setattr(compiled, "execution_device", lambda model: torch.device("cuda"))
    enough = compiled.COMPILE_SECONDS / compiled.SECONDS_SAVED / len(compiled.decoder_layers(model))
    assert compiled_layers(model, None, 0.6 * enough) is None
    assert compiled_layers(model, None, 0.6 * enough) is not None  # with the steps of the call before
    assert compiled_layers(model, False, math.inf) is None


def test_other_threads_run_the_layers_as_they_are_meanwhile() -> None:
    model = enabled()
    layers = CompiledLayers(model)
    before, results = num_graphs(), []

    def plain() -> None:
        results.append(model(PROMPT[None]).logits)

    def meanwhile() -> torch.Tensor:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
        return torch.zeros(0)

    layers.forward(meanwhile)
    assert num_graphs() == before
    assert torch.equal(results[0], model(PROMPT[None]).logits)
    assert all("_compiled_call_impl" not in vars(layer) for layer in layers.layers)


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FUSING_DEVICES", ("cpu",))


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("change", ["replaced", *(pytest.param(n, marks=pytest.mark.slow) for n in ("set", "dtype"))])
def test_fused_projections_follow_weights_that_are_replaced_or_changed(change: str) -> None:
    model = enabled("qwen2")
    generate(model, compile=True)
    projection = model.model.layers[0].self_attn.k_proj  # type: ignore[union-attr,index]
    if change == "set":
        nn.init.normal_(projection.weight)
    elif change == "replaced":
        projection.weight = nn.Parameter(torch.randn_like(projection.weight))
    else:
        model.double()
    out = generate(model, compile=True)
    assert torch.equal(out.sequences, generate(model, compile=False).sequences)

"""During a call, the compiled kernel or oneDNN computes large float32 layers with PyTorch's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

import hf_parallel
from hf_parallel.kernels import native
from hf_parallel.models.cpu.linear import LINEAR_VARIABLE

PROMPT = tiny.make_prompts([40], seed=5)[0][None]
served = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()),
    reason="this PyTorch has no choice between MKL and oneDNN",
)


compiled = pytest.mark.skipif(bool(native.unavailable_reason()), reason="needs a C compiler, as the kernel itself does")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINEAR_VARIABLE, raising=False)


@pytest.fixture
def model() -> Any:
    """A tiny model whose MLP layers have enough weights for the kernels."""
    config: Any = tiny.ARCHITECTURES["llama"].config()
    config.intermediate_size = 2048
    return hf_parallel.enable(LlamaForCausalLM(config).eval())


def replaced(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def operators(function: Callable[[], Any]) -> set[str]:
    """Names of the operators that a function runs."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return {event.key for event in profiler.key_averages()}


def by_definition(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out = x.double() @ layer.weight.double().T
    return out if layer.bias is None else out + layer.bias.double()


# The kernel


@compiled
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 2), (64, 31), (100, 7), (15, 1), (1, 1), (577, 130)])
def test_the_kernel_equals_the_definition(inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    for tokens in range(1, max(native.MAX_TOKENS) + 1):
        x = torch.randn(tokens, inputs)
        with torch.no_grad():
            out = native.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(out.double(), by_definition(layer, x).detach(), rtol=0, atol=5e-6)


@compiled
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("inputs", [200, 207])
@pytest.mark.parametrize("outputs", [333, 334, 335, 1])
def test_results_of_a_token_do_not_depend_on_other_tokens(inputs: int, outputs: int, threads: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(max(native.MAX_TOKENS), inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([native.linear(row[None], weight, bias) for row in x])
        for tokens in range(1, max(native.MAX_TOKENS) + 1):
            assert torch.equal(native.linear(x[:tokens], weight, bias), alone[:tokens])
            assert torch.equal(native.linear(x[-tokens:], weight, bias), alone[-tokens:])
    finally:
        torch.set_num_threads(before)


@served
def test_a_call_uses_the_kernels_and_returns_the_same_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"generation_mode": "shared_prefix", "max_new_tokens": 12, "do_sample": False}
    ours = model.generate(PROMPT, **settings)
    assert "mkldnn::_linear_pointwise" in operators(lambda: model.generate(PROMPT, **settings))  # the prefill
    assert not replaced(model)
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")
    assert torch.equal(model.generate(PROMPT, **settings), ours)
    assert "mkldnn::_linear_pointwise" not in operators(lambda: model.generate(PROMPT, **settings))

"""Linear layers of a call: the compiled kernel gives a token the same bits alone, in any batch, with any threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_packed import packed_weights
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import hf_parallel
from hf_parallel.kernels import native
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.cpu.linear import LINEAR_VARIABLE, PACKINGS, kernel_pass, linear_layers

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
    """A tiny model with wide MLP layers."""
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
    for tokens in (*range(1, 34), 65, 300):
        x = torch.randn(tokens, inputs)
        with torch.no_grad():
            out = native.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(out.double(), by_definition(layer, x).detach(), rtol=0, atol=5e-6)


def chains(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Chains of fused multiply-adds over 1024 inputs each: 64 bits hold the products, and round once more."""
    values, weights = (t.numpy().astype(np.longdouble) for t in (x, weight))
    total = np.zeros((len(x), len(weight)), dtype=np.float32)
    for first in range(0, x.shape[1], 1024):
        chain = np.zeros_like(total)
        for i in range(first, min(first + 1024, x.shape[1])):
            chain = (chain + values[:, i, None] * weights[None, :, i]).astype(np.float32)
        total = chain if first == 0 else total + chain
    return torch.from_numpy(total + bias.numpy())


@compiled
@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="the oracle needs 64 bits")
@pytest.mark.skipif("fma" not in native._processor().split(), reason="needs fused multiply-adds")
@pytest.mark.parametrize("inputs", [7, 200, 1024, 1025, 2100])
@pytest.mark.parametrize("tokens", [1, 4, 5, 17, 70])
def test_a_result_is_a_chain_of_fused_multiply_adds_in_the_order_of_the_inputs(inputs: int, tokens: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(tokens, inputs), torch.randn(50, inputs), torch.randn(50)
    expected = chains(x, weight, bias)
    assert torch.equal(native.linear(x, weight, bias), expected)
    assert torch.equal(native.linear(x, weight.T.contiguous(), bias, by_inputs=True), expected)


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rows_that_differ(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[tuple[int, int, int]]:
    """First row, number of rows and threads of the parts of `x` that `compute` gives other bits than the whole."""
    whole = compute(x)
    found = []
    for threads in (1, 2):
        with threads_set(threads):
            for tokens in (*range(1, 18), 31, 32, 33, 64, 65, 127, 128, 129, 130, 700):
                for first in {0, (7 * tokens) % (len(x) - tokens + 1), len(x) - tokens}:
                    if not torch.equal(compute(x[first : first + tokens]), whole[first : first + tokens]):
                        found.append((first, tokens, threads))
    return found


SHAPES = [(32, 48), (96, 31), (1536, 77), (768, 192), (64, 1), (2080, 100), (576, 576)]


@compiled
@pytest.mark.parametrize("packing", native.PACKINGS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_results_of_a_token_do_not_depend_on_other_tokens_or_threads(packing: str, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    unit = native.PACKINGS[packing][1]
    inputs = -(-inputs // unit) * unit
    weight = torch.randn(outputs, inputs) if packing == "F32" else packed_weights(packing, outputs, inputs)[0]
    bias = torch.randn(outputs)
    x = torch.randn(701, inputs)
    assert not rows_that_differ(lambda rows: native.linear(rows, weight, bias, packing), x)


@served
def test_pytorch_s_own_product_does_depend_on_them() -> None:  # or else the test above could not fail
    torch.manual_seed(0)
    x, weight = torch.randn(701, 576), torch.randn(576, 576)
    assert rows_that_differ(lambda rows: F.linear(rows, weight), x)


class Layers(nn.Module):
    """Linear layers of all kinds that models have, in all dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.small = nn.Linear(24, 5)
        self.large = nn.Linear(576, 300, bias=False)
        self.transposed = Conv1D(129, 77)
        self.part = nn.Linear(50, 40)
        self.to(dtype)
        rows = torch.randn(40, 70).to(dtype)  # of a larger tensor
        self.part.weight = nn.Parameter(rows[:, 10:60])
        self.part.bias = nn.Parameter(torch.randn(40))  # in float32


@compiled
@pytest.mark.parametrize("dtype", PACKINGS, ids=str)
def test_layers_of_a_model_do_not_depend_on_other_tokens_or_threads(dtype: torch.dtype) -> None:
    if (dtype == torch.bfloat16 and native.has_bfloat16()) or (dtype == torch.float16 and native.has_float16()):
        pytest.skip("PyTorch computes this dtype on this processor")
    torch.manual_seed(0)
    model = Layers(dtype)
    with torch.no_grad(), linear_layers(model), kernel_pass():
        for layer in model.children():
            assert "forward" in vars(layer)
            weight = layer.weight
            x = torch.randn(701, weight.shape[0 if isinstance(layer, Conv1D) else 1]).to(dtype)
            assert not rows_that_differ(layer, x)
            expected = x.double() @ (weight if isinstance(layer, Conv1D) else weight.T).double()
            expected += 0 if layer.bias is None else layer.bias.double()
            out = layer(x)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@compiled
def test_a_layer_with_frozen_weights_does_not_keep_its_input_for_gradients() -> None:
    layer = nn.Linear(24, 5)
    layer.requires_grad_(False)
    x = torch.randn(24, requires_grad=True)
    kept: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda x: x
    )
    with linear_layers(layer), kernel_pass(records_gradients=True), hooks:
        out = layer(x)
    assert kept == [layer.weight.data_ptr()]
    out.backward(torch.ones(5))
    torch.testing.assert_close(x.grad, layer.weight.sum(0))


@compiled
def test_products_of_a_module_s_own_matrix_may_name_their_arguments() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(input=x, weight=self.weight) + torch.matmul(x, other=self.weight)

    router, x = Router(), torch.randn(3, 8)
    expected = router(x)
    with fast_layers(router), kernel_pass(records_gradients=True):
        torch.testing.assert_close(router(x), expected)


@served
def test_a_call_uses_the_kernels_and_returns_the_same_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"generation_mode": "shared_prefix", "max_new_tokens": 12, "do_sample": False}
    ours = model.generate(PROMPT, **settings)
    products = {"aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "mkldnn::_linear_pointwise"}
    assert not products & operators(lambda: model.generate(PROMPT, **settings))
    assert not replaced(model)
    for library, operator in (("torch", "aten::linear"), ("onednn", "mkldnn::_linear_pointwise")):
        monkeypatch.setenv(LINEAR_VARIABLE, library)
        assert torch.equal(model.generate(PROMPT, **settings), ours)
        assert operator in operators(lambda: model.generate(PROMPT, **settings))

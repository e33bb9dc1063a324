"""Large float32 layers are computed as PyTorch does, by a kernel of our own or oneDNN, for the time of a call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import hf_parallel
from hf_parallel.kernels import linear, native
from hf_parallel.kernels.linear import LINEAR_VARIABLE, linear_layers

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (288, 320)
PROMPT = tiny.make_prompts([30], seed=5)[0][None]
served = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()),
    reason="this PyTorch has no choice between MKL and oneDNN",
)


compiled = pytest.mark.skipif(bool(native.why_not()), reason="needs a C compiler, as the kernel itself does")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINEAR_VARIABLE, raising=False)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tiny model all of whose layers count as large."""
    monkeypatch.setattr(linear, "LEAST_WEIGHTS", 1)
    yield hf_parallel.enable(tiny.build("llama"))
    hf_parallel.disable(tiny.build("llama"))


def replaced(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def by_definition(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out = x.double() @ layer.weight.double().T
    return out if layer.bias is None else out + layer.bias.double()


@served
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (7,), (1, 16), (3, 2, 5), (300,)], ids=str)
def test_a_layer_gives_what_its_definition_says(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*WIDTHS, bias=bias)
    x = torch.randn(*shape, WIDTHS[0])
    lying = torch.randn(WIDTHS[0], *shape).movedim(0, -1)  # not contiguous
    with torch.no_grad(), linear_layers(layer):
        assert replaced(layer) == {""}
        for given in (x, lying):
            out = layer(given)
            assert (out.shape, out.dtype) == ((*shape, WIDTHS[1]), torch.float32)
            torch.testing.assert_close(out.double(), by_definition(layer, given), rtol=0, atol=5e-6)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@served
def test_other_layers_are_left_alone() -> None:
    hooked = nn.Linear(*WIDTHS)
    hooked.forward = lambda x: x  # type: ignore[method-assign]
    strided = nn.Linear(*WIDTHS)
    strided.weight = nn.Parameter(torch.randn(*WIDTHS).T)
    layers = nn.ModuleDict(
        {
            "plain": nn.Linear(*WIDTHS),
            "small": nn.Linear(8, 8),
            "in_bfloat16": nn.Linear(*WIDTHS, dtype=torch.bfloat16),
            "in_float64": nn.Linear(*WIDTHS, dtype=torch.float64),
            "elsewhere": nn.Linear(*WIDTHS, device="meta"),
            "subclass": Doubled(*WIDTHS),
            "hooked": hooked,
            "strided": strided,
        }
    )
    with linear_layers(layers):
        assert replaced(layers) == {"plain", "hooked"}
    assert replaced(layers) == {"hooked"}


@served
def test_inputs_that_neither_serves_are_pytorchs() -> None:
    layer = nn.Linear(*WIDTHS)
    x = torch.randn(4, WIDTHS[0])
    with linear_layers(layer):
        layer(x).sum().backward()
        assert layer.weight.grad is not None, "gradients go on"
        with torch.no_grad():
            assert layer(x[:0]).shape == (0, WIDTHS[1])
            assert torch.equal(layer(input=x), layer(x))
            with pytest.raises(RuntimeError, match="dtype"):
                layer(x.double())
    with torch.no_grad(), linear_layers(layer), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@served
def test_one_bias_for_all_outputs_is_none_for_each() -> None:
    layer = nn.Linear(*WIDTHS)
    layer.bias = nn.Parameter(torch.ones(1))
    x = torch.randn(2, WIDTHS[0])
    with torch.no_grad():
        expected = layer(x)
        with linear_layers(layer):
            torch.testing.assert_close(layer(x), expected)


@served
def test_layers_are_as_before_after_an_error() -> None:
    layer = nn.Linear(*WIDTHS)
    with pytest.raises(KeyError), linear_layers(layer):
        raise KeyError
    assert not replaced(layer)
    with linear_layers(layer), linear_layers(layer):
        assert replaced(layer) == {""}
    assert not replaced(layer)
    with linear_layers(layer):
        layer.forward = lambda x: x  # type: ignore[method-assign]
    assert layer(1) == 1, "what somebody has put there meanwhile stays"


@pytest.mark.filterwarnings("ignore:TF32")
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(*WIDTHS)
    with torch.backends.mkldnn.flags(enabled=False), linear_layers(layer):
        assert not replaced(layer)
    for asked in ("torch", "onednn", "native"):
        monkeypatch.setenv(LINEAR_VARIABLE, asked)
        if asked != "torch" and (not torch.backends.mkldnn.is_available() or (asked == "native" and native.why_not())):
            continue
        with linear_layers(layer):
            assert bool(replaced(layer)) is (asked != "torch")
            called = by_kernel(monkeypatch, layer, torch.randn(2, WIDTHS[0]))
        assert called is (asked == "native")


def by_kernel(monkeypatch: pytest.MonkeyPatch, layer: nn.Module, x: torch.Tensor) -> bool:
    """Whether the kernel computes a layer."""
    called, compute = [], native.linear
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(native, "linear", lambda *given: called.append(given) or compute(*given))
        layer(x)
    return bool(called)


def test_a_kernel_that_cannot_be_compiled_is_refused_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "no C compiler was found")
    linear._library.cache_clear()
    monkeypatch.setenv(LINEAR_VARIABLE, "native")
    with pytest.raises(ValueError, match="HF_PARALLEL_LINEAR=native cannot be used: "), linear_layers(nn.Linear(2, 2)):
        pass


# The kernel


@compiled
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 2), (64, 31), (100, 7), (15, 1), (1, 1), (577, 130)])
def test_the_kernel_gives_what_the_definition_says(inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    for tokens in range(1, native.MAX_TOKENS + 1):
        x = torch.randn(tokens, inputs)
        with torch.no_grad():
            out = native.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(out.double(), by_definition(layer, x).detach(), rtol=0, atol=5e-6)


@compiled
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("inputs", [200, 207])
@pytest.mark.parametrize("outputs", [333, 334, 335, 1])
def test_a_token_gives_the_same_whatever_shares_its_pass(inputs: int, outputs: int, threads: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(native.MAX_TOKENS, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([native.linear(row[None], weight, bias) for row in x])
        for tokens in range(1, native.MAX_TOKENS + 1):
            assert torch.equal(native.linear(x[:tokens], weight, bias), alone[:tokens])
            assert torch.equal(native.linear(x[-tokens:], weight, bias), alone[-tokens:])
    finally:
        torch.set_num_threads(before)


@served
@compiled
def test_many_tokens_and_other_shapes_are_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(*WIDTHS)
    with linear_layers(layer):
        assert by_kernel(monkeypatch, layer, torch.randn(native.MAX_TOKENS, WIDTHS[0]))
        assert not by_kernel(monkeypatch, layer, torch.randn(native.MAX_TOKENS + 1, WIDTHS[0]))
        with pytest.raises(RuntimeError), torch.no_grad():
            layer(torch.randn(2, WIDTHS[0] + 1))
        layer.weight = nn.Parameter(torch.randn(*WIDTHS).T)  # somebody exchanges it during the call
        assert not by_kernel(monkeypatch, layer, torch.randn(2, WIDTHS[0]))


def test_an_unknown_library_is_refused_and_leaves_the_model_usable(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    monkeypatch.setenv(LINEAR_VARIABLE, "blas")
    with pytest.raises(
        ValueError, match=r"HF_PARALLEL_LINEAR must be one of \['native', 'onednn', 'torch'\], got 'blas'"
    ):
        model.generate(PROMPT, generation_mode="shared_prefix", max_new_tokens=4)
    monkeypatch.delenv(LINEAR_VARIABLE)
    again = model.generate(PROMPT, generation_mode="shared_prefix", max_new_tokens=4, do_sample=False)
    assert torch.equal(again, expected)


@served
def test_a_call_is_computed_by_it_and_gives_the_same_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    forward = linear._forward
    monkeypatch.setattr(linear, "_forward", lambda self, x: called.append(x.shape) or forward(self, x))
    settings: dict[str, Any] = {"generation_mode": "shared_prefix", "max_new_tokens": 12, "do_sample": False}
    ours = model.generate(PROMPT, **settings)
    assert called
    assert not replaced(model)
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")
    called.clear()
    assert torch.equal(model.generate(PROMPT, **settings), ours)
    assert not called


@served
def test_a_call_that_fails_leaves_the_layers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(linear, "_forward", fail)
    with pytest.raises(MemoryError):
        model.generate(PROMPT, generation_mode="shared_prefix", max_new_tokens=4)
    assert not replaced(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

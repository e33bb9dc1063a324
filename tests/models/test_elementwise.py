"""During a call, norms and rotary embeddings are computed by C kernels, with the results of the model's own code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb as rotate_complex
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as rotate_complex_by_token
from transformers.pytorch_utils import Conv1D

import hf_parallel
from hf_parallel.kernels import native, sampling
from hf_parallel.models.cpu import elementwise
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.cpu.gates import GATES
from hf_parallel.models.cpu.linear import kernel_pass

compiled = pytest.mark.skipif(bool(native.unavailable_reason()), reason="needs a C compiler, as the kernels do")


@pytest.fixture
def in_a_pass() -> Iterator[None]:
    with torch.no_grad(), kernel_pass():
        yield


FAST = {  # norms and attention layers that use the kernels
    "llama": (5, 2),
    "gemma3_text": (25, 4),
    "qwen3": (17, 4),
    "cohere": (0, 2),  # interleaved rotation
    "deepseek_v3": (17, 4),
    "glm": (5, 0),  # rotates a part of each head
    "gpt2": (0, 0),
}


def is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")


def fast_modules(model: nn.Module) -> list[nn.Module]:
    """Norms and attention layers that use the kernels."""
    fast = [module for module in model.modules() if "forward" in vars(module) and not is_activation(module)]
    return [module for module in fast if not isinstance(module, nn.Linear | Conv1D)]


@compiled
@pytest.mark.usefixtures("in_a_pass")
@pytest.mark.parametrize("name", FAST)
def test_logits_equal_those_of_the_own_code(name: str) -> None:
    model, (ids,) = tiny.build(name), tiny.make_prompts([40])
    with torch.no_grad():
        expected = model(ids[None]).logits
        with fast_layers(model):
            names = [type(module).__name__ for module in fast_modules(model)]
            kinds = sum("Norm" in name for name in names), sum("Attention" in name for name in names)
            torch.testing.assert_close(model(ids[None]).logits, expected, rtol=0, atol=5e-5)
    assert kinds == FAST[name]
    assert not fast_modules(model)


@compiled
def test_a_row_does_not_depend_on_other_rows_or_threads() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2000, 77), torch.randn(77)
    query, cos, sin = torch.randn(1, 500, 6, 24).transpose(1, 2), torch.randn(1, 500, 24), torch.randn(1, 500, 24)
    norms, rotated = native.rms_norm(x, weight, 1e-6, 1.0), native.rotate_heads(query, query[:, :2], cos, sin, True)
    torch.set_num_threads(3)
    try:
        assert torch.equal(norms, native.rms_norm(x, weight, 1e-6, 1.0))
        assert torch.equal(norms[7:8], native.rms_norm(x[7:8], weight, 1e-6, 1.0))
        some = [t[:, 499:] for t in (cos, sin)]
        alone = native.rotate_heads(query[:, :, 499:], query[:, :2, 499:], *some, True)  # type: ignore[arg-type]
        for a, b in zip(alone, rotated, strict=True):
            assert torch.equal(a, b[:, :, 499:])
    finally:
        torch.set_num_threads(1)


class Doubled(nn.Module):
    """Has the parameters of an RMSNorm, and computes something else."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Ours(Doubled):
    """An RMSNorm under another name, with another epsilon for each module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@compiled
@pytest.mark.usefixtures("in_a_pass")
def test_a_module_is_recognized_by_what_it_computes() -> None:
    model = nn.ModuleList([Doubled(), Ours(), Ours(0.5), nn.RMSNorm(64, eps=1e-3), nn.RMSNorm(64), nn.LayerNorm(64)])
    x = torch.randn(2, 3, 64)
    with torch.no_grad(), fast_layers(model):
        assert [list(model).index(module) for module in fast_modules(model)] == [1, 2, 3]
        for module in fast_modules(model):
            torch.testing.assert_close(module(x), type(module).forward(module, x))


class Varied(Ours):
    """An RMSNorm whose results depend on all kinds of state."""

    factor = 1.0
    scale: Any = None

    def __init__(self, **state: Any) -> None:
        super().__init__()
        self.variant, self.limits = "plain", (float("inf"),)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer("buffer", value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.factor * self.normed(x.clamp(max=min(self.limits)))
        result = result if self.scale is None else result * self.scale
        result = result * self.buffer if self._buffers else result
        return result.tanh() if self.variant == "tanh" else result

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class OtherMethod(Varied):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().normed(x).sin()


class OtherFactor(Varied):
    factor = 3.0


@compiled
@pytest.mark.usefixtures("in_a_pass")
@pytest.mark.parametrize("order", [1, -1])
def test_norms_of_one_class_or_forward_that_differ_in_any_state_keep_their_own_results(order: int) -> None:
    plain = [Varied(), Varied(scale=1.0)]
    states = [{"scale": torch.tensor(2.0)}, {"scale": 2.0}, {"scale": 2}, {"variant": "tanh"}, {"limits": (1.0, 0.5)}]
    others = [*(Varied(**state) for state in states), OtherMethod(), OtherFactor()]
    others.append(patched := Varied())
    patched.normed = torch.cos  # type: ignore[method-assign]
    norms = nn.ModuleList([*plain, *others][::order])
    x = 3 * torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = [norm(x) for norm in norms]
        with fast_layers(norms):
            assert {*fast_modules(norms)} == {*plain}
            for norm, result in zip(norms, expected, strict=True):
                torch.testing.assert_close(norm(x), result)


def clamped(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(x.clamp(max=50))


class Function(nn.Module):
    """An activation of a function, as those of Transformers."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@compiled
@pytest.mark.usefixtures("in_a_pass")
def test_activations_are_recognized_by_what_they_compute() -> None:
    fast = [nn.SiLU(), nn.Sigmoid(), nn.Softplus(), nn.GELU("tanh"), ACT2FN["silu"], ACT2FN["gelu_pytorch_tanh"]]
    fast += [Function(nn.functional.silu), Function(partial(nn.functional.gelu, approximate="tanh"))]
    others = [
        nn.ReLU(),
        nn.GELU(),
        nn.Tanh(),
        nn.Softplus(2.0),
        nn.Identity(),
        nn.Dropout().eval(),
        ACT2FN["quick_gelu"],
    ]
    others += [Function(clamped), Function(partial(nn.functional.silu, inplace=True))]
    model = nn.ModuleList([*fast, *others])
    x = torch.randn(3, 77)
    expected = [module(x.clone()) for module in model]
    with torch.no_grad(), fast_layers(model):
        replaced = [module for module in model if "forward" in vars(module)]
        assert replaced[: len(fast)] == fast
        for module, result in zip(model, expected, strict=True):
            torch.testing.assert_close(module(x.clone()), result, rtol=1e-6, atol=1e-6)


@compiled
@pytest.mark.usefixtures("in_a_pass")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_have_the_same_bits_anywhere_and_with_any_threads(dtype: torch.dtype) -> None:
    kernels = set()
    own = set()
    x = (4 * torch.randn(260, 77)).to(dtype)
    for function, gate in GATES.items():
        arguments = {"approximate": "tanh"} if function is nn.functional.gelu else {}
        for compute, differing in ((gate, kernels), (function, own)):
            whole = compute(x, **arguments)  # type: ignore[operator]
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for first, tokens in ((0, 1), (5, 1), (1, 3), (7, 129), (0, 260)):
                    part = compute(x[first : first + tokens].clone(), **arguments)  # type: ignore[operator]
                    if not torch.equal(part, whole[first : first + tokens]):
                        differing.add(function)
            torch.set_num_threads(1)
        exact = function(x.double(), **arguments)  # type: ignore[operator]
        torch.testing.assert_close(gate(x, **arguments).double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-6)
    assert not kernels
    assert own or dtype != torch.float32  # or else the test could not fail


@compiled
def test_gradients_of_activations_are_those_of_pytorch() -> None:
    x = torch.randn(5, 77, requires_grad=True)
    for function, gate in GATES.items():
        arguments = {"approximate": "tanh"} if function is nn.functional.gelu else {}
        with kernel_pass(records_gradients=True):
            result = gate(x, **arguments)
            assert torch.equal(result.detach(), gate(x.detach(), **arguments))
        expected = function(x, **arguments)  # type: ignore[operator]
        gradients = [torch.autograd.grad(value.square().sum(), x)[0] for value in (result, expected)]
        torch.testing.assert_close(*gradients)


class Watched(llama.LlamaRMSNorm):
    """Records which weight its layer has while its own code runs."""

    watched: Any = None
    seen: list[nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Watched.watched is not None:
            Watched.seen.append(Watched.watched.weight)
        return super().forward(x)


@compiled
def test_gradients_of_norms_leave_the_weight_in_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in another thread may compute the layer meanwhile, and checks that its weights are the same."""
    norm = Watched(77)
    x = torch.randn(5, 77, requires_grad=True)
    expected = torch.autograd.grad(norm(x).square().sum(), [x, norm.weight])
    monkeypatch.setattr(Watched, "seen", [])
    with fast_layers(norm), kernel_pass(records_gradients=True):
        total = norm(x).square().sum()
    monkeypatch.setattr(Watched, "watched", norm)
    found = torch.autograd.grad(total, [x, norm.weight])
    torch.testing.assert_close(found, expected)
    assert len(Watched.seen) == 1
    assert Watched.seen[0] is norm.weight


class Gated(nn.Module):
    """Calls gates in its own code, in all ways that models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.sigmoid(x) + nn.functional.silu(x) + torch.nn.functional.softplus(x)
        return first + functional.sigmoid(x) + functional.gelu(x, approximate="tanh") + functional.gelu(x)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 77))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight).sigmoid()


class LinearRouter(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


class RouterOfALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(77, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.classifier.weight).sigmoid()


@compiled
@pytest.mark.usefixtures("in_a_pass")
@pytest.mark.parametrize("module", [Gated(), Router(), LinearRouter(77, 7), RouterOfALayer()])
def test_gates_and_products_of_own_code_have_the_same_bits_for_any_number_of_tokens(module: nn.Module) -> None:
    x = torch.randn(130, 77)
    plain = module(x)
    with fast_layers(module):
        assert "forward" in vars(module)
        whole = module(x)
        torch.testing.assert_close(whole, plain, rtol=0, atol=1e-5)
        for first, tokens in ((0, 1), (5, 1), (1, 3), (7, 120)):
            assert torch.equal(module(x[first : first + tokens]), whole[first : first + tokens])
    assert torch.equal(module(x), plain)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rotate_small_heads(q, k, cos, sin)


def rotate_small_heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Rotate heads of up to 16 dimensions only."""
    return llama.apply_rotary_pos_emb(q, k, cos, sin) if q.shape[-1] <= 16 else (q, k)


class Rotation(nn.Module):
    """A function as the library `kernels` makes a module of it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rotate_small_heads(q, k, cos, sin)


rotate_by_module = Rotation()


class AttentionOverModule(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rotate_by_module(q, k, cos, sin)


@compiled
@pytest.mark.usefixtures("in_a_pass")
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("layer", [Attention(), AttentionOverModule()])
def test_a_rotary_function_is_recognized_for_each_size_of_heads(layer: nn.Module, dim: int) -> None:
    inputs = [torch.randn(1, 6, 5, dim), torch.randn(1, 3, 5, dim), torch.randn(1, 5, dim), torch.randn(1, 5, dim)]
    with torch.no_grad():
        expected = layer(*inputs)
        with fast_layers(layer):
            assert fast_modules(layer)
            for found, result in zip(layer(*inputs), expected, strict=True):
                torch.testing.assert_close(found, result)


class ComplexRotation(nn.Module):
    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head = by_head

    def forward(self, q: torch.Tensor, k: torch.Tensor, rotation: torch.Tensor) -> Any:
        return rotate_complex(q, k, rotation)


class ComplexRotationByToken(ComplexRotation):
    def forward(self, q: torch.Tensor, k: torch.Tensor, rotation: torch.Tensor) -> Any:
        return rotate_complex_by_token(q, k, rotation)


@compiled
@pytest.mark.usefixtures("in_a_pass")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [ComplexRotation(True), ComplexRotationByToken(False)])
def test_complex_rotations_have_the_same_bits_for_any_number_of_tokens(layer: Any, dtype: torch.dtype) -> None:
    tokens_dim = 2 if layer.by_head else 1
    heads = [torch.randn(1, number, 200, 8) if layer.by_head else torch.randn(1, 200, number, 8) for number in (4, 1)]
    q, k = (x.to(dtype) for x in heads)
    rotation = torch.polar(torch.ones(1, 200, 4), torch.rand(1, 200, 4))

    def in_parts(size: int) -> list[torch.Tensor]:
        parts = [x.split(size, dim) for x, dim in ((q, tokens_dim), (k, tokens_dim), (rotation, 1))]
        rotated = [layer(*part) for part in zip(*parts, strict=True)]
        return [torch.cat(of_parts, tokens_dim) for of_parts in zip(*rotated, strict=True)]

    plain = in_parts(200)
    with fast_layers(layer):
        whole = in_parts(200)
        for size in (1, 7):
            assert all(map(torch.equal, in_parts(size), whole))
        with torch.enable_grad():  # as a trainer
            assert all(map(torch.equal, in_parts(200), whole))
    torch.testing.assert_close(whole, plain)


@compiled
def test_kernels_write_float32_whatever_the_default_dtype_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = tiny.build("llama"), tiny.make_prompts([40])
    hf_parallel.enable(model)
    settings: dict[str, Any] = {"generation_mode": "shared_prefix", "do_sample": True, "max_new_tokens": 8}
    torch.manual_seed(0)
    expected = model.generate(prompt[None], **settings)
    monkeypatch.setattr(elementwise, "_norms", {})  # found again
    elementwise._fast_rotary.cache_clear()
    elementwise._rotary_style.cache_clear()
    sampling._has_own_noise.cache_clear()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # as another thread that loads a model does
    try:
        assert model.generate(prompt[None], **settings).equal(expected)
    finally:
        torch.set_default_dtype(torch.float32)


@compiled
def test_gradients_autocast_and_other_dtypes_use_the_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids,) = tiny.build("llama"), tiny.make_prompts([5])

    def fail(*args: object) -> Any:
        raise AssertionError

    with fast_layers(model):
        monkeypatch.setattr(native, "rms_norm", fail)
        monkeypatch.setattr(native, "rotate_heads", fail)
        with kernel_pass():
            model(ids[None]).logits.sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), kernel_pass():
            model(ids[None])
        with torch.no_grad(), pytest.raises(AssertionError), kernel_pass():
            model(ids[None])
    model.zero_grad()
    half = tiny.build("llama", dtype=torch.bfloat16)
    with torch.no_grad(), fast_layers(half), kernel_pass():
        half(ids[None])


@compiled
def test_wrappers_are_removed_after_an_error_and_other_replacements_are_kept() -> None:
    model: Any = hf_parallel.enable(tiny.build("llama"))

    def fail(*args: object) -> Any:
        assert fast_modules(model)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.generate(torch.ones(1, 3).long(), generation_mode="shared_prefix", logits_processor=[fail])
    assert not fast_modules(model)
    norm = model.model.norm
    norm.forward = lambda x: x
    try:
        with fast_layers(model):
            assert len(fast_modules(model)) == 7
        assert fast_modules(model) == [norm]
    finally:
        del norm.forward


@compiled
@pytest.mark.skipif(not sampling._has_own_noise(), reason="this PyTorch draws noise by MKL")
@pytest.mark.parametrize("vocabulary", [1, 2, 333, 5000])
def test_draws_equal_those_of_multinomial(vocabulary: int) -> None:
    for seed in range(30):
        scores = torch.randn(1 + seed % 4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4
        if seed % 2:
            scores[scores < scores.amax(dim=-1, keepdim=True) - 6] = -torch.inf
        found = []
        for draw in (sampling.multinomial, lambda probs: torch.multinomial(probs, 1)[:, 0]):
            torch.manual_seed(seed)
            torch.rand(seed)
            found.append([*draw(scores.softmax(dim=-1)).tolist(), *torch.rand(3).tolist()])
        assert found[0] == found[1]
    state = torch.get_rng_state()
    for bad in (torch.zeros(1, 4), torch.tensor([[0.5, torch.nan]]), torch.tensor([[-1.0, 2]])):
        with pytest.raises(RuntimeError, match="probabilit"):
            sampling.multinomial(bad)
    assert torch.equal(state, torch.get_rng_state())


def test_a_norm_with_a_gate_keeps_it() -> None:
    model: Any = tiny.build("mamba2")
    norms = [one for one in model.modules() if "gate" in inspect.signature(type(one).forward).parameters]
    assert norms
    x, gate = torch.randn(2, 1, 3, norms[0].weight.numel())
    expected = norms[0](x, gate), norms[0](x)
    with torch.no_grad(), fast_layers(model):
        assert torch.equal(norms[0](x, gate), expected[0])
        assert torch.equal(norms[0](x), expected[1])

"""A model on a GPU with `batch_invariant=True` has the same bits in every schedule; what breaks them is named.

On a CPU, in Triton's interpreter: tests are collected if `TRITON_INTERPRET=1` was set before Python started;
`test_triton_compile.py` runs them. `test_gpu.py` has the test for a device.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import one_layer
import pytest
import tiny
import torch
from test_same_bits import num_different, passes_of

import hf_parallel
from hf_parallel.cache import Segment
from hf_parallel.generation import same_bits
from hf_parallel.generation.enabled import enabled
from hf_parallel.kernels import BACKEND_VARIABLE
from hf_parallel.models.cpu.linear import LINEAR_VARIABLE
from hf_parallel.models.intercept.attention import UnsupportedModelError

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    import interpreter

    from hf_parallel.kernels.triton.invariant import parts
    from hf_parallel.models.gpu import invariant_ops

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the backend of a GPU, PyTorch's linear layers, parts of 16 keys, and products as on a GPU."""
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")
    monkeypatch.setattr(parts, "PART", 16)
    with interpreter.products_row_by_row():
        yield


def without_probe(model: Any) -> Any:
    """Enable a model with `batch_invariant=True`, whose probe takes too long in the interpreter."""
    hf_parallel.enable(model)
    enabled(model).capabilities = replace(enabled(model).capabilities, batch_invariant=True)
    return model


def test_logits_have_the_same_bits_in_any_schedule() -> None:
    model = without_probe(one_layer.build(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1))
    different, total = num_different(model, 40, 4, (1, 2, 17))
    assert different == 0, f"{different} of {total}"


def test_logits_of_latents_and_experts_have_the_same_bits_in_any_schedule() -> None:
    model = without_probe(copy.deepcopy(tiny.build("deepseek_v3")))
    different, total = num_different(model, 13, 3, (1, 2))
    assert different == 0, f"{different} of {total}"


def test_logits_equal_those_of_the_model() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    (ids,) = tiny.make_prompts([21])
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    with passes_of(without_probe(model)) as (cache, cached):
        forward = cache.prepare([Segment([cache.pool.new_block(21)], 21)])
        logits = cached.logits(forward, ids, list(range(21)))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_enable_probes_and_names_what_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own products have other bits in other schedules."""
    monkeypatch.setattr(same_bits, "SHARED", 20)
    monkeypatch.setattr(same_bits, "CHUNKS", (1, 12, 7))
    monkeypatch.setattr(same_bits, "OWN", 21)
    monkeypatch.setattr(same_bits, "ROWS", 2)
    model = one_layer.build(num_attention_heads=1, num_key_value_heads=1)
    hf_parallel.enable(model, batch_invariant=True)
    assert enabled(model).capabilities.batch_invariant
    hf_parallel.disable(model)
    products = [name for name in invariant_ops._OPERATIONS if "mm" in str(name) or "linear" in str(name)]
    for name in products:
        monkeypatch.delitem(invariant_ops._OPERATIONS, name)
    with pytest.raises(UnsupportedModelError, match=r"\(Linear\)"):
        hf_parallel.enable(model, batch_invariant=True)

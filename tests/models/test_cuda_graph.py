"""Decode steps captured as CUDA graphs read only device buffers in a replay and generate the tokens of `generate`.

A CPU has no CUDA graphs. A replacement replays a step by running the model again with the CPU's plan of the captured
step, so results are correct only if everything that changes is in the buffers. Tests are collected if
`TRITON_INTERPRET=1` was set before Python started; `test_triton_compile.py` runs them.
"""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_parallel
from hf_parallel.kernels import BACKEND_VARIABLE
from hf_parallel.models.decode import cuda_graph as graph
from hf_parallel.models.decode.cuda_graph import CapturedGraph, DecodeGraphs, NoSyncMode

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    import interpreter  # noqa: F401

    from hf_parallel.kernels.triton import attend as triton_attend
    from hf_parallel.kernels.triton import attention as triton_attention


ROOT, *TAILS = tiny.make_prompts([9, 2, 4, 3], seed=8)
INPUT_IDS, ATTENTION_MASK = tiny.left_pad([torch.cat((ROOT, tail)) for tail in TAILS])
NEW = 5


class Graphs:
    """Makes `DecodeGraphs` work on a CPU and counts captures and replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[int] = []
        self.replays = 0
        self._made: list[DecodeGraphs] = []
        self._replaying = False
        made = self.usual_init = DecodeGraphs.__init__
        launch_for = triton_attention.launch_for

        def remember(graphs: DecodeGraphs, *given: Any) -> None:
            made(graphs, *given)
            self._made.append(graphs)

        def as_captured(plan: Any, key: Any, make: Any) -> Any:
            return plan.derived[key] if self._replaying else launch_for(plan, key, make)

        monkeypatch.setenv(BACKEND_VARIABLE, "triton")
        monkeypatch.setattr(DecodeGraphs, "__init__", remember)
        monkeypatch.setattr(DecodeGraphs, "supports", staticmethod(lambda model, device: True))
        for module in (triton_attend, triton_attention):
            monkeypatch.setattr(module, "launch_for", as_captured)
        monkeypatch.setattr(graph, "capture_graph", self._record)

    def _record(self, function: Callable[[], torch.Tensor], *_: Any) -> CapturedGraph:
        cache = self._made[-1]._cache
        captured, result = cache._pass, function()
        self.captures.append(len(result))

        def replay() -> None:
            now, cache._pass, self._replaying = cache._pass, captured, True
            try:
                result.copy_(function())
            finally:
                cache._pass, self._replaying = now, False
            self.replays += 1

        return CapturedGraph(replay, result, 1000, "pool")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """One layer with one head, as the interpreter is slow."""
    config = copy.deepcopy(tiny.build("llama").config)
    config.update({"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1})
    model = LlamaForCausalLM(config).eval()
    tiny.draw_weights(model, tiny.ARCHITECTURES["llama"], seed=1)
    return hf_parallel.enable(model)


def generate(model: PreTrainedModel, mode: str | None = "shared_prefix", **settings: Any) -> Any:
    defaults: dict[str, Any] = {"attention_mask": ATTENTION_MASK, "do_sample": False, "max_new_tokens": NEW}
    defaults |= {"return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(INPUT_IDS, generation_mode=mode, **(defaults | settings))  # type: ignore[operator]


def test_one_graph_is_replayed_for_all_steps(graphs: Graphs, model: PreTrainedModel) -> None:
    expected = generate(model, None).sequences
    out = generate(model)
    assert torch.equal(out.sequences, expected)
    assert (graphs.captures, graphs.replays) == ([len(TAILS)], NEW - 1)
    assert out.stats.graph_bytes == 1000


def test_reallocated_storage_needs_a_new_capture(
    graphs: Graphs, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_parallel.generation.decoding.prefill.SUFFIX_CAPACITY", 1)
    expected = generate(model, None).sequences
    assert torch.equal(generate(model).sequences, expected)
    assert 1 < len(graphs.captures) < NEW - 1


@pytest.mark.parametrize("captures", [0, 1])
def test_a_failed_capture_warns_once_and_falls_back_to_eager(
    graphs: Graphs,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    captures: int,
) -> None:
    """The warning names the first error; earlier graphs release their memory."""

    def fail(*given: Any) -> CapturedGraph:
        if len(graphs.captures) < captures:
            return graphs._record(*given)
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("the capture has failed")

    monkeypatch.setattr(graph, "capture_graph", fail)
    monkeypatch.setattr("hf_parallel.generation.decoding.prefill.SUFFIX_CAPACITY", 1)
    expected = generate(model, None).sequences
    out = generate(model)
    assert torch.equal(out.sequences, expected)
    assert caplog.text.count("could not be captured: operation not permitted") == 1
    assert (len(graphs.captures), out.stats.graph_bytes) == (captures, 0)


@pytest.mark.parametrize(
    ("function", "synchronizes"),
    [
        (lambda x: x[x > 0], True),
        (lambda x: x.index_put_((x > 0,), torch.zeros(())), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x.unique(), True),
        (lambda x: x.max().item(), True),
        (lambda x: 1 if (x > 0).all() else 0, True),
        (lambda x: x.to("meta"), True),  # represents another device
        (lambda x: torch.zeros(3, device="meta").copy_(x), True),
        (lambda x: x[torch.tensor([0, 2])], False),
        (lambda x: torch.where(x > 0, x, 0.0).to(torch.float16).sum(), False),
        (lambda x: x[1:].clone().masked_fill_(x[1:] > 0, 7.0), False),
    ],
)
def test_synchronizing_operations_raise_before_a_capture(
    function: Callable[[torch.Tensor], Any], synchronizes: bool
) -> None:
    with NoSyncMode():
        if synchronizes:
            with pytest.raises(RuntimeError, match="the model (waits|copies)"):
                function(torch.tensor([1.0, -2.0, 3.0]))
        else:
            function(torch.tensor([1.0, -2.0, 3.0]))


def test_graphs_are_released_with_their_call(
    graphs: Graphs, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector, which does not know the GPU's memory."""
    made = []

    def noted(captured: DecodeGraphs, *given: Any) -> None:
        graphs.usual_init(captured, *given)
        made.append(weakref.ref(captured))

    def record(function: Callable[[], torch.Tensor], *given: Any) -> CapturedGraph:
        return CapturedGraph(lambda: None, function(), 1, None)

    monkeypatch.setattr(DecodeGraphs, "__init__", noted)
    monkeypatch.setattr(graph, "capture_graph", record)
    gc.disable()
    try:
        generate(model)
        assert [graphs_of_call() for graphs_of_call in made] == [None]
    finally:
        gc.enable()


def test_each_adapter_of_an_engine_has_graphs_of_its_own(graphs: Graphs, model: PreTrainedModel) -> None:
    from hf_parallel.engine import Engine

    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=32, target_modules=["q_proj"])
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora, "first")
    adapted.add_adapter("second", lora)
    expected = {}
    for name in ("first", "second"):
        adapted.set_adapter(name)
        expected[name] = adapted.generate(INPUT_IDS[-1:], max_new_tokens=NEW, do_sample=False).tolist()
    assert expected["first"] != expected["second"]
    with Engine(adapted.eval()) as engine:
        submitted = {name: engine.submit(INPUT_IDS[-1:], max_new_tokens=NEW, adapter=name) for name in expected}
        assert {name: handle.result(600).sequences.tolist() for name, handle in submitted.items()} == expected
    assert len([captured for captured in graphs._made if captured._steps]) == 3  # with those of the active adapter

"""Decode steps captured as graphs: what is replayed reads device buffers alone, and gives what `generate` gives.

There is no CUDA graph on a CPU. A stand-in replays a step by running the model again with the host's plan of the step
that was captured, so that results are right only if all that changes lies in the buffers. Collected where
`TRITON_INTERPRET=1` was set before Python began; `test_triton_compile.py` runs it so.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from transformers import PreTrainedModel
from workers import SETTINGS

import hf_parallel
from hf_parallel.generation import decode, graph
from hf_parallel.generation.graph import DecodeGraphs, bucket
from hf_parallel.kernels import BACKEND_VARIABLE

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    from hf_parallel.kernels import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT, *TAILS = tiny.make_prompts([9, 2, 4, 3], seed=8)
INPUT_IDS, ATTENTION_MASK = tiny.left_pad([torch.cat((ROOT, tail)) for tail in TAILS])
NEW = 5


class Graphs:
    """Makes `DecodeGraphs` work on a CPU, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[int] = []
        self.replays = 0
        self._made: list[DecodeGraphs] = []
        self._replaying = False
        made, launch_for = DecodeGraphs.__init__, triton_attention.launch_for

        def remember(graphs: DecodeGraphs, *given: Any) -> None:
            made(graphs, *given)
            self._made.append(graphs)

        def as_captured(plan: Any, key: Any, make: Any) -> Any:
            return plan._memo[key] if self._replaying else launch_for(plan, key, make)

        monkeypatch.setenv(BACKEND_VARIABLE, "triton")
        monkeypatch.setattr(DecodeGraphs, "__init__", remember)
        monkeypatch.setattr(DecodeGraphs, "serve", staticmethod(lambda model, device: True))
        monkeypatch.setattr(triton_attention, "launch_for", as_captured)
        monkeypatch.setattr(graph, "record", self._record)

    def _record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor, int]:
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

        return replay, result, 1000


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture
def model() -> PreTrainedModel:
    """Of one layer: the interpreter is slow."""
    model = copy.deepcopy(tiny.build("llama"))
    del model.model.layers[1:]  # type: ignore[union-attr,operator]
    model.config.num_hidden_layers = 1
    return hf_parallel.enable(model)


def generate(model: PreTrainedModel, mode: str | None = "shared_prefix", **settings: Any) -> Any:
    defaults: dict[str, Any] = {"attention_mask": ATTENTION_MASK, "do_sample": False, "max_new_tokens": NEW}
    defaults |= {"return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(INPUT_IDS, generation_mode=mode, **(defaults | settings))  # type: ignore[operator]


def test_one_capture_serves_all_steps(graphs: Graphs, model: PreTrainedModel) -> None:
    expected = generate(model, None).sequences
    out = generate(model)
    assert torch.equal(out.sequences, expected)
    assert (graphs.captures, graphs.replays) == ([len(TAILS)], NEW - 1)
    assert out.stats.graph_bytes == 1000


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_end_leave_their_graph_to_the_others(
    graphs: Graphs, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(decode, "RUNNING_AHEAD", ("cpu",) if ahead else ())
    plain = generate(model, None).sequences[:, INPUT_IDS.shape[1] :]
    eos = [int(plain[0, 1]), int(plain[2, 2])]
    settings: dict[str, Any] = {"eos_token_id": eos, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
    expected = generate(model, None, **settings).sequences
    assert torch.equal(generate(model, **settings).sequences, expected)
    assert graphs.captures == sorted(graphs.captures, reverse=True)
    assert len(graphs.captures) < graphs.replays


def test_workers_steps_that_move_need_no_new_capture_while_they_fit(graphs: Graphs, model: PreTrainedModel) -> None:
    settings: dict[str, Any] = {**SETTINGS, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    settings |= {
        "generation_mode": "hogwild",
        "step_prefix": "{name}",
        "worker_names": ["A", "B"],
        "sentence_ends": [chr(code) for code in range(32, 127)],
    }
    settings |= dict.fromkeys(("history_header", "others_header", "own_header", "step_gap"), "") | {
        "finisher_tokens": 0
    }
    ids = TAILS[0][None]
    written = model.generate(ids, cuda_graph=False, **settings).texts[0]  # type: ignore[operator]
    settings["separator"] = written[2]  # its second token ends a step
    without = model.generate(ids, cuda_graph=False, **settings)  # type: ignore[operator]
    assert graphs.replays == 0  # the setting turns them off
    with_graphs = model.generate(ids, **settings)  # type: ignore[operator]
    assert with_graphs.history == without.history
    assert any(step.forward_pass for step in with_graphs.history[0])
    assert graphs.replays > len(graphs.captures)


def test_storage_that_moved_is_captured_anew(
    graphs: Graphs, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_parallel.generation.shared_prefix.SUFFIX_ROOM", 1)
    expected = generate(model, None).sequences
    assert torch.equal(generate(model).sequences, expected)
    assert 1 < len(graphs.captures) < NEW - 1


def test_a_failed_capture_is_said_once_and_costs_nothing_but_speed(
    graphs: Graphs, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "record", fail)
    expected = generate(model, None).sequences
    assert torch.equal(generate(model).sequences, expected)
    assert caplog.text.count("could not be captured") == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 17, 33, 100, 1000, 1024])
def test_buckets_are_few_and_not_much_larger(rows: int) -> None:
    assert rows <= bucket(rows) < max(1.25 * rows, rows + 1)
    assert bucket(bucket(rows)) == bucket(rows)

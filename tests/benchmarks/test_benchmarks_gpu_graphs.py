"""The graph stage of `python -m benchmarks.gpu` detects stale CUDA graphs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import graphs, models, run
from benchmarks.gpu_parts.cases import attempt
from hf_parallel.cache import BlockCache
from hf_parallel.generation.executor import LocalExecutor
from hf_parallel.generation.runner import Runner
from hf_parallel.models import compiled
from hf_parallel.models import cuda_graph as graph
from hf_parallel.models.cuda_graph import DecodeGraphs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("way", ["shared_prefix", "rows end", "compiled, rows end", "hogwild"])
def test_a_replay_with_stale_logits_is_detected(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    cases = {
        case.settings["way"]: case for case in run.TOY.graphs.cases(models.Models(torch.device("cpu"), torch.float32))
    }
    right = attempt(cases[way].run)
    assert right["ok"], right
    assert right["compared"] > 0
    usual, before = Runner.run, dict[int, torch.Tensor]()

    def stale(runner: Runner, passes: Any, ids: torch.Tensor, ends: Any) -> torch.Tensor:
        logits = usual(runner, passes, ids, ends)
        assert isinstance(runner.executor, LocalExecutor)
        if not runner.executor.cuda_graph or any(segment.num_tokens > 1 for segment in passes[0]):
            return logits
        earlier, before[len(ids)] = before.get(len(ids), logits), logits
        return earlier

    monkeypatch.setattr(Runner, "run", stale)
    figures = attempt(cases[way].run)
    assert not figures["ok"]
    assert run.wrong({"stages": {"graphs": {"cases": [figures]}}})


def test_logits_are_compared_while_rows_have_the_same_tokens() -> None:
    expected = [torch.eye(4)[[i, 3]] for i in (0, 1, 2)]  # two rows; the best tokens are 0, 1, 2 and 3, 3, 3
    other = [expected[0], expected[1].roll(1, 1), expected[2] + 0.5]
    assert graphs.largest_difference(expected, expected) == (0.0, 6)
    assert graphs.largest_difference(other[:1] + other[2:], expected[:1] + expected[2:]) == (0.5, 4)
    assert graphs.largest_difference(other, expected) == (1.0, 4)  # both rows have other tokens
    assert graphs.largest_difference(other, expected, ends=[0, 3]) == (0.0, 2)  # and had ended before
    one = [step.clone() for step in expected]
    one[0][0] = one[0][0].roll(2)
    assert graphs.largest_difference(one, expected) == (1.0, 4)
    assert graphs.largest_difference(one, expected, together=True) == (1.0, 2)
    with pytest.raises(RuntimeError, match="2 steps instead of 3"):
        graphs.largest_difference(expected[:2], expected)
    with pytest.raises(FloatingPointError):
        graphs.largest_difference([step * math.nan for step in expected], expected)


def test_rows_end_late_and_not_all_at_once() -> None:
    torch.manual_seed(7)  # without the penalty, its model would repeat one token
    stage = graphs.GraphStage()
    compared = stage.check_rows(models.Models(torch.device("cpu"), torch.float32), "small", end=True)["compared"]
    assert stage.rows * stage.steps // 2 < compared < stage.rows * stage.steps


def test_missing_graphs_on_a_gpu_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error holds the reason and the traceback."""
    ours = SimpleNamespace(sequences=SimpleNamespace(is_cuda=True), stats=SimpleNamespace(graph_bytes=0))
    with pytest.raises(RuntimeError, match="no decode step was captured"):
        graphs.compare(ours, ours)

    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(graph, "capture_graph", fails)
    monkeypatch.setattr(DecodeGraphs, "_capturable", lambda made: True)
    step: Any = SimpleNamespace(position_ids=torch.zeros(1, dtype=torch.int64))
    with graphs.reasons() as said:
        assert not DecodeGraphs(BlockCache())._capture(lambda *_: torch.zeros(1), step, 1)
    with pytest.raises(RuntimeError, match=r"(?s)captured: .*operation not permitted.*in fails"):
        graphs.compare(ours, ours, said)

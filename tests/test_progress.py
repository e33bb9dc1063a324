"""Progress of long runs: quiet unless stderr is a terminal, one kind of bar in one place."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT
from serving import small_model
from sweeps import PROBLEMS, RUNS, SAMPLING
from transformers.utils import logging

from benchmarks.measure import run_rounds
from hf_parallel import progress
from hf_parallel.evaluation.sweep import sweep
from hf_parallel.models.cpu.packed import pack_half
from hf_parallel.progress import progress_bar


class Stream(io.StringIO):
    """Standard error that is a terminal or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def evaluate() -> None:
    sweep(*small_model(), PROBLEMS[:2], RUNS[:1], (2,), 1, progress=True, **SAMPLING)


def pack() -> None:
    pack_half(small_model()[0].to(torch.bfloat16))


def measure() -> None:
    def way(clock: Any) -> None:
        for _ in range(3):
            clock.put(torch.zeros(1))

    run_rounds({"ours": way}, 2)


RUNS_OF_BARS = [(evaluate, "Evaluating"), (pack, "Packing weights"), (measure, "2 rounds of ours, and a warm-up")]


@pytest.mark.parametrize(("run", "words"), RUNS_OF_BARS)
def test_long_runs_show_rate_and_time_left_on_a_terminal_alone(
    run: Callable[[], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    for is_terminal in (True, False):
        stream = Stream(is_terminal)
        monkeypatch.setattr("sys.stderr", stream)
        run()
        shown = stream.getvalue()
        assert (words in shown) == is_terminal
        if is_terminal:
            assert "/s]" in shown or "s/ " in shown, "the rate"
            assert "<" in shown, "the time left"


def test_bars_are_hidden_where_they_are_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr("sys.stderr", stream := Stream(is_terminal=True))
    assert list(progress_bar(range(3), what="Counting", unit="numbers", is_hidden=True)) == [0, 1, 2]
    logging.disable_progress_bar()
    try:
        assert list(progress_bar(range(3), what="Counting", unit="numbers")) == [0, 1, 2]
    finally:
        logging.enable_progress_bar()
    assert stream.getvalue() == ""
    assert list(progress_bar(range(3), what="Counting", unit="numbers")) == [0, 1, 2]
    assert "Counting" in stream.getvalue()


def test_no_other_module_makes_bars() -> None:
    found = []
    for path in [*(ROOT / "hf_parallel").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        if "tqdm" in names:
            found.append(path.relative_to(ROOT))
    assert found == [Path("hf_parallel/progress.py")]

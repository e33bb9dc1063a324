"""Every mode returns what it returned when `recorded_runs.json` was written, in a call, a session and an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import recorded_runs
from recorded_runs import PATH, Run, result, runs

RECORDED: dict[str, Any] = json.loads(PATH.read_text())
BITS = os.environ.get("HF_PARALLEL_TEST_BITS")
"""A file that `recorded_runs.py --bits` wrote on this machine, from the code to compare with."""
LOG_PROB = 2e-3
"""Tolerance of log-probabilities, of which three decimals are recorded."""
QUICK = {"greedy", "seed 1"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        pytest.param(name, how, marks=[] if name == "llama" and how != "kept cache" else pytest.mark.slow)
        for name in recorded_runs.ARCHITECTURES
        for how in recorded_runs.WAYS
    ],
)
def test_runs_return_what_was_recorded(architecture: str, how: str) -> None:
    bits = None if BITS is None else json.loads(Path(BITS).read_text())
    if bits is not None:
        assert {name: bits[name] for name in recorded_runs.place()} == recorded_runs.place(), "another machine or torch"
    for run in runs(architecture):
        if run.how == how:
            compare(run, None if bits is None else bits["bits"][run.key])


def compare(run: Run, bits: str | None) -> None:
    """Compare what a run returns now with the record; its bits, too, unless the engine's schedule decides them."""
    now, then = result(run), RECORDED[run.key]
    assert now["tokens"] == then["tokens"], run.key
    assert now["stats"] == then["stats"], run.key
    for values, recorded in zip(now["log_probs"], then["log_probs"], strict=True):
        assert values == pytest.approx(recorded, abs=LOG_PROB, nan_ok=True), run.key
    if bits is not None and "engine" not in run.how:
        assert now["bits"] == bits, run.key


def test_every_mode_is_recorded() -> None:
    assert {run.key for run in runs()} == RECORDED.keys()

"""`make test` runs the same cases on the same examples each time, and what `-k` names is run as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

FILE = Path(__file__).parent / "kernels" / "test_native.py"


def test_property_tests_draw_the_same_examples_each_time(pytestconfig: pytest.Config) -> None:
    is_free = pytestconfig.getoption("hypothesis_profile") == "free"
    assert hypothesis.settings().derandomize == (not is_free)


@pytest.mark.slow
def test_all_cases_of_a_named_test_are_quick() -> None:
    def selected(*options: str) -> int:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:xdist",
            "--collect-only",
            "-m",
            "not slow",
            str(FILE),
        ]
        listed = subprocess.run([*command, *options], capture_output=True, text=True, cwd=FILE.parents[2]).stdout
        return listed.count("::test_short_runs_are_causal[")

    assert (selected(), selected("-k", "causal")) == (2, 3 * 8 * 3)

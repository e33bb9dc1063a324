"""`python -m benchmarks.lm_eval`: its smallest form runs, and both backends give the same scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from small_tokenizers import small_llama

from benchmarks import lm_eval


@pytest.mark.slow
def test_the_smallest_form_runs(embedded: tuple[Any, Any], tmp_path: Path) -> None:
    for part in (small_llama(embedded[1], initializer_range=0.3), embedded[1]):
        part.save_pretrained(tmp_path / "model")
    path = tmp_path / "result.json"
    assert lm_eval.main(["--quick", "--model", str(tmp_path / "model"), "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert all(report[name]["same"] and report[name]["ratio"] > 0 for name in lm_eval.LIMITS)

"""`python -m benchmarks.parallel_answers`: its smallest form runs, and only a rotated answer diverges."""

from __future__ import annotations

import json
from pathlib import Path

import one_layer
import pytest
import small_tokenizers
from stories import tell
from workers import small_model

from benchmarks import parallel_answers
from hf_parallel.evaluation import GENERATED


@pytest.mark.slow
def test_the_smallest_form_runs(tmp_path: Path) -> None:
    one_layer.build().save_pretrained(tmp_path / "model")
    small_tokenizers.make("split_marker").save_pretrained(tmp_path / "model")
    path = tmp_path / "result.json"
    options = ["--quick", "--model", str(tmp_path / "model"), "--output", str(path)]
    assert parallel_answers.main(options) == 0
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert list(report["rotate_from_reencode"]) == list(GENERATED)
    assert all(of["positions"] > 0 for of in report["rotate_from_reencode"].values())
    assert [one["ratios"]["kv_bytes"] for one in report["branches"]] == [1, 1]


def test_only_a_rotated_answer_diverges() -> None:
    story = "I look at each. ####A:......\n####B:......\n####%%%% So it is. ####C:......\n####D:......\n####%%%% Yes."
    far = {}
    for join in ("reencode", "rotate"):
        out = tell(story, branches=("aa####", "bbb####", "c####", "dd####"), join=join, output_logits=True)
        far[join], _ = parallel_answers.distance(small_model(), out, len("Tell: "))
    assert len(far["rotate"]) > 10
    assert far["reencode"].abs().max() < 1e-6
    assert far["rotate"].max() > 1e-3

"""`python -m benchmarks.parallel_answers`: a run on a tiny model, and the figures of its report."""

from __future__ import annotations

import json
from typing import Any

import one_layer
import pytest
import small_tokenizers
import tiny
import torch
from stories import tell
from workers import small_model

from benchmarks import parallel_answers
from benchmarks.parallel_answers import TARGETS, coaching, distance, endings, summary_of, targets
from hf_parallel.evaluation import GENERATED
from hf_parallel.generation.modes.pdos.token_text import get_vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = ["sequential", "pdos_reencode", "pdos_rotate", "skeleton_of_thought", "chain_of_draft", "chain_of_draft_pdos"]
PROMPT = len("Tell: ")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report for a coached model of one layer."""
    folder = tmp_path_factory.mktemp("parallel_answers")
    one_layer.build().save_pretrained(folder / "model")
    small_tokenizers.make("split_marker").save_pretrained(folder / "model")
    path = folder / "new" / "result.json"
    options = ["--quick", "--coach", "--tasks", *GENERATED, "--new-tokens", "100", "--branch-tokens", "6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["parallel_answers", *options, "--model", str(folder / "model"), "--output", str(path)]
        )
        assert parallel_answers.main() == 0
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_report_describes_machine_and_settings(result: dict[str, Any]) -> None:
    assert result["machine"]["torch"] == torch.__version__
    assert result["quick"]
    assert result["settings"]["tasks"]["coached"]
    assert result["settings"]["branches"]["lengths"] == [2]


def test_every_task_is_solved_by_every_method(result: dict[str, Any]) -> None:
    assert list(result["tasks"]) == list(GENERATED)
    for ways in result["tasks"].values():
        assert list(ways) == WAYS
        for way in ways.values():
            assert way["score"] == way["scores"][0]
            assert way["tokens_per_second"] == pytest.approx(way["answer_tokens"] / way["decode_seconds"])
            assert 0 < way["decode_seconds"] < way["seconds"]
            assert 0 < way["kv_bytes"] <= way["reserved_bytes"]
        plain = ways["sequential"]
        assert plain["forward_passes"] == plain["decoded_tokens"] == plain["answer_tokens"] == 100


def test_a_coached_model_writes_a_branch_for_each_part(result: dict[str, Any]) -> None:
    for task, ways in result["tasks"].items():
        settings = coaching(GENERATED[task].make(0, 2))
        for name in ("pdos_reencode", "pdos_rotate", "chain_of_draft_pdos"):
            assert not ways[name]["fallbacks"]
            (text,) = ways[name]["texts"]
            assert text.startswith(settings["opening"])
            assert settings["terminator"] in text
            assert ways[name]["answer_tokens"] < 100


def test_tokens_after_a_rotated_block_are_compared(result: dict[str, Any]) -> None:
    for of in result["rotate_from_reencode"].values():
        assert of["positions"] == len(of["kl"][0]) > 10
        assert of["mean_kl"] == pytest.approx(sum(of["kl"][0]) / of["positions"], rel=1e-3)
        assert 0 <= of["median_kl"] <= of["max_kl"]
        assert 0 <= of["same_best_token"] <= 1


def test_branches_are_compared_with_sequential_decoding_of_as_many_tokens(result: dict[str, Any]) -> None:
    assert [one["join"] for one in result["branches"]] == ["reencode", "rotate"]
    for one in result["branches"]:
        (measured,) = one["rounds"]
        stage = measured["stages"]["branches"]
        assert (stage["decoded_tokens"], stage["forward_passes"]) == (2 * 2, 2)
        assert measured["sequential_tokens"] == measured["answer_tokens"]
        sequential = measured["answer_tokens"] / measured["sequential_seconds"]
        assert one["ratios"]["branch_stage"] == pytest.approx(4 / stage["seconds"] / sequential)
        assert one["ratios"]["whole_answer"] == pytest.approx(measured["sequential_seconds"] / measured["seconds"])
        assert one["ratios"]["kv_bytes"] == 1
        assert measured["stages"]["continuation"]["decoded_tokens"] == 2


def test_targets_follow_from_the_ratios(result: dict[str, Any]) -> None:
    assert [one["value"] for one in result["targets"]] == [
        one["ratios"][name] for one in result["branches"] for name in TARGETS
    ]
    ratios = {"branch_stage": 4.0, "whole_answer": 2.4, "kv_bytes": 1.02}
    found = targets([{"length": 24, "join": "rotate", "ratios": ratios}])
    assert [one["met"] for one in found] == [True, False, False]
    assert found[2]["at_most"] == 1.01


def test_only_a_rotated_answer_diverges() -> None:
    story = "I look at each. ####A:......\n####B:......\n####%%%% So it is. ####C:......\n####D:......\n####%%%% Yes."
    far = {}
    for join in ("reencode", "rotate"):
        out = tell(story, branches=("aa####", "bbb####", "c####", "dd####"), join=join, output_logits=True)
        divergence, same = distance(small_model(), out, PROMPT)
        between = out.blocks[0][1].start - out.blocks[0][0].end
        behind = out.sequences.shape[1] - PROMPT - out.blocks[0][1].end
        assert len(divergence) == len(same) == between + behind
        far[join] = divergence
        if join == "reencode":
            assert same.all()
    assert far["reencode"].abs().max() < 1e-6
    assert far["rotate"].max() > 1e-3


def test_answers_without_a_block_do_not_diverge() -> None:
    out = tell("No block.", output_logits=True, max_new_tokens=9)
    found = summary_of([distance(small_model(), out, PROMPT)])
    assert found["positions"] == 0
    assert found["mean_kl"] is None
    assert found["kl"] == [[]]


def test_endings_are_all_tokens_that_may_end_a_branch() -> None:
    tokenizer = small_tokenizers.make("merged_colon")
    model = tiny.build("llama")
    found = endings(model, get_vocabulary(tokenizer, tiny.VOCAB_SIZE))
    marked = {token for token in range(len(tokenizer)) if "#" in tokenizer.decode([token])}
    assert set(found) == marked | set(tokenizer.all_special_ids) | {model.generation_config.eos_token_id}

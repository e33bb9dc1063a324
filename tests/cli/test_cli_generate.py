"""`hf-parallel generate`: output, saved files and interrupts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import STEPS, WORKERS, Tokenizer, interrupt, loading

from hf_parallel import LogitsCache
from hf_parallel.cli import main as cli

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let the command line load a tiny model; see `loading`."""
    return loading(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ([], "P\n\n"),
        (["--mode", "hogwild"], "Alice, Bob solve tasks together.(.|\n)*Task: P\n\n"),
        (["--mode", "hogwild", "--no-preset"], "2 assistants, Alice, Bob, work(.|\n)*\n\nP\n\n"),
        (["--mode", "pdos"], "Often an answer has parts(.|\n)*\n\nP\n\n"),
        (["--raw"], "P"),
    ],
)
def test_prompts_get_the_instructions_of_the_mode_unless_raw(model: Any, arguments: list[str], seen: str) -> None:
    calls = model()
    assert cli.main(["generate", "P", "--max-new-tokens", "1", *arguments]) == 0
    read = Tokenizer().decode(calls[0]["input_ids"][0].tolist()).removeprefix("<bos>")
    assert re.fullmatch(seen, read)


# Output


def test_json_lines_have_the_fields_of_the_modes_output(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model(*STEPS)
    assert cli.main([*WORKERS, "--format", "jsonl"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["prompt"] == "P"
    assert record["workers"] == ["Alice 1: Ann.\n\nAlice 2: Two.xxxx", "Bob 1: Bo is slow.\n\nBob 2: x"]
    assert [(step["name"], step["forward_pass"]) for step in record["history"]][:2] == [("Alice", 6), ("Bob", 13)]
    assert record["generated_text"].startswith("Alice 1: Ann.\n\nBob 1: Bo is slow.\n\n")
    assert record["stats"]["decoded_tokens"] == 28
    assert record["truncated"] is True


def test_json_lines_have_log_probabilities_if_asked_for(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "P", "--raw", "--no-preset", "--mode", "shared_prefix", "--max-new-tokens", "5"]
    model()
    assert cli.main([*command, "--format", "jsonl", "--log-probs"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["log_probs"]) == 5
    assert all(value <= 0 for value in record["log_probs"])
    assert cli.main([*command, "--log-probs"]) == 2
    assert "--log-probs needs --format jsonl" in capsys.readouterr().err


# Batches

SEVERAL = ["generate", "P", "QRS", "TU", "--mode", "hogwild", "--raw", "--no-preset", "--max-new-tokens", "6"]


def test_batches_are_saved_as_one_transcript(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*SEVERAL, "--greedy", "--batch-size", "1", "-o", str(tmp_path / "run.json")]
    model()
    assert cli.main([*arguments, "--set", "finisher_tokens=0"]) == 0
    whole = json.loads((tmp_path / "run.json").read_text())
    assert [section["prompt"] for section in whole["sections"]] == ["<bos>P", "<bos>QRS", "<bos>TU"]
    assert whole["passes"] == 3 * 6
    assert whole["stats"]["decoded_tokens"] == 3 * 2 * 6
    model()
    interrupt(monkeypatch, after=10)  # in the second call: each puts the prompt and six passes
    assert cli.main([*arguments, "--set", "finisher_tokens=0"]) == 130
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["sections"] == whole["sections"][:1]
    assert capsys.readouterr().err == ""


# Saved files


def test_a_transcript_is_saved_and_viewed(model: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(*STEPS)
    run, page = tmp_path / "run.json", tmp_path / "page.html"
    assert cli.main([*WORKERS, "-o", str(run)]) == 0
    assert cli.main(["view", str(run), "-o", str(page)]) == 0
    assert "into the history after pass 13" in page.read_text()
    assert "SmolLM2-135M-Instruct" in page.read_text()
    assert cli.main(["view", str(run)]) == 0
    assert (tmp_path / "run.html").read_text() == page.read_text()
    model(*STEPS)
    assert cli.main([*WORKERS, "-o", str(page)]) == 0
    assert "into the history after pass 13" in page.read_text()
    capsys.readouterr()
    assert cli.main(["view", str(run), "-o", str(tmp_path / "run.pdf")]) == 2
    assert "run.pdf must be a new file that ends in .html or .htm" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.html", "page.html"}


def test_cached_logits_are_saved_and_loaded(model: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["generate", "P", "--raw", "--mode", "resample", "--sample", "--seed", "3", "--max-new-tokens", "5"]
    outputs = []
    for _ in range(2):
        model()
        assert cli.main([*arguments, "--logits-cache", str(tmp_path / "logits"), "--format", "jsonl"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert [record["stats"]["replayed_tokens"] for record in outputs] == [0, 5]
    assert outputs[0]["generated_text"] == outputs[1]["generated_text"]
    assert LogitsCache.load(tmp_path / "logits")

"""`hf-parallel generate`: what it prints and keeps, and how it stops."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from ascii_tokenizer import SPECIAL, AsciiTokenizer
from transformers import BatchEncoding
from workers import SETTINGS, Scripted, small_model

from hf_parallel import LogitsCache, cli, cli_generate
from hf_parallel.printing import StepPrinter

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = ("Ann.\n\nTwo.", "Bo is slow.\n\nx")
"""What two workers write."""


class Tokenizer(AsciiTokenizer):
    """With what the command line asks of a tokenizer besides."""

    all_special_ids, pad_token_id = list(SPECIAL), tiny.PAD
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> Any:
        tokens = super().__call__(text, add_special_tokens)["input_ids"]
        encoded = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        return BatchEncoding(encoded, tensor_type=return_tensors, prepend_batch_axis=return_tensors is not None)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let the command line load a tiny model whose rows write scripts; returns the calls of `generate`."""
    loaded = small_model()

    def use(*scripts: Any, finisher: str = "") -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def generate(**arguments: Any) -> Any:
            calls.append(arguments)
            processors = [Scripted(scripts, finisher)] if scripts else []
            return type(loaded).generate(loaded, logits_processor=processors, **arguments)

        monkeypatch.setattr(loaded, "generate", generate, raising=False)
        monkeypatch.setattr(cli_generate, "load", lambda options: (loaded, Tokenizer()))
        return calls

    return use


def given(settings: dict[str, Any]) -> list[str]:
    """Settings as options."""
    return [f"--set={name}={json.dumps(value)}" for name, value in settings.items() if name != "tokenizer"]


WORKERS = [
    "generate",
    "P",
    "--raw",
    "--greedy",
    "--no-preset",
    "--max-new-tokens",
    "14",
    *given(SETTINGS | {"finisher_tokens": 0}),
]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ([], "Alice, Bob solve tasks together.(.|\n)*Task: P\n\n"),
        (["--no-preset"], "2 assistants, Alice, Bob, work(.|\n)*\n\nP\n\n"),
        (["--mode", "pdos"], "Often an answer has parts(.|\n)*\n\nP\n\n"),
        (["--mode", "shared_prefix"], "P\n\n"),
        (["--raw"], "P"),
    ],
)
def test_prompts_go_through_the_words_of_the_mode_unless_raw(model: Any, arguments: list[str], seen: str) -> None:
    calls = model()
    assert cli.main(["generate", "P", "--max-new-tokens", "1", *arguments]) == 0
    read = Tokenizer().decode(calls[0]["input_ids"][0].tolist()).removeprefix("<bos>")
    assert re.fullmatch(seen, read)


# What is printed


def test_steps_of_workers_are_printed_one_after_the_other(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model(*STEPS)
    assert cli.main(WORKERS) == 0
    assert capsys.readouterr().out == "Alice 1: Ann.\n\nBob 1: Bo is slow.\n\nAlice 2: Two.xxxx\n\nBob 2: x\n"


def test_an_answer_that_was_found_is_named(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model("a", "b", finisher="42}")
    assert cli.main([*WORKERS, "--max-new-tokens", "1", "--set", "finisher_tokens=3"]) == 0
    assert capsys.readouterr().out.endswith("\nAnswer: 42\n")


def test_completions_are_numbered_under_their_prompts(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model(["a", tiny.EOS], "bbb", ["cc", tiny.EOS], "dd")
    arguments = ["P", "Q?", "--raw", "--mode", "shared_prefix", "--sample", "--num-return-sequences", "2"]
    assert cli.main(["generate", *arguments, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == "== P\n[1 of 2]\na\n\n[2 of 2]\nbbb\n\n== Q?\n[1 of 2]\ncc\n\n[2 of 2]\nddx\n"


@pytest.mark.parametrize("mode", ["generate", "shared_prefix"])
def test_without_a_mode_the_text_is_the_same(model: Any, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    model("some text")
    assert cli.main(["generate", "P", "--raw", "--mode", mode, "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == "some text\n"


def test_json_lines_hold_what_the_mode_tells(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model(*STEPS)
    assert cli.main([*WORKERS, "--format", "jsonl"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["prompt"] == "P"
    assert record["workers"] == ["Alice 1: Ann.\n\nAlice 2: Two.xxxx", "Bob 1: Bo is slow.\n\nBob 2: x"]
    assert [(step["name"], step["forward_pass"]) for step in record["history"]][:2] == [("Alice", 6), ("Bob", 13)]
    assert record["generated_text"].startswith("Alice 1: Ann.\n\nBob 1: Bo is slow.\n\n")
    assert record["stats"]["decoded_tokens"] == 28


def test_json_lines_have_one_object_per_answer(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model("aa", "bb", "cc", "dd")
    arguments = ["P", "Q", "--raw", "--mode", "shared_prefix", "--sample", "--num-return-sequences", "2"]
    assert cli.main(["generate", *arguments, "--max-new-tokens", "2", "--format", "jsonl"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["prompt"], record["generated_text"]) for record in records] == [
        ("P", "aa"),
        ("P", "bb"),
        ("Q", "cc"),
        ("Q", "dd"),
    ]


@pytest.mark.parametrize(
    ("encoding", "line"), [("ascii", '{"prompt": "\\u00fc"}\n'), ("utf-8", '{"prompt": "\u00fc"}\n')]
)
def test_json_lines_lose_nothing_where_stdout_has_few_characters(
    monkeypatch: pytest.MonkeyPatch, encoding: str, line: str
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    cli_generate.print_record({"prompt": "\u00fc"})
    assert out.buffer.getvalue().decode(encoding) == line  # type: ignore[attr-defined]


def test_settings_stored_with_a_model_count(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = small_model().generation_config
    monkeypatch.setattr(stored, "generation_mode", "hogwild", raising=False)
    monkeypatch.setattr(stored, "parallel_config", {"num_workers": 3}, raising=False)
    calls = model("a", "b", "c")
    assert cli.main([option for option in WORKERS if option != "--raw"]) == 0
    rest = "x" * 13
    assert capsys.readouterr().out == f"Alice 1: a{rest}\n\nBob 1: b{rest}\n\nCarol 1: c{rest}\n"
    assert "3 assistants, Alice, Bob, Carol" in Tokenizer().decode(calls[0]["input_ids"][0].tolist())


def test_stats_go_to_stderr(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model(*STEPS)
    assert cli.main([*WORKERS, "--stats"]) == 0
    assert re.search(r"\d+ forward passes, 28 tokens written, \d+ given tokens computed", capsys.readouterr().err)


# What is kept


def test_a_run_is_kept_and_viewed(model: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    assert cli.main(["view", str(run), "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.html", "page.html"}


def test_logits_are_remembered_between_runs(model: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["generate", "P", "--raw", "--mode", "resample", "--sample", "--seed", "3", "--max-new-tokens", "5"]
    told = []
    for _ in range(2):
        model()
        assert cli.main([*arguments, "--logits-cache", str(tmp_path / "logits"), "--format", "jsonl"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [record["stats"]["replayed_tokens"] for record in told] == [0, 5]
    assert told[0]["generated_text"] == told[1]["generated_text"]
    assert LogitsCache.load(tmp_path / "logits")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        cli_generate.write_whole(tmp_path / "run.json", "a" * 10**6 + "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "before"


def test_what_a_link_leads_to_is_written_and_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "run.json").symlink_to(tmp_path / "other.json")
    cli_generate.write_whole(tmp_path / "run.json", "text")
    assert (tmp_path / "run.json").is_symlink()
    assert (tmp_path / "other.json").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    cli_generate.write_whole(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()
    assert os.read(reader, 99) == b"text"
    os.close(reader)


# How it stops


def interrupting(model: Any, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let Ctrl-C come after some passes."""
    model(*STEPS)
    put = StepPrinter.put
    passes = iter(range(10**6))

    def interrupted(printer: StepPrinter, value: Any) -> None:
        if next(passes) == after:
            raise KeyboardInterrupt
        put(printer, value)

    monkeypatch.setattr(StepPrinter, "put", interrupted)


def test_an_interrupt_prints_what_was_written_so_far(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(model, monkeypatch, after=9)
    assert cli.main(WORKERS) == 130
    assert capsys.readouterr().out == "Alice 1: Ann.\n\nBob 1: Bo is sl\n\nAlice 2: Tw\n"


def test_an_interrupt_leaves_whole_json_lines(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(model, monkeypatch, after=9)
    assert cli.main([*WORKERS, "--format", "jsonl"]) == 130
    record = json.loads(capsys.readouterr().out)
    assert record == {
        "prompt": "P",
        "texts": ["Alice 1: Ann.\n\n", "Bob 1: Bo is sl", "Alice 2: Tw"],
        "interrupted": True,
    }


def test_an_interrupt_while_the_model_loads_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_generate, "load", interrupted)
    assert cli.main(["generate", "P"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_is_no_error() -> None:
    """Nobody reads any more when the first line comes."""
    command = f"{sys.executable} -m hf_parallel.cli env | true; echo ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    piped = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
    assert (piped.stdout, piped.stderr) == ("1\n", "")


def in_a_terminal(arguments: list[str], until: str, timeout: float = 120) -> tuple[str, int]:
    """Run a command in a terminal, and press Ctrl-C when it has shown something; what it wrote, and its status."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "CI")}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hf_parallel.cli", *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    text, pressed, end = "", False, time.monotonic() + timeout
    while time.monotonic() < end:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                read = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            text += read.decode(errors="replace")
        if not pressed and re.search(until, text):
            pressed = True
            process.send_signal(signal.SIGINT)
    os.close(ours)
    return text, process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["live", "text"])
def test_an_interrupt_leaves_a_terminal_as_it_was(form: str, embedded: tuple[Any, Any]) -> None:
    """The real program, on the embedded model: cursor, colours, what was written, and the status."""
    text, status = in_a_terminal(
        ["generate", "Plan a picnic.", "--format", form, "--seed", "2"], r"Alice(.|\n)*Bob(.|\n)*sandwich"
    )
    assert status == 130, text
    assert "Traceback" not in text
    hidden, shown = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert (shown > hidden) if form == "live" else "\x1b[" not in text
    assert "sandwich" in text[max(shown, 0) :]
    colours = re.findall(r"\x1b\[([\d;]*)m", text)
    assert not colours or colours[-1] == "0"

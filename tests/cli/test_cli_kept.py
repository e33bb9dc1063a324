"""`hf-parallel` saves its results if a pipe is closed, a disk is full or a later prompt fails."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import STEPS, WORKERS, at, loading
from paths import ROOT

from hf_parallel import ConsoleStreamer, LogitsCache
from hf_parallel.cli import main as cli
from hf_parallel.cli.interruptible import InterruptibleCall
from hf_parallel.cli.live import LiveView

pytestmark = pytest.mark.usefixtures("one_thread")

STREAMERS = {"text": ConsoleStreamer, "jsonl": ConsoleStreamer, "live": LiveView}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let the command line load a tiny model; see `loading`."""
    return loading(monkeypatch)


@pytest.fixture(params=["closed", "full"])
def pipe(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[[], Any], int, str]]:
    """A pipe for stdout, a function that closes it or redirects it to a full disk, exit status and error message."""
    read, write = os.pipe()
    out = os.fdopen(write, "w")
    if request.param == "closed":
        yield out, lambda: os.close(read), 1, ""
    else:
        yield out, lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), write), 2, "No space left on device"
        os.close(read)
    out.close()  # fails if it has text left to write


def status_of(arguments: list[str]) -> int:
    """Return the exit status of a command; rich exits by itself if a pipe is closed."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.parametrize("form", STREAMERS)
def test_a_transcript_is_saved_if_its_text_cannot_be_printed(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, form: str, pipe: Any
) -> None:
    out, break_pipe, status, message = pipe
    monkeypatch.setattr(sys, "stdout", out)
    model(*STEPS)
    at(monkeypatch, 9, break_pipe, STREAMERS[form])
    assert status_of([*WORKERS, "--format", form, "-o", str(tmp_path / "run.json")]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == bool(message)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert ("interrupted" in saved) == (form != "jsonl")  # JSON lines are printed after the call
    (section,) = saved["sections"]
    written = ["".join(piece[1] for piece in card["pieces"]) for card in section["cards"]]
    assert written[0].strip() == "Ann."


def test_logits_are_saved_if_the_text_cannot_be_printed(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipe: Any
) -> None:
    out, break_pipe, status, _ = pipe
    monkeypatch.setattr(sys, "stdout", out)
    model("a" * 9)
    at(monkeypatch, 4, break_pipe, ConsoleStreamer)
    arguments = ["P", "--raw", "--mode", "resample", "--logits-cache", str(tmp_path / "logits")]
    assert cli.main(["generate", *arguments, "-o", str(tmp_path / "run.json")]) == status
    assert len(LogitsCache.load(tmp_path / "logits")) >= 3
    assert json.loads((tmp_path / "run.json").read_text())["interrupted"] is True


def test_a_call_with_an_invalid_argument_keeps_earlier_files(model: Any, capsys: Any, tmp_path: Path) -> None:
    model()
    (tmp_path / "run.json").write_text("earlier")
    arguments = ["P", "--raw", "--mode", "resample", "--logits-cache", str(tmp_path / "logits"), "--set", "num_beams=2"]
    assert cli.main(["generate", *arguments, "-o", str(tmp_path / "run.json")]) == 2
    assert "num_beams=2 is not supported" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == "earlier"
    assert not (tmp_path / "logits").exists()


@pytest.mark.parametrize(("after", "kept"), [(7, 1), (10, 2)])
def test_results_before_an_error_in_a_later_batch_are_saved(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, after: int, kept: int
) -> None:
    """Each call puts the prompt and six passes."""

    def fail() -> None:
        raise RuntimeError("no memory")

    arguments = ["P", "QRS", "TU", "--raw", "--no-preset", "--max-new-tokens", "6", "--greedy", "--batch-size", "1"]
    arguments = ["generate", *arguments, "--set", "finisher_tokens=0", "-o", str(tmp_path / "run.json")]
    model()
    assert cli.main(arguments) == 0
    whole = json.loads((tmp_path / "run.json").read_text())
    model()
    at(monkeypatch, after, fail)
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == "hf-parallel: error: RuntimeError: no memory\n"
    run = json.loads((tmp_path / "run.json").read_text())
    assert [section["prompt"] for section in run["sections"]] == ["<bos>P", "<bos>QRS"][:kept]
    assert run["sections"][0] == whole["sections"][0]


def test_a_call_that_never_ran_has_no_text() -> None:
    assert not InterruptibleCall(None, None, None, {}).has_text


def test_output_that_cannot_be_printed_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any, pipe: Any) -> None:
    out, break_pipe, status, message = pipe
    monkeypatch.setattr(sys, "stdout", out)
    break_pipe()
    assert cli.main(["env"]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == bool(message)


def test_a_command_runs_without_stdout(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["env"]) == 0
    assert capsys.readouterr().err == ""


def test_a_transcript_is_viewed_from_stdin(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model(*STEPS)
    assert cli.main([*WORKERS, "-o", "run.json"]) == 0
    assert cli.main(["view", "run.json"]) == 0
    page = Path("run.html").read_text()
    capsys.readouterr()
    for arguments in ([], ["-o", "page.html"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(Path("run.json").read_text()))
        assert cli.main(["view", "-", *arguments]) == 0
    assert capsys.readouterr().out == page + "\n"
    assert Path("page.html").read_text() == page
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.html", "page.html"}


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "stdin is not JSON: "), (["--open"], "--open needs a file to open")]
)
def test_view_rejects_other_text_on_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("not json"))
    assert cli.main(["view", "-", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_while_torch_is_imported_prints_nothing(tmp_path: Path) -> None:
    """A module named torch raises `KeyboardInterrupt`."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "hf_parallel_command", "env"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

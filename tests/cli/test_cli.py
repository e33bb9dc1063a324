"""The command line: prompts, settings, error messages, and the commands besides `generate`."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import tiny

import hf_parallel
from hf_parallel import HogwildConfig
from hf_parallel.cli import bench
from hf_parallel.cli import generate as cli_generate
from hf_parallel.cli import main as cli
from hf_parallel.cli import settings as cli_settings
from hf_parallel.cli.measure import StepClock
from hf_parallel.generation import MODES
from hf_parallel.models.capabilities import Capabilities, embedded_capabilities, probe_capabilities

pytestmark = pytest.mark.usefixtures("one_thread")

# Prompts and settings


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
        (["x", "--set", "num_worker=3"], "did you mean 'num_workers'?"),
        (["x", "--set", "num_workers=two"], "got 'two'"),
        (["x", "--set", "num_workers"], "NAME=VALUE, got 'num_workers'"),
        (["x", "--set", "logits_cache=1"], "--logits-cache"),
        (["x", "--mode", "generate", "--set", "layout=combined"], "'layout'"),
        (["x", "--greedy", "--temperature", "0.5"], "--greedy .* --temperature"),
        (["x", "--set", "do_sample=false", "--top-p", "0.5"], "do_sample=False .* --top-p"),
        (["x", "--temperature", "0.9", "--set", "temperature=0.1"], "--set temperature and --temperature"),
        (["x", "--mode", "pdos", "--logits-cache", "f"], "--logits-cache .* --mode pdos"),
        (["x", "--mode", "generate", "-o", "run.json"], "-o .* --mode generate"),
        (["x", "--mode", "generate", "--stats"], "--stats .* --mode generate"),
        (["x", "-o", "/nowhere/run.json"], "/nowhere"),
        (["x", "-o", "/"], "-o / is a folder"),
        (["x", "-o", "run.txt"], "run.txt must end in .json"),
        (["x", "-o", "/proc/run.json"], "/proc/run.json cannot be written"),
        (["x", "--batch-size", "0"], "at least 1, got 0"),
        (["x", "y", "--format", "live"], "got 2"),
        (["x", "--device", "cuda:99"], "--device cuda:99"),
        (["x", "--model", "/proc"], "--model /proc: no model"),
        (["x", "--model", "./nothere"], "--model ./nothere: no such folder"),
        (["x", "--top-p", "1.5"], "top_p=1.5"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be an int of at least 1, got 0"),
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


def test_a_model_that_does_not_exist_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["generate", "x", "--model", "nobody/nothing"]) == 2
    shown = capsys.readouterr().err
    assert "'nobody/nothing'" in shown
    assert shown.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="num_workers must be"):
        cli.main(["generate", "x", "--debug", "--set", "num_workers=0"])


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", 2, 3),
        ("False", True, False),
        ("None", 3, None),
        ('["a", "b"]', None, ["a", "b"]),
        ("interleaved", "combined", "interleaved"),
        ("42", "text", "42"),
        ('"\\n"', "text", "\n"),
        ('"quoted', "text", '"quoted'),
        ("plain", None, "plain"),
    ],
)
def test_values_are_json_or_text_and_text_settings_stay_text(text: str, default: Any, value: Any) -> None:
    assert cli_settings.parse(text, default) == value


def test_only_given_settings_are_passed_on_so_that_presets_can_fill_in_the_others() -> None:
    config, settings = cli_settings.read_settings(options("x", "--temperature", "0.3", "--set", "step_prefix={name}> "))
    assert config is not None
    assert config.to_dict() == {"step_prefix": "{name}> "}
    assert settings == {"temperature": 0.3, "do_sample": True, "max_new_tokens": 256}
    config, settings = cli_settings.read_settings(options("x", "--seed", "7", "--greedy", "--set", "max_length=30"))
    assert config == HogwildConfig(seed=7)
    assert settings == {"do_sample": False, "max_length": 30}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_settings_of_sampling_enable_it(name: str) -> None:
    for arguments in (["--no-preset"], ["--mode", "shared_prefix"], ["--mode", "generate"]):
        _, settings = cli_settings.read_settings(options("x", *arguments, "--set", f"{name}=0.7"))
        assert (settings["do_sample"], settings[name]) == (True, 0.7)


@pytest.mark.parametrize("mode", [*MODES, "generate"])
def test_every_mode_describes_its_settings(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    assert cli.main(["generate", "--mode", mode, "--settings"]) == 0
    printed = capsys.readouterr().out
    names = MODES[mode].fields() if mode in MODES else ["temperature"]
    assert all(re.search(rf"\b{name}\b", printed) for name in names)


@pytest.mark.parametrize(("mode", "says"), [("hogwlid", "did you mean 'hogwild'?"), ("nothing", "got 'nothing'\n")])
def test_a_misspelt_mode_gets_a_suggestion(capsys: pytest.CaptureFixture[str], mode: str, says: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "x", "--mode", mode])
    assert says in capsys.readouterr().err


# The program and the other commands


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["--help"], "usage: hf-parallel"), (["--version"], f"hf_parallel {hf_parallel.__version__}\n")],
)
def test_help_and_version_import_no_torch(tmp_path: Path, arguments: list[str], printed: str) -> None:
    (tmp_path / "torch.py").write_text("raise SystemError('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(bench.REPOSITORY)])}
    command = [sys.executable, "-m", "hf_parallel", *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(printed)


def test_an_interrupt_while_torch_is_imported_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(bench.REPOSITORY)])}
    command = [sys.executable, "-m", "hf_parallel", "env"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_help_names_every_command_and_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name} ", shown, re.MULTILINE) for name in cli.COMMANDS)
    assert all(name in shown for config in MODES.values() for name in config.fields() if name != "logits_cache")


def test_env_prints_versions_backends_and_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PARALLEL_BACKEND", "reference")
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hf_parallel"] == hf_parallel.__version__
    assert set(found["backends"]) == {backend.name for backend in hf_parallel.backends()}
    assert found["environment"]["HF_PARALLEL_BACKEND"] == "reference"
    assert cli.main(["env"]) == 0
    assert "  triton: " in capsys.readouterr().out


def test_bench_runs_the_benchmarks_of_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> Any:
        ran.append(command[2:])
        assert str(bench.REPOSITORY) in settings["env"]["PYTHONPATH"]
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(bench.subprocess, "run", run)
    assert cli.main(["bench", "gpu", "--toy"]) == 7
    assert ran == [["benchmarks", "gpu", "--toy"]]
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    assert cli.main(["bench"]) == 2
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["top"], ["generate", "x", "--format", "live"]])
def test_an_error_names_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("rich", "hf_parallel.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in ("demo", "top", "live", "generate"):
        monkeypatch.delattr(f"hf_parallel.cli.{name}", raising=False)
    assert cli.main(command) == 2
    assert "pip install rich" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not JSON"),
        ("[" * 10**5, "run.json"),
        ("[1]", "not a transcript"),
        ('{"format": "hf_parallel run", "version": 1}', "version 1"),
    ],
)
def test_view_rejects_other_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    assert cli.main(["view", str(tmp_path / "run.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run.html").exists()
    (tmp_path / "run.html").write_text("{}")  # not overwritten by its page
    assert cli.main(["view", str(tmp_path / "run.html")]) == 2


@pytest.mark.parametrize(("arguments", "message"), [([], "stdin is not JSON: "), (["--open"], "--open needs a file")])
def test_view_rejects_other_text_on_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("not json"))
    assert cli.main(["view", "-", *arguments]) == 2
    assert message in capsys.readouterr().err


# Start-up


@pytest.mark.parametrize("name", ["llama", "gpt2", "exaone4", "llama-dynamic", "gemma3_text"])
def test_capabilities_survive_json(name: str) -> None:
    found = probe_capabilities(tiny.build(name))
    assert Capabilities.from_json(found.to_json()) == found


def test_the_embedded_model_is_probed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, embedded: tuple[Any, Any]
) -> None:
    monkeypatch.setenv("HF_PARALLEL_CACHE", str(tmp_path))
    model, _ = embedded
    passes: list[Any] = []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(_))
    found = []
    try:
        for damage in ("", "", "{", '{"specs": [], "layers": [[0, 0]]}', ""):
            if damage:
                next(tmp_path.iterdir()).write_text(damage)
            before = len(passes)
            found.append((embedded_capabilities(model), len(passes) > before))
            hf_parallel.disable(model)
    finally:
        handle.remove()
        hf_parallel.disable(model)
    assert [probed for _, probed in found] == [True, False, True, True, False]
    assert all(of == found[0][0] for of, _ in found)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_the_first_token_takes_at_most_1_2_times_as_long_as_with_generate(
    monkeypatch: pytest.MonkeyPatch, embedded: tuple[Any, Any]
) -> None:
    """Processor time from the command, or from loading the model, to the first token, without imports."""
    prompt = "Name three fruits that grow in Italy, and say in one sentence each what they taste like."

    def command() -> float:
        first: list[float] = []

        class Output(io.StringIO):
            def write(self, text: str) -> int:
                first.extend([time.process_time()] if text.strip() else [])
                return super().write(text)

        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Output())
            cli.main(["generate", prompt, "--mode", "shared_prefix", "--max-new-tokens", "2", "--greedy"])
        return first[0]

    def plain() -> float:
        first: list[float] = []
        model, tokenizer = hf_parallel.load_embedded_model()
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        clock = StepClock(lambda count: first.append(time.process_time()))
        model.generate(**inputs, streamer=clock, max_new_tokens=2, do_sample=False)
        return first[0]

    def seconds(run: Callable[[], float]) -> float:
        gc.collect()  # garbage of other tests would be collected during the run
        return -time.process_time() + run()

    seconds(command)  # warm-up
    times: list[tuple[float, float]] = []
    while not times or min(of for of, _ in times) > 1.2 * min(of for _, of in times):
        assert len(times) < 6, times
        times.append((seconds(command), seconds(plain)))

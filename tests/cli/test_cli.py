"""The command line: prompts, settings, error messages, and the commands besides `generate`."""

from __future__ import annotations

import gc
import importlib.util
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

import benchmarks.__main__
import hf_parallel
from hf_parallel import HogwildConfig
from hf_parallel.cli import generate as cli_generate
from hf_parallel.cli import main as cli
from hf_parallel.cli import settings as cli_settings
from hf_parallel.cli.measure import StepClock
from hf_parallel.generation import MODES
from hf_parallel.models.capabilities import Capabilities, embedded_capabilities, probe_capabilities

pytestmark = pytest.mark.usefixtures("one_thread")

# Prompts and settings


def options(*arguments: str) -> Any:
    return cli.make_parser().parse_args(["generate", *arguments])


def test_prompts_come_from_arguments_files_and_stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin\n"))
    (tmp_path / "file").write_text("from a\n\nfile\n")
    read = cli_generate.read_prompts(options("first", "-", "--file", str(tmp_path / "file")))
    assert read == ["first", "from\nstdin", "from a\n\nfile"]


def test_a_file_called_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert cli_generate.read_prompts(options("first", "--file", "-", "--lines")) == ["first", "one", "two"]


def test_without_a_prompt_stdin_is_read_and_lines_splits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\x0c\u2028three\n"))
    assert cli_generate.read_prompts(options("--lines")) == ["one", "two\x0c\u2028three"]


@pytest.mark.parametrize("lines", [[], ["--lines"]])
@pytest.mark.parametrize(("text", "state"), [("", "empty"), (" \n\n", "blank")])
@pytest.mark.parametrize("source", ["stdin", "prompts.txt"])
def test_an_error_names_the_file_without_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: str,
    text: str,
    state: str,
    lines: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    Path("prompts.txt").write_text(text)
    arguments = [] if source == "stdin" else ["a prompt", "--file", source]
    assert cli.main(["generate", *arguments, *lines]) == 2
    assert capsys.readouterr() == ("", f"hf-parallel: error: there is no prompt in {source}: it is {state}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt"),
        ([" "], "a prompt must not be empty"),
        (["x", "--set", "num_worker=3"], "has no setting 'num_worker' (got '3'); did you mean 'num_workers'? It has"),
        (["x", "--set", "num_workers=0"], "num_workers must be an int of at least 1, got 0"),
        (["x", "--set", "num_workers=two"], "num_workers must be an int of at least 1, got 'two'"),
        (["x", "--set", "num_workers"], "--set must be NAME=VALUE, got 'num_workers'"),
        (["x", "--set", "logits_cache=1"], "--set cannot hold the object logits_cache (got 'logits_cache=1'); use --l"),
        (["x", "--mode", "generate", "--set", "layout=combined"], "generate has no setting 'layout' (got 'combined')"),
        (["x", "--greedy", "--temperature", "0.5"], "--greedy disables sampling, so it cannot be combined with --t"),
        (["x", "--greedy", "--set", "top_k=5"], "--greedy disables sampling, so it cannot be combined with --set t"),
        (["x", "--set", "do_sample=false", "--top-p", "0.5"], "--set do_sample=False disables sampling, so it"),
        (["x", "--mode", "pdos", "--logits-cache", "f"], "--logits-cache needs a mode with logits_cache, got --mode"),
        (["x", "--mode", "generate", "-o", "run.json"], "-o saves the transcript of a mode, so it cannot be"),
        (["x", "-o", "/nowhere/run.json"], "-o /nowhere/run.json: there is no folder /nowhere"),
        (["x", "-o", "/"], "-o / is a folder"),
        (["x", "-o", "run.txt"], "-o run.txt must end in .json, or in .html or .htm for the page"),
        (["x", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["x", "--logits-cache", "/nowhere/logits"], "--logits-cache /nowhere/logits: there is no folder /nowhere"),
        (["x", "y", "--format", "live"], "--format live shows one prompt in a mode, got 2"),
        (["x", "--file", "/nowhere"], "No such file or directory: '/nowhere'"),
        (["x", "-o", "/proc/run.json"], "-o /proc/run.json cannot be written: "),
        (["x", "--mode", "resample", "--logits-cache", "/proc/l"], "--logits-cache /proc/l cannot be written: "),
        (["x", "--mode", "resample", "--logits-cache", "/"], "--logits-cache / is a folder"),
        (["x", "--temperature", "0.9", "--set", "temperature=0.1"], "--set temperature and --temperature are the sam"),
        (["x", "--seed", "1", "--set", "seed=2"], "--set seed and --seed are the same setting"),
        (["x", "--greedy", "--set", "do_sample=true"], "--set do_sample and --greedy are the same setting"),
        (["x", "--sample", "--set", "do_sample=true"], "--set do_sample and --sample are the same setting"),
        (["x", "\udcff"], "a prompt is not valid UTF-8: "),
        (["x", "--device", "nope"], "--device nope: "),
        (["x", "--device", "cuda:99"], "--device cuda:99: "),
        (["x", "--model", "./nothere"], "--model ./nothere: no such folder"),
        (["x", "--model", "/proc"], "--model /proc: no model in this folder, there must be a config.json"),
        (["x", "--model", "/nowhere"], "--model /nowhere: no such folder"),
        (["x", "--model", "~nobody/model"], "--model ~nobody/model: no such folder"),
        (["x", "--lines"], "--lines splits files and stdin, but the prompts are arguments"),
        (["x", "--stats", "--mode", "generate"], "--stats reports the cost of a mode, so it cannot be"),
        (["x", "--temperature", "0"], "temperature=0.0 is invalid: "),
        (["x", "--set", "temperature=warm"], "temperature must be a number, got 'warm'"),
        (["x", "--top-p", "1.5"], "top_p=1.5 is invalid: "),
        (["x", "--top-k", "-1"], "top_k must be an int of at least 0, got -1"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be an int of at least 1, got 0"),
        (["x", "--mode", "generate", "--repetition-penalty", "-1"], "repetition_penalty=-1.0 is invalid: "),
        (["x", "--greedy", "--num-return-sequences", "2"], "do not support `num_return_sequences`"),
        (["--file", "-"], "give a prompt"),
    ],
)  # fmt: skip
def test_invalid_options_are_one_line_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(cli_generate, "load", lambda options: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert cli.main(["generate", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("hf-parallel: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_an_output_that_cannot_be_written_raises_before_logits_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "logits").write_text("damaged")
    arguments = ["--mode", "resample", "--logits-cache", str(tmp_path / "logits"), "-o", "/proc/run.json"]
    assert cli.main(["generate", "x", *arguments]) == 2
    assert "-o /proc/run.json cannot be written" in capsys.readouterr().err


def test_checking_whether_an_output_can_be_written_leaves_no_files(tmp_path: Path) -> None:
    arguments = ["x", "--mode", "resample", "-o", str(tmp_path / "run.json"), "--logits-cache", str(tmp_path / "l")]
    cli_generate.check_options(options(*arguments), ["x"])
    assert not list(tmp_path.iterdir())


def test_an_error_names_stdin_if_it_is_not_utf_8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert cli.main(["generate"]) == 2
    assert "error: stdin is not valid UTF-8: " in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["generate", "x", "--model", "nobody/nothing"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        "hf-parallel: error: there is no folder 'nobody/nothing', nothing of it is in the Hub's cache"
    )
    assert shown.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_workers must be"):
        cli.main(["generate", "x", "--debug", "--set", "num_workers=0"])


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", 2, 3),
        ("true", False, True),
        ("False", True, False),
        ("None", 3, None),
        ('["a", "b"]', None, ["a", "b"]),
        ("interleaved", "combined", "interleaved"),
        ("42", "text", "42"),
        ("true", "text", "true"),
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
    config, settings = cli_settings.read_settings(options("x", "--seed", "7", "--greedy"))
    assert config == HogwildConfig(seed=7)
    assert settings == {"do_sample": False, "max_new_tokens": 256}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_settings_of_sampling_enable_it(name: str) -> None:
    for arguments in (["--no-preset"], ["--mode", "shared_prefix"], ["--mode", "generate"]):
        _, settings = cli_settings.read_settings(options("x", *arguments, "--set", f"{name}=0.7"))
        assert (settings["do_sample"], settings[name]) == (True, 0.7)


def test_settings_of_generate_can_be_set() -> None:
    _, settings = cli_settings.read_settings(
        options("x", "--set", "no_repeat_ngram_size=4", "--set", 'stop_strings=["."]')
    )
    assert (settings["no_repeat_ngram_size"], settings["stop_strings"]) == (4, ["."])


def test_max_length_replaces_the_default_of_max_new_tokens() -> None:
    _, settings = cli_settings.read_settings(options("x", "--no-preset", "--set", "max_length=30"))
    assert settings == {"max_length": 30}


@pytest.mark.parametrize("mode", [*MODES, "generate"])
def test_every_mode_describes_its_settings(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    assert cli.main(["generate", "--mode", mode, "--settings"]) == 0
    printed = capsys.readouterr().out
    names = MODES[mode].fields() if mode in MODES else ["temperature"]
    assert all(re.search(rf"\b{name}\b", printed) for name in names)
    assert cli_settings.describe(mode) == printed.rstrip("\n")


# The other commands


def test_help_names_every_command_and_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(
        re.search(rf"^    {name} ", shown, re.MULTILINE) for name in ("demo", "generate", "bench", "view", "env")
    )
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for config in MODES.values() for name in config.fields() if name != "logits_cache")


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["--help"], "usage: hf-parallel"), (["--version"], f"hf_parallel {hf_parallel.__version__}\n")],
)
def test_help_and_version_take_at_most_half_a_second(arguments: list[str], printed: str) -> None:
    """Processor time; importing torch alone takes longer."""
    began = sum(os.times()[2:4])
    done = subprocess.run([sys.executable, "-m", "hf_parallel_command", *arguments], capture_output=True, text=True)
    assert sum(os.times()[2:4]) - began < 0.5
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(printed)


@pytest.mark.parametrize(
    ("mode", "says"),
    [("hogwlid", "got 'hogwlid'; did you mean 'hogwild'?"), ("nothing", "got 'nothing'\n")],
)
def test_a_misspelt_mode_gets_a_suggestion(capsys: pytest.CaptureFixture[str], mode: str, says: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "x", "--mode", mode])
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("hf-parallel generate: error: argument --mode: must be one of ")
    assert says in said


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
    plain = capsys.readouterr().out
    assert "compiled CPU kernel: " in plain
    assert "  triton: " in plain


def test_bench_runs_the_benchmarks_of_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> Any:
        ran.append(command[2:])
        assert str(cli.BENCHMARKS.parent) in settings["env"]["PYTHONPATH"]
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(cli.subprocess, "run", run)
    assert cli.main(["bench", "--quick", "--rounds", "3"]) == 7
    assert cli.main(["bench", "gpu", "--toy"]) == 7
    assert ran == [["benchmarks", "--quick", "--rounds", "3"], ["benchmarks.gpu", "--toy"]]
    assert cli.main(["bench", "nothing"]) == 2
    assert "there is no benchmark 'nothing'; choose one of " in capsys.readouterr().err


def test_bench_with_the_name_of_a_main_benchmark_says_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "shared_prefix"]) == 2
    assert "for the main ones, of which --only NAME runs one" in capsys.readouterr().err


def test_without_the_repository_bench_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "BENCHMARKS", tmp_path)
    assert cli.main(["bench"]) == 2
    assert "part of the repository, not of the installed package" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["demo"], ["bench"], ["generate", "x", "--format", "live"]])
def test_an_error_names_missing_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    assert cli.main(command) == 2
    assert "needs rich, which is not installed: pip install rich" in capsys.readouterr().err


def test_demo_options_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("hf_parallel.cli.demo.main", lambda arguments: seen.append(arguments) or 0)
    assert cli.main(["demo", "--quick", "--task", "Sing a song."]) == 0
    assert seen == [["--quick", "--task", "Sing a song."]]


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_help_of_forwarded_commands_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as left:
        cli.main(["demo", "--help"]) if command == "demo" else benchmarks.__main__.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hf-parallel {command} [")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
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


def test_a_transcript_is_not_overwritten_by_its_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text("{}")
    assert cli.main(["view", str(tmp_path / "run.html")]) == 2


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

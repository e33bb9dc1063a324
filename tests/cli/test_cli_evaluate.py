"""`hf-parallel evaluate`: runs, files, messages, and two processes that share the problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import small_model
from sweeps import lines_of

from hf_parallel.cli import evaluate as cli_evaluate
from hf_parallel.cli import main as cli
from hf_parallel.evaluation import Finisher, Run, load_problems, read_results, table
from hf_parallel.generation import MODES

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = ["evaluate", "--task", "arithmetic", "--set", "task.num_questions=1"]
SMALL = [*TASK, "--count", "3", "--samples", "2", "--mode", "none", "--set", "hogwild.num_workers=1,2"]
SMALL += ["--budgets", "4,8", "--set", "temperature=1.0", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model."""
    path = tmp_path_factory.mktemp("model")
    for part in small_model():
        part.save_pretrained(path)
    return path


def runs_of(*arguments: str) -> list[Run]:
    options = cli.make_parser("evaluate").parse_args(["evaluate", "--task", "planning", "-o", "folder", *arguments])
    return cli_evaluate.read_runs(options)[1]


def test_each_combination_of_values_is_a_run() -> None:
    assert runs_of() == [Run()]
    assert runs_of("--mode", "none", "--mode", "hogwild") == [Run(), Run("hogwild")]
    found = runs_of("--set", "hogwild.num_workers=2,3", "--set", "hogwild.layout=combined,contiguous")
    layouts = ("combined", "contiguous")
    assert found == [Run("hogwild", {"num_workers": n, "layout": of}) for n in (2, 3) for of in layouts]


def test_a_preset_is_that_of_the_modes_that_have_it() -> None:
    given = ["--preset", "paper", "--mode", "none", "--set", "hogwild.num_workers=2,3", "--mode", "shared_prefix"]
    two, three, none, plain = (runs_of(*given)[i] for i in (2, 3, 0, 1))
    assert (none, plain) == (Run(), Run("shared_prefix"))
    assert [two, three] == [Run("hogwild", {"num_workers": n, "preset": "paper"}) for n in (2, 3)]
    config = two.config()
    assert config is not None
    assert config.redundancy_prompt.startswith("Quick check")  # type: ignore[attr-defined]
    assert config.finisher_tokens == 0, "the sweep has a finisher"  # type: ignore[attr-defined]
    problem = load_problems("arithmetic", count=1)[0]
    assert Finisher(preset="paper").prompt_for(problem) == MODES["hogwild"](preset="paper").finisher_prompt
    assert Finisher().prompt_for(problem) == MODES["hogwild"]().finisher_prompt


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "arithmetics"], "did you mean 'arithmetic'"),
        (["--mode", "resample"], "resample cannot be swept"),
        (["--set", "hogwild.num_worker=2"], "did you mean 'num_workers'"),
        (["--set", "hogwld.num_workers=2"], "did you mean 'hogwild'"),
        (["--set", "num_workers=2"], "generate has no setting 'num_workers' (got 2); it is one of hogwild"),
        (["--set", "hogwild.num_workers=2,0"], "num_workers must be an int of at least 1, got 0"),
        (["--set", "temprature=1"], "did you mean 'temperature'"),
        (["--set", "temperature=1,2"], "only settings of a mode may have several values, got temperature"),
        (["--greedy", "--set", "top_p=0.9"], "do_sample=False disables sampling"),
        (["--set", "max_new_tokens=5"], "max_new_tokens=5 cannot be given"),
        (["--set", "task.questions=5"], "arithmetic has no option 'questions' (got 5)"),
        (["--count", "0"], "count must be an int of at least 1, got 0"),
        (["--budgets", "4,x"], "--budgets must be numbers of at least 1, separated by commas, got '4,x'"),
        (["--mode", "self_consistency", "--greedy"], "answers that vote would be equal with greedy decoding"),
        (["--model", "./no/such"], "no such folder"),
        (["--preset", "papers"], "preset must be 'embedded' or 'paper' or None for 'hogwild', got 'papers'"),
        (["--set", "none.instruction=drafts"], "one of chain_of_draft, "),
        (["--judge", "answers=gpt-4o"], "the kind of a judge must be one of"),
    ],
    ids=lambda given: given[-1] if isinstance(given, list) else None,
)
def test_invalid_options_are_named_before_a_model_is_loaded(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(cli_evaluate, "load", None)
    assert cli.main([*TASK, "-o", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_results_are_written_and_resumed(folder: Path, tmp_path: Path, capsys: Any) -> None:
    command = [*SMALL, "--model", str(folder), "-o", str(tmp_path / "runs" / "out")]
    assert cli.main(command) == 0
    shown, out = capsys.readouterr().out, tmp_path / "runs" / "out"
    rows = table(read_results(out))
    assert [(row["mode"], row["settings"], row["budget"]) for row in rows] == [
        (mode, settings, budget)
        for mode, settings in (("hogwild", {"num_workers": 1}), ("hogwild", {"num_workers": 2}), ("none", {}))
        for budget in (4, 8)
    ]
    assert all((row["problems"], row["generations"]) == (3, 6) for row in rows)
    assert len(read_results(out)) == 36
    before = lines_of(out)
    assert cli.main(command) == 0
    assert capsys.readouterr().out == shown
    assert lines_of(out) == before
    assert not list(out.glob("*.png"))
    assert cli.main([*command, "--count", "1", "--plot"]) == 0
    assert capsys.readouterr().out == shown, "the table is that of the folder"
    names = sorted(path.name for path in out.glob("*.png"))
    assert names == [f"accuracy_by_{axis}.png" for axis in ("passes", "seconds", "tokens")]

"""Sweeps: results at all budgets from one generation, early finisher, resuming, tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import sweeps
import torch
from pages import OWN_MODES
from serving import small_model
from sweeps import PROBLEMS, RUNS, SAMPLING, Letters, Never, lines_of, small_sweep, without_costs

import hf_parallel
from hf_parallel.engine import Engine
from hf_parallel.evaluation import Finisher, Run, format_table, read_results, table
from hf_parallel.evaluation.judge import Judge
from hf_parallel.evaluation.sweep import sweep
from hf_parallel.generation import MODES
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.modes import find_answer, majority
from hf_parallel.generation.prompts import encode_task

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Results of the small sweep."""
    return small_sweep()


# Budgets


SWEPT = [None, *(name for name in OWN_MODES if not MODES[name].traits.needs_logits_cache)]


def inserts_tokens(mode: str | None) -> bool:
    """Return whether rows of a mode have new tokens that were not sampled."""
    model, tokenizer = small_model()
    given = {"generation_mode": mode, "tokenizer": tokenizer, "return_dict_in_generate": True, "max_new_tokens": 5}
    out = hf_parallel.enable(model).generate(torch.ones(1, 3).long(), **given)
    ends = [length - out.record.begin for length in out.record.lengths]
    return any(bool(row[:end].isnan().any()) for row, end in zip(out.log_probs, ends, strict=True))


@pytest.mark.parametrize("mode", SWEPT)
@pytest.mark.filterwarnings("ignore")
def test_results_at_a_budget_are_those_of_a_generation_with_that_budget(mode: str | None) -> None:
    def of(*budgets: int) -> dict[tuple[int, int], dict[str, Any]]:
        results = small_sweep(problems=PROBLEMS[:2], runs=[Run(mode)], budgets=budgets, samples=1)
        for result in results:  # an incomplete character is shown only at the end of a row
            result["text"] = re.sub("\n{3,}", "\n\n", result["text"].replace("\ufffd", ""))
            del result["score"]  # a function of the text
        return {(result["index"], result["budget"]): result for result in results}

    within = of(5, 12)
    for key, result in of(5).items():
        longer = within[key]
        assert 0 < longer["passes"] <= min(5, longer["tokens"])
        if result["passes"] == longer["passes"]:
            assert result == longer
        else:
            assert result["passes"] < longer["passes"]
            assert inserts_tokens(mode), "which count as new tokens, but not as passes"


@pytest.mark.parametrize("mode", ["hogwild", "pdos", "shared_prefix"])
@pytest.mark.filterwarnings("ignore")
def test_passes_tokens_and_texts_are_those_of_generate(mode: str) -> None:
    model, tokenizer = small_model()
    hf_parallel.enable(model)
    pattern = {"finisher_tokens": 0, "answer_pattern": Letters.answer_pattern} if mode == "hogwild" else {}
    for result in small_sweep(problems=PROBLEMS[:2], runs=[Run(mode)], samples=1, finisher=Finisher(0)):
        prompt = hf_parallel.build_prompt(mode, PROBLEMS[result["index"]].prompt, tokenizer, **pattern)
        more = {"seed": result["seed"], "max_new_tokens": result["budget"], "return_dict_in_generate": True, **SAMPLING}
        out = model.generate(**prompt, generation_mode=mode, tokenizer=tokenizer, **pattern, **more)
        assert result["tokens"] == out.stats.decoded_tokens
        assert result["passes"] == out.record.passes
        if mode == "hogwild":
            steps = [step.text.rstrip() for step in out.history[0]]  # unfinished ones last in the results
            assert sorted(result["text"].split("\n\n")) == sorted("\n\n".join(steps).split("\n\n"))


def test_results_depend_neither_on_the_order_nor_on_the_number_at_a_time(results: list[dict[str, Any]]) -> None:
    alone = small_sweep(problems=PROBLEMS[:1], runs=RUNS[::-1], concurrent=1)
    by_run = {run.mode: [r for r in alone if r["mode"] == (run.mode or "none")] for run in RUNS}
    expected = [result for result in results if result["index"] == 0]
    assert [result for run in RUNS for result in by_run[run.mode]] == expected


@pytest.mark.parametrize("mode", [None, "hogwild", "self_consistency", "pdos"])
@pytest.mark.filterwarnings("ignore")
def test_seconds_end_with_the_last_pass_of_a_budget(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts forward passes of the model, and each decode pass is one of them."""
    model, tokenizer = small_model()
    passes = 0

    def add_pass(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_pre_hook(add_pass)
    monkeypatch.setattr("time.perf_counter", lambda: float(passes))
    found = sweep(model, tokenizer, PROBLEMS[:1], [Run(mode)], (3, 6, 9), concurrent=1, **SAMPLING)
    first, *others = found
    assert first["seconds"] >= first["passes"] - 1, "the last token of a budget comes from the pass before"
    for result in others:
        assert result["seconds"] - first["seconds"] == result["passes"] - first["passes"]


def test_costs_are_in_results_and_table(tmp_path: Path) -> None:
    small_sweep(tmp_path, budgets=(3, 6), problems=PROBLEMS[:2], runs=RUNS[:1], samples=1)
    results = read_results(tmp_path)
    at = {budget: [one for one in results if one["budget"] == budget] for budget in (3, 6)}
    rows = table(results)
    for row, found in zip(rows, at.values(), strict=True):
        seconds = sum(one["seconds"] for one in found)
        assert row["seconds"] == pytest.approx(seconds / 2)
        assert row["tokens_per_second"] == pytest.approx(sum(one["tokens"] for one in found) / seconds)
    assert not any("kv_bytes" in one for one in (*at[3], rows[0]))
    assert rows[1]["kv_bytes"] == sum(one["kv_bytes"] for one in at[6]) / 2 > 0
    assert {"seconds", "tokens_per_second", "kv_bytes"} <= set(format_table(rows).splitlines()[0].split())
    assert "kv_bytes" not in format_table(rows[:1])


# Answers


def test_the_finisher_continues_a_text_without_an_answer() -> None:
    problem, finisher = Never("Write one.", "one"), Finisher(5, "\nANSWER:")
    (result,) = small_sweep(problems=[problem], runs=[Run()], budgets=[4], samples=1, finisher=finisher)
    model, tokenizer = small_model()
    text, separator, answer = result["text"].partition("\nANSWER:")
    assert not result["answered"]
    assert separator
    prompt = encode_task(None, problem.prompt, tokenizer)["input_ids"][0].tolist()
    given = prompt + tokenizer(text + separator, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([given])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    generated = tokenizer.decode(out[0, len(given) :], skip_special_tokens=True)
    assert answer == generated.split("\n")[0]
    assert result["score"] == problem.score(result["text"])
    assert result["tokens"] == 4, "tokens of the finisher do not count"


def test_the_finisher_always_concludes_answers_that_the_model_reads() -> None:
    """As in Hogwild! Inference: it reads both answers, whether they have a final answer or not, and does not count."""
    model, tokenizer = small_model()
    problem, finisher = Letters("Write one.", "one"), Finisher(5, "\nSo the letter is")
    both = Run("self_consistency", {"num_answers": 2, "vote": "final"})
    given = {"problems": [problem], "runs": [both], "samples": 1}
    results = small_sweep(budgets=[4, 9], finisher=finisher, **given)
    more = {"max_new_tokens": 9, "return_dict_in_generate": True, **SAMPLING, **both.settings}
    more |= {"generation_mode": both.mode, "answer_pattern": problem.answer_pattern, "seed": results[0]["seed"]}
    prompt = encode_task(None, problem.prompt, tokenizer)
    out = hf_parallel.enable(model).generate(**prompt, tokenizer=tokenizer, **more)
    assert any(found is not None for found in out.found[0]), "an answer needs no finisher"
    for result in results:
        budget = result["budget"]
        assert result["passes"] == budget
        assert result["tokens"] == 2 * budget
        answers, asked, _ = result["text"].partition("\nSo the letter is")
        assert asked
        assert result["answered"] == problem.has_answer(answers)
    assert results[-1]["answered"], "the finisher follows an answer, too"
    assert all(text.rstrip() in results[-1]["text"] for text in out.texts[0])
    assert out.conclusions[0] not in results[-1]["text"]


def test_two_workers_take_turns_at_independent_rows() -> None:
    """A pass of n rows is ceil(n / 2) passes of two workers, computed from the lengths of the answers."""
    runs = [Run(), Run("hogwild", {"num_workers": 2}), Run("self_consistency", {"num_answers": 5})]
    settings: dict[str, Any] = {"problems": PROBLEMS[:2], "runs": runs, "samples": 1, "budgets": (3, 40)}
    results = small_sweep(finisher=Finisher(0), **settings)
    assert all(("two_worker_passes" in result) == (result["mode"] == "self_consistency") for result in results)
    model, tokenizer = small_model()
    for result in results[-4:]:
        problem = PROBLEMS[result["index"]]
        more = {"max_new_tokens": 40, "return_dict_in_generate": True, **SAMPLING, "num_answers": 5}
        more |= {"answer_pattern": problem.answer_pattern, "seed": result["seed"]}
        prompt = encode_task(None, problem.prompt, tokenizer)
        out = hf_parallel.enable(model).generate(
            **prompt, generation_mode="self_consistency", tokenizer=tokenizer, **more
        )
        (section,) = out.to_dict(tokenizer)["sections"]
        lengths = [card["end"] for card in section["cards"]]
        active = [sum(length >= at for length in lengths) for at in range(1, result["passes"] + 1)]
        assert result["two_worker_passes"] == sum(-(-count // 2) for count in active)


def test_several_rows_have_measures_of_collaboration(results: list[dict[str, Any]]) -> None:
    model, tokenizer = small_model()
    for result in results:
        assert ({"duplicated", "mentions"} <= set(result)) == (result["mode"] != "none")
    rows = {(row["mode"], row["budget"]): row for row in table(results)}
    of_group = [one["duplicated"] for one in results if (one["mode"], one["budget"]) == ("hogwild", 12)]
    assert rows["hogwild", 12]["duplicated"] == pytest.approx(sum(of_group) / len(of_group))
    assert "duplicated" not in rows["none", 12]
    assert "mentions" in format_table(list(rows.values())).splitlines()[0].split()


def test_answers_that_vote_are_all_finished_before_the_vote() -> None:
    """Each as if it were alone; the text that is scored is the winner's."""
    problem, finisher = Never("Write one.", "one"), Finisher(5, "\nANSWER:")
    vote = Run("self_consistency", {"num_answers": 3})
    (result,) = small_sweep(problems=[problem], runs=[vote], budgets=[4], samples=1, finisher=finisher)
    assert not result["answered"]
    model, tokenizer = small_model()
    more = {"seed": result["seed"], "max_new_tokens": 4, "return_dict_in_generate": True, **SAMPLING}
    more |= {"generation_mode": "self_consistency", "num_answers": 3, "answer_pattern": problem.answer_pattern}
    prompt = encode_task(None, problem.prompt, tokenizer)
    out = hf_parallel.enable(model).generate(**prompt, tokenizer=tokenizer, **more)
    finished = []
    for text in out.texts[0]:
        given = prompt["input_ids"][0].tolist() + encode(tokenizer, text + "\nANSWER:")
        ids = torch.tensor([given])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        finished.append(text + "\nANSWER:" + tokenizer.decode(full[0, len(given) :], skip_special_tokens=True))
    answers = [find_answer(problem.answer_pattern, text) for text in finished]
    assert len(set(out.texts[0])) == 3
    assert finished[majority(answers)[0]].startswith(result["text"])
    assert result["text"].startswith(out.texts[0][majority(answers)[0]])


# Resuming


def test_a_finished_sweep_computes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small_sweep(tmp_path, problems=PROBLEMS[:2], samples=1)
    before = (tmp_path / "results.rank0.jsonl").read_bytes()
    monkeypatch.setattr(hf_parallel.evaluation.solver, "Engine", None)
    assert small_sweep(tmp_path, problems=PROBLEMS[:2], samples=1) == first
    assert small_sweep(tmp_path, problems=PROBLEMS[:1], samples=1, budgets=(6, 12), runs=RUNS[:1]) == [
        result for result in first if (result["index"], result["mode"]) == (0, "none") and result["budget"] > 3
    ]
    assert (tmp_path / "results.rank0.jsonl").read_bytes() == before
    assert sorted(without_costs(read_results(tmp_path)), key=str) == sorted(first, key=str)


def test_a_sweep_resumes_from_any_line_with_more_problems_samples_and_runs(
    tmp_path: Path, results: list[dict[str, Any]]
) -> None:
    small_sweep(tmp_path, problems=PROBLEMS[:1], samples=1, runs=RUNS[:2], budgets=(3, 12))
    path = tmp_path / "results.rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])  # killed while it wrote the last line
    before = lines_of(tmp_path)
    assert len(before) == 3
    expected = [result for result in results if result["index"] < 2]
    assert small_sweep(tmp_path, problems=PROBLEMS[:2]) == expected
    assert lines_of(tmp_path)[:3] == before


def test_results_of_another_sweep_or_model_are_not_mixed_in(tmp_path: Path) -> None:
    small = {"problems": PROBLEMS[:1], "runs": RUNS[:1], "samples": 1, "budgets": (3,)}
    small_sweep(tmp_path, **small)
    for name, changed in {
        "seed": {"seed": 1},
        "largest_budget": {"budgets": (24,)},
        "finisher": {"finisher": Finisher(3)},
        "generation": {"temperature": 0.5},
    }.items():
        with pytest.raises(ValueError, match=f"results of another {name}"):
            small_sweep(tmp_path, **small | changed)
    model, tokenizer = small_model()
    model.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match="another defaults than .*repetition_penalty"):
        sweep(model, tokenizer, **small, output=tmp_path, **sweeps.SAMPLING)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    with pytest.raises(ValueError, match="fingerprint"):
        sweep(model, tokenizer, **small, output=tmp_path, **sweeps.SAMPLING)


# Arguments


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"problems": []}, "problems must not be empty"),
        ({"budgets": [0]}, "budget must be .*got 0"),
        ({"samples": 0}, "samples must be .*got 0"),
        ({"seed": -1}, "seed must be .*got -1"),
        ({"concurrent": 1.5}, "concurrent must be .*got 1.5"),
        ({"max_new_tokens": 4}, "max_new_tokens=4"),
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"do_sample": False}, "samples of a problem would be equal"),
        ({"do_sample": False, "samples": 1}, "answers that vote would be equal"),
        ({"generation_config": object()}, "generation_config=.* cannot be stored"),
    ],
)
def test_invalid_arguments_raise(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_sweep(**changed)


# Instructions and judges


def test_an_instruction_follows_the_task_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, rules = Run(settings={"instruction": "chain_of_draft"}), MODES["pdos"]().prompt.rules()
    assert "five words" in draft.task("T")
    assert Run(settings={"instruction": "pdos"}).task("T") == f"T\n\n{rules}"
    assert Run(settings={"instruction": "Be brief."}).task("T") == "T\n\nBe brief."
    assert Run(settings={"instruction": ""}).task("T") == Run().task("T") == "T"
    for wrong in ("draft", "shared_prefix"):
        with pytest.raises(ValueError, match=f"one of chain_of_draft, .*pdos.*got '{wrong}'"):
            Run(settings={"instruction": wrong})
    found = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *given, **more: found.append(submit(*given, **more)) or found[-1])
    runs = [Run(settings={"instruction": "Be brief."}), Run("hogwild", {"instruction": "Be brief."}), Run("hogwild")]
    small_sweep(problems=PROBLEMS[:1], runs=runs, budgets=[2], samples=1, finisher=Finisher(0))
    tokenizer = small_model()[1]
    prompts = [tokenizer.decode(handle.result().record.prompts[0]) for handle in found]
    assert [text.count(f"{PROBLEMS[0].prompt}\n\nBe brief.") for text in prompts] == [1, 1, 0]
    small_sweep(problems=PROBLEMS[:1], runs=runs[2:], budgets=[2], samples=1, instruction="Be brief.")
    assert "Be brief." in tokenizer.decode(found[3].result().record.prompts[0])


class Scripted(Judge):
    """A judge that gives each prompt a score of 4, or none if it holds `UNREADABLE`."""

    prompts: ClassVar[list[str]] = []

    def _ask(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return "?" if "UNREADABLE" in prompt else "Score: 4"


@pytest.mark.parametrize("kind", ["collaboration", "answer"])
def test_a_judge_rates_the_texts_within_each_budget(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.OpenAIError, match="OPENAI_API_KEY"):
        Judge(kind, "m")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    Scripted.prompts.clear()
    settings: dict[str, Any] = {"runs": RUNS[:2], "budgets": [3, 6], "samples": 1, "finisher": Finisher(0)}
    problems = [*PROBLEMS[:1], Letters("Write it.", "UNREADABLE")]
    results = small_sweep(tmp_path, problems, judge=Scripted(kind, "m"), **settings)
    expected = [4.0, 4.0, *([None] * 2 if kind == "answer" else [4.0] * 2)] * 2
    assert [result["rating"] for result in results] == expected
    rows = table(read_results(tmp_path))
    assert [row["rating"] for row in rows] == [4.0] * 4
    assert "rating" in format_table(rows).splitlines()[0]
    assert "rating" not in format_table(table(small_sweep(None, problems, **settings)))
    if kind == "collaboration":
        hogwild = [prompt for prompt in Scripted.prompts if "Text of Bob:" in prompt]
        assert len(hogwild) == 3 * 4  # votes, problems and budgets
        assert all("Text of Alice:" in prompt for prompt in hogwild)
        texts = [re.findall(r"Text of Alice:\n(.*?)\n\nText of Bob", text, re.DOTALL)[0] for text in hogwild]
        assert texts[3].startswith(texts[0])
    else:
        assert all(any(result["text"].strip() in prompt for prompt in Scripted.prompts) for result in results)
    with pytest.raises(ValueError, match="has results of another judge"):
        small_sweep(tmp_path, problems, judge=Scripted(kind, "another"), **settings)
    unread = small_sweep(None, PROBLEMS[:1], judge=Judge(kind), **settings)
    assert all(result["rating"] is None for result in unread), "the small model writes no score"
    with pytest.raises(ValueError, match="the kind of a judge must be one of"):
        Judge("quality")

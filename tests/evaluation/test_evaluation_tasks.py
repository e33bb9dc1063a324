"""Tasks of the papers: loaded from files of the test, prompts, answers and scores; metrics."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub

from hf_parallel.evaluation import TASKS, CodeProblem, Finisher, Problem, load_problems
from hf_parallel.evaluation.metrics import pass_at_k
from hf_parallel.evaluation.tasks.code import last_block

SANDBOX = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs setrlimit")


def cases(*tests: tuple[str, str], kind: str = "stdin") -> list[dict[str, str]]:
    return [{"input": given, "output": output, "testtype": kind} for given, output in tests]


GSM8K = [
    {"question": f"What is {number} + 1000?", "answer": f"It is {number} + 1000.\n#### {number + 1000:,}"}
    for number in range(11)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": GSM8K,
    "gsm8kx5": GSM8K,
    "limo": [{"question": "Halve 1.", "solution": "Divide.", "answer": "\\frac{1}{2}"}],
    "math500": [
        {"problem": "Halve 1.", "solution": "Divide.", "answer": "\\frac{1}{2}", "level": 1, "subject": "Algebra"}
    ],
    "aime25": [{"problem": "Find 70.", "answer": "70", "id": "0"}],
    "olympiadbench": [
        {
            **{"question": "Find all.", "context": "Here.", "final_answer": ["$1$,$2$"], "is_multiple_answer": True},
            **{"unit": "m", "answer_type": "Numerical", "error": "1e-1", "id": 1, "solution": ["s"]},
        },
        {
            **{"question": "Find it.", "context": None, "final_answer": ["2"], "is_multiple_answer": False},
            **{"unit": None, "answer_type": "Numerical", "error": None, "id": 2, "solution": ["s"]},
        },
    ],
    "livecodebench": [
        {
            **{"question_content": "Double an integer.", "starter_code": "", "metadata": "{}"},
            "public_test_cases": json.dumps(cases(("1\n", "2\n"))),
            "private_test_cases": base64.b64encode(
                zlib.compress(pickle.dumps(json.dumps(cases(("5\n", "10\n")))))
            ).decode(),
        },
        {
            "question_content": "Double an integer.",
            "starter_code": "class Solution:\n    def double(self, x: int) -> List[int]:\n        ",
            "metadata": json.dumps({"func_name": "double"}),
            "public_test_cases": json.dumps(cases(("1\n[3]", "[2, 3]"), kind="functional")),
            "private_test_cases": json.dumps(cases(("4\n[5]", "[8, 5]"), kind="functional")),
        },
    ],
    "apps": [
        {
            **{"problem_id": 1, "question": "Double an integer.", "starter_code": "", "difficulty": "introductory"},
            "input_output": json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}),
        },
        {
            **{"problem_id": 2, "question": "Double it.", "starter_code": "def double(x):", "difficulty": "interview"},
            "input_output": json.dumps({"fn_name": "double", "inputs": [[1], [5]], "outputs": [[2], 10]}),
        },
    ],
    "game24": [{"Rank": 1, "Puzzles": "1 1 4 6", "AMT (s)": 4.4}, {"Rank": 2, "Puzzles": "3 3 8 8", "AMT (s)": 9.9}],
    "documents": [
        {"input": "Who wrote it?", "context": "Passage 1:\nAnn wrote it.", "answers": ["Ann Lee", "Lee"], "length": 9}
    ],
}
"""Rows with the columns of the datasets on the Hub."""
BOOK = "It was a fine morning in the town. Nobody was awake. The bells rang; the birds sang! Who heard them? " * 50


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(task: str, tmp_path: Path, **settings: Any) -> list[Problem]:
    pytest.importorskip("datasets")
    return load_problems(task, write(tmp_path / f"{task}.jsonl", ROWS[task]), **settings)


# Loading


@pytest.mark.parametrize("task", ROWS)
def test_tasks_load_from_files(task: str, tmp_path: Path) -> None:
    if task == "olympiadbench":
        pytest.importorskip("math_verify")
    problems = load(task, tmp_path)
    assert len(problems) == len(ROWS[task]) // TASKS[task].rows_per_problem
    for problem in problems:
        assert type(problem) is TASKS[task]
        assert problem.prompt
        assert problem.score("") == problem.score("I do not know.") == 0.0
    assert load(task, tmp_path, count=1) == problems[:1]


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        *(("gsm8k", {"answer": None}), ("gsm8k", {"answer": "12 apples or 13"}), ("gsm8k", {"question": " "})),
        *(("limo", {"answer": ["a"]}), ("olympiadbench", {"final_answer": []}), ("olympiadbench", {"error": "small"})),
        *(("livecodebench", {"metadata": "{"}), ("apps", {"input_output": ""})),
        *(("game24", {"Puzzles": "1 2 3"}), ("game24", {"numbers": [1, 2, 3]}), ("documents", {"answers": "Ann"})),
    ],
)
def test_a_malformed_column_is_named(task: str, changes: dict[str, Any]) -> None:
    rows = [{**row, **changes} for row in ROWS[task]]
    with pytest.raises(ValueError, match=f"column '{next(iter(changes))}'"):
        TASKS[task].from_rows(rows[: TASKS[task].rows_per_problem])


def test_puzzles_have_the_columns_of_either_data_set() -> None:
    row = {"numbers": [1, 1, 4, 6], "solutions": ["4*(6+1-1)"], "solvable": True}  # of nlile/24-game
    assert TASKS["game24"].from_rows([row]) == TASKS["game24"].from_rows([{"Puzzles": "1 1 4 6"}])


@pytest.mark.parametrize("task", ["apps", "documents"])
def test_datasets_with_a_loading_script_are_read_from_their_files(task: str, local_hub: Hub, tmp_path: Path) -> None:
    """The layouts of the two on the Hub, whose scripts `datasets` 5 no longer runs."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[task])
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data/2wikimqa.jsonl", lines)
        file.writestr("data/hotpotqa.jsonl", lines.replace("Ann", "Bob"))
    local_hub.repositories["codeparrot/apps"] = [{"apps.py": b"script", "test.jsonl": lines.encode()}]
    local_hub.repositories["THUDM/LongBench"] = [{"LongBench.py": b"script", "data.zip": zipped.getvalue()}]
    problems = load_problems(task)
    assert problems == load_problems(task, write(tmp_path / "rows.jsonl", ROWS[task]))
    if task == "documents":
        assert "Bob" in load_problems(task, "THUDM/LongBench:hotpotqa")[0].prompt
        with pytest.raises(
            ValueError, match=r"no file 'zip://data/none.jsonl::hf://datasets/THUDM/LongBench/data.zip'"
        ):
            load_problems(task, "THUDM/LongBench:none")
    else:
        with pytest.raises(ValueError, match="no file 'hf://datasets/codeparrot/apps/train.jsonl'"):
            load_problems(task, "codeparrot/apps::train")


@pytest.mark.skipif("HF_PARALLEL_TEST_HUB" not in os.environ, reason="downloads from the Hub: set HF_PARALLEL_TEST_HUB")
@pytest.mark.parametrize("task", ROWS)
def test_sources_on_the_hub_load(task: str) -> None:
    """In a process of its own: tests disable the network of huggingface_hub."""
    code = f"from hf_parallel.evaluation import load_problems; print(load_problems({task!r}, count=2))"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=1800)


# Scores


@pytest.mark.parametrize(
    ("task", "index", "text", "score"),
    [
        ("gsm8k", 2, r"\boxed{1,002}", 1.0),
        ("gsm8k", 2, "so\n#### 1002", 1.0),
        ("gsm8kx5", 0, r"\boxed{1000, 1001, 1002, 1003, 0}", 0.8),
        ("aime25", 0, r"\boxed{070}", 1.0),
        ("aime25", 0, r"\boxed{71}", 0.0),
        ("olympiadbench", 1, r"So the final answer is \boxed{2}.", 1.0),
        ("olympiadbench", 1, r"So the final answer is \boxed{3}.", 0.0),
        ("olympiadbench", 0, r"So the final answer is \boxed{2.05, 0.95}.", 1.0),
        ("game24", 0, r"\boxed{(1 + 1 + 4) * 4}", 0.0),
        ("game24", 0, r"\boxed{(1 + 1) * (4 + 6)}", 0.0),
        ("game24", 0, r"\boxed{4 * (6 + 1 - 1)}", 1.0),
        ("game24", 0, r"\boxed{4 \times \left(6 + 1 - 1\right) = 24}", 1.0),
        ("game24", 0, r"\boxed{4 * (6 + 1 - 1) = 25}", 0.0),
        ("game24", 1, r"\boxed{8 / (3 - 8 / 3)}", 1.0),
        ("game24", 1, r"\boxed{\frac{8}{3 - \frac{8}{3}}}", 1.0),
        ("game24", 1, r"\boxed{8 ** 3 // 3 % 8}", 0.0),
        ("game24", 1, r"\boxed{__import__('os').abort()}", 0.0),
        ("game24", 1, r"\boxed{" + "(" * 90 + "}", 0.0),
        ("documents", 0, "Passage 1 helps.\nAnswer: Ann Lee.", 1.0),
        ("documents", 0, "**Answer:** the Lee", 1.0),
        ("documents", 0, "Answer: Ann Smith", 0.5),
        ("documents", 0, "Answer: Bob", 0.0),
    ],
)
def test_answers_are_scored(task: str, index: int, text: str, score: float) -> None:
    size = TASKS[task].rows_per_problem
    problem = TASKS[task].from_rows(ROWS[task][index * size : (index + 1) * size])
    assert problem.score(text) == pytest.approx(score)


# Programs

STDIN, FUNCTION = 0, 1
PROGRAMS = [
    (STDIN, "print(2 * int(input()))", True),
    (STDIN, "import sys\nprint(2 * int(sys.stdin.read()), '\\n')\nsys.exit(1)", True),
    (STDIN, "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()", True),
    (STDIN, "print(reduce(mul, [2, int(input())]))", True),  # names of the modules that LiveCodeBench imports
    (STDIN, "print(3 * int(input()))", False),
    (STDIN, "print(2 * int(input()))\n1 / 0", False),
    (STDIN, "print(2)\nraise SystemExit(0)", False),
    (STDIN, "def", False),
    (STDIN, "while True: pass", False),
    (
        FUNCTION,
        "class Solution:\n    def double(self, x: int, y: List[int]) -> List[int]:\n        return [2 * x, *y]",
        True,
    ),
    (
        FUNCTION,
        "class Solution:\n    def double(self, x, y):\n        print('noise')\n        return (2 * x, y[0])",
        True,
    ),
    (FUNCTION, "class Solution:\n    def double(self, x, y):\n        return [2, 3]", False),
    (FUNCTION, "class Always:\n    def __eq__(self, other): return True\ndef double(x, y): return Always()", False),
    (FUNCTION, "class Solution:\n    def double(self, x, y):\n        import sys; sys.exit(0)", False),
]


@SANDBOX
@pytest.mark.parametrize(("index", "code", "passes"), PROGRAMS)
def test_programs_pass_or_fail_as_in_livecodebench(
    index: int, code: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodeProblem, "seconds", 1.0 if "while True" in code else 60.0)
    problem = TASKS["livecodebench"].from_row(ROWS["livecodebench"][index])
    assert problem.score(f"Here:\n```python\n{code}\n```\nDone.") == float(passes)


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch pickle_ran",)


@pytest.mark.parametrize("value", [Attack(), ["text", Attack()], ["a", "b"], b"bytes", 7])
def test_pickles_of_anything_but_a_text_raise_and_never_run(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(2, 6):
        packed = base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()
        with pytest.raises(ValueError, match="test cases must be JSON"):
            TASKS["livecodebench"].from_row({**ROWS["livecodebench"][0], "private_test_cases": packed})
    assert not list(tmp_path.iterdir())


# Needles


def test_needles_are_hidden_in_one_text_that_all_problems_share(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    settings: dict[str, Any] = {"characters": 3000, "num_facts": 20, "shots": 0}
    problems = load_problems("needles", path, count=5, seed=1, **settings)
    books, questions = zip(*(problem.prompt.split("\n\nQuestion:") for problem in problems), strict=True)
    assert len(set(books)) == 1
    assert len(set(questions)) == 5
    book = books[0]
    assert 2800 < len(book) < 3050
    assert book.count("the cat of") == 20
    for problem in problems:
        name = problem.prompt.rpartition("the cat of ")[2].split("?")[0]
        assert f"the cat of {name} had {problem.answer} eyes" in book
        assert problem.score(f"Let me see.\nAnswer: {problem.answer.title()}.") == 1.0
        assert problem.score(f"Answer: not {problem.answer}") == 0.0
        assert problem.score(problem.prompt) == 0.0
    assert problems == load_problems("needles", path, count=5, seed=1, **settings)
    assert problems != load_problems("needles", path, count=5, seed=2, **settings)


def test_needles_have_by_default_the_facts_the_examples_and_the_repeated_questions_of_the_paper(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(BOOK * 20)
    problems = load_problems("needles", path, count=300)
    book, *examples, _ = problems[0].prompt.split("\n\nQuestion: ")
    assert 79_000 < len(book) <= 80_050
    facts = dict(re.findall(r"the cat of ([\w ]+) had (\w+) eyes", book))
    assert len(facts) == 261
    solved = dict(re.findall(r"the cat of ([\w ]+)\?.*\nAnswer: (\w+)", "\n".join(examples)))
    assert len(examples) == len(solved) == 5
    assert solved.items() <= facts.items()
    asked = [problem.prompt.rpartition("the cat of ")[2].split("?")[0] for problem in problems]
    assert [facts[name] for name in asked] == [problem.answer for problem in problems]
    assert len(set(asked)) == 256
    assert set(asked).isdisjoint(solved)
    assert asked[256:] == asked[:44]


# Selections


def test_livecodebench_has_the_problems_of_a_period_whose_bounds_belong_to_it(tmp_path: Path) -> None:
    dates = ["2024-07-31T00:00:00", "2024-08-01T00:00:00", "2025-02-28T00:00:00", "2025-03-01T00:00:00"]
    base = ROWS["livecodebench"][0]
    rows = [{**base, "question_content": date, "contest_date": date} for date in dates]
    path = write(tmp_path / "dated.jsonl", rows)

    def found(**options: Any) -> list[str]:
        return [
            re.findall(r"Question: (\S+)", one.prompt)[-1] for one in load_problems("livecodebench", path, **options)
        ]

    assert found(since="2024-08", until="2025-02") == dates[1:3]
    assert found(since="2025-02-28") == dates[2:]
    assert found(until="2024-07-31") == dates[:1]
    assert found(until=2024, count=1) == dates[:1]
    for options in ({"since": "8/2024"}, {"until": "2024-8"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be a date such as 2024-08"):
            found(**options)
    with pytest.raises(ValueError, match="no column 'contest_date'"):
        load("livecodebench", tmp_path, since="2024")
    with pytest.raises(ValueError, match="livecodebench has no option 'from'"):
        load("livecodebench", tmp_path, **{"from": "2024"})


def test_apps_has_problems_of_a_difficulty_after_two_solved_ones(tmp_path: Path) -> None:
    base = ROWS["apps"][0]
    texts = {"short": "a", "long": "b" * 3900, "longest": "c" * 9000}
    rows = [{**base, "question": f"{name} {text}", "solutions": json.dumps([f"print({i})"])} for i, (name, text) in
            enumerate(texts.items())]  # fmt: skip
    rows += [{**row, "difficulty": "interview"} for row in rows] + [
        {**row, "starter_code": "def f(x):"} for row in rows
    ]
    train = write(tmp_path / "train.jsonl", rows)
    options: dict[str, Any] = {"difficulty": "introductory", "starter_code": False}
    (plain,) = load("apps", tmp_path, **options)
    (problem,) = load("apps", tmp_path, **options, examples=train)
    asked = "Question: Double an integer."
    shared, _, question = problem.prompt.rpartition(asked)
    assert question == plain.prompt.rpartition(asked)[2]
    assert re.findall(r"Question: (\w+) ", shared) == ["long", "short"]
    assert re.findall(r"```python\n(.*)\n```", shared) == ["print(1)", "print(0)"]
    assert problem.score("```python\nprint(2 * int(input()))\n```") == 1.0
    assert problem.score("Here:\r\n```python\r\nprint(2 * int(input()))\r\n```\r\nDone.") == 1.0
    with pytest.raises(ValueError, match="has no rows with {'difficulty': 'hard'}"):
        load("apps", tmp_path, difficulty="hard")


# Metrics


def test_pass_at_k_equals_the_mean_over_all_choices() -> None:
    for correct in (0, 1, 2, 5):
        completions = [True] * correct + [False] * (5 - correct)
        for k in (1, 2, 4):
            chosen = [any(choice) for choice in itertools.combinations(completions, k)]
            assert pass_at_k(5, correct, k) == pytest.approx(sum(chosen) / len(chosen))
    for n, c, k in ((5, 6, 1), (5, -1, 1), (5, 2, 0), (5, 2, 6)):
        with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
            pass_at_k(n, c, k)


# Programs of a budget


def test_a_program_that_a_budget_has_cut_is_no_answer_and_the_finisher_begins_a_new_one() -> None:
    problem = TASKS["livecodebench"].from_row(ROWS["livecodebench"][0])
    cut = "I add them.\n```python\na, b = map(int"
    assert not problem.has_answer(cut)
    prompt = Finisher().prompt_for(problem)
    assert prompt == problem.finisher_prompt
    finished = f"{cut}{prompt}print(1)\n```\nThat is all."
    assert problem.has_answer(finished)
    assert last_block(finished) == "print(1)\n"
    assert Finisher(prompt="In short:").prompt_for(problem) == "In short:"

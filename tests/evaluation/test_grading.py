r"""Final answers: extraction and comparison, also of hostile texts.

The expected results are those of the authors' scripts: GSM8K's `####`, the tolerance and percentages of OlympiadBench,
the comparison of outputs in LiveCodeBench.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hf_parallel.evaluation.formulas import FormulaComparer
from hf_parallel.evaluation.grading import (
    boxed,
    final_answer,
    formulas_equal,
    numbers_equal,
    outputs_equal,
    score_by_position,
)


@pytest.fixture
def formulas() -> None:
    pytest.importorskip("math_verify")


# Extraction


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{5}", ["5"]),
        (r"so \boxed{\frac{1}{2}} or \boxed{ x }", [r"\frac{1}{2}", "x"]),
        (r"\boxed{\frac{\sqrt{\frac{a}{\frac{b}{c}}}}{2}}", [r"\frac{\sqrt{\frac{a}{\frac{b}{c}}}}{2}"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{\boxed{3}}", ["3", r"\boxed{3}"]),
        (r"\fbox{7} and \boxed {8}", ["7", "8"]),
        (r"\boxed{5", []),
        (r"} \boxed{5}", ["5"]),
        (r"\boxed{}", [""]),
        ("", []),
    ],
)
def test_boxes_are_found_with_balanced_braces(text: str, contents: list[str]) -> None:
    assert boxed(text) == contents


# Numbers


EQUAL = {
    "18": ["18", "$18", r"\$18.00", "18 dollars", "x = 18", "18.", "+18", "**18**", "`18`", "x = **18** m", "≈ 18"],
    "1234": ["1,234", r"1\,234"],
    "1234567": [r"1{,}234{,}567"],
    "60": [r"60\%"],
    "-5": ["−5", "- 5 km"],
    "0.5": [r"\frac{1}{2}", "1/2", ".5"],
    "-0.5": [r"-\dfrac{1}{2}"],
    "2.5": ["2 1/2", "2 1/2 hours", r"2\frac{1}{2}", "2½ cups", "+2.5", "5/2 kg", r"\frac{5}{2}\text{ kg}"],
    "-2.5": ["-2 1/2", "−2½"],
    "10": ["10 km/h", "10 cm^2", "10 m^{2}", "10 m/s^2", "10 cm²", "10 m2.", "10 light-years", "10 kg·m^2/s^2"],
    "10.0": [r"10\text{ cm}^2", r"10 \mathrm{~km/h}", r"10\,\text{N}\cdot\text{m}", r"10 \frac{\text{km}}{\text{h}}"],
    "90": ["USD 90", "US$90", "Rs. 90", "£90", "¥ 90", "90€", "$90/hour", r"\$90 per day"],
    "90.0": [r"90^\circ", r"90^{\circ}\text{C}", "90°", "90 degrees (angle)"],
}
OTHERS = [None, "", "19", "1.8", "18.01", "18 or 19", "18^2", "18 + 1", "18x + 2", "eighteen", "1 8", "3-18", "18/0"]
OTHERS += ["18²", "18^{2}", "18x^2", "18/x", "18 m - 3 m", "18 km 5", "18**2", "2**18", "18 1/2", "18/2/1", "18e3"]
OTHERS += [r"18\pi", r"18 \times 10^8", "18:30", "0 18/0"]


def test_numbers_are_equal_however_they_are_written() -> None:
    assert all(numbers_equal(answer, given) for answer, written in EQUAL.items() for given in written)
    assert not any(numbers_equal("18", given) for given in OTHERS)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"\boxed{18, 3, 70000, 540, 20}", 1.0),
        (r"\boxed{\$18, 3, \$70,000, 540 meters, 20}", 1.0),
        (r"\boxed{18, 3, 7, 540, 20}", 0.8),
        (r"\boxed{3, 18, 70000, 540, 20}", 0.6),
        (r"\boxed{18, 3, 70000, 540, 20, 20}", 0.0),
        (r"\boxed{18} \boxed{3} \boxed{70000} \boxed{540} \boxed{20}", 1.0),
        (r"\boxed{1, 2, 3, 4, 5} no: \boxed{18, 3, 70000, 540, 20}", 1.0),
        (r"18, 3, 70000, 540, 20", 0.0),
        (r"\boxed{answer1, answer2, answer3, answer4, answer5}", 0.0),
    ],
)
def test_several_answers_are_scored_by_position(text: str, score: float) -> None:
    assert score_by_position(text, ["18", "3", "70000", "540", "20"], units=True) == pytest.approx(score)


# Formulas


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (r"\frac{3}{5}", "0.6"),
        (r"\dfrac{3}{5}", r"\frac35"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("10", r"\$10"),
        ("5", r"5\text{ cm}"),
        ("2\\pi", r"\pi \cdot 2"),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        (r"x \in [0, 1)", "[0,1)"),
        ("1", "x = 1"),
        ("11111111100", "11,\\! 111,\\! 111,\\! 100"),
        (r"90^\circ", "90"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_equal_formulas_are_equal(answer: str, given: str) -> None:
    assert formulas_equal(answer, given)


@pytest.mark.usefixtures("formulas")
def test_other_formulas_are_not() -> None:
    for answer, given in [
        (r"\frac{3}{5}", "0.61"),
        ("(1,2)", "(2,1)"),
        ("x+1", "x+2"),
        ("[0,1)", "[0,1]"),
        ("3", "3x"),
    ]:
        assert not formulas_equal(answer, given)


@pytest.mark.parametrize("given", ["10^{10^{10^{10}}}", "100000000!"])
def test_formulas_that_take_forever_are_wrong(given: str) -> None:
    comparer = FormulaComparer(seconds=0.5)
    assert not comparer.compare("10^{10}", given)
    comparer.seconds = 600
    assert comparer.compare("10^{10}", "10000000000"), "the next comparison works"


@pytest.mark.usefixtures("formulas")
def test_formulas_are_compared_in_any_thread_and_run_no_code() -> None:
    hostile = "__import__('os').system('touch /tmp/hf_parallel_hostile')"
    found: list[bool] = []
    for given in (r"\frac{1}{3}", hostile, rf"\operatorname{{{hostile}}}"):
        thread = threading.Thread(target=lambda: found.append(formulas_equal("1/3", given)))  # noqa: B023
        thread.start()
        thread.join()
    assert found == [True, False, False]


# Lists of answers


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize(
    ("answer", "given", "tolerance", "equal"),
    [
        ("0.6", r"60\%", 0.0, True),
        ("(2,1), (3,1)", "(3,1),(2,1)", 0.0, True),
        ("(2,1), (3,1)", "(2,1)", 0.0, False),
        (r"\sqrt{2}, -\sqrt{2}", r"\pm \sqrt{2}", 0.0, True),
        ("5, 123", "123, 5", 0.0, True),
        ("5, 123", "5123", 0.0, False),
        ("5123", "5,123", 0.0, True),
        ("2", "2, 3", 0.0, False),
        ("0.003, 5.233", "5.234, 0.002", 1e-3, True),
        ("0.605", "0.6071", 1e-3, False),
        ("3", "3.001", 1e-8, False),
        ("0.6", "60", 0.0, False),
        ("0.6", "60", 1e-8, True),  # with a tolerance, also as percentages
        (r"\frac{3}{5}", r"60", 1e-8, True),
        ("0.25, 0.5", "50, 25", 1e-8, True),
        ("(1, 2)", "(100, 200)", 0.0, False),
    ],
)
def test_lists_are_compared_in_any_order_within_a_tolerance(
    answer: str, given: str, tolerance: float, equal: bool
) -> None:
    assert formulas_equal(answer, given, tolerance) == equal


# Outputs of programs


@pytest.mark.parametrize(
    ("expected", "given", "equal"),
    [
        ("1\n2\n", "1\n2", True),
        ("1\n2", "\n 1 \n2  \n\n", True),
        ("1 2", "1  2", True),  # equal decimals
        ("0.5", "0.50", True),
        ("1e3", "1000", True),
        ("50000000000000000", "50000000000000001", False),
        ("a b", "a  b", False),
        ("1\n\n2", "1\n2", False),
        ("1.0 x", "1 x", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("1", "sNaN", False),
        ("1", "1e999999999", False),
    ],
)
def test_outputs_are_compared_as_in_livecodebench(expected: str, given: str, equal: bool) -> None:
    assert outputs_equal(expected, given) == equal


# Hostile texts


def hostile() -> Iterator[str]:
    size = 100_000
    yield r"\boxed{" * (size // 7)
    yield r"\boxed{1}" * (size // 9)
    yield r"\boxed{" + "{" * size + "}" * size
    yield "{" * size
    yield r"\boxed{1" + " " * size
    yield "#" * size
    yield "####" + " " * size
    yield "#### 1\n" * (size // 7)
    yield "1," * (size // 2)
    yield r"\boxed{" + "1," * (size // 2) + "}"
    yield r"\boxed{" + "9" * size + "}"
    yield "\\" * size
    yield "$" * size
    yield "a" * size + r"\boxed{"
    yield r"\boxed{18 " + "m^2/" * 240 + "}"
    yield r"\boxed{18 " + "*a" * 480 + "}"
    yield r"\boxed{answer1,answer2,answer3,answer4,answer5}" * (size // 50)


@pytest.mark.parametrize("text", list(hostile()), ids=range(17))
def test_hostile_texts_are_graded_fast(text: str) -> None:
    start = time.process_time()
    final_answer(text)
    numbers_equal("18", final_answer(text))
    score_by_position(text, ["18", "3"], units=True)
    score_by_position(text, ["18", "3"])
    outputs_equal("1", text)
    assert time.process_time() - start < 60

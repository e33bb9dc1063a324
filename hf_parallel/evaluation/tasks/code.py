"""Programs: LiveCodeBench and APPS. Answers run in the sandbox, one process per test."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, TypeVar

from hf_parallel.evaluation.grading import outputs_equal
from hf_parallel.evaluation.sandbox import run_code
from hf_parallel.evaluation.tasks.base import Problem, column, text_column
from hf_parallel.files import JSONObject

MODULES = (
    "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator, "
    "io, sys, json, builtins, typing"
)
"""Modules that answers may use without an import, as in LiveCodeBench."""
PREAMBLE = "".join(f"from {name} import *\n" for name in MODULES.split(", ")) + f"import {MODULES}\n"
PROGRAM = Path(__file__).with_name("run_program.txt").read_text(encoding="utf-8")
FUNCTION = Path(__file__).with_name("run_function.txt").read_text(encoding="utf-8")
"""Templates of what runs in the sandbox."""
MAX_TESTS = 1 << 28
"""Maximum size of decompressed tests, in bytes."""
TEXT_CODES = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n((?:(?![ \t]*```)[^\n]*\n)*)[ \t]*```[ \t`]*$", re.MULTILINE)
"""Fenced block. A fence with a language begins a block, also within another that has not ended."""


@dataclass(frozen=True)
class Test:
    """An input of a program and its output; of a function: its arguments and result, as JSON."""

    input: str
    output: str
    __test__ = False  # pytest


@dataclass(frozen=True)
class CodeProblem(Problem):
    """A programming problem with tests. `answer` is empty, because any program that passes all tests is correct.

    Programs read stdin and write stdout. If `function` is given, tests call this function, or method of `Solution`,
    instead.
    """

    seconds: ClassVar[float] = 6.0
    """Wall-clock limit per test, as in LiveCodeBench."""
    max_memory: ClassVar[int] = 1 << 30
    finisher_prompt: ClassVar[str] = "\n\n```python\n"
    finisher_tokens: ClassVar[int] = 1024
    nested_tuples: ClassVar[bool] = False
    """Whether tuples in the result of a function count as lists."""

    tests: tuple[Test, ...] = field(repr=False)
    function: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(test, Test) for test in self.tests):
            raise ValueError(f"tests must be objects Test(input, output), got {self.tests!r:.80}")

    def has_answer(self, text: str) -> bool:
        return last_block(text) is not None

    def score(self, text: str) -> float:
        """Return 1.0 if the code of the answer passes all tests in the sandbox, otherwise 0.0.

        The code is the last fenced block. An answer without a block is wrong.
        """
        source = last_block(text)
        if source is None:
            return 0.0
        return float(all(self.passes(source, test) for test in self.tests))

    def passes(self, source: str, test: Test) -> bool:
        """Return whether code passes a test."""
        run = partial(run_code, timeout=self.seconds, max_memory=self.max_memory)
        if not self.function:
            code = PROGRAM.format(preamble=PREAMBLE, source=source)
            execution = run(code, stdin=test.input)
            return execution.returncode == 0 and outputs_equal(test.output, execution.stdout)
        arguments = [json.loads(line) for line in test.input.split("\n")] if test.input else []
        code = FUNCTION.format(
            preamble=PREAMBLE,
            source=source,
            name=self.function,
            arguments=repr(arguments),
            nested=self.nested_tuples,
        )
        execution = run(code)
        if execution.returncode != 0:
            return False
        try:
            return self.is_result(json.loads(execution.stdout), json.loads(test.output))
        except (ValueError, RecursionError):
            return False

    def is_result(self, result: object, expected: object) -> bool:
        """Return whether a function's result is correct."""
        return bool(result == expected)


@dataclass(frozen=True)
class LiveCodeBenchProblem(CodeProblem):
    """A problem of LiveCodeBench (Jain et al., 2024), code generation. All prompts begin with the same text."""

    name: ClassVar[str] = "livecodebench"
    source: ClassVar[str] = "lighteval/code_generation_lite:release_v5:test"

    @classmethod
    def selects(cls, row: Mapping[str, object], since: str = "", until: str = "") -> bool:
        """Return whether `contest_date` is in a period; its bounds, such as 2024-08 or 2024-08-15, belong to it."""
        for name, bound in (("since", since), ("until", until)):
            if bound and not re.fullmatch(r"\d{4}(-\d\d){0,2}", str(bound)):
                raise ValueError(f"{name} must be a date such as 2024-08 or 2024-08-15, got {bound!r}")
        if not since and not until:
            return True
        date = str(column(row, "contest_date"))
        if date < str(since):
            return False
        return not until or date[: len(str(until))] <= str(until)

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> LiveCodeBenchProblem:
        """Read `question_content`, `starter_code`, `public_test_cases`, `private_test_cases` and `metadata`."""
        cases = _test_cases(column(row, "public_test_cases"))
        cases = cases + _test_cases(row.get("private_test_cases") or "[]")
        tests = tuple(Test(case["input"], case["output"]) for case in cases)
        metadata = _json(row.get("metadata") or "{}", "metadata")
        function = metadata.get("func_name") or ""
        starter = str(row.get("starter_code") or "")
        if not tests:
            raise ValueError("no test in 'public_test_cases' and 'private_test_cases'")
        return _make(cls, text_column(row, "question_content"), tests, function, starter, INSTRUCTION)


@dataclass(frozen=True)
class APPSProblem(CodeProblem):
    """A problem of APPS (Hendrycks et al., 2021), with the two levels of Hydragen (section 4.4).

    All problems share the few-shot examples, and the completions of a problem share its question.
    """

    name: ClassVar[str] = "apps"
    nested_tuples: ClassVar[bool] = True
    source: ClassVar[str] = "codeparrot/apps::test"
    hub_file: ClassVar[str] = "hf://datasets/{name}/{split}.jsonl"

    @classmethod
    def selects(cls, row: Mapping[str, object], difficulty: str = "", starter_code: bool = True) -> bool:
        """Return whether a row has the difficulty, and no starter code if `starter_code` is False."""
        return difficulty in ("", row.get("difficulty")) and (starter_code or not row.get("starter_code"))

    @classmethod
    def with_examples(cls, problems: Sequence[Problem], rows: Iterable[Mapping[str, object]]) -> list[Problem]:
        """Return problems after two solved ones of about 2,400 tokens (Hydragen, appendix D.4, names none)."""
        examples = []
        for row in islice(rows, 100):
            question = cls.from_row(row).prompt.removeprefix(EXAMPLES)
            solutions = json.loads(text_column(row, "solutions"))
            examples.append(f"{question}```python\n{solutions[0].strip()}\n```\n\n")
        examples.sort(key=lambda example: abs(len(example) - 4000))
        opening = INSTRUCTION + "".join(examples[:2])
        return [replace(problem, prompt=opening + problem.prompt.removeprefix(EXAMPLES)) for problem in problems]

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> APPSProblem:
        """Read `question`, `input_output` (JSON) and `starter_code`."""
        cases = _json(column(row, "input_output"), "input_output")
        inputs = cases.get("inputs")
        outputs = cases.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
            raise ValueError("column 'input_output' must have as many 'inputs' as 'outputs', and at least one")
        function = cases.get("fn_name") or ""
        tests = []
        for value, output in zip(inputs, outputs, strict=True):
            if function:
                tests.append(Test("\n".join(map(json.dumps, value)), json.dumps(output)))
            else:
                tests.append(Test(_lines(value), _lines(output)))
        starter = str(row.get("starter_code") or "")
        return _make(cls, text_column(row, "question"), tests, function, starter, EXAMPLES)

    def is_result(self, result: object, expected: object) -> bool:
        """Return whether a function's result is correct; the expected one may be in a list."""
        if result == expected:
            return True
        return isinstance(expected, list) and len(expected) > 0 and bool(result == expected[0])


EXAMPLES = Path(__file__).with_name("code_prompt.txt").read_text(encoding="utf-8")
"""Instruction and two-shot prompt, as in Hydragen (appendix D.4)."""
INSTRUCTION = EXAMPLES[: EXAMPLES.index("Question:")]


def last_block(text: str) -> str | None:
    """Return the last complete fenced block of a text, or None."""
    return next(reversed(_BLOCK.findall(text.replace("\r\n", "\n"))), None)


P = TypeVar("P", bound=CodeProblem)


def _make(cls: type[P], question: str, tests: Sequence[Test], function: str, starter: str, shared: str) -> P:
    """Return a problem; `shared` are the instructions and examples before its question."""
    if starter:
        form = f"Complete this code:\n```python\n{starter}\n```"
    elif function:
        form = f"Define the function `{function}`."
    else:
        form = "Read from stdin, write to stdout."
    prompt = f"{shared}Question: {question}\n{form}\n\nAnswer:\n"
    return cls(prompt, "", tuple(tests), function)


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(text: object, name: str) -> JSONObject:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        raise ValueError(f"column {name!r} must be JSON, got {text!r:.80}") from None
    if not isinstance(value, dict):
        raise ValueError(f"column {name!r} must be a JSON object, got {text!r:.80}")
    return value


def _test_cases(value: object) -> list[dict[str, str]]:
    """Read test cases: JSON, or base64 of JSON (on the Hub, of a pickled string) that zlib has compressed."""
    try:
        cases = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        cases = _compressed(str(value))
    if not isinstance(cases, list) or not all(map(_is_test_case, cases)):
        raise ValueError(f"test cases must be a list of objects with the texts 'input' and 'output', got {cases!r:.80}")
    return cases


def _is_test_case(case: object) -> bool:
    if not isinstance(case, dict):
        return False
    return isinstance(case.get("input"), str) and isinstance(case.get("output"), str)


def _compressed(value: str) -> object:
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(value, validate=True), MAX_TESTS)
        if inflate.unconsumed_tail:
            raise ValueError(f"more than {MAX_TESTS} bytes")
        return json.loads(_pickled_text(data) if data[:1] == b"\x80" else data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(
            f"test cases must be JSON, also compressed by zlib in base64, got {value!r:.80} ({error})"
        ) from None


def _pickled_text(data: bytes) -> str:
    """Return the string in a pickle, without unpickling; raise `ValueError` for any other pickle."""
    allowed = TEXT_CODES | {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
    texts = []
    for code, argument, _ in pickletools.genops(data):
        if code.name not in allowed:
            raise ValueError("a pickle must hold one string")
        if code.name in TEXT_CODES:
            texts.append(str(argument))
    if len(texts) != 1:
        raise ValueError("a pickle must hold one string")
    return texts[0]

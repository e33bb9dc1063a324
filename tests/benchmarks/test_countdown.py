"""Countdown's own solutions are right, and its scorers find what is changed in them."""

from __future__ import annotations

import random
import re

from benchmarks import countdown
from hf_parallel import Candidate

PROBLEMS = countdown.all_problems(3, 5)


def candidate(problem: countdown.Problem, text: str, is_complete: bool) -> Candidate:
    return Candidate(f"<s>{countdown.write_prompt(problem)}", text, [], -0.5, is_complete)


def test_every_solution_is_right_and_every_changed_line_a_mistake() -> None:
    rng = random.Random(0)
    for problem in PROBLEMS:
        lines = "".join(problem.lines)
        text = f"{lines}answer {problem.expression};"
        assert countdown.is_right(text, problem.numbers, problem.target)
        assert countdown.read_lines(text, problem.numbers) == (0, [problem.target])
        assert not countdown.is_right(text, problem.numbers, problem.target + 1)
        assert countdown.check(candidate(problem, text, True)) > 0.9
        number = rng.choice(re.findall(r"\d+", lines))
        changed = lines.replace(number, str(int(number) + 1), 1)
        mistakes, _ = countdown.read_lines(changed, problem.numbers)
        assert mistakes
        assert countdown.check(candidate(problem, changed, False)) < -0.9


def test_looking_ahead_finds_a_first_line_that_cannot_reach_the_target() -> None:
    for problem in PROBLEMS[:200]:
        for a, b in {problem.numbers[:2], problem.numbers[1:]}:
            line = f"{a}+{b}={a + b}\n"
            left = [*problem.numbers, a + b]
            left.remove(a)
            left.remove(b)
            can = any(problem.target == result for _, result in countdown.results(max(left), min(left)))
            first = candidate(problem, line, False)
            assert countdown.look_ahead(first) == countdown.check(first) - (not can)


def test_tokens_are_those_of_the_tokenizer() -> None:
    tokenizer = countdown.make_tokenizer()
    for problem in PROBLEMS[:50]:
        tokens, labels = countdown.make_example(problem, random.Random(problem.target))
        text = tokenizer.decode(tokens)
        assert tokenizer(text, return_token_type_ids=False).input_ids == tokens
        answer = [token for token, label in zip(tokens, labels, strict=True) if label != -100]
        assert tokenizer.decode(answer).endswith(f"{problem.expression};</s>")

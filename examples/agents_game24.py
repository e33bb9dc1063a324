"""Game of 24 by Tree of Thoughts (Yao et al., 2023). Run: python examples/agents_game24.py

The agent proposes one step after another and checks it with exact arithmetic. The supervisor searches over its steps;
it receives values from a function that asks the model, several times, whether the remaining numbers can reach 24.
A small model proposes wrong steps, each of which ends its path; larger ones solve puzzles.
"""

import argparse
import csv
import operator
import re
from fractions import Fraction
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import Chat, Runtime, TreeOfThoughts, agent
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
PUZZLES = ("1 1 4 6", "4 5 6 10", "2 2 6 6", "1 3 4 8")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NUMBER = r"(-?\d+(?:/\d+)?)"
STEP = re.compile(rf"{NUMBER} ([-+*/]) {NUMBER} = {NUMBER}\b")
PROPOSE = "Combine two of the numbers to get closer to 24. Write one step."
PROPOSED = {"2 8 8 14": "14 + 2 = 16", "4 4 10": "10 - 4 = 6", "4 6": "4 * 6 = 24", "1 5 8 12": "12 / 1 = 12"}
JUDGE = "Can the numbers reach 24? Answer sure, likely or impossible."
JUDGED = {"4 6": "sure", "10 14": "sure", "11 12": "impossible", "5 7 8": "likely", "1 3 3": "impossible", "24": "sure"}
VALUES = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}
"""As in the paper's code."""
VOTES = 3
SOLVED = VOTES * VALUES["sure"]
"""Value of a solution."""


def ask(task, shown, numbers, **settings):
    """Return a conversation that asks for an answer about numbers, after some examples."""
    chat = Chat(task, do_sample=True, temperature=0.7, **settings)
    for example, answer in shown.items():
        chat.user(example).assistant(answer)
    return chat.user(numbers)


def apply(step, numbers):
    """Return the numbers after a step, such as `14 + 2 = 16`. Raises `ValueError` if it is not correct."""
    match = STEP.match(step.strip())
    if match is None:
        raise ValueError(f"not a step: {step!r}")
    left, sign, right, claimed = match.groups()
    rest = [Fraction(number) for number in numbers.split()]
    try:
        for used in (left, right):
            rest.remove(Fraction(used))
        result = OPERATORS[sign](Fraction(left), Fraction(right))
        is_right = result == Fraction(claimed)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"impossible step for {numbers}: {step!r}") from error
    if not is_right:
        raise ValueError(f"wrong step: {step!r}")
    return " ".join(map(str, sorted([*rest, result])))


async def judge(state):
    """Return the value of a state: the sum of several votes."""
    if state.is_final:
        return SOLVED if is_solution(state.yielded) else 0.0
    numbers = state.messages[-1]["content"]
    votes = await ask(JUDGE, JUDGED, numbers, max_new_tokens=4).sample(VOTES)
    return sum(VALUES.get(vote.strip().lower(), 0.0) for vote in votes)


def is_solution(found):
    """Return whether the steps that an agent has yielded reach 24."""
    return found["left"] == "24"


@agent(supervisor=TreeOfThoughts(breadth=5, expand=5, value=judge, goal=SOLVED))
async def solve(numbers):
    """Yield the steps and the numbers that are left: `24` after a solution."""
    steps = []
    while " " in numbers:
        step = await ask(PROPOSE, PROPOSED, numbers, max_new_tokens=16).gen()
        try:
            numbers = apply(step, numbers)
        except ValueError:
            break
        steps.append(step.strip())
    yield {"steps": steps, "left": numbers}


def read_puzzles(path, count):
    """Return the first puzzles of a CSV file with a column `Puzzles`."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [row["Puzzles"] for row, _ in zip(csv.DictReader(file), range(count), strict=False)]


def main():
    """Solve puzzles and print the best path of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--puzzles", metavar="FILE", help="CSV file with a column Puzzles; default: a few puzzles")
    parser.add_argument("--count", type=int, default=len(PUZZLES), help="number of puzzles")
    options = parser.parse_args()
    puzzles = read_puzzles(options.puzzles, options.count) if options.puzzles else PUZZLES[: options.count]
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    num_solved = 0
    with Engine(model, tokenizer) as engine:
        runtime = Runtime(engine)
        for puzzle in puzzles:
            result = runtime.run(solve, puzzle)
            found, stats = result.value, result.stats
            num_solved += is_solution(found)
            print(f"{puzzle:>12}  {', '.join(found['steps']) or 'no correct step'}; left: {found['left']}")
            print(f"{stats.completions:>12}  completions, {stats.tokens} tokens, {stats.replayed_tokens} replayed")
    print(f"\nsolved: {num_solved} of {len(puzzles)}")


if __name__ == "__main__":
    main()

# Prints:
#   1 1 4 6  ...
#   solved: ... of 4

"""Two agents repair small Python bugs (figure 6 of the Hive paper). Run: python examples/agents_bug_repair.py

`bug_repair` spawns `context_gather`. In each round it receives the gathered code by `next`, writes a patch, runs the
tests, and passes patch and result back by `resume`, until the tests pass. The demo model is too small to repair
bugs; try a larger one.

The tests run in a sandbox (`hf_parallel.evaluation.sandbox`): without network, other processes and files, and with
limits on time, memory and output. It needs Linux.
"""

import argparse
import ast
import asyncio
import re

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import BestOfN, Chat, Runtime, agent, next, resume, spawn, tool
from hf_parallel.engine import Engine
from hf_parallel.evaluation.sandbox import run_code

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
ROUNDS = 3
PASSED = "all tests passed"
BUGS = {
    "mean": {
        "source": '''
def mean(values):
    """Return the arithmetic mean; 0 of no values."""
    return sum(values) // len(values)
''',
        "tests": "assert mean([1, 2]) == 1.5\nassert mean([4]) == 4\nassert mean([]) == 0",
    },
    "search": {
        "source": '''
def search(values, wanted):
    """Return the index of a value in a sorted list, or None."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= wanted:
            low = middle
        else:
            high = middle
    return low if values[low] == wanted else None
''',
        "tests": "assert search([1, 3, 5], 3) == 1\nassert search([1, 3], 2) is None\nassert search([], 1) is None",
    },
    "collect": {
        "source": '''
def collect(value, into=[]):
    """Append a value to a list, by default to a new one, and return it."""
    into.append(value)
    return into
''',
        "tests": "assert collect(1) == [1]\nassert collect(2) == [2]\nassert collect(3, [0]) == [0, 3]",
    },
    "roman": {
        "source": '''
DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}

def digits(text):
    """Return the values of the digits of a Roman number."""
    return [DIGITS[digit] for digit in text]

def roman(text):
    """Return the value of a Roman number."""
    return sum(digits(text))
''',
        "tests": "assert roman('XVI') == 16\nassert roman('IV') == 4\nassert roman('MCMXCIV') == 1994",
    },
    "flatten": {
        "source": '''
def is_nested(value):
    """Return whether a value is a list."""
    return isinstance(value, list)

def flatten(values):
    """Return the values of nested lists in one list."""
    flat = []
    for value in values:
        if is_nested(value):
            flat.append(flatten(value))
        else:
            flat.append(value)
    return flat
''',
        "tests": "assert flatten([1, [2, [3]], []]) == [1, 2, 3]\nassert flatten(['ab']) == ['ab']",
    },
}
HARNESS = """
import linecache, sys, traceback
namespace = {{"__name__": "module"}}
for name, text in (("module.py", {source!r}), ("tests.py", {tests!r})):
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    try:
        exec(compile(text, name, "exec"), namespace)
    except Exception as error:
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        sys.exit(1)
print()
print({passed!r})
"""


async def run_tests(source, tests, seconds=5, megabytes=256):
    """Run tests of a module in a sandbox; return `{"passed": bool, "output": str}`."""
    code = HARNESS.format(source=source, tests=tests, passed=PASSED)
    limits = {"timeout": seconds, "max_memory": megabytes << 20, "max_output": 1 << 16}
    done = await asyncio.to_thread(run_code, code, **limits)
    note = f"\nThe tests took more than {seconds} seconds." if done.timed_out else ""
    passed = done.returncode == 0 and done.stdout.endswith(f"\n{PASSED}\n")
    return {"passed": passed, "output": ((done.stdout + done.stderr)[-1000:] + note).strip()}


def functions_of(source):
    """Return the functions of a module: their texts by name."""
    try:
        nodes = ast.parse(source).body
    except SyntaxError:
        return {}
    return {node.name: ast.get_source_segment(source, node) for node in nodes if isinstance(node, ast.FunctionDef)}


def code_of(text):
    """Return the code of an answer: its first fenced block, or all of it."""
    found = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return (found[1] if found else text).strip() + "\n"


@agent
async def context_gather(bug):
    """Yield the code that matters; receive the last patch and the output of its tests."""
    chat = Chat("You find the function that is wrong. Answer with its name.", max_new_tokens=8)
    update = {"source": bug["source"], "output": ""}
    while True:
        shown = functions_of(bug["source"])
        chat.user(f"{update['source']}\nTests:\n{bug['tests']}\n{update['output']}\nFunctions: {', '.join(shown)}")
        answer = await chat.gen()
        wanted = [text for name, text in shown.items() if re.search(rf"\b{name}\b", answer)]
        update = yield "\n\n".join(wanted or shown.values())


@agent
async def bug_repair(bug):
    """Yield the last patch, and whether its tests pass."""
    gatherer = spawn(context_gather, bug)
    chat = Chat("You repair Python code. Answer with the whole corrected module.", max_new_tokens=192)
    chat.user(f"{bug['source']}\nIt must pass these tests:\n{bug['tests']}")
    for number in range(1, ROUNDS + 1):
        code = await next(gatherer)
        chat.messages.append({"role": "user", "content": f"Look at this part:\n{code}"})
        patch = code_of(await chat.gen(do_sample=True, temperature=0.4))
        tested = await tool(run_tests, patch, bug["tests"], timeout=60)
        if tested["passed"] or number == ROUNDS:
            break
        chat.user(f"The tests fail:\n{tested['output']}")
        await resume(gatherer, {"source": patch, "output": tested["output"]})
    yield {"patch": patch, "passed": tested["passed"], "rounds": number, "output": tested["output"]}


def passes(state):
    """Return the value of a patch."""
    return float(state.yielded["passed"])


def main():
    """Repair all bugs and print the patches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1, help="runs per bug, of which the best counts")
    parser.add_argument("--bugs", nargs="+", default=list(BUGS), choices=list(BUGS))
    options = parser.parse_args()
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with Engine(model, tokenizer) as engine:
        for name in options.bugs:
            repair = bug_repair.under(BestOfN(options.samples, value=passes))
            found = Runtime(engine).run(repair, BUGS[name]).value
            last = (found["output"].splitlines() or [""])[-1]
            print(f"{name}: {'repaired' if found['passed'] else 'not repaired'} in round {found['rounds']}: {last}")


if __name__ == "__main__":
    main()

# Prints:
#   mean: ...repaired in round ...
#   flatten: ...repaired in round ...

"""Mutation check: change one line of the core at a time, and count the changes that the tests notice.

    python tests/mutations.py --number 40 --report mutations.json -- -m "not slow"

Arguments after `--` go to pytest. Tests that fail without a mutation are deselected. `--mutations mutations.json`
repeats the mutations of a report, with the tests of another folder (`--tests`) or in another checkout (`--root`); a
mutation whose line is missing there is reported as absent.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

GENERATION = "hf_parallel/generation"
DECODE_LOOP = ["ahead", "call", "decode", "executor", "prefill", "rows", "runner"]
SAMPLING = ["criteria", "log_probs", "rng", "row_processors", "sampling", "token_table", "warpers"]
ROOMS = {  # files to mutate, and the tests that run first
    "kernels": (["hf_parallel/kernels/**/*.py"], ["tests/kernels"]),
    "cache": (["hf_parallel/cache/**/*.py"], ["tests/cache", "tests/generation/modes"]),
    "decode loop": ([f"{GENERATION}/{name}.py" for name in DECODE_LOOP], ["tests/generation"]),
    "sampling": ([f"{GENERATION}/{name}.py" for name in SAMPLING], ["tests/generation"]),
    "engine": (["hf_parallel/engine/*.py", "hf_parallel/engine/policies/*.py"], ["tests/engine"]),
}
OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
UNCHECKED = ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr
"""Nodes without behaviour that a test should pin down, such as the wording of errors."""


@dataclass(frozen=True)
class Mutation:
    """One line of a file, before and after."""

    room: str
    file: str
    line: int
    before: str
    after: str
    kind: str


def mutations_of(room: str, path: Path, root: Path) -> Iterator[Mutation]:
    """Yield all mutations of a file."""
    lines = path.read_bytes().splitlines()  # offsets of `ast` are in UTF-8
    for kind, line, begin, end, text in changes(ast.parse(path.read_bytes())):
        before = lines[line - 1]
        after = before[:begin] + text(before[begin:end].decode()).encode() + before[end:]
        if after != before:
            yield Mutation(room, str(path.relative_to(root)), line, before.decode(), after.decode(), kind)


def changes(node: ast.AST) -> Iterator[tuple]:
    """Yield kind, line, first and last column, and the change of the text between them."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, UNCHECKED):
                yield from changes(child)
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if test.lineno == test.end_lineno:
            yield "condition", test.lineno, test.col_offset, test.end_col_offset, lambda text: f"(not ({text}))"
    if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:
        return
    whole = node.lineno, node.col_offset, node.end_col_offset
    match node:
        case (
            ast.Compare(left=left, ops=[operator], comparators=[right]) | ast.BinOp(left=left, op=operator, right=right)
        ):
            yield from operator_change(operator, left, right)
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            yield from operator_change(operator, left, right)
        case ast.UnaryOp(op=ast.Not()):
            yield "operator", *whole, lambda text: text.removeprefix("not ")
        case ast.Constant(value=bool(value)):
            yield "constant", *whole, lambda text: str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", *whole, lambda text: str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "removed", *whole, lambda text: "pass"
        case ast.Return(value=ast.expr()):
            yield "removed", *whole, lambda text: "return None"
        case ast.Call(args=[first, second, *_]) if not {ast.Starred} & {type(first), type(second)}:
            size, start = first.end_col_offset - first.col_offset, second.col_offset - first.col_offset
            span = first.lineno, first.col_offset, second.end_col_offset
            yield "swapped", *span, lambda text: text[start:] + text[size:start] + text[:size]


def operator_change(operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[tuple]:
    """Yield the change of an operator between two operands."""
    old, new = OPERATORS.get(type(operator), ("", ""))
    if old:
        yield "operator", left.lineno, left.end_col_offset, right.col_offset, lambda text: text.replace(old, new, 1)


def choose(root: Path, number: int, seed: int) -> list[Mutation]:
    """Return random mutations, as many of each room."""
    draw, chosen = random.Random(seed), []
    for index, (room, (patterns, _)) in enumerate(ROOMS.items()):
        paths = sorted(path for pattern in patterns for path in root.glob(pattern))
        found = [mutation for path in paths for mutation in mutations_of(room, path, root)]
        chosen += draw.sample(found, (number + index) // len(ROOMS))
    return chosen


def copy_tree(root: Path, tests: Path, folder: Path) -> None:
    """Copy a checkout without what git ignores, with the given tests."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith("tests/") and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    shutil.copytree(tests, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))


def apply(mutation: Mutation, folder: Path) -> bool:
    """Change the line of a copy that is nearest to the mutation's; False if no line has its text."""
    path = folder / mutation.file
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    places = [number for number, line in enumerate(lines) if line == mutation.before]
    if places:
        lines[min(places, key=lambda number: abs(number - mutation.line + 1))] = mutation.after
        path.write_text("\n".join(lines), encoding="utf-8")
    return bool(places)


class Check:
    """Runs mutations in copies of a checkout."""

    def __init__(self, root: Path, tests: Path, arguments: list[str], seconds: float) -> None:
        self.root, self.tests, self.arguments, self.seconds = root, tests, arguments, seconds

    def pytest(self, folder: Path, *arguments: str) -> tuple[int | None, list[str]]:
        """Return the exit status, None after the limit of time, and the tests that failed."""
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        try:
            done = subprocess.run(
                [*command, *self.arguments, *arguments],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.seconds,
            )
        except subprocess.TimeoutExpired:
            return None, []
        return done.returncode, re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)

    def baseline(self) -> None:
        """Deselect the tests that fail without a mutation."""
        with tempfile.TemporaryDirectory() as name:
            copy_tree(self.root, self.tests, Path(name))
            _, failing = self.pytest(Path(name))
        print(f"{len(failing)} tests fail without a mutation", *failing, sep="\n  ")
        self.arguments += [f"--deselect={test}" for test in failing]

    def run(self, mutation: Mutation) -> dict[str, object]:
        """Return what became of a mutation, and the test that noticed it."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_tree(self.root, self.tests, folder)
            result, failing = self._result(mutation, folder)
        where = f"{mutation.file}:{mutation.line}"
        print(f"{result:<16} {where:<50} {mutation.after.strip()}  {' '.join(failing)}", flush=True)
        return {**asdict(mutation), "result": result, "test": failing[0] if failing else None}

    def _result(self, mutation: Mutation, folder: Path) -> tuple[str, list[str]]:
        if not apply(mutation, folder):
            return "absent", []
        first = [path for path in ROOMS[mutation.room][1] if (folder / path).exists()]
        rest = ["tests", *(f"--ignore={path}" for path in first)]
        for paths in (first, rest) if first else (rest,):
            status, failing = self.pytest(folder, "-x", *paths)
            if status is None:
                return "caught (hangs)", []
            if status in (2, 3, 4):
                return "does not import", failing
            if status == 1:
                return "caught", failing
        return "survived", []


def main() -> None:
    """Run the command line."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40, help="of mutations, divided evenly among the rooms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=Path, help="a report whose mutations are run again")
    parser.add_argument("--root", type=Path, default=here, help="the checkout that is mutated")
    parser.add_argument("--tests", type=Path, help="the folder of tests; that of the checkout by default")
    parser.add_argument("--report", type=Path, help="where to write the results as JSON")
    parser.add_argument("--processes", type=int, default=1, help="mutations that are run at the same time")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds after which a run of pytest counts as a hang"
    )
    parser.add_argument("--no-baseline", action="store_true", help="do not look for tests that fail without a mutation")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    if arguments.mutations:
        fields = Mutation.__dataclass_fields__
        rows = json.loads(arguments.mutations.read_text())
        chosen = [Mutation(**{name: row[name] for name in fields}) for row in rows]
    else:
        chosen = choose(arguments.root, arguments.number, arguments.seed)
    tests = arguments.tests or arguments.root / "tests"
    check = Check(arguments.root, tests, arguments.pytest, arguments.limit)
    if not arguments.no_baseline:
        check.baseline()
    with ThreadPoolExecutor(arguments.processes) as pool:
        results = list(pool.map(check.run, chosen))
    if arguments.report:
        arguments.report.write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)


def print_table(results: list[dict[str, object]]) -> None:
    """Print how many mutations of each room had which result."""
    kinds = sorted({str(result["result"]) for result in results})
    print(f"\n{'':14}" + "".join(f"{kind:>18}" for kind in kinds))
    for room in [*ROOMS, "all"]:
        counts = Counter(result["result"] for result in results if room in (result["room"], "all"))
        print(f"{room:14}" + "".join(f"{counts[kind]:>18}" for kind in kinds))


if __name__ == "__main__":
    main()

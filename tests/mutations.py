"""Mutation check: change one line of the core at a time, and count the changes that the tests notice.

    python tests/mutations.py --map map.json --report mutations.json -- -m "not slow"

The tests that the arguments after `--` select run once, with `coverage`, unless the map exists. Each mutation then runs
the tests of its line, shortest first. Tests that fail without a mutation do not count. To compare two checkouts:

    python tests/mutations.py --also-in OTHER --map map.json --report new.json -- -m "not slow"
    python tests/mutations.py --root OTHER --mutations new.json --map other_map.json --report old.json
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

ROOMS = {  # files of the package
    "kernels": ["kernels/*.py"],
    "cache": ["cache/*.py"],
    "decode loop": ["generation/decoding/*.py"],
    "sampling": ["generation/sampling/*.py"],
    "engine": ["engine/*.py", "engine/policies/*.py"],
}
OTHER_DEVICES = re.compile(r"cuda|triton|flash|ASYNC_DEVICES|\b_backend\b")
"""A line is not changed if it or a neighbor contains one of these, as it may not run on a CPU."""

OPERATOR = re.compile(r"\bis not\b|\bnot in\b|\b(?:is|in|and|or)\b|[<>=!]=|\*\*|//|[-+*/%&|<>]")
CHANGED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
CHANGED |= {"in": "not in", "not in": "in", "and": "or", "or": "and", "&": "|", "|": "&"}
CHANGED |= {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "+"}
UNCHECKED = ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr
"""Nodes without behavior that a test should pin down, such as the wording of errors."""


@dataclass(frozen=True)
class Mutation:
    """Change of one line. `before` and `after` are the line between its neighbors, which identify it."""

    room: str
    file: str
    line: int
    before: str
    after: str


def mutations_of(room: str, path: Path, root: Path) -> Iterator[Mutation]:
    """Yield all mutations of the lines of a file that their neighbors identify."""
    source = path.read_text(encoding="utf-8")
    lines = ["", *source.encode().split(b"\n"), ""]  # offsets of `ast` are in UTF-8
    for number, begin, end, text in changes(ast.parse(source)):
        line = lines[number]
        changed = line[:begin] + text(line[begin:end].decode()).encode() + line[end:]
        before, after = (b"\n".join([lines[number - 1], each, lines[number + 1]]).decode() for each in (line, changed))
        if changed != line and source.count(before) == 1:
            yield Mutation(room, str(path.relative_to(root)), number, before, after)


def changes(node: ast.AST) -> Iterator[tuple]:
    """Yield line, first and last column, and the change of the text between them."""
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, UNCHECKED):
                    yield from changes(child)
    if isinstance(test := getattr(node, "test", None), ast.expr) and test.lineno == test.end_lineno:
        yield test.lineno, test.col_offset, test.end_col_offset, lambda text: f"(not ({text}))"
    if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:
        return
    whole = node.lineno, node.col_offset, node.end_col_offset
    match node:
        case ast.Compare(left=a, comparators=[b]) | ast.BinOp(left=a, right=b) | ast.BoolOp(values=[a, b, *_]):
            between = a.lineno, a.end_col_offset, b.col_offset
            yield *between, lambda text: OPERATOR.sub(lambda found: CHANGED.get(found[0], found[0]), text, count=1)
        case ast.Constant(value=bool(value)):
            yield *whole, lambda text: str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield *whole, lambda text: str(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield *whole, lambda text: "pass"
        case ast.Return(value=ast.expr()):
            yield *whole, lambda text: "return None"
        case ast.Call(args=[first, second, *_]) if not {ast.Starred} & {type(first), type(second)}:
            size, start = first.end_col_offset - first.col_offset, second.col_offset - first.col_offset
            span = first.lineno, first.col_offset, second.end_col_offset
            yield *span, lambda text: text[start:] + text[size:start] + text[:size]


def choose(root: Path, other: Path, number: int, seed: int) -> list[Mutation]:
    """Return mutations of random lines that both checkouts have, as many of each room."""
    draw, chosen = random.Random(seed), []
    for index, (room, patterns) in enumerate(ROOMS.items()):
        lines = defaultdict(list)
        for path in sorted(path for pattern in patterns for path in root.glob(f"hf_parallel/{pattern}")):
            twin = other / path.relative_to(root)
            text = twin.read_text(encoding="utf-8") if twin.exists() else ""
            for mutation in mutations_of(room, path, root):
                if text.count(mutation.before) == 1:
                    lines[mutation.file, mutation.line].append(mutation)
        skipped = {line for line, found in lines.items() if OTHER_DEVICES.search(found[0].before)}
        print(f"{room}: {len(lines)} lines, skipped {len(skipped)} of other devices")
        drawn = draw.sample(sorted(lines.keys() - skipped), (number + index) // len(ROOMS))
        chosen += [draw.choice(lines[line]) for line in drawn]
    return chosen


class Recorder:
    """Plugin of pytest that records the seconds of each test, and the lines of those that pass."""

    def __init__(self, path: Path) -> None:
        from coverage import Coverage

        self.path, self.failing, self.seconds = path, [], {}
        self.coverage = Coverage(None, source_pkgs=["hf_parallel"], concurrency=["thread"])

    def pytest_configure(self) -> None:
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.seconds[nodeid] = -time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.coverage.switch_context("")
        self.seconds[nodeid] += time.process_time()

    def pytest_runtest_logreport(self, report: object) -> None:
        self.failing += [report.nodeid] if report.failed else []

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data, lines = self.coverage.get_data(), defaultdict(lambda: defaultdict(list))
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in {*tests} - {"", *self.failing}:
                    lines[test][os.path.relpath(file)].append(line)
        self.path.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


class Check:
    """Runs mutations in a copy of a checkout."""

    def __init__(self, root: Path, folder: Path, map_path: Path, arguments: list[str]) -> None:
        self.folder = folder
        os.environ |= {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        for name in ("pytest", "torch._dynamo", "transformers.pipelines", "transformers.generation.utils"):
            importlib.import_module(name)  # once: tests run in forks
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "site"), dirs_exist_ok=True)
        if not map_path.exists():
            print(self.pytest(arguments, plugins=[Recorder(map_path.resolve())])[1])
        recorded = json.loads(map_path.read_text())
        self.lines, self.seconds = recorded["lines"], recorded["seconds"]

    def pytest(self, arguments: list[str], limit: float = 0, plugins: Sequence[Recorder] = ()) -> tuple[int, str]:
        """Run tests in a fork until one takes longer than a limit of seconds; return exit status and output."""
        options = ["-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        options += ["-o", f"faulthandler_timeout={limit}", "-o", "faulthandler_exit_on_timeout=true"]
        with tempfile.TemporaryFile("w+") as output:
            if not (child := os.fork()):
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(self.folder)
                os._exit(importlib.import_module("pytest").main([*options, *arguments], plugins))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            return status, output.read()

    def run(self, mutation: Mutation) -> dict[str, object]:
        """Return a mutation with what became of it."""
        path, result, tests = self.folder / mutation.file, "absent", []
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if source.count(mutation.before) == 1:
            line = source.partition(mutation.before)[0].count("\n") + 2
            tests = self.tests_of(ast.parse(source), mutation.file, line)
            path.write_text(source.replace(mutation.before, mutation.after), encoding="utf-8")
            result = self.result(tests) if tests else "not run"
            path.write_text(source, encoding="utf-8")
        print(f"{mutation.file}:{mutation.line}", mutation.after.split("\n")[1].strip())
        print(f"    {result} ({len(tests)} tests)", flush=True)
        return {**asdict(mutation), "result": result, "tests": len(tests)}

    def tests_of(self, tree: ast.AST, file: str, line: int) -> list[str]:
        """Return the tests that run a line, or any line of its file if it runs on import; the shortest first."""
        around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= n.end_lineno]
        inside = any(isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line for node in around)
        lines = range(max(node.lineno for node in around), line + 1) if inside else range(1, 10_000)
        found = [test for test, files in self.lines.items() if not set(lines).isdisjoint(files.get(file, ()))]
        return sorted(found, key=self.seconds.__getitem__)

    def result(self, tests: list[str]) -> str:
        """Run tests until one fails or hangs, first those that take ten seconds in all."""
        seconds = [0.0, *(self.seconds[test] for test in tests)]
        first = bisect(list(accumulate(seconds)), 10) - 1
        for group in filter(None, (tests[:first], tests[first:])):
            (self.folder / "arguments").write_text("\n".join(["-x", *group]))
            status, output = self.pytest(["@arguments"], limit=60 + 20 * max(seconds))
            if status:
                failing = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
                return f"caught: {failing[1] if failing else f'exit status {status}'}"
        return "survived"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40, help="of mutations, divided evenly among the rooms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=".", help="the checkout that is mutated")
    parser.add_argument("--also-in", type=Path, help="draw only lines that this checkout has too")
    parser.add_argument("--mutations", type=Path, help="a report whose mutations are run again")
    parser.add_argument("--map", type=Path, required=True, help="which tests run which lines; recorded if missing")
    parser.add_argument("--report", type=Path, required=True, help="where to write the results as JSON")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest for the map, after --")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if arguments.mutations:
        rows = json.loads(arguments.mutations.read_text())
        chosen = [Mutation(**{name: row[name] for name in Mutation.__dataclass_fields__}) for row in rows]
    else:
        chosen = choose(root, (arguments.also_in or root).resolve(), arguments.number, arguments.seed)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        check = Check(root, Path(folder), arguments.map, arguments.pytest)
        for mutation in chosen:
            results.append(check.run(mutation))
            arguments.report.write_text(json.dumps(results, indent=2) + "\n")
    counts = Counter((result["room"], result["result"].partition(":")[0]) for result in results)
    print(*(f"{room:12} {kind:9} {number}" for (room, kind), number in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    main()

"""Control flow of a function between its suspension points, from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

START, END = "start", "end"
"""Names of the first and the last state."""
KINDS = ("gen", "next", "resume", "spawn", "yield")
"""Kinds of states that calls of these names make; `tool` is any other `await`."""


@dataclass(frozen=True)
class FlowState:
    """A suspension point.

    Attributes
    ----------
    name
        Unique in the graph: the kind or the name of the tool, with a number from the second one on, such as `gen 2`.
    kind
        `start`, `end`, `gen`, `next`, `resume`, `spawn`, `yield` or `tool` (any other `await`, `async for` and
        `async with`).
    line
        Line in the source file.
    call
        The source of the expression.
    forkable
        Whether a supervisor may continue the state several times: a `gen` without `forkable=False`.
    """

    name: str
    kind: str
    line: int
    call: str
    forkable: bool = False


@dataclass
class _Loop:
    """Nodes where `continue` and `break` go."""

    head: int
    exit: int


@dataclass
class _Handlers:
    """Nodes of `except` clauses, and whether they catch every exception."""

    entries: list[int]
    catches_all: bool


@dataclass
class _Finally:
    """Node of a `finally` clause, and the jumps that pass through it."""

    entry: int
    jumps: set[str] = field(default_factory=set)


class ControlFlow(ast.NodeVisitor):
    """Control-flow graph of a function: nodes are states and junctions, and `_at` is the node that control is at.

    Visits expressions in the order in which Python evaluates them. Code that cannot be reached starts at a junction
    without predecessors, and is left out at the end.
    """

    def __init__(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._states: dict[int, FlowState] = {}
        self._next: list[set[int]] = []
        self._around: list[_Loop | _Handlers | _Finally] = []
        self._names = {END: 1}
        self._in_await = False
        self._end = self._junction()
        self._at = self._junction()
        self._state(START, definition, ast.unparse(definition.args).join((f"{definition.name}(", ")")))
        self._start = self._at
        self._statements(definition.body)
        self._jump("return", self._at)
        last = definition.end_lineno or definition.lineno
        self._states[self._end] = FlowState(END, END, last, END)

    def graph(self) -> tuple[tuple[FlowState, ...], tuple[tuple[str, str], ...]]:
        """Return the states that can be reached, with the end, and the edges between them as pairs of names."""
        reached = self._reached()
        order = [node for node in self._states if node in reached or node == self._end]
        place = {node: number for number, node in enumerate(order)}
        edges = sorted((place[begin], place[end]) for begin in order for end in self._following(begin))
        states = tuple(self._states[node] for node in order)
        return states, tuple((states[begin].name, states[end].name) for begin, end in edges)

    def _reached(self) -> set[int]:
        """Return the nodes to which control comes from the start."""
        found, waiting = {self._start}, [self._start]
        while waiting:
            new = self._next[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def _following(self, node: int) -> set[int]:
        """Return the states that follow a node, with only junctions between."""
        found: set[int] = set()
        seen, waiting = {node}, [*self._next[node]]
        while waiting:
            node = waiting.pop()
            if node in self._states:
                found.add(node)
            elif node not in seen:
                seen.add(node)
                waiting += self._next[node]
        return found

    def _junction(self, *before: int) -> int:
        self._next.append(set())
        for node in before:
            self._next[node].add(len(self._next) - 1)
        return len(self._next) - 1

    def _state(self, name: str, node: ast.AST, call: str, kind: str | None = None, forkable: bool = False) -> None:
        """Add a state that control is at from now on."""
        self._names[name] = number = self._names.get(name, 0) + 1
        self._at = self._junction(self._at)
        unique = name if number == 1 else f"{name} {number}"
        self._states[self._at] = FlowState(unique, kind or name, getattr(node, "lineno", 0), call, forkable)
        self._jump("fail", self._at)

    def _jump(self, how: str, begin: int) -> None:
        """Leave a node by `break`, `continue`, `return`, `raise`, or `fail`: an exception that is not written down."""
        for around in reversed(self._around):
            if isinstance(around, _Finally):
                self._next[begin].add(around.entry)
                around.jumps.add(how)
                return
            if isinstance(around, _Loop) and how in ("break", "continue"):
                self._next[begin].add(around.exit if how == "break" else around.head)
                return
            if isinstance(around, _Handlers) and how in ("raise", "fail"):
                self._next[begin].update(around.entries)
                if around.catches_all:
                    return
        if how in ("return", "raise"):
            self._next[begin].add(self._end)

    @contextmanager
    def _within(self, around: _Loop | _Handlers | _Finally) -> Iterator[None]:
        self._around.append(around)
        yield
        self._around.pop()

    def _statements(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

        # Expressions

    def visit_Await(self, node: ast.Await) -> None:  # noqa: N802
        """Visit the operand, then add a state, which a call of `gen`, `spawn` and others adds itself."""
        outer, self._in_await = self._in_await, True
        self.visit(node.value)
        self._in_await = outer
        if not (isinstance(node.value, ast.Call) and _called(node.value) in ("gen", "spawn")):
            name = _called(node.value) if isinstance(node.value, ast.Call) else ""
            kind = name if name in KINDS else "tool"
            if name == "tool" and isinstance(node.value, ast.Call) and node.value.args:
                name = _name(node.value.args[0]) or name  # tool(function, ...)
            self._state(name or "await", node, ast.unparse(node.value), kind)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """Visit function and arguments, then add a state for `spawn` and for a `gen` within an `await`."""
        self.generic_visit(node)
        name = _called(node)
        if name == "spawn" or (name == "gen" and self._in_await):
            fixed = any(k.arg == "forkable" and _is_constant(k.value, False) for k in node.keywords)
            self._state(name, node, ast.unparse(node), name, forkable=name == "gen" and not fixed)

    def _visit_yield(self, node: ast.Yield | ast.YieldFrom) -> None:
        self.generic_visit(node)
        self._state("yield", node, ast.unparse(node).removeprefix("(").removesuffix(")"), "yield")

    visit_Yield = visit_YieldFrom = _visit_yield  # noqa: N815

    def visit_BoolOp(self, node: ast.BoolOp) -> None:  # noqa: N802
        """Visit the operands; those after the first may be left out."""
        first, *rest = node.values
        self.visit(first)
        before = [self._at]
        for value in rest:
            self.visit(value)
            before.append(self._at)
        self._at = self._junction(*before)

    def visit_IfExp(self, node: ast.IfExp) -> None:  # noqa: N802
        """Visit the condition, then either value."""
        self.visit(node.test)
        condition = self._at
        self.visit(node.body)
        first, self._at = self._at, condition
        self.visit(node.orelse)
        self._at = self._junction(first, self._at)

    def visit_Dict(self, node: ast.Dict) -> None:  # noqa: N802
        """Visit each key with its value."""
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.visit(key)
            self.visit(value)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._generators(node.generators, values)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension  # noqa: N815

    def _generators(self, generators: Sequence[ast.comprehension], values: Sequence[ast.expr]) -> None:
        """Visit the loops of a comprehension from the outermost."""
        if not generators:
            for value in values:
                self.visit(value)
            return
        loop, *inner = generators
        self.visit(loop.iter)
        head = self._at = self._junction(self._at)
        if loop.is_async:
            self._state(
                "async for", loop.iter, f"async for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}", "tool"
            )
        done = self._at
        for condition in loop.ifs:
            self.visit(condition)
            self._next[self._at].add(head)
        self._generators(inner, values)
        self._next[self._at].add(head)
        self._at = self._junction(done)

    def _visit_definition(self, node: ast.AST) -> None:
        """Leave out the body of an inner function or class, which runs elsewhere."""
        outer = [*getattr(node, "decorator_list", []), *getattr(node, "bases", [])]
        if (arguments := getattr(node, "args", None)) is not None:
            outer += [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]
        for expression in outer:
            self.visit(expression)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _visit_definition  # noqa: N815

    # Statements

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self.visit(target)

    visit_Assign = visit_AnnAssign = _visit_assignment  # noqa: N815

    def _leave(self, how: str) -> None:
        """Jump, and go on where control does not come to."""
        self._jump(how, self._at)
        self._at = self._junction()

    def visit_Return(self, node: ast.Return) -> None:  # noqa: N802
        """Visit the value and leave the function."""
        self.generic_visit(node)
        self._leave("return")

    def visit_Raise(self, node: ast.Raise) -> None:  # noqa: N802
        """Visit the exception and go to what handles it."""
        self.generic_visit(node)
        self._leave("raise")

    def visit_Break(self, node: ast.Break) -> None:  # noqa: N802
        """Go to the end of the loop."""
        self._leave("break")

    def visit_Continue(self, node: ast.Continue) -> None:  # noqa: N802
        """Go to the beginning of the loop."""
        self._leave("continue")

    def visit_If(self, node: ast.If) -> None:  # noqa: N802
        """Visit the condition, then either body."""
        self.visit(node.test)
        condition = self._at
        self._statements(node.body)
        first, self._at = self._at, condition
        self._statements(node.orelse)
        self._at = self._junction(first, self._at)

    def visit_While(self, node: ast.While) -> None:  # noqa: N802
        """Visit condition and body in a circle; a constant condition never ends it."""
        loop = _Loop(self._junction(self._at), self._junction())
        self._at = loop.head
        self.visit(node.test)
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self._loop(loop, node.body, node.orelse, self._junction() if endless else self._at)

    def _visit_for(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        loop = _Loop(self._junction(self._at), self._junction())
        self._at = loop.head
        if isinstance(node, ast.AsyncFor):
            call = f"async for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            self._state("async for", node, call, "tool")
        done = self._at
        self.visit(node.target)
        self._loop(loop, node.body, node.orelse, done)

    visit_For = visit_AsyncFor = _visit_for  # noqa: N815

    def _loop(self, loop: _Loop, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], done: int) -> None:
        with self._within(loop):
            self._statements(body)
        self._next[self._at].add(loop.head)
        self._at = done
        self._statements(orelse)
        self._next[self._at].add(loop.exit)
        self._at = loop.exit

    def _visit_try(self, node: ast.Try) -> None:
        if node.finalbody:
            self._finally(lambda: self._handled(node), lambda: self._statements(node.finalbody))
        else:
            self._handled(node)

    visit_Try = visit_TryStar = _visit_try  # noqa: N815

    def _finally(self, body: Callable[[], None], final: Callable[[], None]) -> None:
        """Visit a body and what runs after it however it is left."""
        around = _Finally(self._junction())
        with self._within(around):
            body()
        ends = self._at in self._reached()
        self._next[self._at].add(around.entry)
        self._at = around.entry
        final()
        for how in sorted(around.jumps):
            self._jump(how, self._at)
        if not ends:
            self._at = self._junction()

    def _handled(self, node: ast.Try) -> None:
        """Visit body, `else` and handlers. Plain code at the beginning of the body may raise, too."""
        handlers = _Handlers([self._junction() for _ in node.handlers], any(map(_catches_all, node.handlers)))
        with self._within(handlers):
            begin, known = self._at, len(self._states)
            self.visit(node.body[0])
            if len(self._states) == known:
                self._jump("fail", begin)
            self._statements(node.body[1:])
        self._statements(node.orelse)
        ends = [self._at]
        for handler, entry in zip(node.handlers, handlers.entries, strict=True):
            self._at = entry
            self._statements(handler.body)
            ends.append(self._at)
        self._at = self._junction(*ends)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:  # noqa: N802
        """Visit the context managers: each is a state where it is entered, and one where it is left."""
        self._contexts(node.items, node)

    def _contexts(self, items: Sequence[ast.withitem], node: ast.AsyncWith) -> None:
        if not items:
            self._statements(node.body)
            return
        item, *inner = items
        self.visit(item.context_expr)
        call = ast.unparse(item.context_expr)
        self._state("async with", node, f"async with {call}", "tool")
        if item.optional_vars is not None:
            self.visit(item.optional_vars)
        self._finally(lambda: self._contexts(inner, node), lambda: self._state("leave", node, f"leave {call}", "tool"))

    def visit_Match(self, node: ast.Match) -> None:  # noqa: N802
        """Visit the subject, then the guards in turn, each with its body."""
        self.visit(node.subject)
        ends = []
        for case in node.cases:
            before = self._at
            if case.guard is not None:
                self.visit(case.guard)
            passed = self._at
            self._statements(case.body)
            ends.append(self._at)
            certain = case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            self._at = self._junction() if certain else self._junction(before, passed)
        self._at = self._junction(*ends, self._at)


def _called(call: ast.Call) -> str:
    """Return the last part of the name that is called, empty if it has none."""
    return _name(call.func)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _catches_all(handler: ast.ExceptHandler) -> bool:
    name = handler.type.id if isinstance(handler.type, ast.Name) else ""
    return handler.type is None or name in ("Exception", "BaseException")

"""Flow graph of an agent: its coroutine as a state machine, read from the source (Hive, section 5.1).

States are the function's suspension points, a start and an end. Edges lead to the states where the coroutine can
suspend next.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_parallel.agents.agent import Agent
from hf_parallel.agents.drawing.mermaid import Flowchart, count, shorten

START, END = "start", "end"
KINDS = ("gen", "next", "resume", "spawn", "yield")
"""Kinds of states that calls of these names make. Any other `await` is a `tool`."""
_LENGTH = 44
"""Maximum number of characters of a call in a drawing."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class FlowState:
    """A suspension point.

    Attributes
    ----------
    name
        Unique in the graph: the kind, or the name of the tool. Later ones of a name are numbered: `gen 2`.
    kind
        `start`, `end`, `gen`, `next`, `resume`, `spawn`, `yield` or `tool` (any other `await`, `async for` and
        `async with`).
    line
        Line in the source file.
    call
        Source of the expression.
    forkable
        Whether a supervisor may continue the state several times: a `gen` without `forkable=False`.
    """

    name: str
    kind: str
    line: int
    call: str
    forkable: bool = False


@dataclass(frozen=True)
class FlowGraph:
    """States of an agent in source order, and edges as pairs of their names."""

    states: tuple[FlowState, ...]
    edges: tuple[tuple[str, str], ...]
    name: str = ""

    def mermaid(self) -> str:
        """Return the graph as Mermaid text. Forkable states are blue."""
        chart = Flowchart()
        self.draw(chart, {})
        return str(chart)

    def draw(self, chart: Flowchart, visits: Mapping[tuple[str, int], int]) -> None:
        """Add the graph to a flowchart, with the numbers of visits by kind and line."""
        for state in self.states:
            is_end = state.kind in (START, END)
            text = shorten(state.call if is_end else f"{state.line}: {state.call}", _LENGTH)
            times = visits.get((state.kind, state.line), 0)
            style = "fork" if state.forkable else ""
            lines = (text, *([count(times, "time")] if times else []))
            chart.node((self.name, state.name), *lines, style=style, rounded=is_end)
        for begin, end in self.edges:
            chart.link((self.name, begin), (self.name, end))


def flow_graph(function: Callable[..., object]) -> FlowGraph:
    """Return the flow graph of a function from its source.

    The state before a `try` and every suspension point in it also lead to the handlers and to `finally`, so the graph
    may have paths through `finally` that no run takes. Comprehensions are loops.

    Parameters
    ----------
    function : callable or Agent
        A function defined by `async def` or `def`, or an agent.

    Raises
    ------
    ValueError
        If the source is unavailable (C functions, interactive sessions) or is not a function definition.
    """
    function = function.function if isinstance(function, Agent) else function
    name = getattr(function, "__name__", repr(function))
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of {name} is not available, define it in a file to draw it: {error}") from error
    source, nested = "".join(lines), lines[0][:1].isspace()
    try:  # unlike dedent, `if` keeps texts with lines at the margin
        body = ast.parse(f"if True:\n{source}" if nested else source).body
    except SyntaxError as error:
        raise ValueError(f"the source of {name} is not a function definition: {lines[0].strip()}") from error
    definition = body[0].body[0] if nested and isinstance(body[0], ast.If) else body[0]
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"the source of {name} is not a function definition: {lines[0].strip()}")
    ast.increment_lineno(definition, first - 1 - nested)
    return _ControlFlow(definition).graph


_Names = frozenset[str]
"""States that control may come from at a statement. Empty: the statement is unreachable."""
_NOWHERE: _Names = frozenset()


class _ControlFlow:
    """Walk over a function in evaluation order, passing on the states that control may come from.

    Loop bodies are walked twice, the second time also from their own last states.
    """

    def __init__(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._states: dict[ast.AST, FlowState] = {}
        self._edges: set[tuple[str, str]] = set()
        self._tries: list[set[str]] = []  # states that may raise, by `try`
        self._finals: list[set[str]] = []  # states before a `return` within `try ... finally`
        self._loops: list[tuple[set[str], set[str]]] = []  # states before `continue` and `break`
        self._written_out: dict[ast.expr, list[ast.stmt]] = {}  # comprehensions as statements
        self._awaiting = False
        begin = self._state(definition, START, START, f"{definition.name}({ast.unparse(definition.args)})")
        self._leave(self._body(definition.body, begin))
        end = FlowState(END, END, definition.end_lineno or definition.lineno, END)
        states = (*self._states.values(), end)
        place = {state.name: number for number, state in enumerate(states)}
        edges = sorted(self._edges, key=lambda edge: (place[edge[0]], place[edge[1]]))
        self.graph = FlowGraph(states, tuple(edges), definition.name)

    def _state(
        self, node: ast.AST, name: str, kind: str, call: str, before: _Names | None = None, forkable: bool = False
    ) -> _Names:
        """Add a suspension at a node; return its name."""
        if before is not None and not before:
            return before
        if node not in self._states:
            number = 1 + sum(state.name.partition(" ")[0] == name.partition(" ")[0] for state in self._states.values())
            unique = name if number == 1 else f"{name} {number}"
            self._states[node] = FlowState(unique, kind, getattr(node, "lineno", 0), call, forkable)
        state = self._states[node].name
        self._edges.update((one, state) for one in before or ())
        for raising in self._tries:
            raising.add(state)
        return frozenset([state])

    def _leave(self, at: _Names) -> None:
        self._edges.update((one, END) for one in at)

    def _body(self, statements: Sequence[ast.stmt], at: _Names) -> _Names:
        for statement in statements:
            at = self._statement(statement, at)
        return at

    def _statement(self, node: ast.stmt, at: _Names) -> _Names:
        match node:
            case ast.If():
                at = self._walk(node.test, at)
                return self._body(node.body, at) | self._body(node.orelse, at)
            case ast.While() | ast.For() | ast.AsyncFor():
                return self._loop(node, at)
            case ast.Try():
                return self._try(node, at)
            case ast.AsyncWith():
                for item in node.items:
                    at = self._walk(item.context_expr, at)
                    call = ast.unparse(item.context_expr)
                    at = self._state(item, "async with", "tool", f"async with {call}", at)
                return self._body(node.body, at)
            case ast.With():
                return self._body(node.body, self._walk(ast.Tuple([item.context_expr for item in node.items]), at))
            case ast.Match():
                at, left = self._walk(node.subject, at), _NOWHERE
                for case in node.cases:
                    passed = self._walk(case.guard, at)
                    left |= self._body(case.body, passed)
                    takes_all = (
                        case.guard is None and isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern
                    )
                    at = _NOWHERE if takes_all else at | passed
                return left | at
            case ast.Return():
                at = self._walk(node.value, at)
                if self._finals:
                    self._finals[-1].update(at)
                else:
                    self._leave(at)
                return _NOWHERE
            case ast.Raise():
                at = self._walk(node.exc, at)
                if not self._tries:
                    self._leave(at)
                return _NOWHERE
            case ast.Break() | ast.Continue():
                self._loops[-1][isinstance(node, ast.Break)].update(at)
                return _NOWHERE
        return self._walk(node, at)

    def _loop(self, node: ast.While | ast.For | ast.AsyncFor, at: _Names) -> _Names:
        continued, broken = set[str](), set[str]()
        self._loops.append((continued, broken))
        head = at if isinstance(node, ast.While) else self._walk(node.iter, at)
        for _ in range(2):
            at = self._head(node, head)
            head |= self._body(node.body, at) | continued
        at = self._head(node, head)
        self._loops.pop()
        is_endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and bool(node.test.value)
        return self._body(node.orelse, _NOWHERE if is_endless else at) | broken

    def _head(self, node: ast.While | ast.For | ast.AsyncFor, at: _Names) -> _Names:
        if isinstance(node, ast.While):
            return self._walk(node.test, at)
        if isinstance(node, ast.AsyncFor):
            call = f"async for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            return self._state(node, "async for", "tool", call, at)
        return at

    def _try(self, node: ast.Try, at: _Names) -> _Names:
        if node.finalbody:
            self._finals.append(set())
        self._tries.append(set(at))  # plain code at the beginning may raise, too
        at = self._body(node.body, at)
        raised = frozenset(self._tries.pop())
        at = self._body(node.orelse, at)
        for handler in node.handlers:
            at |= self._body(handler.body, raised)
        if node.finalbody:
            after = self._body(node.finalbody, at | self._finals.pop() | raised)
            self._leave(after)
            return after if at else _NOWHERE
        return at

    def _walk(self, node: ast.AST | None, at: _Names) -> _Names:
        """Walk an expression, or a statement that consists of expressions."""
        if node is None or isinstance(node, _DEFINITIONS):
            return at
        if isinstance(node, ast.IfExp):
            at = self._walk(node.test, at)
            return self._walk(node.body, at) | self._walk(node.orelse, at)
        if isinstance(node, ast.BoolOp):
            at = left = self._walk(node.values[0], at)
            for value in node.values[1:]:
                at = self._walk(value, at)
                left |= at
            return left
        if isinstance(node, _COMPREHENSIONS):
            return self._comprehension(node, at)
        outer, self._awaiting = self._awaiting, self._awaiting or isinstance(node, ast.Await)
        for child in ast.iter_child_nodes(node):
            at = self._walk(child, at)
        self._awaiting = outer
        return self._suspend(node, at)

    def _comprehension(self, node: ast.expr, at: _Names) -> _Names:
        """Walk a comprehension as nested loops."""
        if node not in self._written_out:
            *values, loops = (getattr(node, name) for name in node._fields)
            body: list[ast.stmt] = [ast.Expr(value) for value in values]
            for loop in reversed(loops):
                for test in reversed(loop.ifs):
                    body = [ast.If(test, body, [])]
                kind = ast.AsyncFor if loop.is_async else ast.For
                body = [kind(loop.target, loop.iter, body, [], lineno=node.lineno)]
            self._written_out[node] = body
        return self._body(self._written_out[node], at)

    def _suspend(self, node: ast.AST, at: _Names) -> _Names:
        """Add a state for an expression, whose parts have been walked, if it suspends."""
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return self._state(node, "yield", "yield", ast.unparse(node).removeprefix("(").removesuffix(")"), at)
        call = node.value if isinstance(node, ast.Await) else node
        name = _name(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(node, ast.Call) and (name == "spawn" or (name == "gen" and self._awaiting)):
            fixed = any(one.arg == "forkable" and ast.unparse(one.value) == "False" for one in node.keywords)
            return self._state(node, name, name, ast.unparse(node), at, forkable=name == "gen" and not fixed)
        if not isinstance(node, ast.Await) or name in ("gen", "spawn"):
            return at
        kind = name if name in KINDS else "tool"
        if name == "tool" and isinstance(call, ast.Call) and call.args:
            name = _name(call.args[0]) or name  # tool(function, ...)
        return self._state(node, name or "await", kind, ast.unparse(call), at)


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

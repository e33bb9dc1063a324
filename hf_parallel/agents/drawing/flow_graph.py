"""Flow graph of an agent: its coroutine as a state machine, read from the source (Hive, section 5.1).

States are the suspension points of the function, with a start and an end. An edge leads to each state at which the
coroutine can be suspended next.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_parallel.agents.agent import Agent
from hf_parallel.agents.drawing.control_flow import END, START, ControlFlow, FlowState
from hf_parallel.agents.drawing.svg import Box, Drawing, Link, document, draw, shorten

_LENGTH = 44
"""Characters of a call in a drawing."""


@dataclass(frozen=True)
class FlowGraph:
    """States of an agent in the order of the source, and edges as pairs of their names."""

    states: tuple[FlowState, ...]
    edges: tuple[tuple[str, str], ...]
    name: str = ""

    def svg(self, counts: Mapping[str | tuple[str, str], float] | None = None) -> str:
        """Return a drawing as SVG text: forkable states are blue and doubled, edges of loops are curves at the right.

        Parameters
        ----------
        counts
            How often a run was in a state (by name) and took an edge (by the pair of names). If it has edges, those
            that are missing are dashed.

        Raises
        ------
        ValueError
            If a key is neither a state nor an edge.
        """
        return document([("", self.drawing(counts))], f"flow graph of {self.name}" if self.name else "flow graph")

    def drawing(self, counts: Mapping[str | tuple[str, str], float] | None = None) -> Drawing:
        """Return the drawing of `svg` without the document around it."""
        counts = counts or {}
        known = {*(state.name for state in self.states), *self.edges}
        for key in counts:
            if key not in known:
                names = ", ".join(state.name for state in self.states)
                raise ValueError(f"counts has {key!r}, which is neither an edge nor one of the states {names}")
        boxes = [_box(state, counts.get(state.name)) for state in self.states]
        partial = any(edge in counts for edge in self.edges)
        links = [
            Link(*edge, f"{counts[edge]:g}" if edge in counts else "", faint=partial and not counts.get(edge))
            for edge in self.edges
        ]
        return draw(boxes, links)


def _box(state: FlowState, count: float | None) -> Box:
    if state.kind in (START, END):
        text, style = shorten(state.call, _LENGTH), "end"
    else:
        text, style = f"{state.line}: {shorten(state.call, _LENGTH)}", "fork" if state.forkable else "plain"
    times = () if count is None else (f"{count:g} time{'' if count == 1 else 's'}",)
    return Box(state.name, (text, *times), style, f"{state.name} (line {state.line})\n{state.call}")


def flow_graph(function: Callable[..., object]) -> FlowGraph:
    """Return the flow graph of a function from its source.

    Where an exception can leave a suspension point within `try`, an edge leads to what handles it; that an unhandled
    exception ends the agent is drawn for `raise` only. A `finally` continues to wherever it can be entered from, so a
    path through it may combine what no single run does. Comprehensions are loops, also those of generators.

    Parameters
    ----------
    function : callable or Agent
        A function defined with `async def` or `def`, or an agent.

    Raises
    ------
    ValueError
        If the source is not available, as for functions in C and of an interactive session, or is no `def`.
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
        raise ValueError(f"the source of {name} is no function definition: {lines[0].strip()}") from error
    definition = body[0].body[0] if nested and isinstance(body[0], ast.If) else body[0]
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"the source of {name} is no function definition: {lines[0].strip()}")
    ast.increment_lineno(definition, first - 1 - nested)
    return FlowGraph(*ControlFlow(definition).graph(), definition.name)

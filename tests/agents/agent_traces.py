"""Traces of agents that no model ran."""

from __future__ import annotations

from collections.abc import Callable

from hf_parallel.agents.trace import RunTrace

HOSTILE = '</span></script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;b ]]> <!-- \x00\ud800'
"""Text that would leave an element, an attribute, a script or a comment."""


def ticking(begin: int = 1000) -> Callable[[], float]:
    """Return a clock that advances by a second at each call."""
    seconds = iter(range(begin, 1_000_000))
    return lambda: float(next(seconds))


def gen(trace: RunTrace, agent: str, state: str, begin: float, text: str = "fix", tokens: int = 3) -> None:
    """Add a generation that ends now."""
    numbers = {"begin": begin, "tokens": tokens, "prompt_tokens": 10, "reused": 8}
    trace.add(agent, "gen", state, **numbers, text=text, settings={"temperature": 0.5})


def repair_trace(text: str = "fix") -> RunTrace:
    """Return the trace of a repair in two rounds: `bug_repair` and `context_gather` (Hive, figure 6)."""
    trace = RunTrace(clock=ticking())
    repair, gather = "bug_repair#0", "bug_repair#0/context_gather#0"
    trace.add(repair, "spawn", child=gather, name="context_gather")
    trace.add(repair, "state", "0", parent=None, value=None, status="committed")
    for number in range(2):
        begin = trace.events[-1].time
        trace.add(gather, "tool", begin=begin, name="read", result=None, error=text)
        trace.add(gather, "yield", value=text)
        trace.add(repair, "next", child=gather, begin=begin)
        for branch in range(2):
            state = "0" + f".{branch}" * (number + 1)
            gen(trace, repair, state, begin + 3, text)
            trace.add(repair, "state", state, parent=state[:-2], value=branch + 0.5, status="committed")
        trace.add(repair, "state", "0.0" if number == 0 else "0.0.0", parent=None, value=None, status="dropped")
        trace.add(repair, "resume", child=gather)
        trace.add("", "kv", bytes=1_000_000 * (number + 1))
        trace.add("", "scores", scores={"bug_repair": 0.5 + number, "context_gather": 0.25})
    trace.add(gather, "cancel")
    trace.add(repair, "end", value=text)
    return trace


def large_trace(agents: int, rounds: int) -> RunTrace:
    """Return a trace of many agents that generate at the same time."""
    trace = RunTrace(clock=ticking())
    for agent in range(agents):
        trace.add("root#0", "spawn", child=f"root#0/worker#{agent}", name="worker")
    for number in range(rounds):
        for agent in range(agents):
            worker = f"root#0/worker#{agent}"
            gen(trace, worker, "0" + ".0" * number, max(0, trace.events[-1].time - 30), f"text {number}\n" * 20)
            trace.add(
                worker, "state", "0" + ".0" * (number + 1), parent="0" + ".0" * number, value=0.5, status="selected"
            )
            trace.add(worker, "yield", value=str(number))
            trace.add("", "kv", bytes=number * 1000 + agent)
            trace.add("", "scores", scores={"worker": number / rounds, "root": 0.5})
    return trace

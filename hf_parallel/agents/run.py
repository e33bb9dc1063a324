"""AgentRun: state of one run of an agent and of all agents that it spawns."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_parallel.agents.definition import Agent
from hf_parallel.agents.errors import AgentError, ReplayError, ToolError, agent_failure
from hf_parallel.agents.execution import Execution
from hf_parallel.agents.journal import Journal, completion_from_json, completion_to_json
from hf_parallel.agents.models import Completion, EngineModel, Model
from hf_parallel.agents.search import Search
from hf_parallel.agents.state import END, State, derive_seed, digest
from hf_parallel.agents.trace import RunTrace
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.policies.contribution import Contribution
from hf_parallel.generation.prompts import Message


@dataclass
class AgentStats:
    """Cost of a run."""

    agents: int = 0
    """Instances of agents."""
    transitions: int = 0
    """Transitions between states."""
    completions: int = 0
    tokens: int = 0
    """New tokens."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens, counted once per request, and how many of them had cached keys and values."""
    replayed_tokens: int = 0
    """New tokens sampled from cached logits."""
    tool_calls: int = 0
    resumed: int = 0
    """Requests for completions and tool calls whose results were read from the journal."""
    passes: int = 0
    """Forward passes of the engine during the run, including passes of other callers."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the statistics as a plain dictionary."""
        return asdict(self)


class AgentRun:
    """State of a run, the `runtime` of its searches."""

    def __init__(self, model: Model, seed: int, max_requests: int, journal: Journal | None = None) -> None:
        self.model = model
        self.seed = seed
        self.journal = journal
        self.id = secrets.token_hex(8)
        self.trace = RunTrace()
        self.stats = AgentStats()
        self._scores: Mapping[str, Contribution] = {}  # the last ones in the trace
        self.executions: set[Execution] = set()
        self.search_tasks: set[asyncio.Task[State]] = set()  # tasks of `Search` objects
        self._places = asyncio.Semaphore(max_requests)
        self._end: asyncio.Future[AgentError] = asyncio.get_running_loop().create_future()  # see `end`

    async def drive(self, agent: Agent, arguments: tuple[object, ...], named: Mapping[str, object]) -> list[Any]:
        """Run an agent to its end and return its values."""
        began = time.monotonic()
        passes = self.model.passes
        values: list[Any] = []
        search = Search(self, State(agent, f"{agent.name}#0", (arguments, named)))
        try:
            while True:
                awaited: list[asyncio.Future[Any]] = [search.task, self._end]
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if self._end.done():
                    raise self._end.result()
                state = search.task.result()
                if not (state.status == END and state.yielded is None):
                    values.append(state.yielded)
                if state.status == END:
                    return values
                search = Search(self, state)
        finally:
            tasks = {execution.task for execution in self.executions} | self.search_tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.stats.seconds = time.monotonic() - began
            self.stats.passes = self.model.passes - passes

    def end(self, agent_id: str, error: ReplayError) -> None:
        """End the run with an agent's error, even if an agent catches it."""
        if not self._end.done():
            self._end.set_result(agent_failure(agent_id, error))

    async def generate(
        self, execution: Execution, key: str, messages: Sequence[Message], settings: Mapping[str, object]
    ) -> Completion:
        """Generate completions."""
        agent_id = execution.agent_id
        state = execution.state
        assert state is not None
        begin = self.trace.now()
        model = self.model
        stats = self.stats
        hints = AgentHints(self.id, state.agent.name)

        async def compute() -> dict[str, Any]:
            async with self._places:
                completion = await model.generate(messages, settings, derive_seed(self.seed, key), hints)
            return completion_to_json(completion)

        operation = f"completion of {state.agent.name} {digest(messages, settings)}"
        completion = completion_from_json(await self.journaled(agent_id, key, operation, compute))
        stats.completions += len(completion.texts)
        stats.tokens += completion.tokens
        stats.prompt_tokens += completion.prompt_tokens
        stats.reused_tokens += completion.reused_tokens
        stats.replayed_tokens += completion.replayed_tokens
        self.trace.add(
            agent_id,
            "gen",
            state.id,
            begin=begin,
            tokens=completion.tokens,
            prompt_tokens=completion.prompt_tokens,
            reused=completion.reused_tokens,
            text="\n\n".join(completion.texts),
            settings={name: repr(value) for name, value in settings.items()},
        )
        if isinstance(model, EngineModel):
            self.trace.add(agent_id, "kv", bytes=model.engine.stats.kv_bytes)
            contributions = model.contributions
            if contributions and contributions is not self._scores:
                scores = {name: contribution.score for name, contribution in contributions.items()}
                self.trace.add(agent_id, "scores", scores=scores)
                self._scores = contributions
        return completion

    async def journaled(self, agent_id: str, key: str, operation: str, compute: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result that the journal has, or compute it and add it to the journal."""
        if self.journal is None:
            return await compute()
        if key in self.journal:
            self.stats.resumed += 1
            return self._read(agent_id, key, operation)
        try:
            value = await compute()
        except ToolError as error:
            self.journal.add(key, operation, error=str(error))
            raise
        return self.journal.add(key, operation, value)

    def now(self, agent_id: str, key: str) -> float:
        """Return the time in seconds since the epoch, or the time that the journal has."""
        if self.journal is None:
            return time.time()
        if key in self.journal:
            return float(self._read(agent_id, key, "now"))
        return float(self.journal.add(key, "now", time.time()))

    def _read(self, agent_id: str, key: str, operation: str) -> Any:
        assert self.journal is not None
        try:
            return self.journal.get(key, operation)
        except ReplayError as error:
            self.end(agent_id, error)
            raise

"""Runtime: runs agents on an engine (Hive, section 5.1.1)."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_parallel.agents.definition import Agent
from hf_parallel.agents.journal import Journal
from hf_parallel.agents.models import EngineModel, Model
from hf_parallel.agents.run import AgentRun, AgentStats
from hf_parallel.agents.trace import RunTrace
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine import ContributionPolicy, Engine
from hf_parallel.generation.validation import check_int

MAX_REQUESTS = 256
"""Maximum number of concurrent requests of a run whose model is not an engine."""


@dataclass(frozen=True)
class AgentResult:
    """Values of an agent, and trace and cost of the run.

    Attributes
    ----------
    value : object
        The last yielded value, or the returned one. None if it yielded nothing.
    values : list
        All yielded values.
    trace : RunTrace
        What each agent did and when.
    stats : AgentStats
        Cost of the run.
    """

    value: Any
    values: list[Any]
    trace: RunTrace = field(repr=False)
    stats: AgentStats


class Runtime:
    """Runs agents. The engine batches all concurrent requests.

    Parameters
    ----------
    engine : Engine or Model
        An open engine, or an object with the methods of `agents.Model`. An engine without a policy gets a
        `ContributionPolicy`, which prefers requests and prefixes of the agents that contribute most.
    seed : int
        Seed of all completions and random numbers. Equal runs give equal results, however their requests interleave.
    logits_cache : LogitsCache or bool
        Cached logits, which completions without a mode replay. True: a cache of this runtime. False: none.

    Examples
    --------
    >>> with Engine(model, tokenizer) as engine:
    ...     result = Runtime(engine).run(answer, "What is a KV cache?")
    >>> result.value
    """

    def __init__(self, engine: Engine | Model, *, seed: int = 0, logits_cache: LogitsCache | bool = True) -> None:
        check_int("seed", seed, at_least=0)
        if not isinstance(logits_cache, bool | LogitsCache):
            raise TypeError(f"logits_cache must be a LogitsCache, True or False, got {logits_cache!r}")
        self.seed = seed
        self.model: Model
        self._max_requests = MAX_REQUESTS
        if isinstance(engine, Engine):
            if not engine.has_policy:
                engine.use_policy(ContributionPolicy())
            cache = LogitsCache() if logits_cache is True else logits_cache or None
            self.model = EngineModel(engine, cache)
            self._max_requests = engine.max_waiting
        elif callable(getattr(engine, "generate", None)):
            self.model = engine
        else:
            raise TypeError(f"Runtime needs an Engine, got {type(engine).__name__}")

    def run(
        self,
        agent: Agent,
        *arguments: object,
        journal: str | Path | None = None,
        timeout: float | None = None,
        **named: object,
    ) -> AgentResult:
        """Run an agent to its end.

        Parameters
        ----------
        agent : Agent
        *arguments, **named
            Arguments of the agent. They are copied. None is named `journal` or `timeout`.
        journal : path, optional
            File of JSON lines that gets the result of each completion and tool as it arrives. If the file exists, the
            run reads the results that it has and computes only the others. So a run that died continues with the same
            agents, arguments, seed and model, and its tools do not run twice. Tools return values of JSON: a tuple
            becomes a list.
        timeout : float, optional
            Seconds after which the run ends. Functions of tools that run in a thread continue, without an effect.

        Returns
        -------
        AgentResult

        Raises
        ------
        AgentError
            If the agent fails; the cause is its error.
        TimeoutError
            If the run takes longer than `timeout`.
        ValueError
            If the journal is of another seed or damaged, or the timeout is not positive.
        """
        if asyncio._get_running_loop() is None:
            return asyncio.run(self.run_async(agent, *arguments, journal=journal, timeout=timeout, **named))
        loop = asyncio.new_event_loop()  # runs in a thread: this one has a running loop, as in a notebook
        task = loop.create_task(self.run_async(agent, *arguments, journal=journal, timeout=timeout, **named))

        def work() -> None:
            loop.run_until_complete(asyncio.wait([task]))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

        thread = threading.Thread(target=work, name="hf_parallel-agents")
        thread.start()
        try:
            thread.join()
        except BaseException:  # Ctrl-C
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            raise
        return task.result()

    async def run_async(
        self,
        agent: Agent,
        *arguments: object,
        journal: str | Path | None = None,
        timeout: float | None = None,
        **named: object,
    ) -> AgentResult:
        """Run an agent in asyncio; see `run`."""
        if not isinstance(agent, Agent):
            raise TypeError(f"run needs an agent, got {agent!r}: decorate the function with @agent")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r}")
        results = None if journal is None else Journal(journal, self.seed)
        run = AgentRun(self.model, self.seed, self._max_requests, results)
        try:
            values = await asyncio.wait_for(run.drive(agent, arguments, named), timeout)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"the run of agent {agent.name} took more than {timeout} seconds") from error
        return AgentResult(values[-1] if values else None, values, run.trace, run.stats)

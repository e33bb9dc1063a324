"""Models of a runtime: what generates the completions of agents."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hf_parallel.agents.state import joined_contents
from hf_parallel.cache.fingerprint import fingerprint_of_present
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine import Engine, QueueFullError, RequestHandle
from hf_parallel.engine.policies.scores import Contribution, ContributionScores
from hf_parallel.generation.rng import mix

RETRY_SECONDS = 0.05
"""Time after which a request is submitted again that found the queue full."""


@dataclass(frozen=True)
class Completion:
    """Texts of a request, one for each of its `num_return_sequences`, and its cost in tokens."""

    texts: tuple[str, ...]
    tokens: int = 0
    """New tokens."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Tokens of the prompt, and those of them whose keys and values were cached, once for all completions."""
    replayed_tokens: int = 0
    """New tokens whose logits were cached."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Model(Protocol):
    """Generates completions. `passes` counts forward passes."""

    @property
    def passes(self) -> int:
        """Number of forward passes so far."""

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int, hints: Any
    ) -> Completion:
        """Continue a conversation `num_return_sequences` times, a setting whose default is 1.

        `hints` are `AgentHints`.
        """


class EngineModel:
    """The model of an engine, whose requests of a moment are one batch.

    Completions without a mode pass through `logits_cache`, if there is one: a conversation that is continued again
    replays the logits as far as its samples agree, with the same tokens as without (Hive, section 6.1).
    """

    def __init__(self, engine: Engine, logits_cache: LogitsCache | None = None) -> None:
        self.engine, self.logits_cache = engine, logits_cache

    @property
    def passes(self) -> int:
        """Number of forward passes so far."""
        return self.engine.stats.steps

    def fingerprint(self) -> str:
        """Return the fingerprint of the engine's model, without its offloaded weights."""
        return fingerprint_of_present(self.engine.model)

    @property
    def contributions(self) -> Mapping[str, Contribution]:
        """Scores of the agents, as of the last round; another object in each. Empty: the policy has none."""
        scores = getattr(self.engine.policy, "scores", None)
        return scores.current if isinstance(scores, ContributionScores) else {}

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int, hints: Any
    ) -> Completion:
        """See `Model.generate`."""
        given = dict(settings)
        if given.get("do_sample") is not False:  # the model's generation config may say that it samples
            given.setdefault("seed", seed)
        if self.logits_cache is not None and given.get("generation_mode") is None and "parallel_config" not in given:
            given.setdefault("logits_cache", self.logits_cache)
        prompt: Any = list(messages)
        if not getattr(self.engine.tokenizer, "chat_template", None):
            prompt = joined_contents(messages)
        handle = await self._submit(prompt, hints, given)
        try:
            output = await handle.result_async()
        except asyncio.CancelledError:
            handle.cancel()
            raise
        stats = handle.stats
        return Completion(
            texts=tuple(output.answer_texts(self.engine.tokenizer)),
            tokens=stats.decoded_tokens,
            prompt_tokens=output.record.begin,
            reused_tokens=stats.cached_tokens,
            replayed_tokens=stats.replayed_tokens,
        )

    async def _submit(self, prompt: Any, hints: Any, settings: Mapping[str, Any]) -> RequestHandle:
        while True:
            try:
                return self.engine.submit(prompt, agent_hints=hints, **settings)
            except QueueFullError:  # others use the engine, too
                await asyncio.sleep(RETRY_SECONDS)


Script = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any], int], "str | Awaitable[str]"]
"""(messages, settings, seed) -> text. It is called once for each of `num_return_sequences`."""


@dataclass
class ScriptedModel:
    """A function in place of a model, for tests of agents. Each word counts as a token."""

    script: Script
    calls: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)
    """Conversations that were continued."""

    @property
    def passes(self) -> int:
        """Number of requests."""
        return len(self.calls)

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], seed: int, hints: Any
    ) -> Completion:
        """See `Model.generate`."""
        self.calls.append(messages)
        own = dict(settings)
        count = own.pop("num_return_sequences", None) or 1
        seeds = [seed] if count == 1 else [mix(seed, index) for index in range(count)]
        answers = [self.script(messages, own, one) for one in seeds]
        texts = [await answer if inspect.isawaitable(answer) else answer for answer in answers]
        prompt = sum(len(str(message["content"]).split()) for message in messages)
        return Completion(tuple(texts), sum(len(text.split()) for text in texts), prompt)

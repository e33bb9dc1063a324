"""Models that generate completions for agents: an engine, or any object with the methods of `Model`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hf_parallel.agents.state import joined_contents
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine import Engine, QueueFullError, RequestHandle
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.policies import ContributionPolicy
from hf_parallel.engine.policies.contribution import Contribution
from hf_parallel.generation.prompts import Message

Settings: TypeAlias = Mapping[str, Any]
"""Keyword arguments of `Engine.submit`."""
RETRY_SECONDS = 0.05
"""Delay before a request is submitted again if the queue was full."""


@dataclass(frozen=True)
class Completion:
    """Texts of a request, one per `num_return_sequences`, and their cost in tokens."""

    texts: tuple[str, ...]
    tokens: int = 0
    """New tokens."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens, and how many of them had cached keys and values; counted once for all completions."""
    replayed_tokens: int = 0
    """New tokens sampled from cached logits."""


class Model(Protocol):
    """Generates completions."""

    @property
    def passes(self) -> int:
        """Number of forward passes so far."""

    async def generate(
        self, messages: Sequence[Message], settings: Settings, seed: int, hints: AgentHints
    ) -> Completion:
        """Continue a conversation `num_return_sequences` times (a setting, default 1)."""


class EngineModel:
    """An engine as a model. It batches concurrent requests.

    Completions without a mode use `logits_cache`, if given: a second completion of a conversation replays cached logits
    as long as its samples agree. The tokens are the same with and without it (Hive, section 6.1).
    """

    def __init__(self, engine: Engine, logits_cache: LogitsCache | None = None) -> None:
        self.engine = engine
        self.logits_cache = logits_cache

    @property
    def passes(self) -> int:
        """Number of forward passes so far."""
        return self.engine.stats.steps

    @property
    def contributions(self) -> Mapping[str, Contribution]:
        """Contribution scores after the last round, a new mapping each round; empty if the policy has none."""
        policy = self.engine.policy
        return policy.scores.current if isinstance(policy, ContributionPolicy) else {}

    async def generate(
        self, messages: Sequence[Message], settings: Settings, seed: int, hints: AgentHints
    ) -> Completion:
        """See `Model.generate`."""
        settings = dict(settings)
        if settings.get("do_sample") is not False:  # the model's generation config may set do_sample
            settings.setdefault("seed", seed)
        has_mode = settings.get("generation_mode") is not None or "parallel_config" in settings
        if self.logits_cache is not None and not has_mode:
            settings.setdefault("logits_cache", self.logits_cache)
        prompt: str | list[Message] = list(messages)
        if not getattr(self.engine.tokenizer, "chat_template", None):
            prompt = joined_contents(messages)
        handle = await self._submit(prompt, hints, settings)
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

    async def _submit(self, prompt: str | list[Message], hints: AgentHints, settings: Settings) -> RequestHandle:
        while True:
            try:
                return self.engine.submit(prompt, agent_hints=hints, **settings)
            except QueueFullError:  # the engine has other callers
                await asyncio.sleep(RETRY_SECONDS)

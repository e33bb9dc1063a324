"""ScriptedModel: a function in place of a model."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from hf_parallel.agents.models import Completion, Settings
from hf_parallel.engine.hints import AgentHints
from hf_parallel.generation.prompts import Message
from hf_parallel.generation.sampling.rng import mix

Script = Callable[[Sequence[Message], Settings, int], "str | Awaitable[str]"]
"""(messages, settings, seed) -> text, called once per `num_return_sequences`."""


@dataclass
class ScriptedModel:
    """A function in place of a model, Each word counts as a token."""

    script: Script
    calls: list[Sequence[Message]] = field(default_factory=list)
    """Conversations of the requests so far."""

    @property
    def passes(self) -> int:
        """Number of requests."""
        return len(self.calls)

    async def generate(
        self, messages: Sequence[Message], settings: Settings, seed: int, hints: AgentHints
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

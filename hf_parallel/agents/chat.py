"""Chat: a conversation of an agent with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_parallel.agents.execution import current_frame, perform
from hf_parallel.agents.models import Completion
from hf_parallel.agents.state import digest
from hf_parallel.generation.prompts import Message
from hf_parallel.generation.validation import check_int, check_text


class Chat:
    """A conversation.

    Parameters
    ----------
    system : str, optional
        System message.
    messages : list of dict, optional
        First messages, as for a chat template.
    **settings
        Defaults for `gen`: any generation mode, and settings of `model.generate`.

    Attributes
    ----------
    messages : list of dict
        The messages so far.
    """

    def __init__(self, system: str | None = None, *, messages: Sequence[Message] = (), **settings: Any) -> None:
        self.messages: list[Message] = [dict(message) for message in messages]
        if "forkable" in settings:
            raise ValueError("forkable is an argument of each gen, not of Chat")
        self.settings = settings
        if system is not None:
            self._add("system", system)

    def _add(self, role: str, text: str) -> Chat:
        check_text(role, text)
        self.messages.append({"role": role, "content": text})
        return self

    def user(self, text: str) -> Chat:
        """Append a user message."""
        return self._add("user", text)

    def assistant(self, text: str) -> Chat:
        """Append an assistant message."""
        return self._add("assistant", text)

    def fork(self, count: int) -> list[Chat]:
        """Return independent copies. The engine stores their common messages once."""
        return [Chat(messages=self.messages, **self.settings) for _ in range(count)]

    async def gen(self, *, forkable: bool = True, **settings: Any) -> str:
        """Generate the assistant's next message, append it and return it.

        This is a choice: the supervisor may continue the conversation with several completions.

        Parameters
        ----------
        forkable : bool
            False: no choice. The message is generated once.
        **settings
            Settings of `Engine.submit`: `generation_mode`, `max_new_tokens`, `do_sample`, `temperature`, ... The run
            sets the seed, so `do_sample=True` is reproducible.
        """
        settings = {**self.settings, **settings}
        if (settings.get("num_return_sequences") or 1) != 1:
            raise ValueError(
                f"gen returns one text, got num_return_sequences={settings['num_return_sequences']}: use chat.sample(n)"
            )
        messages = [dict(message) for message in self.messages]

        async def generate(key: str, is_choice: bool) -> str:
            (text,) = (await self._generate(key, messages, settings)).texts
            if is_choice:
                current_frame().state.text = text
            return text

        text = await perform(f"gen {digest(messages, settings)}", generate, messages if forkable else None)
        self._add("assistant", text)
        return text

    async def sample(self, n: int, **settings: Any) -> list[str]:
        """Generate several candidates for the next message as one request, such as votes, without appending them.

        Supervisors do not continue them separately.

        Parameters
        ----------
        n : int
            Number of completions; with a mode, `num_return_sequences`.
        **settings
            Settings of `gen`.
        """
        check_int("n", n, at_least=1)
        messages = [dict(message) for message in self.messages]
        settings = {**self.settings, **settings}
        num_return_sequences = settings.setdefault("num_return_sequences", n)
        if num_return_sequences != n:
            raise ValueError(f"num_return_sequences={num_return_sequences} differs from n={n}: give n alone")

        async def generate(key: str, is_choice: bool) -> list[str]:
            return list((await self._generate(key, messages, settings)).texts)

        return await perform(f"sample {digest(messages, settings)}", generate)

    async def complete(self, **settings: Any) -> Completion:
        """Generate the next message, or continue the last one if it is the assistant's, without appending anything.

        It is no choice. Returns the text with its cost in tokens.
        """
        messages = [dict(message) for message in self.messages]
        settings = {**self.settings, **settings}

        async def generate(key: str, is_choice: bool) -> Completion:
            return await self._generate(key, messages, settings)

        return await perform(f"complete {digest(messages, settings)}", generate)

    @staticmethod
    async def _generate(key: str, messages: Sequence[Message], settings: Mapping[str, object]) -> Completion:
        execution = current_frame().execution
        assert execution.state is not None
        completion = await execution.search.runtime.generate(execution, key, messages, settings)
        execution.state.tokens += completion.tokens
        return completion

"""Rollouts with tools: each is a conversation that an engine continues where it stands.

The prompt of a turn is the tokens that the row has, and those of the tools' answers. So sampled tokens are never
decoded and encoded again, and a turn computes only what is new. Conversations do not wait for each other: while one
calls its tools, the engine continues the others.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from transformers import GenerationConfig
from trl.chat_template_utils import parse_response

from hf_parallel.engine import Engine
from hf_parallel.engine.request import Request
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prompts import Message
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.training.requests import as_they_end, sampled_row

ToolResults: TypeAlias = list[tuple[str, Any]]
"""Names of tools, with what they returned."""
Tool: TypeAlias = Callable[..., Any]


class NextAnswer(NamedTuple):
    """A conversation wants the model's next answer: at most `max_new_tokens` tokens after `ids`."""

    ids: list[int]
    max_new_tokens: int
    number: int


Wanted: TypeAlias = "NextAnswer | Future[Any]"
Steps: TypeAlias = Generator[Wanted, Any, None]


@dataclass(frozen=True)
class ToolRules:
    """TRL's rules for tools, which `SharedPrefixGRPOTrainer` inherits.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Parses tool calls by its `response_template`.
    suffix_ids : callable
        Returns the tokens that the chat template writes for tool messages, and for the beginning of the next answer.
    max_completion_length : int
        Tokens of a conversation after its prompt, those of tools included.
    max_length : int
        Tokens of a conversation that the model can read.
    max_iterations : int
        Times that a conversation calls tools.
    loop : asyncio.AbstractEventLoop, optional
        Runs in a thread of its own, for tools that are coroutine functions.
    """

    tokenizer: Any
    suffix_ids: Callable[[list[Message]], list[int]]
    max_completion_length: int
    max_length: int
    max_iterations: int
    loop: asyncio.AbstractEventLoop | None = None


@dataclass
class Conversation:
    """A rollout: a prompt, and answers of the model and messages of tools in turn.

    `messages`, `ids` and their masks grow while `run` is driven.
    """

    prompt_ids: list[int]
    tools: list[Any]
    """Tools that its prompt describes."""
    functions: Mapping[str, Tool]
    """Those that it can call, by name."""
    rules: ToolRules
    completion_ids: list[int] = field(default_factory=list)
    """Tokens after the prompt, as they were sampled, or as the template wrote them for tools."""
    tool_mask: list[int] = field(default_factory=list)
    """1 for sampled tokens, 0 for tokens of tools."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probabilities of sampled tokens under the distribution that was sampled; 0 for tokens of tools."""
    turns: list[int] = field(default_factory=list)
    """Numbers of tokens that the model sampled, by turn."""
    messages: list[Message] = field(default_factory=list)
    num_calls: int = 0
    num_failures: int = 0

    def run(self) -> Steps:
        """Yield turns and futures of tools, and receive the outputs of the engine and the results of the futures."""
        rules = self.rules
        calls = yield from self._answer(rules.max_completion_length)
        iterations = 0
        while calls and iterations < rules.max_iterations:
            results = yield from self._call_tools(calls)
            messages = [_tool_message(name, result) for name, result in results]
            suffix = rules.suffix_ids(messages)
            num_tokens = len(self.completion_ids) + len(suffix)
            num_left = rules.max_completion_length - num_tokens
            if num_left < 0 or len(self.prompt_ids) + num_tokens >= rules.max_length:
                return  # as if the tools had not been called
            self.messages += messages
            self.completion_ids += suffix
            self.tool_mask += [0] * len(suffix)
            self.log_probs += [0.0] * len(suffix)
            if not num_left:
                return
            calls = yield from self._answer(num_left)
            iterations += 1

    def _answer(self, max_new_tokens: int) -> Generator[Wanted, Any, Sequence[Mapping[str, Any]]]:
        """Let the model answer, and return the calls of tools in its answer."""
        ids = self.prompt_ids + self.completion_ids
        output: ParallelOutput = yield NextAnswer(ids, max_new_tokens, len(self.turns))
        sampled, log_probs = sampled_row(output)
        self.completion_ids += sampled
        self.tool_mask += [1] * len(sampled)
        self.log_probs += log_probs
        self.turns.append(len(sampled))
        message = parse_response(self.rules.tokenizer, sampled, prefix=ids, tools=self.tools)
        self.messages.append(message)
        return message.get("tool_calls") or ()

    def _call_tools(self, calls: Sequence[Mapping[str, Any]]) -> Generator[Wanted, Any, ToolResults]:
        """Return the results of calls: those of functions, then those of coroutine functions, which run together."""
        results: ToolResults = []
        running: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            self.num_calls += 1
            if call["type"] != "function":
                name = call.get("name", "unknown")
                results.append((name, self._failure(f"Unsupported tool call type: {call['type']}")))
                continue
            name = call["function"]["name"]
            try:
                function = self.functions.get(name)
                if function is None:
                    raise ValueError(f"Tool {name} not found.")
                result = function(**call["function"]["arguments"])
            except Exception as error:  # which the model reads
                results.append((name, self._failure(error)))
                continue
            if inspect.iscoroutinefunction(function):
                running.append((name, result))
            else:
                results.append((name, result))
        if running:
            assert self.rules.loop is not None, "TRL starts a loop for tools that are coroutine functions"
            together = _gather([coroutine for _, coroutine in running])
            outcomes = yield asyncio.run_coroutine_threadsafe(together, self.rules.loop)
            for (name, _), outcome in zip(running, outcomes, strict=True):
                failed = isinstance(outcome, Exception)
                results.append((name, self._failure(outcome) if failed else outcome))
        return results

    def _failure(self, error: object) -> dict[str, str]:
        self.num_failures += 1
        return {"error": str(error)}


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _tool_message(name: str, result: Any) -> Message:
    """Return the message of a tool. Raises `ValueError` if it has images."""
    if not isinstance(result, list):
        return {"role": "tool", "name": name, "content": str(result)}
    for part in result:
        if isinstance(part, dict) and part.get("type") == "image":
            raise ValueError(f"tool {name} returned an image: rollouts with tools in an engine read text only")
    return {"role": "tool", "name": name, "content": result}


def hold(
    engine: Engine,
    conversations: Sequence[Conversation],
    seed: int | None,
    generation_mode: str,
    generation_config: GenerationConfig,
) -> None:
    """Hold conversations to their ends. Each turn is a request of an open engine.

    Functions of tools run in this thread, one at a time.

    Parameters
    ----------
    engine : Engine
    conversations : sequence of Conversation
    seed : int, optional
        Of all tokens, which do not depend on how long tools take. None: without sampling.
    generation_mode : str
        Whose rows continue their prompts.
    generation_config : GenerationConfig
        Of all turns, without their limits.
    """
    waiting: dict[Future[Any], tuple[Steps, int, Callable[[], Any]]] = {}
    turns: list[tuple[Request, Steps, int]] = []

    def want(run: Steps, index: int, wanted: Wanted) -> None:
        if isinstance(wanted, NextAnswer):
            settings: dict[str, Any] = {} if seed is None else {"seed": mix(mix(seed, index), wanted.number)}
            config = copy.copy(generation_config)
            config.max_new_tokens = wanted.max_new_tokens
            request = engine.prepare(wanted.ids, generation_mode, generation_config=config, **settings)
            turns.append((request, run, index))
        else:
            waiting[wanted] = run, index, wanted.result

    def submit_turns() -> None:
        handles = engine.submit_together([request for request, *_ in turns])
        for (_, run, index), handle in zip(turns, handles, strict=True):
            waiting[handle.ended()] = run, index, handle.result
        turns.clear()

    for index, conversation in enumerate(conversations):
        run = conversation.run()
        want(run, index, next(run))
    submit_turns()
    for ended in as_they_end(waiting):
        for run, index, result in ended:
            try:
                wanted = run.send(result())
            except StopIteration:
                continue
            want(run, index, wanted)
        submit_turns()

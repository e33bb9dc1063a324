"""Value functions of supervisors: agents that score, and reward models.

Any function from a `State` to a number is a value function, such as a verifier that compares `state.yielded` with an
answer. A coroutine function may use `Chat`, `spawn`, `next` and `tool`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.agents.agent import Agent
from hf_parallel.agents.calls import next, spawn
from hf_parallel.agents.state import State, joined_contents
from hf_parallel.generation.prompts import Message, apply_template

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def scored_by(agent: Agent, *, default: float | None = None) -> Callable[[State], Awaitable[float]]:
    """Return a value function that starts an agent with `state.text` and takes the number that it yields.

    Parameters
    ----------
    agent : Agent
        If it yields a text, the first number in it counts.
    default : float, optional
        Value of a text without a number. Default: raise `ValueError`.

    Examples
    --------
    >>> @agent
    ... async def judge(text):
    ...     chat = Chat()
    ...     chat.user(f"Rate this answer from 0 to 10. Reply with the number.\\n\\n{text}")
    ...     yield await chat.gen(max_new_tokens=4)
    >>> answer.under(BestOfN(4, value=scored_by(judge, default=0)))
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"scored_by needs an agent, got {agent!r}: decorate the function with @agent")

    async def value(state: State) -> float:
        found = await next(spawn(agent, state.text))
        if not isinstance(found, str):
            return float(found)
        if (match := NUMBER.search(found)) is not None:
            return float(match[0])
        if default is None:
            raise ValueError(f"agent {agent.name} must yield a number, got {found!r}")
        return default

    return value


def reward_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[State], Awaitable[float]]:
    """Return a value function that applies a reward model: its logit for `state.conversation`.

    Each conversation takes one forward pass, in a thread beside the engine. In a batch, rounding would depend on which
    states are scored together.

    Parameters
    ----------
    model : PreTrainedModel
        Model with a sequence-classification head of one label (`AutoModelForSequenceClassification`).
    tokenizer : PreTrainedTokenizerBase
        Tokenizer of the reward model. Without a chat template, line breaks join the messages.
    """
    if model.config.num_labels != 1:
        raise ValueError(f"a reward model must have one label, got {model.config.num_labels}")
    thread = ThreadPoolExecutor(1, "hf_parallel-reward-model")

    @torch.inference_mode()
    def logit(messages: Sequence[Message]) -> float:
        if tokenizer.chat_template:
            text = apply_template(messages, tokenizer)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            inputs = tokenizer(joined_contents(messages), return_tensors="pt")
        return float(model(**inputs.to(model.device)).logits[0, 0])

    async def value(state: State) -> float:
        return await asyncio.get_running_loop().run_in_executor(thread, logit, state.conversation)

    return value

"""Value functions of supervisors: agents that score, votes of the model, and reward models.

Any function from a `State` to a number is a value function, such as a verifier that compares `state.yielded` with an
answer. A coroutine function may use `Chat`, `spawn`, `next` and `tool`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_parallel.agents.agent import Agent
from hf_parallel.agents.calls import next, spawn
from hf_parallel.agents.chat import Chat
from hf_parallel.agents.state import State, joined_contents
from hf_parallel.generation.prompts import Message, apply_template
from hf_parallel.generation.validation import check_int, check_template

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


def votes(
    question: str, n: int, *, accept: Callable[[str], bool] | None = None, **settings: Any
) -> Callable[[State], Awaitable[float]]:
    """Return a value function that asks the model for several verdicts: the fraction of good ones.

    Parameters
    ----------
    question : str
        User message; `{text}` stands for the last completion.
    n : int
        Number of verdicts.
    accept : callable, optional
        Whether a verdict is good. Default: whether it begins with "yes".
    **settings
        Settings of `Chat.gen`. Default: `do_sample=True, max_new_tokens=8`.

    Examples
    --------
    >>> BeamSearch(2, 4, value=votes("Is this step right? Reply yes or no.\\n\\n{text}", 5))
    """
    check_template("question", question, text="")
    check_int("n", n, at_least=1)
    if accept is not None and not callable(accept):
        raise ValueError(f"accept must be a function of a verdict, got {accept!r}")
    is_good = accept or (lambda verdict: verdict.strip().lower().startswith("yes"))

    async def value(state: State) -> float:
        chat = Chat(**{"do_sample": True, "max_new_tokens": 8, **settings})
        chat.user(question.format(text=state.text))
        verdicts = await chat.sample(n)
        return sum(map(bool, map(is_good, verdicts))) / n

    return value


def reward_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, label: int | None = None
) -> Callable[[State], Awaitable[float]]:
    """Return a value function that applies a reward model: its logit for `state.conversation`.

    Each conversation takes one forward pass, in a thread beside the engine. In a batch, rounding would depend on which
    states are scored together.

    Parameters
    ----------
    model : PreTrainedModel
        Model with a sequence-classification head (`AutoModelForSequenceClassification`).
    tokenizer : PreTrainedTokenizerBase
        Tokenizer of the reward model. Without a chat template, line breaks join the messages.
    label : int, optional
        Index of the logit. Default: the only one.
    """
    num_labels: int = model.config.num_labels  # type: ignore[assignment]
    if label is None and num_labels != 1:
        raise ValueError(
            f"label must be an int from 0 to {num_labels - 1} for a model of {num_labels} labels, got None"
        )
    if label is not None and not 0 <= label < num_labels:
        raise ValueError(f"label must be an int from 0 to {num_labels - 1}, got {label!r}")
    thread = ThreadPoolExecutor(1, "hf_parallel-reward-model")

    @torch.inference_mode()
    def logit(messages: Sequence[Message]) -> float:
        if tokenizer.chat_template:
            text = apply_template(messages, tokenizer)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            inputs = tokenizer(joined_contents(messages), return_tensors="pt")
        return float(model(**inputs.to(model.device)).logits[0, label or 0])

    async def value(state: State) -> float:
        return await asyncio.get_running_loop().run_in_executor(thread, logit, state.conversation)

    return value

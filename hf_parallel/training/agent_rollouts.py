"""Agents as rollouts of TRL's GRPOTrainer: the tree of an agent's requests becomes the tree of the loss.

A request of an agent is a prompt and the tokens that the model sampled after it. Forks, retries and sub-agents have
prompts that begin alike, and a later turn has earlier answers in its prompt. So the requests of all runs of a batch
form a tree of tokens, and the loss computes each node once. Its targets are the sampled tokens alone, and not the
messages of users, tools and other agents.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import torch

from hf_parallel.agents import Agent, Runtime
from hf_parallel.agents.models import Completion, EngineModel, Settings
from hf_parallel.agents.state import digest, joined_contents
from hf_parallel.engine import Engine
from hf_parallel.engine.hints import AgentHints
from hf_parallel.generation.prompts import Chat, Message, render_prompt
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.training.requests import check_no_seed
from hf_parallel.training.rollouts import REQUESTS, TEXTS, RolloutFunc, rollout_engine

VALUES = "values"
"""Field that reward functions receive: what each agent returned, or yielded last."""
ALLOWED = ("max_new_tokens", "num_return_sequences", "stop_strings")
"""Settings of an agent's requests. Others would change the distribution of the loss, which is the trainer's."""

logger = logging.getLogger(__name__)


class SampledRequest(NamedTuple):
    """A prompt, the tokens that were sampled after it, and their log-probabilities under the sampled distribution."""

    prompt: list[int]
    completion: list[int]
    log_probs: list[float]


class TokenModel(EngineModel):
    """An engine as the model of one agent run, which keeps the tokens of all requests.

    A conversation that continues an answer contains the sampled tokens: only the text that the chat template writes
    after the answer is encoded. If the template changes earlier messages, for example by dropping the thinking of an
    answer, the conversation is encoded again and leaves the tree where it differs; `rewritten` counts these requests.

    Parameters
    ----------
    engine : Engine
        An engine with a tokenizer.
    generation_config : GenerationConfig
        Config of all requests. Agents may set only the settings `ALLOWED`.
    """

    def __init__(self, engine: Engine, generation_config: Any) -> None:
        super().__init__(engine)
        self.requests: list[SampledRequest] = []
        self.rewritten = 0
        self._config = generation_config
        self._rows: dict[str, tuple[str, list[int]]] = {}  # text and tokens of a conversation up to an answer

    async def generate(
        self, messages: Sequence[Message], settings: Settings, seed: int, hints: AgentHints
    ) -> Completion:
        """See `Model.generate`. Raises `ValueError` for settings that the trainer decides."""
        for name, value in settings.items():
            if name not in ALLOWED:
                raise ValueError(
                    f"requests of a rollout sample as the trainer does: {name}={value!r} is not one of {list(ALLOWED)}"
                )
        tokenizer = self.engine.tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        text = render_prompt(None, list(messages), tokenizer) if has_template else joined_contents(messages)
        prompt = self._continue(messages, text)
        if prompt is None:
            prompt = list(tokenizer(text, add_special_tokens=not has_template)["input_ids"])
        own: dict[str, Any] = dict(settings)
        if self._config.do_sample:
            own["seed"] = seed
        config = copy.copy(self._config)
        for name in ALLOWED:
            if name in own:
                setattr(config, name, own.pop(name))
        handle = self.engine.submit(
            prompt, self._config.generation_mode, agent_hints=hints, generation_config=config, **own
        )
        try:
            output = await handle.result_async()
        except asyncio.CancelledError:
            handle.cancel()
            raise
        begin = output.record.begin
        texts = tuple(output.answer_texts(tokenizer))
        rows, values = output.record.sampled_log_probs(processed=True)
        for row, (ids, end) in enumerate(zip(output.sequences.tolist(), output.record.lengths, strict=True)):
            completion = ids[begin:end]
            self.requests.append(SampledRequest(prompt, completion, values[rows == row].tolist()))
            answered = digest([*messages, {"role": "assistant", "content": texts[row]}])
            self._rows[answered] = text + tokenizer.decode(completion), prompt + completion
        stats = handle.stats
        return Completion(
            texts=texts,
            tokens=stats.decoded_tokens,
            prompt_tokens=len(prompt),
            reused_tokens=stats.cached_tokens,
        )

    def _continue(self, messages: Sequence[Message], text: str) -> list[int] | None:
        """Return the tokens of a conversation with this text that continues a sampled answer; None: it does not."""
        for length in range(len(messages), 0, -1):
            row_text, ids = self._rows.get(digest(list(messages[:length])), ("", []))
            if ids and text.startswith(row_text):
                return ids + self.engine.tokenizer(text[len(row_text) :], add_special_tokens=False)["input_ids"]
            if ids:
                self.rewritten += 1
                logger.info("the chat template rewrites earlier messages: a request leaves the tree where they differ")
        return None


def make_agent_rollout_func(agent: Agent, **named: Any) -> RolloutFunc:
    """Return a `rollout_func` for `SharedPrefixGRPOTrainer` whose completions are runs of an agent.

    The agent gets the prompt of a row, a text or a chat, as its first argument. A completion consists of all tokens
    that the model sampled in the run, including forks, retries and sub-agents, with the requests in the order in which
    they end. All of them get the advantage of the run. Reward functions receive the agent's last value: as text in the
    completion, and the value itself in the column `values`. The agents of a batch run concurrently in one engine, which
    is open during this time.

    The trainer sets the arguments of `generate`; its `generation_kwargs` must name `shared_prefix`. Agents may set
    `max_new_tokens` (default: `max_completion_length`), `num_return_sequences` and `stop_strings`.

    Parameters
    ----------
    agent : Agent
        Function decorated with `agents.agent`.
    **named
        Further arguments of the agent.

    Raises
    ------
    TypeError
        If `agent` is not an agent.
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"agent must be an agent, got {agent!r}: decorate the function with @agent")

    def rollout(prompts: Sequence[str | Chat], trainer: Any) -> dict[str, list[object]]:
        if not getattr(trainer, "computes_layouts", False):
            raise ValueError(f"runs of agents need a SharedPrefixGRPOTrainer, got {type(trainer).__name__}")
        config = trainer.generation_config
        check_no_seed(config)
        seed = int(torch.randint(2**62, ()))
        with rollout_engine(trainer, len(prompts)) as engine:
            models = [TokenModel(engine, config) for _ in prompts]

            async def run_all() -> list[Any]:
                runs = []
                for index, (prompt, model) in enumerate(zip(prompts, models, strict=True)):
                    runtime = Runtime(model, seed=mix(seed, index))
                    runs.append(runtime.run_async(agent, prompt, **named))
                return await asyncio.gather(*runs)

            results = _run(run_all)
        if not all(model.requests for model in models):
            raise ValueError(f"agent {agent.name} has ended without a request to the model, so that nothing is trained")
        values = [result.value for result in results]
        return {
            "prompt_ids": [model.requests[0].prompt for model in models],
            "completion_ids": [[token for r in model.requests for token in r.completion] for model in models],
            "logprobs": [[value for r in model.requests for value in r.log_probs] for model in models],
            REQUESTS: [model.requests for model in models],
            TEXTS: [str(value) for value in values],
            VALUES: values,
        }

    return rollout


def _run(coroutine: Callable[[], Coroutine[Any, Any, list[Any]]]) -> list[Any]:
    """Run a coroutine in a thread with a loop of its own: this thread may have a running one, as in a notebook."""
    results: list[list[Any]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(asyncio.run(coroutine()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="hf_parallel-rollouts")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

"""Rollouts of TRL's GRPOTrainer in a generation mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from hf_parallel.engine import Engine
from hf_parallel.generation.config import ParallelConfig, make_config
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.pass_streamer import PassStreamer
from hf_parallel.generation.prompts import Chat, encode_task
from hf_parallel.progress import progress_bar
from hf_parallel.training.attention import require_enabled
from hf_parallel.training.conversations import Conversation, ToolRules, hold
from hf_parallel.training.example import ParallelExample
from hf_parallel.transcript.record import Record

EXAMPLES = "parallel_examples"
TEXTS = "parallel_texts"
"""Fields of the dictionary that a `rollout_func` returns: layout and text of each completion."""
REQUESTS = "parallel_requests"
"""The same for completions that are several requests: prompt and sampled tokens of each request, in a list for each
completion."""
PASSES = "passes"
"""Field that reward functions receive: decode passes until the last row of each completion ended."""

MAX_WAITING = 4096
"""Requests that may wait in the engine of a batch."""

RolloutFunc = Callable[[Sequence[str | Chat], GRPOTrainer], dict[str, list[object]]]


def make_rollout_func(
    generation_mode: str, *, chat_template_kwargs: Mapping[str, object] | None = None, **settings: Any
) -> RolloutFunc:
    """Return a `rollout_func` for `SharedPrefixGRPOTrainer` whose completions are runs of a mode.

    A completion consists of all tokens that the model samples in a run, in all its rows, in the order of
    `ParallelExample.target_ids`. Reward functions receive the transcript of the run as its completion, and a column
    `passes`: the number of decode steps until the last row of the run ended. The trainer computes log-probabilities
    from the layout of the run, because a token attended to more than the tokens before it in its row.

    Prompts are tasks or chats, from which `build_prompt` builds the mode's prompt. The trainer sets the other arguments
    of `generate`; its `max_completion_length` is the `max_new_tokens` of each row.

    Parameters
    ----------
    generation_mode : str
        A mode such as `hogwild` or `pdos`.
    chat_template_kwargs : mapping, optional
        Passed to `build_prompt`.
    **settings
        Settings of the mode, without a seed.

    Raises
    ------
    ValueError
        If a mode or setting is unknown, or the mode's rows continue their prompts, so that it needs no `rollout_func`.
    """
    config = make_config(generation_mode, settings)
    if config.traits.rows_continue_prompts:
        kwargs = f"generation_kwargs={{'generation_mode': {config.mode!r}}}"
        raise ValueError(f"{config.mode} needs no rollout_func: pass {kwargs} to GRPOConfig")
    if config.seed is not None:
        raise ValueError(f"seed must be None, or all completions of a prompt are equal; got {config.seed!r}")

    def rollout(prompts: Sequence[str | Chat], trainer: Any) -> dict[str, list[object]]:
        if not getattr(trainer, "computes_layouts", False):
            raise ValueError(f"runs of {config.mode} need a SharedPrefixGRPOTrainer, got {type(trainer).__name__}")
        tokenizer = trainer.processing_class
        prompt_ids = []
        for prompt in prompts:
            task = encode_task(config, prompt, tokenizer, chat_template_kwargs)
            prompt_ids.append(task["input_ids"][0].tolist())
        output = _run_mode(trainer, config, prompt_ids)
        examples, log_probs = _runs_of(output, len(prompt_ids))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [example.target_ids.tolist() for example in examples],
            "logprobs": log_probs,
            PASSES: _passes(output.record, len(prompt_ids)),
            EXAMPLES: examples,
            TEXTS: _texts(output, tokenizer),
        }

    return rollout


def _run_mode(trainer: Any, config: ParallelConfig, prompt_ids: Sequence[Sequence[int]]) -> ParallelOutput:
    """Return the output of a call of a mode for several prompts, which shows a progress bar meanwhile."""
    tokenizer = trainer.processing_class
    bar = progress_bar(
        total=trainer.generation_config.max_new_tokens,
        what=f"Rollout of {len(prompt_ids)} prompts",
        unit="passes",
        is_hidden=not trainer.accelerator.is_main_process,
    )
    with _generating(trainer) as generate, bar:
        inputs = _inputs(prompt_ids, tokenizer)
        return generate(**inputs, parallel_config=config, tokenizer=tokenizer, streamer=PassStreamer(bar.update))


def _runs_of(output: ParallelOutput, num_prompts: int) -> tuple[list[ParallelExample], list[list[float]]]:
    """Return the layout of the run of each prompt, and the log-probabilities of its targets as they were sampled."""
    whole = ParallelExample.from_output(output)
    _, log_probs = output.record.sampled_log_probs(processed=True)  # as TRL has vLLM return them
    prompts_of_targets = np.array([output.record.place(row)[0] for row in whole.target_rows.tolist()])
    examples = []
    log_probs_of_runs = []
    for index in range(num_prompts):
        of_prompt = prompts_of_targets == index
        examples.append(whole.of_rows(whole.target_rows[of_prompt]))
        log_probs_of_runs.append(log_probs[of_prompt].tolist())
    return examples, log_probs_of_runs


def sample_rows(trainer: Any, prompt_ids: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Return a completion of each prompt, and the log-probabilities of its tokens under the sampled distribution."""
    with _generating(trainer) as generate:
        output = generate(**_inputs(prompt_ids, trainer.processing_class))
    record = output.record
    completions = []
    for row, length in zip(output.sequences.tolist(), record.lengths, strict=True):
        completions.append(row[record.begin : length])
    rows, values = record.sampled_log_probs(processed=True)
    log_probs = [values[rows == row].tolist() for row in range(len(completions))]
    return completions, log_probs


def hold_conversations(trainer: Any, prompt_ids: Sequence[Sequence[int]]) -> list[Conversation]:
    """Return a conversation of the trainer's model with its tools for each prompt of a batch.

    An engine is open in this process meanwhile. Prompts, tools, templates and limits are those that the trainer has
    prepared for the batch, as TRL does for its own loop.
    """
    text_config = trainer.model.config.get_text_config(decoder=True)
    rules = ToolRules(
        tokenizer=trainer._tokenizer,
        suffix_ids=trainer._get_tool_suffix_ids,
        max_completion_length=trainer.max_completion_length,
        max_length=text_config.max_position_embeddings,
        max_iterations=trainer.max_tool_calling_iterations,
        loop=getattr(trainer, "async_loop", None),
    )
    conversations = []
    for index, ids in enumerate(prompt_ids):
        functions = {**trainer._sync_tool_dicts[index], **trainer._async_tool_dicts[index]}
        tools = trainer.tools
        if trainer.environment_factories is not None:
            tools = trainer._env_tools[trainer._batch_environments[index]]
        conversations.append(Conversation(list(ids), tools, functions, rules))
    config = trainer.generation_config
    seed: int | None = None
    if config.do_sample:
        seed = getattr(config, "seed", None)
        if seed is None:
            seed = int(torch.randint(2**62, ()))
    with rollout_engine(trainer, len(conversations)) as engine:
        hold(engine, conversations, seed, config.generation_mode, config)
    return conversations


@contextmanager
def rollout_engine(trainer: Any, num_rows: int) -> Iterator[Engine]:
    """Yield an open engine of the trainer's model, in which that many rows generate at the same time."""
    with (
        _unwrapped(trainer) as model,
        Engine(model, trainer._tokenizer, max_rows=num_rows, max_waiting=max(num_rows, MAX_WAITING)) as engine,
    ):
        yield engine


@contextmanager
def _unwrapped(trainer: Any) -> Iterator[Any]:
    """Yield the trainer's model as it generates, without gradients."""
    args = trainer.args
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
    ):
        require_enabled(model)
        yield model


@contextmanager
def _generating(trainer: Any) -> Iterator[Callable[..., ParallelOutput]]:
    """Yield `generate` of the trainer's model, with its generation arguments."""
    with _unwrapped(trainer) as model:
        generation_config = copy.deepcopy(trainer.generation_config)
        generation_config.return_dict_in_generate = True

        def generate(**arguments: object) -> ParallelOutput:
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    arguments[name] = value.to(model.device)
            return model.generate(**arguments, generation_config=generation_config)

        yield generate


def _inputs(prompts: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return arguments of `generate`, padded on the left."""
    longest = max(map(len, prompts))
    pad = getattr(tokenizer, "tokenizer", tokenizer).pad_token_id  # of a processor
    ids = []
    mask = []
    for prompt in prompts:
        padding = longest - len(prompt)
        ids.append([pad] * padding + list(prompt))
        mask.append([0] * padding + [1] * len(prompt))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _passes(record: Record, num_prompts: int) -> list[int]:
    """Return the decode pass of the call in which the last row of each prompt wrote or ended."""
    last_of_row: dict[int, int] = {}
    for event in record.events:
        last_of_row[event.row] = event.forward_pass  # events are in the order of passes
    last = [0] * num_prompts
    for row, forward_pass in last_of_row.items():
        prompt, _ = record.place(row)
        last[prompt] = max(last[prompt], forward_pass)
    return last


def _texts(output: ParallelOutput, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of the run of each prompt."""
    transcripts = getattr(output, "transcripts", None)
    if transcripts:
        return list(transcripts)
    first: dict[int, str] = {}
    for row, text in enumerate(output.answer_texts(tokenizer)):
        prompt, *_ = output.record.place(row)
        first.setdefault(prompt, text)
    return [first[prompt] for prompt in sorted(first)]

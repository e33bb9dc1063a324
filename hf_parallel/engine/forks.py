"""Forks: requests that continue the tokens of a row of another request, which has ended or goes on.

A fork is a request like any other, whose prompt is what it continues. Keys and values are found in the prefix tree: the
engine first lets a row that generates keep there what it has computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_parallel.engine.handle import RequestHandle
from hf_parallel.engine.request import ForkPoint, Request
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.prompts import Chat, apply_template, is_valid_message
from hf_parallel.generation.validation import check_int, is_int

OF_PARENT = ("streamer", "num_return_sequences", "attention_mask", "input_ids", "inputs")
"""Arguments of a request that its forks do not inherit."""
SUBMIT_ARGUMENTS = ("generation_mode", "priority", "submitter", "agent_hints", "cache_salt", "adapter", "lease")
"""Arguments of `Engine.submit` besides the prompt and the settings of `generate`."""
ANSWER = "hf parallel answer"
"""Content of a message in whose place a fork has the tokens of a row."""


@dataclass
class Origin:
    """What forks of a request need: its prompts, the arguments of its submission, and while it runs, the request."""

    prompts: Sequence[np.ndarray]  # by row, int64 [length]
    settings: Mapping[str, Any]  # of `Engine.submit`
    mode_settings: Collection[str]  # names of the settings of its mode, which forks in another mode do not inherit
    obstacle: str  # why it cannot be forked; empty: it can
    request: weakref.ref[Request]

    @classmethod
    def of(cls, request: Request, call: GenerationCall, settings: Mapping[str, Any]) -> Origin:
        """Return the origin of forks of a request, given the arguments of its submission."""
        obstacle = ""
        if not request.config.traits.rows_continue_prompts:
            obstacle = f"rows of generation_mode={request.config.mode!r} are no sequences of tokens"
        elif call.images:
            obstacle = "its prompt has images"
        elif any(call.gaps):
            obstacle = "its prompt has masked tokens"
        kept: dict[str, Any] = {}
        if not obstacle:  # else settings may hold the features of images
            kept = {name: value for name, value in settings.items() if name not in OF_PARENT}
        return cls(
            prompts=call.prompts,
            settings=kept,
            mode_settings={*request.config.fields(), "parallel_config"} - {"seed"},
            obstacle=obstacle,
            request=weakref.ref(request),
        )


def point_of(origin: Origin, row: int, num_tokens: int) -> ForkPoint | None:
    """Return the point after a number of new tokens of a row; None: the request does not run, or cannot be forked."""
    request = origin.request()
    return None if request is None or origin.obstacle else ForkPoint(request, row, num_tokens)


def fork_point(origin: Origin, handle: RequestHandle, row: object, at: object) -> tuple[np.ndarray, int]:
    """Return the tokens of a row up to a fork, int64 `[length]`, and how many of them are new.

    `at` is the number of new tokens; None: all that the row has now, without a token that has ended it. Raises
    `ValueError` for a row, or a number of tokens, that the request does not have.
    """
    if origin.obstacle:
        raise ValueError(f"the request cannot be forked: {origin.obstacle}")
    num_rows = len(origin.prompts)
    check_int("row", row, at_least=0)
    assert isinstance(row, int)
    if row >= num_rows:
        raise ValueError(f"row must be below the {num_rows} rows of the request, got {row}")
    tokens = handle.row_tokens(row)
    if at is None:
        at = len(tokens) - bool(tokens and tokens[-1] in handle.end_tokens)
    check_int("at", at, at_least=0)
    assert isinstance(at, int)
    if at > len(tokens):
        so_far = "" if handle.done else " so far"
        raise ValueError(f"at must be at most the {len(tokens)} tokens that row {row} has{so_far}, got {at}")
    return np.concatenate((origin.prompts[row], np.array(tokens[:at], np.int64))), at


def fork_settings(
    origin: Origin, n: object, children: Sequence[Mapping[str, Any]] | None, changes: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the arguments of each fork: those of the parent, then `changes` of all, then those of the fork itself.

    Forks with a common seed get the seeds that follow it. Raises `ValueError` unless there are `n` of them.
    """
    if children is not None and not (
        isinstance(children, list | tuple) and children and all(isinstance(child, Mapping) for child in children)
    ):
        raise ValueError(f"children must be a list of mappings, one for each fork, got {children!r}")
    if n is None:
        n = 1 if children is None else len(children)
    check_int("n", n, at_least=1)
    assert isinstance(n, int)
    if children is not None and len(children) != n:
        raise ValueError(f"n={n} differs from the {len(children)} children: give one of them")
    seed = changes.get("seed", origin.settings.get("seed"))
    forks = []
    for index in range(n):
        of_fork = {**changes, **(children[index] if children is not None else {})}
        settings = inherited(origin.settings, origin.mode_settings, of_fork) | of_fork
        if is_int(seed) and n > 1 and "seed" not in (children[index] if children is not None else ()):
            settings["seed"] = seed + index
        forks.append(settings)
    return forks


def inherited(
    settings: Mapping[str, Any], mode_settings: Collection[str], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a parent that a fork with `changes` has, too: none of its mode if the fork has another."""
    mode = settings.get("generation_mode")
    if changes.get("generation_mode", mode) == mode:
        return dict(settings)
    return {name: value for name, value in settings.items() if name not in mode_settings}


def with_suffix(tokens: np.ndarray, suffix: Any, tokenizer: Any, template: Mapping[str, Any] | None) -> torch.Tensor:
    """Return a prompt, int64 `[1, length]`: tokens and a suffix, which is None, a text, token ids or messages.

    Messages follow the tokens as if these ended with the assistant's message; `template` are variables of the chat
    template. Raises `ValueError` for another suffix, and for messages that the template cannot write there.
    """
    ids: Any = suffix
    if suffix is None:
        ids = []
    elif isinstance(suffix, str) or _is_chat(suffix):
        if tokenizer is None:
            raise ValueError("suffix is text: give the Engine a tokenizer, or pass token ids")
        text = suffix if isinstance(suffix, str) else messages_after_answer(suffix, tokenizer, template)
        ids = encode(tokenizer, text)
    try:
        added = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"suffix must be text, messages or token ids, got {type(suffix).__name__}") from error
    if added.numel() and (added.dim() != 1 or added.dtype.is_floating_point or added.dtype == torch.bool):
        got = f"{list(added.shape)} {added.dtype}"
        raise ValueError(f"suffix must be text, messages, or token ids [length], got {got}")
    return torch.cat((torch.from_numpy(tokens), added.to(torch.int64)))[None]


def messages_after_answer(messages: Chat, tokenizer: Any, template: Mapping[str, Any] | None) -> str:
    """Return the text that a chat template writes after an answer: its end, messages, and the beginning of the next.

    Raises `ValueError` if the template cannot write the messages there.
    """
    answered: list[Any] = [{"role": "user", "content": ANSWER[::-1]}, {"role": "assistant", "content": ANSWER}]
    text = apply_template([*answered, *messages], tokenizer, add_generation_prompt=True, **(template or {}))
    before, mark, after = text.partition(ANSWER)
    if not mark:
        raise ValueError("suffix: the chat template does not write the answer before these messages")
    return after


def _is_chat(suffix: Any) -> bool:
    is_list = isinstance(suffix, list | tuple) and bool(suffix)
    if not is_list or not isinstance(suffix[0], Mapping):
        return False
    if not all(map(is_valid_message, suffix)):
        raise ValueError(f"suffix must hold messages with role and content, got {suffix!r}")
    return True

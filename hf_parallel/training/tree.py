"""Log-probabilities of completions over shared prompts, computed as a tree (Hydragen, applied to the loss)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.training.example import ParallelExample
from hf_parallel.training.masks import stock_mask


class TokenStatistics(NamedTuple):
    """For each token of each completion, in order: float `[N]`."""

    log_probs: torch.Tensor
    entropies: torch.Tensor | None  # of the distribution that the token was sampled from, without gradients


def tree_logprobs(
    model: PreTrainedModel, prompt_ids: Any, completions: Sequence[Any], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return the log-probability of each token of each completion, with gradients.

    Every shared prefix is computed once: prompts, and the beginnings that completions share. The model computes the
    tree with its own attention, under a 4D mask, so that gradient checkpointing and autocast work as usual.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with `sdpa` or `eager` attention; it need not be enabled.
    prompt_ids : 1-D tensor or list of int, or a list of these
        The prompt of all completions, or one for each.
    completions : list of 1-D tensors or lists of int
    temperature : float
        Divides the logits.

    Returns
    -------
    list of torch.Tensor
        For each completion, float `[length]`.

    Raises
    ------
    ValueError
        If a prompt is empty, or the model's attention takes no 4D mask.
    """
    answers = [_ids(completion) for completion in completions]
    single = isinstance(prompt_ids, torch.Tensor) or (len(prompt_ids) > 0 and isinstance(prompt_ids[0], int))
    prompts = [_ids(prompt_ids)] * len(answers) if single else [_ids(prompt) for prompt in prompt_ids]
    found = token_statistics(model, model.config, prompts, answers, temperature)
    return list(found.log_probs.split([len(answer) for answer in answers]))


def token_statistics(
    model: Any,
    config: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float = 1.0,
    with_entropies: bool = False,
) -> TokenStatistics:
    """Compute a tree of completions; `model` may be a wrapper of the model with this config."""
    if not all(prompts):
        raise ValueError("prompts must have at least one token, from whose logits the first token is sampled")
    example = ParallelExample.from_tree(prompts, completions)
    device = next(model.parameters()).device
    queries, inverse = np.unique(example.target_queries, return_inverse=True)
    logits = model(
        input_ids=torch.from_numpy(example.input_ids)[None].to(device),
        position_ids=torch.from_numpy(example.position_ids)[None].to(device),
        attention_mask=stock_mask(example, config, next(model.parameters()).dtype, device),
        use_cache=False,
        logits_to_keep=torch.from_numpy(queries).to(device),
    ).logits[0]
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    rows, ids = torch.from_numpy(inverse).to(device), torch.from_numpy(example.target_ids).to(device)
    normalizers = logits.logsumexp(-1)
    entropies = None
    if with_entropies:
        with torch.no_grad():
            entropies = (normalizers - (logits.softmax(-1) * logits).sum(-1))[rows]
    return TokenStatistics(logits[rows, ids] - normalizers[rows], entropies)


def _ids(tokens: Any) -> list[int]:
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)

"""Log-probabilities of completions over shared prompts, computed as a tree (Hydragen, applied to the loss)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_parallel.training.example import ParallelExample
from hf_parallel.training.masks import stock_mask


class Targets(NamedTuple):
    """Targets of a completion: the row of the batch, the tokens there whose logits predict them, and their ids."""

    row: int
    queries: list[int]
    ids: list[int]


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
    example = make_tree(prompts, answers)
    parameter = next(model.parameters())
    batch = tree_batch([example], model.config, parameter.dtype, parameter.device)
    queries, targets = (
        torch.from_numpy(values).to(parameter.device) for values in (example.target_queries, example.target_ids)
    )
    logits = model(**batch, use_cache=False, logits_to_keep=queries).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1:
        logits = logits / temperature
    log_probs = -F.cross_entropy(logits, targets, reduction="none")
    return list(log_probs.split([len(answer) for answer in answers]))


def make_tree(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> ParallelExample:
    """Return the tree of completions. Raises `ValueError` for an empty prompt."""
    if not all(prompts):
        raise ValueError("prompts must have at least one token, from whose logits the first token is sampled")
    return ParallelExample.from_tree(prompts, completions)


def tree_batch(
    examples: Sequence[ParallelExample], config: Any, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """Return arguments of a model with stock attention for examples whose keys never move, padded to the longest one.

    `input_ids` and `position_ids` are int64 `[B, T]`, `attention_mask` is that of `stock_mask` for a batch.
    """
    shape = len(examples), max(map(len, examples))
    batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    masks = []
    for row, example in enumerate(examples):
        batch["input_ids"][row, : len(example)] = torch.from_numpy(example.input_ids)
        batch["position_ids"][row, : len(example)] = torch.from_numpy(example.position_ids)
        masks.append(stock_mask(example, config, dtype, device))
    batch = {name: values.to(device) for name, values in batch.items()}
    if len(masks) == 1:  # which may be a `BlockMask`
        return {**batch, "attention_mask": masks[0]}
    if isinstance(masks[0], dict):
        return {**batch, "attention_mask": {kind: _padded([mask[kind] for mask in masks]) for kind in masks[0]}}
    return {**batch, "attention_mask": _padded(masks)}


@contextmanager
def computing_targets(model: Any, targets: Sequence[Targets]) -> Iterator[None]:
    """Pass the hidden states of the targets alone, `[1, N, hidden_size]`, to the head of a model."""
    rows = torch.tensor([row.row for row in targets for _ in row.queries], dtype=torch.int64)
    queries = torch.tensor([query for row in targets for query in row.queries], dtype=torch.int64)

    def select(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[rows, queries][None]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _padded(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack masks `[1, 1, T, T]`. Padding sees the first token, as attention over no token is NaN."""
    length = max(mask.shape[-1] for mask in masks)
    blocked = False if masks[0].dtype == torch.bool else torch.finfo(masks[0].dtype).min
    out = masks[0].new_full((len(masks), 1, length, length), blocked)
    for padded, mask in zip(out, masks, strict=True):
        n = mask.shape[-1]
        padded[:, :n, :n] = mask[0]
        padded[:, n:, 0] = mask[0, 0, 0, 0]
    return out


def _ids(tokens: Any) -> list[int]:
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)

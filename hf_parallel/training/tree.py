"""Log-probabilities of completions over shared prompts, computed as a tree (Hydragen, applied to the loss)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from hf_parallel.cache.images import Image
from hf_parallel.training.attention import computes_exactly, layout_logits
from hf_parallel.training.example import ParallelExample, as_ids, padded_tokens
from hf_parallel.training.images import add_images, read_prompts
from hf_parallel.training.masks import make_masks, stateful_kinds
from hf_parallel.training.states import states_branched


class Targets(NamedTuple):
    """Targets of a completion: the row of the batch, the tokens there whose logits predict them, and their ids."""

    row: int
    queries: list[int]
    ids: list[int]

    def where(self, mask: Sequence[bool]) -> Targets:
        """Return the targets that a mask keeps."""
        return Targets(self.row, list(compress(self.queries, mask)), list(compress(self.ids, mask)))


def distinct_targets(targets: Sequence[Targets]) -> tuple[list[Targets], list[int]]:
    """Return targets without those that several completions share, and the index among them of each given one."""
    number: dict[tuple[int, int, int], int] = {}  # by row, query and id
    distinct: list[Targets] = []
    indices: list[int] = []
    for of_completion in targets:
        new = Targets(of_completion.row, [], [])
        for query, token in zip(of_completion.queries, of_completion.ids, strict=True):
            target = of_completion.row, query, token
            if target not in number:
                number[target] = len(number)
                new.queries.append(query)
                new.ids.append(token)
            indices.append(number[target])
        distinct.append(new)
    return distinct, indices


def tree_logprobs(
    model: PreTrainedModel,
    prompt_ids: Any,
    completions: Sequence[torch.Tensor | Sequence[int]],
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """Return the log-probability of each token of each completion, with gradients.

    Every shared prefix is computed once: prompts, and the beginnings that completions share. The model computes the
    tree with its own attention, under a 4D mask, so gradient checkpointing and autocast work as usual.

    An enabled model on a CPU computes the tree with the kernels of inference, without autocast. Its log-probabilities
    then equal those of sampling to the last bit.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with `sdpa` or `eager` attention; it need not be enabled.
    prompt_ids : 1-D tensor or list of int, or a list of these, or a mapping
        The prompt of all completions, or one for each. For prompts with images, the processor's output; the model
        must be enabled, and gradients reach its vision tower.
    completions : list of 1-D tensors or lists of int
        Token ids of each completion.
    temperature : float
        Divides the logits.

    Returns
    -------
    list of torch.Tensor
        For each completion, float `[length]`.

    Raises
    ------
    ValueError
        If there is no completion, a prompt is empty or missing, ids are not 1-D, `temperature` is not positive, the
        model's attention takes no 4D mask, or images do not fit their prompts.
    """
    answers = [as_ids(completion) for completion in completions]
    images: Sequence[Image] = ()
    if isinstance(prompt_ids, Mapping):
        prompt_ids, images = read_prompts(model, prompt_ids)
        if len(prompt_ids) == 1:
            (prompt_ids,) = prompt_ids
    is_array = isinstance(prompt_ids, torch.Tensor | np.ndarray)
    is_one_prompt = is_array or len(prompt_ids) == 0 or isinstance(prompt_ids[0], int)
    if is_one_prompt:
        prompts = [as_ids(prompt_ids)] * len(answers)
    else:
        prompts = [as_ids(prompt) for prompt in prompt_ids]
    if not temperature > 0:
        raise ValueError(f"temperature must be greater than 0, got {temperature}")
    example = ParallelExample.from_tree(prompts, answers)
    parameter = next(model.parameters())
    queries = torch.from_numpy(example.target_queries).to(parameter.device)
    targets = torch.from_numpy(example.target_ids).to(parameter.device)
    if computes_exactly(model) and not images:
        logits = layout_logits(model, example, logits_to_keep=queries)
    else:
        batch = tree_batch([example], model.config, parameter.dtype, parameter.device, images)
        with states_branched(model, [example]):
            logits = model(**batch, use_cache=False, logits_to_keep=queries).logits[0]
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = logits / temperature
    log_probs = -F.cross_entropy(logits, targets, reduction="none")
    return list(log_probs.split([len(answer) for answer in answers]))


def tree_batch(
    examples: Sequence[ParallelExample],
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    images: Sequence[Image] = (),
) -> dict[str, Any]:
    """Return arguments of a model for examples in the form of `stock_mask`; layers with a state get no mask."""
    input_ids, position_ids = padded_tokens(examples)
    batch: dict[str, Any] = {"input_ids": input_ids.to(device), "position_ids": position_ids.to(device)}
    masks = make_masks(examples, config, dtype, device)
    if images:
        batch = add_images(batch, masks, examples, images, config)
    states = stateful_kinds(config)
    if states:
        batch["attention_mask"] = {**masks, **dict.fromkeys(states)} if masks else None
    elif len(masks) > 1:
        batch["attention_mask"] = masks
    else:
        (batch["attention_mask"],) = masks.values()
    return batch


@contextmanager
def computing_targets(model: PreTrainedModel, targets: Sequence[Targets]) -> Iterator[None]:
    """Pass the hidden states of the targets alone, `[1, N, hidden_size]`, to the head of a model."""
    row_indices: list[int] = []
    query_indices: list[int] = []
    for row in targets:
        row_indices += [row.row] * len(row.queries)
        query_indices += row.queries
    rows = torch.tensor(row_indices, dtype=torch.int64)
    queries = torch.tensor(query_indices, dtype=torch.int64)

    def select(module: torch.nn.Module, args: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[rows, queries][None]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()

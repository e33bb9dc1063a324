"""Forward passes of models whose own attention runs, over dense copies of rows: `hf_parallel.cache.dense_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_parallel.cache import BlockCache, ForwardPass
from hf_parallel.cache.dense_rows import dense_batches
from hf_parallel.kernels import to_device
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.mixers import Mixer, mixers_wrapped, packed_calls
from hf_parallel.models.probing.signature import cache_argument, parameters_of


def dense_logits(
    model: PreTrainedModel,
    cache: BlockCache,
    forward: ForwardPass,
    ids: torch.Tensor,
    keep: Sequence[int] | None = None,
    padded: bool = True,
    mixers: Sequence[Mixer] = (),
) -> torch.Tensor:
    """Compute a prepared pass over packed tokens `ids`, int64 `[T]`, in one call of the model per number of new tokens.

    Return the logits `[len(keep), vocabulary]` of the packed tokens with these indices; None: of all `T`. `padded`:
    whether rows of unequal lengths may share a call. Raises `UnsupportedModelError` for images.
    """
    if forward.images:
        raise UnsupportedModelError(f"{type(model).__name__} attends to dense rows, which cannot hold images")
    accepted = parameters_of(model.forward)
    is_wanted = np.zeros(len(ids), np.bool_)  # whether the logits of a packed token are asked for
    is_wanted[slice(None) if keep is None else keep] = True
    index = np.zeros(len(ids), np.int64)  # of each packed token in the logits of all calls
    num_logits = 0
    logits: list[torch.Tensor] = []
    for batch in dense_batches(forward, cache.device, padded, cache.state_plan if mixers else None):
        cache.dense.batch = batch
        tokens = to_device(batch.tokens.reshape(-1), ids.device).view(batch.tokens.shape)
        wanted_columns = is_wanted[batch.tokens].any(axis=0).nonzero()[0]
        last = batch.tokens.shape[1] - 1
        first_column = min([*wanted_columns, last])  # a call computes the logits of at least one token
        ends = batch.tokens[:, first_column:]  # int64 [rows, columns]
        arguments: dict[str, Any] = {cache_argument(model): cache}
        if "position_ids" in accepted:
            arguments["position_ids"] = forward.position_ids[tokens]
        if "logits_to_keep" in accepted:
            arguments["logits_to_keep"] = ends.shape[1]
        with mixers_wrapped(model, mixers, packed_calls(cache)):
            output = model(
                input_ids=ids[tokens], attention_mask=batch.mask, use_cache=True, return_dict=True, **arguments
            )
        logits.append(output.logits[:, -ends.shape[1] :].flatten(0, 1))
        index[ends.reshape(-1)] = num_logits + np.arange(ends.size)
        num_logits += ends.size
    if keep is not None:
        index = index[keep]
    return torch.cat(logits).index_select(0, to_device(index, logits[0].device))

"""Ranks: processes that compute one model together, by tensor or pipeline parallelism of Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel

_COMMON = ("tp", "pp")  # dimensions of a mesh along which ranks work on the same tokens


def num_ranks(model: object) -> int:
    """Return the number of processes that compute one pass of a model together."""
    stage = getattr(model, "_pp_stage", None)
    return (getattr(model, "tp_size", None) or 1) * (1 if stage is None else stage.pp_size)


def leads(model: object) -> bool:
    """Return whether this process is the first of those that compute a model, or the only one."""
    return num_ranks(model) == 1 or distributed.get_rank() == 0


def num_local_layers(model: PreTrainedModel) -> int:
    """Return the number of decoder layers that this process computes."""
    layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    stage = getattr(model, "_pp_stage", None)
    if stage is None:
        return layers
    begin, end = stage.layer_range_for_rank(stage.pp_rank, layers)
    return int(end - begin)


def common_seed(model: Any) -> int:
    """Return a seed from the global generator of the first rank, the same on all ranks of a model."""
    mesh = model._device_mesh
    seed = torch.randint(2**62, (1,)).to(mesh.device_type)
    for dimension, name in enumerate(mesh.mesh_dim_names or [_COMMON[0]]):
        if name in _COMMON and mesh.size(dimension) > 1:
            distributed.broadcast(seed, group=mesh.get_group(dimension), group_src=0)
    return int(seed)

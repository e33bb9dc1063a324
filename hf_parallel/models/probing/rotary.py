"""Finds the rotary embedding of each layer of a model, from queries of one token at several positions.

A single token attends only to itself, so its queries at two positions differ only by their rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_parallel.cache import LayerReads
from hf_parallel.kernels import RotarySpec, rotate_by
from hf_parallel.models.latent import rotated_first

PROBE_POSITIONS = (1, 7)  # the queries of one token at these positions are compared with those at position 0
QUERY_TOLERANCE = (1e-4, 3e-2)  # relative errors allowed in float32 and in half precision

Queries = dict[int, torch.Tensor]  # query [heads, head_dim] of one token, by layer index


def match_rotary(
    model: PreTrainedModel,
    at_zero: Queries,
    queries: dict[int, Queries],
    leads: Mapping[int, int],
    reads: Mapping[int, LayerReads],
) -> tuple[dict[int, RotarySpec | None] | None, str]:
    """Find each layer's rotary embedding: the candidate that maps its query at position 0 to the other positions.

    `leads` has the number of rotated dimensions of layers that cache latents. If there is no embedding by which blocks
    could be rotated, return None and the reason.
    """
    name = type(model).__name__
    changing = sorted(rope_types(model.config) & {"dynamic", "longrope"})
    if changing:
        return None, f"{name} uses {changing[0]} RoPE scaling, whose frequencies change with the length"
    candidates = [RotarySpec(inv_freq, style) for inv_freq in frequencies(model) for style in (False, True)]
    specs: dict[int, RotarySpec | None] = {}
    for layer, base in at_zero.items():
        rotated = {position: of_layers[layer] for position, of_layers in queries.items()}
        if layer in leads:
            lead = leads[layer]
            base = rotated_first(base, lead)
            rotated = {position: rotated_first(query, lead) for position, query in rotated.items()}
        near = {position: rotated[position] for position in PROBE_POSITIONS}
        fits = [spec for spec in (None, *candidates) if _explains(spec, base, near)]
        if not fits:
            if candidates:
                return None, f"{name} changes its queries after their rotary embedding (layer {layer})"
            return None, f"{name} has positions that are not rotary embeddings"
        if any(_differ(query.norm(dim=-1), base.norm(dim=-1)) for query in rotated.values()):
            return None, f"{name} scales its queries by their position (layer {layer})"
        spec = fits[0]
        if spec is not None and layer in leads:
            if spec.rotary_dim != leads[layer]:
                return None, f"{name} rotates {spec.rotary_dim} of the {leads[layer]} dimensions that it caches for it"
            spec = replace(spec, of_values=True)
        specs[layer] = spec
    for layer, read in reads.items():
        if specs[read.source] != specs[layer]:
            return None, f"{name} rotates its queries otherwise than the keys of layer {read.source} (layer {layer})"
    if all(spec is None for spec in specs.values()):
        return None, f"{name}'s queries carry no position that could be rotated"
    return specs, ""


def norms_differ(queries: Mapping[int, Queries]) -> bool:
    """Return whether the norm of a layer's queries depends on the position, by which `queries` are grouped."""
    at_zero = queries[0]
    for at_position in queries.values():
        for layer, query in at_position.items():
            if _differ(query.norm(dim=-1), at_zero[layer].norm(dim=-1)):
                return True
    return False


def is_scaled(queries: Queries, others: Queries) -> bool:
    """Return whether queries are multiples of others in each of their layers, with another factor than 1 in some."""
    factors = {layer: query.norm() / others[layer].norm() for layer, query in queries.items()}
    if any(_differ(query, factors[layer] * others[layer]) for layer, query in queries.items()):
        return False
    return any(_differ(query, others[layer]) for layer, query in queries.items())


def frequencies(model: PreTrainedModel) -> list[tuple[float, ...]]:
    """Return the distinct `inv_freq` buffers of a model, after scaling."""
    distinct: dict[tuple[float, ...], None] = {}  # in order
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            distinct[tuple(buffer.double().flatten().tolist())] = None
    return list(distinct)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return a config's `rope_parameters`, one dictionary per layer type."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]


def rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the RoPE types of a model's config, `"default"` where frequencies are not scaled."""
    return {str(parameters.get("rope_type", "default")) for parameters in _rope_parameters(config)}


def max_length(model: PreTrainedModel) -> int | None:
    """Return the length up to which a model's RoPE frequencies are those of a short sequence."""
    positions = position_limit(model)
    types = rope_types(model.config)
    limits: list[int] = []
    if "dynamic" in types:
        limits.append(positions)
    if "longrope" in types:
        for parameters in _rope_parameters(model.config):
            limits.append(parameters.get("original_max_position_embeddings", positions))
    return min(limits, default=None)


def _explains(spec: RotarySpec | None, base: torch.Tensor, rotated: Queries) -> bool:
    """Return whether `spec` rotates the query `base` at position 0 to those at the other positions."""
    if spec is None:
        return not any(_differ(query, base) for query in rotated.values())
    if spec.rotary_dim > base.shape[-1]:
        return False
    for position, query in rotated.items():
        expected = rotate_by(base.double(), position, spec).to(base.dtype)
        if _differ(query, expected):
            return False
    return True


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    difference = (a.double() - b.double()).abs().max()
    return bool(difference > tolerance(a, QUERY_TOLERANCE) * b.double().abs().max())


def tolerance(x: torch.Tensor, allowed: tuple[float, float]) -> float:
    """Return the relative error allowed for a tensor's dtype: the second one for half precision."""
    return allowed[0] if x.dtype in (torch.float32, torch.float64) else allowed[1]


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return a model's number of positions (`max_position_embeddings`), or None if it has no limit."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "max_target_positions", "max_seq_len"):
        limit: int | None = getattr(text, name, None)
        if limit:
            return limit
    return None


def position_limit(model: PreTrainedModel) -> int:
    """Return the number of positions that can be probed: all of the model's."""
    return max_positions(model.config) or max(PROBE_POSITIONS) + 1

"""Fused projections: q, k and v, and gate and up, computed as one matrix product each in compiled layers.

A decode step of a few rows reads every weight once; one large product reads them faster than several small ones. The
weights of a group become parts of one tensor, so that there is no second copy. In a compiled layer each projection
takes its part of the whole product, and Inductor computes equal products once (`MERGE`). Uncompiled, nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F

from hf_parallel.models.intercept.modules import Forward, replaced_forwards

GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of projections of one input. Correct for others, too: each computes the product with its own input."""

_aten = torch.ops.aten
_MERGED = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten.permute.default,
    torch.ops.prims.convert_element_type.default,  # of the arguments under autocast
)


@dataclass(eq=False)
class FusedLinear:
    """Linear layers whose weights, and biases if they have any, are parts of one tensor each."""

    layers: list[nn.Linear]
    weight: nn.Parameter  # [sum of out_features, in_features]
    bias: nn.Parameter | None

    def is_intact(self) -> bool:
        """Whether the parameters are still parts of the tensors, and not replaced or moved to another device."""
        if not _are_parts([layer.weight for layer in self.layers], self.weight):
            return False
        return self.bias is None or _are_parts([layer.bias for layer in self.layers], self.bias)

    def separate(self) -> None:
        """Give each layer tensors of its own again."""
        for layer in self.layers:
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.clone()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let compiled code compute the layers as one product."""
        try:
            for layer in self.layers:
                vars(layer)["_fused"] = (self.weight, self.bias)
            with replaced_forwards(self._forwards()):
                yield
        finally:
            for layer in self.layers:
                vars(layer).pop("_fused", None)

    def _forwards(self) -> Iterator[tuple[nn.Linear, Forward]]:
        start = 0
        for layer in self.layers:
            stop = start + layer.out_features
            yield layer, _part_of_product(start, stop)
            start = stop


def fuse(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[FusedLinear], str]:
    """Fuse the projections of decoder layers; return them, and why others cannot be (empty if there are none).

    Skips what is not a plain linear layer (adapters, quantized layers), has hooks, or shares its weights.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    fused: list[FusedLinear] = []
    reasons: Counter[str] = Counter()
    modules = [module for layer in layers for module in layer.modules()]
    for module, names in product(modules, GROUPS):
        group: list[Any] = [getattr(module, name, None) for name in names]
        if any(linear is None for linear in group):
            continue
        reason = _reason_against(group, uses)
        if reason:
            reasons[f"{', '.join(names)}: {reason}"] += 1
            continue
        weight = _join([linear.weight for linear in group])
        bias = None if group[0].bias is None else _join([linear.bias for linear in group])
        fused.append(FusedLinear(group, weight, bias))
    return fused, "; ".join(f"{reason} ({count} times)" for reason, count in reasons.items())


def _reason_against(group: Sequence[Any], uses: Counter[int]) -> str:
    for linear in group:
        if type(linear) is not nn.Linear:
            return f"{type(linear).__name__} is not a plain linear layer"
        if "forward" in vars(linear) or linear._forward_hooks or linear._forward_pre_hooks:
            return "a layer has hooks or another forward"
    parameters = [parameter for linear in group for parameter in linear.parameters(recurse=False)]
    if not all(_is_plain(parameter) for parameter in parameters):
        return "a weight is no plain parameter"
    if any(uses[id(parameter)] > 1 or not _has_own_storage(parameter) for parameter in parameters):
        return "a weight is shared"
    kinds = {(linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in group}
    return "the layers differ in input, dtype, device or bias" if len(kinds) > 1 else ""


def _is_plain(parameter: nn.Parameter) -> bool:
    is_subclass = type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor
    return not is_subclass and not parameter.is_inference()


def _has_own_storage(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def _join(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return nn.Parameter(joined, requires_grad=False)


def _are_parts(parameters: Iterable[torch.Tensor], whole: torch.Tensor) -> bool:
    address = whole.data_ptr()
    for part in parameters:
        if part.data_ptr() != address or part.dtype != whole.dtype:
            return False
        address += part.numel() * part.element_size()
    return True


def _part_of_product(start: int, stop: int) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
        if not torch.compiler.is_compiling():
            return F.linear(input, self.weight, self.bias)
        weight, bias = self._fused  # type: ignore[misc]
        return F.linear(input, weight, bias)[..., start:stop]  # type: ignore[arg-type]

    return forward


class _MergeProducts(CustomGraphPass):
    """Computes equal matrix products of a graph once."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace equal products, and equal operations that prepare their arguments.

        All operations are functional at this stage.
        """
        first: dict[object, torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.target not in _MERGED:
                continue
            same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)

    def uuid(self) -> str:
        """Key of the pass in Inductor's cache."""
        return "hf_parallel.models.decode.fused 2"


MERGE = _MergeProducts()
"""Pass of Inductor that lets the layers of a group share their product."""

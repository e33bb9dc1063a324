"""Differentiable attention over the views of a layout, as an attention implementation named `hf_parallel_train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_parallel.generation.mixin import is_enabled, unwrap
from hf_parallel.kernels import AttentionParams, RotarySpec
from hf_parallel.kernels.dense import matmul_attention
from hf_parallel.kernels.rope import rotate, table_dtype
from hf_parallel.models.attention import block_attention_enabled, block_attention_forward
from hf_parallel.models.capabilities import Capabilities
from hf_parallel.training.example import ParallelExample
from hf_parallel.training.layout import View, make_views
from hf_parallel.training.masks import IMPLEMENTATION


class LayoutBatch:
    """Views of the examples of a batch, with the rotation tables and masks that all layers share.

    Padded to the example with most tokens `T`, to `Q` queries and `K` keys in each view. The collator passes it to the
    model as the keyword argument `parallel_layout`, from where it reaches the attention function of each layer.
    """

    def __init__(self, examples: Sequence[ParallelExample], device: torch.device | str = "cpu") -> None:
        self.length = max(map(len, examples))
        of_examples = [make_views(example) for example in examples]
        count = max(map(len, of_examples))
        self.views = [
            _BatchView.of(examples, [views[i] if i < len(views) else None for views in of_examples], self.length)
            for i in range(count)
        ]
        self.to(device)

    def to(self, device: torch.device | str, **_: Any) -> LayoutBatch:
        """Move the layout to a device, in place, as `torch.nn.Module.to` does."""
        for view in self.views:
            view.to(torch.device(device))
        return self

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of one layer: `query` `[B, heads, T, head_dim]`; returns `[B, T, heads, head_dim]`."""
        dtype = table_dtype(query.dtype)
        shape = (*query.shape[:2], self.length + 1)  # padded queries write to the last row
        total = torch.full(shape, float("-inf"), dtype=dtype, device=query.device)
        parts = []
        for view in self.views:
            q = _rotated(_take(query, view.queries), view.query_rotation, params.rotary, view)
            k = _rotated(_take(key, view.keys), view.key_rotation, params.rotary, view)
            mask, is_blind = view.mask(params.window, q.dtype)
            part, lse = matmul_attention(q, k, _take(value, view.keys), mask, False, params.scale, params.softcap)
            lse = lse.to(dtype).masked_fill(is_blind, float("-inf"))
            index = view.queries[:, None].expand(lse.shape)
            total = total.scatter(2, index, torch.logaddexp(total.gather(2, index), lse))
            parts.append((index, part.to(dtype), lse))
        if params.sinks is not None:
            total = torch.logaddexp(total, params.sinks.to(dtype)[None, :, None])
        out = torch.zeros(*shape, value.shape[-1], dtype=dtype, device=query.device)
        for index, part, lse in parts:
            weight = torch.exp(lse - total.gather(2, index).clamp(min=torch.finfo(dtype).min))
            out = out.scatter_add(2, index[..., None].expand(part.shape), part * weight[..., None])
        return out[:, :, : self.length].transpose(1, 2).to(query.dtype)


class _BatchView:
    """One view of each example, padded; `queries` and `keys` are `int64 [B, Q]` and `[B, K]`, padding is index T."""

    def __init__(self, queries: Any, keys: Any, query_rotation: Any, key_rotation: Any, views: Sequence[View | None]):
        self.queries, self.keys = torch.from_numpy(queries), torch.from_numpy(keys)
        self.query_rotation, self.key_rotation, self._views = query_rotation, key_rotation, views
        self.tables: dict[Any, Any] = {}
        self._masks: dict[Any, Any] = {}

    @classmethod
    def of(cls, examples: Sequence[ParallelExample], views: Sequence[View | None], length: int) -> _BatchView:
        width = [max(len(getattr(view, name)) for view in views if view is not None) for name in ("queries", "keys")]
        tables = [np.full((len(views), n), fill) for n in width for fill in (length, 0)]
        for row, (example, view) in enumerate(zip(examples, views, strict=True)):
            if view is not None:
                q, k = len(view.queries), len(view.keys)
                tables[0][row, :q], tables[2][row, :k] = view.queries, view.keys
                tables[1][row, :q] = view.query_positions - example.position_ids[view.queries]
                tables[3][row, :k] = view.key_positions - example.position_ids[view.keys]
        return cls(tables[0], tables[2], tables[1], tables[3], views)

    def to(self, device: torch.device) -> None:
        if self.queries.device != device:
            self.queries, self.keys = self.queries.to(device), self.keys.to(device)
            self.tables, self._masks = {}, {}

    def mask(self, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is added to the scores, `[B, 1, Q, K]`, and which queries see no key here, `bool [B, 1, Q]`."""
        key = (window, dtype)
        if key not in self._masks:
            seen = np.zeros((*self.queries.shape, self.keys.shape[1]), bool)
            for row, view in enumerate(self._views):
                if view is not None:
                    seen[row, : len(view.queries), : len(view.keys)] = view.mask(window)
            is_blind = ~seen.any(-1)
            seen[..., 0] |= is_blind  # otherwise their softmax is NaN
            allowed = torch.from_numpy(seen).to(self.queries.device)[:, None]
            added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            added = added.masked_fill(~allowed, float("-inf"))
            self._masks[key] = added, torch.from_numpy(is_blind).to(allowed.device)[:, None]
        return self._masks[key]


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select tokens `[B, n]` of `[B, heads, T, head_dim]`; padding repeats the last token."""
    index = index.clamp(max=x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def _rotated(x: torch.Tensor, rotation: np.ndarray, spec: RotarySpec | None, view: _BatchView) -> torch.Tensor:
    if spec is None or not rotation.any():
        return x
    key = (spec, x.dtype, rotation is view.key_rotation)
    if key not in view.tables:
        tables = spec.tables(rotation.flatten(), table_dtype(x.dtype), x.device)
        view.tables[key] = [table.view(len(rotation), 1, rotation.shape[1], -1) for table in tables]
    cos, sin = view.tables[key]
    return rotate(x, cos, sin, spec)


class _Active:
    """A layout in the place of the cache, for one forward pass of a model with this rotary embedding."""

    def __init__(self, layout: LayoutBatch, rotary: Mapping[int, RotarySpec | None] | None) -> None:
        self._layout, self.rotary = layout, rotary

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `LayoutBatch.attend`."""
        return self._layout.attend(query, key, value, params)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    parallel_layout: _Active | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention function of the implementation: block attention over the layout, `sdpa` without one."""
    if parallel_layout is None:
        if softcap is not None or s_aux is not None:
            raise ValueError(
                f"attn_implementation={IMPLEMENTATION!r} needs a parallel_layout: use DataCollatorForParallel"
            )
        given = {"scaling": scaling, "dropout": dropout, **kwargs}
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **given)
    if dropout:
        raise ValueError(f"attn_implementation={IMPLEMENTATION!r} has no attention dropout, got {dropout}")
    return block_attention_forward(
        module, query, key, value, None, scaling, 0.0, sliding_window, softcap, s_aux, block_cache=parallel_layout
    )


AttentionInterface.register(IMPLEMENTATION, _attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Let an enabled model compute batches of `DataCollatorForParallel`: its attention becomes `hf_parallel_train`.

    Batches without a layout are computed as by `sdpa`. Idempotent. Wrap the model (PEFT, DDP) before or after.

    Raises
    ------
    ValueError
        If the model is not enabled, or its forward pass drops unknown keyword arguments.
    """
    inner = unwrap(model)
    if not is_enabled(inner):
        raise ValueError(f"{type(inner).__name__} is not enabled: call hf_parallel.enable(model) first")
    capabilities = inner._parallel_capabilities
    if not capabilities.keyword:
        raise ValueError(f"{type(inner).__name__} drops keyword arguments, so that a layout cannot reach its layers")
    if inner.config._attn_implementation != IMPLEMENTATION:
        inner.set_attn_implementation(IMPLEMENTATION)
        inner.register_forward_pre_hook(partial(_activate, capabilities), with_kwargs=True)
    return model


def _activate(capabilities: Capabilities, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Give the layout of a batch the model's rotary embedding, before a forward pass."""
    layout = kwargs.get("parallel_layout")
    if not isinstance(layout, LayoutBatch):
        return None
    if capabilities.rotary is None and len(layout.views) > 1:
        raise ValueError(f"the tokens of this batch move, but {capabilities.why_no_rotation}")
    return args, {**kwargs, "parallel_layout": _Active(layout.to(kwargs["input_ids"].device), capabilities.rotary)}


def teacher_forced_logits(model: PreTrainedModel, example: ParallelExample) -> torch.Tensor:
    """Return the logits `[tokens, vocabulary]` after each token of an example, computed in one forward pass.

    They equal those that the model computed when it generated the tokens, and carry gradients.

    Parameters
    ----------
    model : PreTrainedModel
        An enabled model; its attention implementation does not matter.
    example : ParallelExample
    """
    inner = unwrap(model)
    if not is_enabled(inner):
        raise ValueError(f"{type(inner).__name__} is not enabled: call hf_parallel.enable(model) first")
    capabilities = inner._parallel_capabilities
    active = _Active(LayoutBatch([example], inner.device), capabilities.rotary)
    ids, positions = (torch.from_numpy(v)[None].to(inner.device) for v in (example.input_ids, example.position_ids))
    kwargs = {"block_cache": active} if capabilities.keyword else {}
    with block_attention_enabled(inner, active):
        return model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits[0]

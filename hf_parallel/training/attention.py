"""Differentiable attention over the views of a layout, as an attention implementation named `hf_parallel_train`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property, partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_parallel.cache import LayerReads
from hf_parallel.generation.enabled import enabled
from hf_parallel.generation.mixin import is_enabled, unwrap
from hf_parallel.kernels import AttentionParams, RotarySpec, native
from hf_parallel.kernels.dense import matmul_attention
from hf_parallel.kernels.rope import rotate, table_dtype
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.cpu.linear import kernel_pass, linear_backend
from hf_parallel.models.intercept.attention import block_attention_enabled, block_attention_forward
from hf_parallel.models.probing.capabilities import Capabilities
from hf_parallel.training.example import ParallelExample, padded_tokens
from hf_parallel.training.kernel_attention import KernelAttention, KernelLayout, supports
from hf_parallel.training.layout import LayoutView, make_views
from hf_parallel.training.masks import IMPLEMENTATION, block_mask, check_positions
from hf_parallel.training.states import checkpoints_wrapped, states_branched

T = TypeVar("T")
FLEX_FROM = 2048
"""Keys of a view from which on flex attention computes it on a GPU."""


class LayoutBatch:
    """Views of the examples of a batch, with the rotation tables and masks that all layers share.

    Padded to the example with most tokens `T`, to `Q` queries and `K` keys in each view. The collator passes it to the
    model as `past_key_values`, which a model that is not prepared cannot ignore. `flex`: whether flex attention
    computes views, by default on CUDA, from `FLEX_FROM` keys on. PyTorch has no gradients of it on a CPU.
    """

    rotary: Mapping[int, RotarySpec | None] | None = None
    """Rotary embeddings of the model that computes the batch."""
    reads: Mapping[int, LayerReads] = MappingProxyType({})
    """What its layers read, see `Capabilities`."""

    def __init__(
        self, examples: Sequence[ParallelExample], device: torch.device | str = "cpu", flex: bool | None = None
    ) -> None:
        self.examples = list(examples)
        self.length = max(map(len, examples))
        of_examples = [make_views(example) for example in examples]
        self.views = [_BatchView(examples, views, self.length) for views in zip_longest(*of_examples)]
        positions = [example.position_ids for example in examples]
        positions += [view.query_positions for views in of_examples for view in views]
        self.num_positions = 1 + max(int(values.max()) for values in positions)
        self._flex = flex
        self.to(device)

    def to(self, device: torch.device | str, **_: object) -> LayoutBatch:
        """Move the layout to a device, in place, as `torch.nn.Module.to` does."""
        for view in self.views:
            view.to(torch.device(device))
        return self

    @cached_property
    def _kernel_layout(self) -> KernelLayout:
        return KernelLayout(self.examples, self.length)

    def get_seq_length(self, *_: object) -> int:
        """Raise `ValueError`. A model that is not prepared calls this, or another one of these, before its layers."""
        raise ValueError(
            "the model of this batch is not prepared: call hf_parallel.training.prepare_model(model) first"
        )

    get_query_offset = get_mask_sizes = get_seq_length

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of one layer: `query` `[B, heads, T, head_dim]`; returns `[B, T, heads, head_dim]`.

        On a CPU its bits are those of inference (`kernel_attention`), where the kernels support the layer.
        """
        if params.latent is None and supports(query, key, value):
            arguments = query, key, value, params.sinks, self._kernel_layout, self.attend_by_torch, params
            return KernelAttention.apply(*arguments)  # type: ignore[no-any-return]
        return self.attend_by_torch(query, key, value, params)

    def attend_by_torch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """`attend`, by PyTorch's operations."""
        if len(self.views) == 1 and params.softcap is None and params.sinks is None:
            return self._attend_once(query, key, value, params)
        dtype = table_dtype(query.dtype)
        num_rows, num_heads = query.shape[:2]
        shape = (num_rows, num_heads, self.length + 1)  # padded queries write to the last row
        total = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=query.device)  # log-sum-exp of all views
        parts = []
        for view in self.views:
            q, k, v = view.take(query, key, value, params.rotary)
            part, lse = self._attend_view(view, q, k, v, params)
            lse = lse.to(dtype)
            index = view.queries[:, None].expand(lse.shape)
            merged = torch.logaddexp(total.gather(2, index), lse)
            total = total.scatter(2, index, merged)
            parts.append((index, part.to(dtype), lse))
        if params.sinks is not None:
            sinks = params.sinks.to(dtype)[None, :, None]
            total = torch.logaddexp(total, sinks)
        out = torch.zeros(*shape, value.shape[-1], dtype=dtype, device=query.device)
        for index, part, lse in parts:
            weight = torch.exp(lse - total.gather(2, index))[..., None]
            out = out.scatter_add(2, index[..., None].expand(part.shape), part * weight)
        out = out[:, :, : self.length]  # without padded queries
        return out.transpose(1, 2).to(query.dtype)

    def _attend_once(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention over the only view, whose queries are all tokens in order."""
        view = self.views[0]
        q, k, v = view.take(query, key, value, params.rotary)
        if self._uses_flex(view, q):
            out, _ = self._attend_view(view, q, k, v, params)
        else:
            mask, _ = view.masks(params.window)
            is_grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=params.scale, enable_gqa=is_grouped)
        return out.transpose(1, 2)

    def _attend_view(
        self, view: _BatchView, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp of one view, `[B, heads, Q, head_dim]` and `[B, heads, Q]`."""
        # The log-sum-exp of queries that see no key is -inf, without a gradient
        if self._uses_flex(view, q):
            block_mask = view.block_mask(params.window)
            out, lse = flex(q, k, v, block_mask, params.scale, params.softcap)
            return out, lse.masked_fill(lse.isneginf(), float("-inf"))
        mask, is_blind = view.masks(params.window)
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        bias = zero.masked_fill(~mask, float("-inf"))
        out, lse = matmul_attention(q, k, v, bias, False, params.scale, params.softcap)
        return out, lse.masked_fill(is_blind, float("-inf"))

    def _uses_flex(self, view: _BatchView, q: torch.Tensor) -> bool:
        wanted = self._flex
        if wanted is None:
            wanted = q.is_cuda and view.keys.shape[1] >= FLEX_FROM
        return wanted and q.dtype != torch.float64


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp, `[B, heads, Q, head_dim]` and `[B, heads, Q]`; compiled on a GPU."""

    def score_mod(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    function: Callable[..., Any] = _compiled_flex() if q.is_cuda else flex_attention  # type: ignore[assignment]
    modified = None if softcap is None else score_mod
    grouped = q.shape[1] != k.shape[1]
    out, extra = function(q, k, v, modified, mask, scale, grouped, return_aux=AuxRequest(lse=True))
    return out, extra.lse


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


class _BatchView:
    """One view of each example, padded; `queries` and `keys` are `int64 [B, Q]` and `[B, K]`, padding is index T."""

    def __init__(self, examples: Sequence[ParallelExample], views: Sequence[LayoutView | None], length: int) -> None:
        self._views = views
        self._cached: dict[Hashable, Any] = {}  # tables and masks on the device
        max_queries = max(len(view.queries) for view in views if view is not None)
        max_keys = max(len(view.keys) for view in views if view is not None)
        queries = np.full((len(views), max_queries), length)
        keys = np.full((len(views), max_keys), length)
        self.query_rotation = np.zeros_like(queries)
        self.key_rotation = np.zeros_like(keys)
        for row, (example, view) in enumerate(zip(examples, views, strict=True)):
            if view is None:
                continue
            num_queries = len(view.queries)
            num_keys = len(view.keys)
            queries[row, :num_queries] = view.queries
            keys[row, :num_keys] = view.keys
            self.query_rotation[row, :num_queries] = view.query_positions - example.position_ids[view.queries]
            self.key_rotation[row, :num_keys] = view.key_positions - example.position_ids[view.keys]
        self.queries = torch.from_numpy(queries)
        self.keys = torch.from_numpy(keys)

    def to(self, device: torch.device) -> None:
        if self.queries.device != device:
            self.queries = self.queries.to(device)
            self.keys = self.keys.to(device)
            self._cached = {}

    def take(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: RotarySpec | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values of the view, rotated to its positions."""
        q = _take(query, self.queries)
        k = _take(key, self.keys)
        v = _take(value, self.keys)
        q = self._rotated(q, "query", rotary)
        k = self._rotated(k, "key", rotary)
        return q, k, v

    def masks(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which keys each query sees, `bool [B, 1, Q, K]`, and which queries see none, `bool [B, 1, Q]`.

        Queries without keys see the first one in the mask, to avoid NaN.
        """
        return self._get(("masks", window), lambda: self._make_masks(window))

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the mask for flex attention."""
        shape = (self.queries.shape[1], self.keys.shape[1])
        return self._get(("flex", window), lambda: block_mask(self._views, shape, window, self.queries.device))

    def _get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    def _make_masks(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mask `[B, 1, Q, K]`, and which queries see no key `[B, 1, Q]`; these attend to the first key."""
        seen = np.zeros((*self.queries.shape, self.keys.shape[1]), bool)
        for row, view in enumerate(self._views):
            if view is not None:
                seen[row, : len(view.queries), : len(view.keys)] = view.mask(window)
        is_blind = ~seen.any(-1)
        seen[..., 0] |= is_blind
        device = self.queries.device
        mask = torch.from_numpy(seen).to(device)
        blind = torch.from_numpy(is_blind).to(device)
        return mask[:, None], blind[:, None]

    def _rotated(self, x: torch.Tensor, name: str, spec: RotarySpec | None) -> torch.Tensor:
        """Return queries or keys, rotated to their positions in the view."""
        rotation = self.query_rotation if name == "query" else self.key_rotation
        if spec is None or not rotation.any():
            return x
        dtype = table_dtype(x.dtype)

        def make_tables() -> list[torch.Tensor]:
            shape = (len(rotation), 1, rotation.shape[1], -1)
            tables = spec.tables(rotation.flatten(), dtype, x.device)
            return [table.view(shape) for table in tables]

        cos, sin = self._get((spec, dtype, name), make_tables)
        return rotate(x, cos, sin, spec)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select tokens `[B, n]` of `[B, heads, T, head_dim]`; padding repeats the last token."""
    index = index.clamp(max=x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def _prepare_layout(layout: LayoutBatch, model: PreTrainedModel, capabilities: Capabilities) -> LayoutBatch:
    """Move a layout to its model, and give it the rotary embeddings. Raises `ValueError` if they do not fit."""
    moves = any(view.query_rotation.any() or view.key_rotation.any() for view in layout.views)
    name = type(model).__name__
    reason = capabilities.why_no_rotation
    if capabilities.scaled:
        reason = f"{name} scales its queries by their position"
    if reason and (moves or len(layout.views) > 1):
        raise ValueError(f"the tokens of this batch move, but {reason}")
    if any(read.chunk or read.counts for read in capabilities.reads.values()):
        raise ValueError(f"{name} attends in chunks, or scales queries by counted positions: batches support neither")
    check_positions(layout.num_positions, model.config)
    layout.rotary = capabilities.rotary
    layout.reads = capabilities.reads
    return layout.to(next(model.parameters()).device)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    parallel_layout: LayoutBatch | None = None,
    **given: Any,  # see `block_attention_forward`
) -> tuple[torch.Tensor, None]:
    """Attention function of the implementation: block attention over the layout, `sdpa` without one."""
    if parallel_layout is not None:
        if dropout:
            raise ValueError(f"attn_implementation={IMPLEMENTATION!r} has no attention dropout, got {dropout}")
        return block_attention_forward(module, query, key, value, None, block_cache=parallel_layout, **given)
    if given.get("softcap") is not None or given.get("s_aux") is not None:
        raise ValueError(f"attn_implementation={IMPLEMENTATION!r} needs batches of DataCollatorForParallel")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, dropout=dropout, **given)


AttentionInterface.register(IMPLEMENTATION, _attention_forward)


def _make_mask(*args: object, **kwargs: object) -> torch.Tensor | None:
    """Mask function of the implementation: as `sdpa` for a batch without a layout."""
    return None if _pass.get() else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


AttentionMaskInterface.register(IMPLEMENTATION, _make_mask)
_pass: ContextVar[ExitStack | None] = ContextVar("pass", default=None)
"""What the running pass over a layout leaves at its end."""


def require_enabled(model: nn.Module) -> Any:
    """Return the model inside wrappers. Raises `ValueError` if it is not enabled."""
    inner = unwrap(model)
    if not is_enabled(inner):
        raise ValueError(f"{type(inner).__name__} is not enabled: call hf_parallel.enable(model) first")
    return inner


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Let an enabled model compute batches of `DataCollatorForParallel`: its attention becomes `hf_parallel_train`.

    Batches without a layout are computed as by `sdpa`, which raises an error for models with soft-capping or attention
    sinks. Idempotent; `hf_parallel.disable` reverts it. Wrap the model (PEFT, DDP) before or after.

    Raises
    ------
    ValueError
        If the model is not enabled, or its forward pass drops unknown keyword arguments.
    """
    inner = require_enabled(model)
    capabilities = enabled(inner).capabilities
    if not capabilities.keyword:
        raise ValueError(f"{type(inner).__name__} drops keyword arguments, so that a layout cannot reach its layers")
    if inner.config._attn_implementation != IMPLEMENTATION:
        enabled(inner).attention_before = _chosen_attention(inner.config)
        inner.set_attn_implementation(IMPLEMENTATION)
    if not any(getattr(hook, "func", None) is _activate for hook in inner._forward_pre_hooks.values()):
        inner.register_forward_pre_hook(partial(_activate, capabilities), with_kwargs=True)
        inner.register_forward_hook(_deactivate, always_call=True)
    return model


def _chosen_attention(config: PreTrainedConfig) -> dict[str, str]:
    """Return the attention implementations of a config and the configs in it, for `set_attn_implementation`."""
    chosen = {"": config._attn_implementation}
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            chosen[name] = inner._attn_implementation
    return chosen


def _deactivate(*_: object) -> None:
    entered = _pass.get()
    if entered is not None:
        _pass.set(None)
        entered.close()


def _activate(
    capabilities: Capabilities, model: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Pass the layout of a batch to the layers, before a forward pass."""
    layout = kwargs.get("past_key_values")
    if not isinstance(layout, LayoutBatch):
        return None
    if torch.is_grad_enabled() and "shift_labels" in kwargs and not {"labels", "fused_lm_head"} & kwargs.keys():
        raise ValueError(
            "the labels of a parallel batch are shifted already: label_smoothing_factor must be 0, and a loss of your "
            "own must override compute_loss of the trainer"
        )
    if model.config._attn_implementation != IMPLEMENTATION:
        return None  # the model asks the layout for its length, which raises
    prepared = _prepare_layout(layout, model, capabilities)
    entered = ExitStack()
    entered.enter_context(states_branched(model, layout.examples))
    _pass.set(entered)
    del kwargs["past_key_values"]
    return args, {**kwargs, "use_cache": False, "parallel_layout": prepared}


def computes_exactly(model: nn.Module) -> bool:
    """Whether a forward pass over a layout has the bits of inference: an enabled model on a CPU, without autocast."""
    inner = unwrap(model)
    if not is_enabled(inner) or torch.is_autocast_enabled("cpu") or not native.is_available():
        return False
    if linear_backend(inner) != "native":
        return False
    if _drops_attention(inner):
        return False
    capabilities = enabled(inner).capabilities
    is_plain = capabilities.keyword and not capabilities.mixers and not capabilities.has_latents
    return is_plain and not capabilities.scaled and next(inner.parameters()).device.type == "cpu"


def _drops_attention(model: PreTrainedModel) -> bool:
    """Whether a forward pass drops attention weights, which block attention does not."""
    settings = vars(model.config.get_text_config(decoder=True)).items()
    return model.training and any(value for name, value in settings if "att" in name and "drop" in name)


@contextmanager
def kernel_layers(model: PreTrainedModel, layout: LayoutBatch | None = None) -> Iterator[None]:
    """Compute linear layers and norms of a forward pass by the kernels of inference, with gradients, on a CPU.

    With a `layout`, the layers attend to it, whatever the model's attention implementation is. Both hold for what
    gradient checkpointing computes again, too.
    """

    @contextmanager
    def context() -> Iterator[None]:
        attention = nullcontext() if layout is None else block_attention_enabled(model, layout)
        with attention, fast_layers(model), kernel_pass(records_gradients=True):
            yield

    with context(), checkpoints_wrapped(model, context):
        yield


def teacher_forced_logits(model: PreTrainedModel, example: ParallelExample) -> torch.Tensor:
    """Return the logits `[tokens, vocabulary]` after each token of an example, computed in one forward pass.

    They carry gradients, and equal the logits from which the model sampled the tokens.

    Parameters
    ----------
    model : PreTrainedModel
        An enabled model; its attention implementation does not matter.
    example : ParallelExample

    Raises
    ------
    ValueError
        If the model is not enabled, has fewer positions than the example needs, or cannot rotate tokens that move.
    """
    return layout_logits(model, example)


def layout_logits(model: PreTrainedModel, example: ParallelExample, **arguments: torch.Tensor) -> torch.Tensor:
    """`teacher_forced_logits`, with arguments of the model's `forward`."""
    inner = require_enabled(model)
    batch, layout = layout_inputs(inner, [example])
    with states_branched(inner, [example]), kernel_layers(inner, layout):
        output = model(**batch, **arguments)
    return output.logits[0]


def layout_inputs(model: PreTrainedModel, examples: Sequence[ParallelExample]) -> tuple[dict[str, Any], LayoutBatch]:
    """Return arguments of an enabled model for padded examples, and their layout, for `kernel_layers`."""
    capabilities = enabled(model).capabilities
    layout = _prepare_layout(LayoutBatch(examples), model, capabilities)
    batch: dict[str, Any] = {"block_cache": layout} if capabilities.keyword else {}
    ids, positions = padded_tokens(examples)
    batch |= {"input_ids": ids.to(model.device), "position_ids": positions.to(model.device), "use_cache": False}
    return batch, layout

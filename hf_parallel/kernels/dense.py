"""Dense attention that also returns the log-sum-exp, computed by the fastest kernel available on the device.

PyTorch's fused kernels serve most calls. On a GPU, FlashAttention serves calls without a mask: the flash-attn package
where it is installed (version 3 on Hopper GPUs), PyTorch's own otherwise. cuDNN computes long prefills if PyTorch
prefers it on that GPU. Calls that no fused kernel supports (such as with soft-capping) are plain matrix products.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

BACKEND_VARIABLE = "HF_PARALLEL_BACKEND"
FLASH = "flash"
FLASH_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALIGNED_BYTES = 16
"""Alignment of heads that PyTorch's fused kernels require on a GPU: head dimensions of 8 in half precision."""
CUDNN_SCORES = 1 << 28
"""Scores per head (M * L) from which cuDNN may compute a call, such as 16,384 tokens to as many keys. It plans each new
shape and stride, thus each chunk of a prompt of a new length, and a smaller call is not likely to repay that."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of queries `[N, heads, M, head_dim]` to keys and values `[N, kv_heads, L, head_dim]`.

    `mask`, broadcastable to `[N, heads, M, L]`, is added to the scores. With `causal` (then M = L) query `i` sees keys
    up to `i`. Returns `(out, lse)`: `[N, heads, M, head_dim]` and the log-sum-exp `[N, heads, M]`.
    """
    ops = torch.ops.aten
    if softcap is None and q.shape[-1] > v.shape[-1]:
        dim = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # the fused kernels take equal sizes
        out, lse = dense_attention(q, k, v, mask, causal, scale, softcap)
        return out[..., :dim], lse
    if softcap is None and q.shape[-1] == v.shape[-1]:
        if q.device.type == "cpu" and q.dtype in FLASH_CPU_DTYPES:
            return ops._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, dropout_p=0.0, is_causal=causal, attn_mask=mask, scale=scale
            )
        missing = 0
        if q.is_cuda:
            missing = -q.shape[-1] * q.element_size() % ALIGNED_BYTES // q.element_size()
        if missing:
            dim = v.shape[-1]
            # Zeros change neither scores nor the other outputs.
            q = F.pad(q, (0, missing))
            k = F.pad(k, (0, missing))
            v = F.pad(v, (0, missing))
            out, lse = dense_attention(q, k, v, mask, causal, scale, softcap)
            return out[..., :dim], lse
        if mask is None and flash_supports(q):
            num_scores = q.shape[2] * k.shape[2]
            may_be_cudnn = num_scores >= CUDNN_SCORES and os.environ.get(BACKEND_VARIABLE) != FLASH
            if may_be_cudnn and _cudnn_is_preferred(q, k, v, causal, scale):
                out, lse, *_ = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
                return out, lse.squeeze(-1)
            return _flash(q, k, v, causal, scale)
        if q.device.type == "cuda" and q.dtype in (torch.float32, torch.bfloat16, torch.float16):
            k, v = _repeat_heads(q, k, v)
            bias = None if mask is None else mask.expand(*q.shape[:3], -1)
            out, lse, *_ = ops._scaled_dot_product_efficient_attention(
                q, k, v, bias, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
            )
            return out, lse[..., : q.shape[2]]
    return matmul_attention(q, k, v, mask, causal, scale, softcap)


def flash_supports(q: Tensor) -> bool:
    """Whether FlashAttention supports queries of this dtype, head size and device."""
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return q.is_cuda and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _cudnn_is_preferred(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> bool:
    """Whether PyTorch's `scaled_dot_product_attention` would compute this call by cuDNN, as it does on Hopper GPUs."""
    grouped = q.shape[1] != k.shape[1]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    return chosen == SDPBackend.CUDNN_ATTENTION.value


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    function = flash_package()
    if function is None:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    out, lse, *_ = function(q, k, v, softmax_scale=scale, causal=causal)
    return out.transpose(1, 2), lse


@lru_cache
def flash_package() -> Callable[..., tuple[Tensor, ...]] | None:
    """Return `flash_attn_func` of FlashAttention 3, on GPUs that it supports, or 2; None if it is not installed.

    It returns the output and the log-sum-exp. The first builds of FlashAttention 3 always do and have no argument
    `return_attn_probs`; all others return the log-sum-exp only if it is true.
    """
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    for name in ("flash_attn_interface", "flash_attn")[not is_hopper :]:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        function: Callable[..., Any] = module.flash_attn_func
        if "return_attn_probs" in inspect.signature(function).parameters:
            function = partial(function, return_attn_probs=True)
        return function
    return None


def _repeat_heads(q: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    groups = q.shape[1] // tensors[0].shape[1]
    return tensors if groups == 1 else tuple(x.repeat_interleave(groups, dim=1) for x in tensors)


def matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention by plain matrix products; arguments as in `dense_attention`."""
    k, v = _repeat_heads(q, k, v)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if scores.dtype != torch.float64:
        scores = scores.float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse[..., None]).to(v.dtype)
    return torch.matmul(weights, v), lse

"""Selection of the backend of block attention, once per layer's storage.

`HF_PARALLEL_BACKEND` (`flash`, `torch` or `triton`) overrides the choice; the backend it names must be available.
With `flash`, the flash-attn package computes all prefills that it can, and all else is chosen as without the variable.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers.utils import logging

from hf_parallel.kernels.dense import BACKEND_VARIABLE, FLASH, flash_package
from hf_parallel.kernels.plan import AttentionParams, AttentionPlan
from hf_parallel.kernels.storage import QuantizedStorage
from hf_parallel.kernels.torch_attention import TorchBackend

_NAMES = ("flash", "torch", "triton")
_LEAST_CAPABILITY = (8, 0)
_logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Backend:
    """Description of an implementation of block attention, and whether it is available on this machine."""

    name: str
    available: bool
    reason: str
    """Purpose of the backend, or the reason why it is not available."""

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.available else 'not available, '}{self.reason}"


def backends() -> tuple[Backend, ...]:
    """Return the backends of block attention and their availability on this machine, fastest first."""
    device = _default_device()
    no_triton = _triton_unavailable(device, _interpreted())
    no_flash = _flash_unavailable(device)
    return (
        Backend("triton", not no_triton, no_triton or "decode steps and short appends on a GPU"),
        Backend("flash", not no_flash, no_flash or "long prefills on a GPU, by the flash-attn package"),
        Backend("torch", True, "any device, by PyTorch's own attention and the compiled CPU kernel"),
    )


def select_backend(device: torch.device | str | None = None) -> str:
    """Return the name of the backend that block attention uses on a device (None: the GPU, if there is one).

    Raises
    ------
    ValueError
        If `HF_PARALLEL_BACKEND` names an unknown backend, or the device does not support it.
    """
    device = _default_device() if device is None else torch.device(device)
    name = os.environ.get(BACKEND_VARIABLE, "")
    return _select(name, device, bool(name) and _interpreted())


@lru_cache
def _select(name: str, device: torch.device, interpreted: bool) -> str:
    """Return the backend that `HF_PARALLEL_BACKEND` names for a device, or the default."""
    if name == FLASH:
        reason = _flash_unavailable(device)
        if reason:
            raise ValueError(f"{BACKEND_VARIABLE}={FLASH} cannot be used on {device}: {reason}")
    if name in ("", FLASH):
        uses_triton = device.type == "cuda" and not _triton_unavailable(device, interpreted)
        return "triton" if uses_triton else "torch"
    if name not in _NAMES:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {list(_NAMES)}, got {name!r}")
    if name == "triton":
        reason = _triton_unavailable(device, interpreted)
        if reason:
            raise ValueError(f"{BACKEND_VARIABLE}=triton cannot be used on {device}: {reason}")
    return name


def _triton_unavailable(device: torch.device, interpreted: bool) -> str:
    """Reason why the Triton kernels cannot run on a device; empty if they can."""
    if device.type != "cuda" and not interpreted:
        return "Triton needs a CUDA device (TRITON_INTERPRET=1 runs it on a CPU, slowly)"
    if device.type == "cuda":
        reason = _too_old(device)
        if reason:
            return reason
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install triton"
    return ""


def _flash_unavailable(device: torch.device) -> str:
    """Reason why flash-attn cannot run on a device; empty if it can."""
    if device.type != "cuda":
        return "flash-attn needs a CUDA device"
    reason = _too_old(device)
    if reason:
        return reason
    if flash_package():
        return ""
    return "PyTorch's FlashAttention is used until you pip install flash-attn"


def _too_old(device: torch.device) -> str:
    """Reason why a GPU is too old; empty if it is not."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= _LEAST_CAPABILITY:
        return ""
    name = torch.cuda.get_device_name(device)
    least_major, least_minor = _LEAST_CAPABILITY
    major, minor = capability
    return f"it needs compute capability {least_major}.{least_minor}, {name} has {major}.{minor}"


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def backend_for(keys: Tensor, values: Tensor) -> TorchBackend:
    """Return the backend for a layer's storage, by its device, dtype and head sizes."""
    name = select_backend(keys.device)
    if name == "triton":
        triton_attention = importlib.import_module(".triton.attention", __package__)
        reason = triton_attention.unsupported_reason(keys, values)
        if not reason:
            is_chosen = os.environ.get(BACKEND_VARIABLE) == "triton"
            return triton_attention.TritonBackend(is_chosen)  # type: ignore[no-any-return]
        _logger.warning_once(f"block attention uses PyTorch's kernels instead of Triton's: {reason}")
    return TorchBackend()


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    params: AttentionParams,
    quantized: QuantizedStorage | None = None,
) -> Tensor:
    """Attention of packed rows to the blocks they see: `merge over b of softmax(rotate(q, delta_b) K_b) V_b`.

    Parameters
    ----------
    query : [T, heads, head_dim]
        Packed new tokens, rotated by the model to their `position_ids`.
    keys, values : [slots * kv_heads, head_dim]
        Storage of one layer, which holds the new tokens already. The plan locates each block in it.
    plan : AttentionPlan
        Blocks that each query attends to, its rotation for each of them, and the keys it sees.
    params : AttentionParams
        Parameters of the layer.
    quantized : QuantizedStorage, optional
        Blocks in 8 bits of the layer, which the plan locates from slot `FIRST_QUANTIZED` on.

    Returns
    -------
    torch.Tensor
        `[T, heads, head_dim]` of the query's dtype.

    Notes
    -----
    Keys and values of a block are read once per tile of rows, not once per row (Hydragen, section 3.2); partial
    results are merged by their log-sum-exp (Hydragen, eq. 5). The layers of a model call `attend` of the backend that
    their storage has chosen once (`LayerStorage`).
    """
    return backend_for(keys, values).attend(query, keys, values, plan, params, quantized)

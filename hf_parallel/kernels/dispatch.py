"""Picks the backend of block attention: one operation, several ways to compute it.

`HF_PARALLEL_BACKEND` overrides the choice (`torch`, `triton`, `reference`); what it names must be able to run.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from hf_parallel.kernels import reference, torch_attention
from hf_parallel.kernels.plan import AttentionPlan
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.kernels.work import Place, longest_run

BACKEND_VARIABLE = "HF_PARALLEL_BACKEND"

SCHEDULED_RUN = 64
"""New tokens of a row above which FlashAttention over a schedule's calls replaces the Triton kernels, on a GPU."""

_NAMES = ("reference", "torch", "triton")
_TRITON_CAPABILITY = (8, 0)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """A way to compute block attention, and whether this machine has it.

    Attributes
    ----------
    name : str
    available : bool
    reason : str
        What it is for, or why it is not available.
    """

    name: str
    available: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.available else 'not available, '}{self.reason}"


def backends() -> tuple[Backend, ...]:
    """What this machine can compute block attention with, fastest first."""
    device = _this_device()
    no_triton, no_flash = _why_not_triton(device, _interpreted()), _why_not_flash(device)
    return (
        Backend("triton", not no_triton, no_triton or "decode steps and short appends on a GPU"),
        Backend("flash", not no_flash, no_flash or "long prefills on a GPU, by the flash-attn package"),
        Backend("torch", True, "any device, by PyTorch's own attention and the compiled CPU kernel"),
        Backend("reference", True, f"the oracle of the tests, slow: only where {BACKEND_VARIABLE} asks for it"),
    )


def select_backend(device: torch.device | str | None = None) -> str:
    """Name of the backend that block attention uses on a device (None: the GPU, if there is one).

    Raises
    ------
    ValueError
        If `HF_PARALLEL_BACKEND` names no backend, or one that cannot run on the device.
    """
    at = _this_device() if device is None else torch.device(device)
    asked = os.environ.get(BACKEND_VARIABLE, "")
    return _select(asked, at, bool(asked) and _interpreted())


@lru_cache
def _select(asked: str, device: torch.device, interpreted: bool) -> str:
    if not asked:
        return "triton" if device.type == "cuda" and not _why_not_triton(device, interpreted) else "torch"
    if asked not in _NAMES:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {list(_NAMES)}, got {asked!r}")
    if asked == "triton" and (reason := _why_not_triton(device, interpreted)):
        raise ValueError(f"{BACKEND_VARIABLE}=triton cannot be used on {device}: {reason}")
    return asked


def _why_not_triton(device: torch.device, interpreted: bool) -> str:
    """Why the Triton kernels cannot run on a device; empty if they can."""
    if device.type != "cuda" and not interpreted:
        return "Triton needs a CUDA device (TRITON_INTERPRET=1 runs it on a CPU, slowly)"
    if device.type == "cuda" and (reason := _why_too_old(device)):
        return reason
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install triton"
    return ""


def _why_not_flash(device: torch.device) -> str:
    """Why the flash-attn package does not serve a device; empty if it does."""
    if device.type != "cuda":
        return "flash-attn needs a CUDA device"
    if reason := _why_too_old(device):
        return reason
    installed = torch_attention.flash_package() is not None
    return "" if installed else "PyTorch's FlashAttention serves instead: pip install 'hf_parallel[flash-attn]'"


def _why_too_old(device: torch.device) -> str:
    found = torch.cuda.get_device_capability(device)
    if found >= _TRITON_CAPABILITY:
        return ""
    wanted = ".".join(map(str, _TRITON_CAPABILITY))
    return f"it needs compute capability {wanted}, {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"


def _this_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _module(keys: torch.Tensor, values: torch.Tensor) -> ModuleType:
    """The backend of a layer's storage."""
    name = select_backend(keys.device)
    if name == "reference":
        return reference
    if name == "triton":
        triton_attention = importlib.import_module(".triton_attention", __package__)
        reason = triton_attention.why_not(keys, values)
        if not reason:
            return triton_attention
        _say_once(f"block attention uses PyTorch's kernels instead of Triton's: {reason}")
    return torch_attention


@lru_cache
def _say_once(message: str) -> None:
    _logger.warning(message)


def replayable(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a CUDA graph may hold decode steps over a layer's storage.

    Parameters
    ----------
    keys, values : [slots * kv_heads, head_dim]

    Returns
    -------
    bool
        True if the kernels that serve it read from the device what changes from step to step.
    """
    return _module(keys, values) not in (reference, torch_attention)


def block_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_kv_heads: int,
    scale: float,
    rotary: RotarySpec | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of packed rows to the blocks that they see: `merge over b of softmax(rotate(q, delta_b) K_b) V_b`.

    Parameters
    ----------
    query : [T, heads, head_dim]
        Packed new tokens, rotated by the model to the positions that it was given.
    keys, values : [slots * kv_heads, head_dim]
        One layer's storage; the plan says where each block lies in it. The new tokens' own are stored already.
    plan : AttentionPlan
        What each query sees and by how much it is turned for it.
    num_kv_heads : int
        Must divide `heads` (grouped-query attention).
    scale : float
        Factor of the scores.
    rotary : RotarySpec, optional
        How this layer rotates; None for a layer without RoPE, whose queries are not turned.
    softcap : float, optional
        Scores become `softcap * tanh(score / softcap)` (Gemma 2).
    sinks : [heads], optional
        Logit of an attention sink per head, one more term of the merge (gpt-oss).
    window : int, optional
        Sliding window: positions that a query sees, itself included.

    Returns
    -------
    torch.Tensor
        `[T, heads, head_dim]` of the query's dtype.

    Notes
    -----
    Keys and values of a block are read once however many rows see it (Hydragen, section 3.2); partial results are
    merged by their log-sum-exp (Hydragen, eq. 5).
    """
    backend = _module(keys, values)
    if _is_prefill(keys, values, plan, softcap):
        backend = torch_attention
    return backend.block_attention(
        query,
        keys,
        values,
        plan,
        num_kv_heads=num_kv_heads,
        scale=scale,
        rotary=rotary,
        softcap=softcap,
        sinks=sinks,
        window=window,
    )


def _is_prefill(keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, softcap: float | None) -> bool:
    """Whether FlashAttention does better on a pass than kernels made for few queries, and nobody asked for those."""
    if not keys.is_cuda or os.environ.get(BACKEND_VARIABLE) or softcap is not None or keys.shape != values.shape:
        return False
    return plan.memo("longest run", lambda: longest_run(plan)) > SCHEDULED_RUN


def append(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    num_kv_heads: int,
) -> None:
    """Store a pass's packed new keys and values where its plan says.

    Parameters
    ----------
    new_keys, new_values : [kv_heads, T, head_dim]
    keys, values : [slots * kv_heads, head_dim]
        One layer's storage.
    """
    backend = _module(keys, values)
    backend = torch_attention if backend is reference else backend
    backend.append(new_keys, new_values, keys, values, plan, num_kv_heads)


def move(
    keys: torch.Tensor,
    values: torch.Tensor,
    source: Place,
    target: Place,
    length: int,
    num_kv_heads: int,
    delta: int = 0,
    rotary: RotarySpec | None = None,
) -> None:
    """Copy `length` tokens to another place in a layer's storage, keys turned by `delta` positions.

    Parameters
    ----------
    keys, values : [slots * kv_heads, head_dim]
        One layer's storage.
    source, target : Place
        They do not overlap.
    rotary : RotarySpec, optional
        How the layer rotates; None for a layer without RoPE, whose keys are not turned.
    """
    backend = _module(keys, values)
    backend = torch_attention if backend is reference else backend
    backend.move(keys, values, source, target, length, num_kv_heads, delta, rotary)

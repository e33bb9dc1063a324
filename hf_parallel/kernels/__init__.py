"""The kernel floor: tensors in, tensors out. The attention operation and RoPE; knows no cache and no model."""

from hf_parallel.kernels.dispatch import BACKEND_VARIABLE, Backend, backends, block_attention, select_backend
from hf_parallel.kernels.plan import AttentionPlan, Growth, PlanOnDevice
from hf_parallel.kernels.rope import RotarySpec, rotate
from hf_parallel.kernels.transfer import ToHost, to_device

__all__ = [
    "BACKEND_VARIABLE",
    "AttentionPlan",
    "Backend",
    "Growth",
    "PlanOnDevice",
    "RotarySpec",
    "ToHost",
    "backends",
    "block_attention",
    "rotate",
    "select_backend",
    "to_device",
]

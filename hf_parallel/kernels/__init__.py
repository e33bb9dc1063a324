"""Kernels of block attention: tensors in, tensors out. Independent of caches and models."""

from hf_parallel.kernels.dispatch import BACKEND_VARIABLE, Backend, backends, block_attention, select_backend
from hf_parallel.kernels.layer import LayerStorage
from hf_parallel.kernels.plan import AttentionParams, AttentionPlan, DeviceBuffers, Increments, LatentHeads
from hf_parallel.kernels.rope import RotarySpec, rotate, rotate_by, table_dtype
from hf_parallel.kernels.storage import (
    FIRST_QUANTIZED,
    QuantizedStorage,
    Storage,
    TokenRange,
    quantized_dtype,
    storage_row,
)
from hf_parallel.kernels.transfer import HostCopy, to_device

__all__ = [
    "BACKEND_VARIABLE",
    "FIRST_QUANTIZED",
    "AttentionParams",
    "AttentionPlan",
    "Backend",
    "QuantizedStorage",
    "DeviceBuffers",
    "HostCopy",
    "Increments",
    "LatentHeads",
    "LayerStorage",
    "RotarySpec",
    "Storage",
    "TokenRange",
    "backends",
    "block_attention",
    "quantized_dtype",
    "rotate",
    "rotate_by",
    "select_backend",
    "storage_row",
    "table_dtype",
    "to_device",
]

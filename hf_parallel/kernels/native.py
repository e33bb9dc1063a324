"""Loads `cpu_attention.c` and `cpu_linear.c`, compiled once for this machine by its own C compiler, if it has one.

Without a compiler PyTorch and oneDNN do the same, more slowly. `HF_PARALLEL_NATIVE=0` asks for that.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hf_parallel.files import cache_folder

NATIVE_VARIABLE = "HF_PARALLEL_NATIVE"

MAX_ROWS = 1024
"""Rows of one KV head up to which the kernel of attention was measured to be faster."""
MAX_TOKENS = 16
"""Tokens up to which the kernel of linear layers was measured to be faster than oneDNN (docs/cpu.md)."""

_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp")
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("cpu_attention.c", "cpu_linear.c"))
_logger = logging.getLogger(__name__)


class _Call(ctypes.Structure):
    """As in `cpu_attention.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("blocks", "queries", "num_keys")),
        *((name, ctypes.c_int64) for name in ("key_offset", "key_block", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_offset", "value_block", "value_head")),
        *((name, ctypes.c_void_p) for name in ("take", "lo", "hi", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("half", "interleaved", "repeats")),
    )


class _Layer(ctypes.Structure):
    """As in `cpu_attention.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        ("scale", ctypes.c_float),
    )


class Calls:
    """Calls of a schedule as the kernel reads them, the same for all layers of one shape."""

    def __init__(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Lay out calls, each a mapping of `_Call`'s fields; arrays are contiguous tensors or absent."""
        self._kept = calls  # the kernel reads their arrays
        self.array = (_Call * len(calls))()
        for into, call in zip(self.array, calls, strict=True):
            for name, value in call.items():
                setattr(into, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)

    def __len__(self) -> int:
        return len(self.array)


def serves(dtype: torch.dtype, device: torch.device, rows: int, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes a call whose blocks are met by `rows` query rows per KV head each."""
    fits = rows <= MAX_ROWS and key_dim == value_dim and key_dim % 8 == 0
    return fits and dtype == torch.float32 and device.type == "cpu" and _library() is not None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    calls: Calls,
    num_kv_heads: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all queries to the blocks of all calls, merged.

    Parameters
    ----------
    query : float32 [T, heads, head_dim]
    keys, values : float32 [slots * kv_heads, head_dim]
        A layer's storage.
    calls : Calls
    num_kv_heads : int
    scale : float
        Factor of the scores.
    sinks : [heads], optional
        Logit of an attention sink per head.

    Returns
    -------
    (out, lse) : [T, heads, head_dim], [T, heads]
    """
    library = _library()
    assert library is not None, "asked only where it serves"
    query = query.contiguous()
    tokens, heads, dim = query.shape
    out, lse = torch.empty_like(query), query.new_empty(tokens, heads)
    pointers = (tensor.data_ptr() for tensor in (query, keys, values, out, lse))
    layer = _Layer(*pointers, heads, num_kv_heads, dim, scale)
    sinks = None if sinks is None else sinks.float().contiguous()
    sink_pointer = None if sinks is None else sinks.data_ptr()
    failed = library.attend(ctypes.byref(layer), sink_pointer, tokens, calls.array, len(calls), torch.get_num_threads())
    if failed:
        raise MemoryError(f"attention of {tokens} tokens x {heads} heads found no memory for its partial sums")
    return out, lse


def serves_linear(tokens: int) -> bool:
    """Whether the kernel takes a linear layer of so many tokens."""
    return tokens <= MAX_TOKENS and _library() is not None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`; what a token gives is the same to the last bit whatever other tokens there are.

    Parameters
    ----------
    x : float32 [..., inputs]
        On the host, as all of these.
    weight : float32 [outputs, inputs]
        Contiguous.
    bias : float32 [outputs], optional
        Contiguous.

    Returns
    -------
    float32 [..., outputs]
    """
    library = _library()
    assert library is not None, "asked only where it serves"
    outputs, inputs = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    pointers = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    library.linear(*pointers, x.numel() // inputs, inputs, outputs, torch.get_num_threads())
    return out


def why_not() -> str:
    """Why the compiled kernels cannot serve, empty if they can; they are compiled where they have not been yet."""
    return _loaded()[1]


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernels, or None; says once why not."""
    library, reason = _loaded()
    if library is None and os.environ.get(NATIVE_VARIABLE) != "0":
        _logger.warning(
            "attention and linear layers on the CPU use other kernels, their own could not be compiled: %s", reason
        )
    return library


@lru_cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None, f"{NATIVE_VARIABLE}=0 turns them off"
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, str(error)
    library.attend.argtypes = [
        ctypes.POINTER(_Layer),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.POINTER(_Call),
        ctypes.c_int64,
        ctypes.c_int,
    ]
    library.attend.restype = ctypes.c_int
    library.linear.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]
    library.linear.restype = None
    return library, ""


def _compiled() -> Path:
    """Path of the shared library, compiled if these sources and this processor have not met before."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler was found (set CC)")
    known = (*(source.read_text() for source in _SOURCES), compiler, platform.machine(), _processor(), *_FLAGS)
    path = cache_folder() / f"cpu_kernels-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-300:]}")
        os.replace(made, path)
    return path


def _processor() -> str:
    """What tells processors apart that the same code may not run on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())

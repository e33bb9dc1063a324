"""Loads `cpu_attention.c`, compiled once for this machine by its own C compiler, if it has one.

Without a compiler PyTorch's attention does the same, more slowly. `HF_PARALLEL_NATIVE=0` asks for that.
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
from functools import lru_cache
from pathlib import Path

import torch

from ..folders import cache_folder

NATIVE_VARIABLE = "HF_PARALLEL_NATIVE"

MIN_KEYS = 256
"""Keys of a single block below which a call of PyTorch's costs as little."""
MAX_ROWS = 1024
"""Rows of one KV head up to which the kernel was measured to be faster."""

_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp")
_SOURCE = Path(__file__).with_name("cpu_attention.c")
_logger = logging.getLogger(__name__)


def serves(
    dtype: torch.dtype, device: torch.device, blocks: int, rows: int, num_keys: int, key_dim: int, value_dim: int
) -> bool:
    """Whether the kernel takes a call: blocks of `num_keys` keys, all seen by `rows` query rows per KV head each."""
    fits = rows <= MAX_ROWS and (num_keys >= MIN_KEYS or blocks > 1) and key_dim == value_dim and key_dim % 8 == 0
    return fits and dtype == torch.float32 and device.type == "cpu" and _library() is not None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries of N blocks to all keys of theirs.

    Parameters
    ----------
    query : float32 [N * M, heads, head_dim]
    keys, values : float32 [N, kv_heads, L, head_dim]
        Tokens of a head lie one after another.
    scale : float
        Factor of the scores.
    seen : (out, lse), optional
        What the same queries saw in other blocks, contiguous. It is merged with, in place, and returned.

    Returns
    -------
    (out, lse) : [N * M, heads, head_dim], [N * M, heads]
    """
    library = _library()
    assert library is not None, "asked only where it serves"
    query = query.contiguous()
    tokens, heads, dim = query.shape
    out, lse = (torch.empty_like(query), query.new_empty(tokens, heads)) if seen is None else seen
    failed = library.attend(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        keys.shape[0],
        tokens // keys.shape[0],
        heads,
        keys.shape[1],
        keys.shape[2],
        dim,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        scale,
        seen is not None,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"attention of {tokens} tokens x {heads} heads found no memory for its partial sums")
    return out, lse


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel, or None; says once why not."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _logger.warning("attention on the CPU uses PyTorch's kernels, its own could not be compiled: %s", error)
        return None
    library.attend.argtypes = (
        [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 10 + [ctypes.c_float, ctypes.c_int, ctypes.c_int]
    )
    library.attend.restype = ctypes.c_int
    return library


def _compiled() -> Path:
    """Path of the shared library, compiled if this source and this processor have not met before."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler was found (set CC)")
    known = (_SOURCE.read_text(), compiler, platform.machine(), _processor(), *_FLAGS)
    path = cache_folder() / f"cpu_attention-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"]
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

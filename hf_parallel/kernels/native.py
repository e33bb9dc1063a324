"""Loads the C kernels: those of a wheel, else compiled once per machine by its own C compiler.

Without either, PyTorch and oneDNN compute the same, more slowly. `HF_PARALLEL_NATIVE=0` disables the kernels, and
`HF_PARALLEL_NATIVE=compile` has them compiled although the wheel brings some.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from hf_parallel.files import cache_folder
from hf_parallel.kernels import prebuilt
from hf_parallel.kernels.library import compiled, load
from hf_parallel.kernels.storage import FIRST_QUANTIZED, QuantizedStorage, storage_row
from hf_parallel.kernels.tiles import Tiles

NATIVE_VARIABLE = "HF_PARALLEL_NATIVE"
NATIVE_CHOICES = ("", "0", "1", "compile")
MAX_ROWS = 1024  # query rows per KV head up to which attention was measured to be faster than PyTorch without AVX2
PACKINGS = {"F32": (4, 1), "BF16": (2, 1), "F16": (2, 1), "Q4_0": (18, 32), "Q4_1": (20, 32), "Q8_0": (34, 32)}
PACKINGS |= {"Q4_K": (144, 256), "Q5_K": (176, 256), "Q6_K": (210, 256)}
"""Formats of weights by their names in GGUF, in the order of `cpu_linear.c`: bytes and weights of a block."""
INTEGERS = tuple(name for name, (_, weights) in PACKINGS.items() if weights > 1)  # integers with scales

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
"""Formats of keys and values, in the order of `cpu_attention.c`."""

ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid", "softplus")
"""Activations, in the order of `cpu_elementwise.c`."""

_NUMBERS = {packing: number for number, packing in enumerate(PACKINGS)}
_OMP_PAUSE_SOFT = 1
_MIN_SCORES_PER_KEPT = 16  # scores for each that `keep_top_k` keeps: it is meant for a few of many
_FLAGS = (*prebuilt.FLAGS, "-march=native", "-shared")
_SOURCES = prebuilt.SOURCES
_logger = logging.get_logger(__name__)

Rotation = tuple[tuple[Tensor, Tensor], bool] | None
"""Cosines and sines of the pairs, and whether the rotated pairs of dimensions are adjacent."""


class _PlanStruct(ctypes.Structure):
    """`Plan` of `cpu_attention.c`."""

    _fields_ = (
        ("levels", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("level_blocks", "row", "stride", "quantized", "before")),
        *((name, ctypes.c_void_p) for name in ("first_piece", "first_pair", "pieces", "query")),
        *((name, ctypes.c_void_p) for name in ("lo", "hi", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("half", "interleaved")),
    )


class _StorageStruct(ctypes.Structure):
    """`Storage` of `cpu_attention.c`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("keys", "values", "scales")), ("format", ctypes.c_int64))


class _Layer(ctypes.Structure):
    """`Layer` of `cpu_attention.c`."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head")),
        *((name, ctypes.c_void_p) for name in ("out", "best", "total", "sinks")),
        *(("storage", _StorageStruct), ("quantized", _StorageStruct)),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "lead", "dim")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class NativePlan:
    """Tiles as a C struct, shared by all layers of one shape.

    `arrays` maps pointers of `_PlanStruct` to contiguous arrays and tensors, which it keeps, `tables` are cosines and
    sines `[Q, rotary_dim / 2]` of the pairs, None if no query is rotated.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], tables: tuple[Tensor, Tensor] | None = None, interleaved: bool = False
    ) -> None:
        self.arrays = arrays
        self.tables = tables
        self.struct = _PlanStruct(levels=len(arrays["level_blocks"]) - 1, interleaved=interleaved)
        for name, array in arrays.items():
            setattr(self.struct, name, array.ctypes.data)
        if tables is not None:
            cos, sin = tables
            self.struct.cos = cos.data_ptr()
            self.struct.sin = sin.data_ptr()
            self.struct.half = cos.shape[1]

    @classmethod
    def of(cls, tiles: Tiles, query: np.ndarray, num_kv_heads: int, rotary: Rotation = None) -> NativePlan:
        """Return the plan of `tiles` for layers of `num_kv_heads`; `query` `[Q]` is the query of each pair."""
        pieces = tiles.pieces
        piece_rows = storage_row(pieces[:, 0], pieces[:, 1], pieces[:, 2], num_kv_heads)
        arrays = {
            "level_blocks": tiles.level_blocks,
            "row": storage_row(tiles.origin, tiles.capacity, tiles.first, num_kv_heads),
            "stride": tiles.capacity,
            "quantized": (tiles.origin >= FIRST_QUANTIZED).astype(np.int64),
            "before": tiles.before,
            "first_piece": tiles.first_piece,
            "first_pair": tiles.first_pair,
            "pieces": np.column_stack((piece_rows, pieces[:, 1], pieces[:, 0] >= FIRST_QUANTIZED, pieces[:, 3])),
            "query": query,
            "lo": tiles.lo,
            "hi": tiles.hi,
        }
        return cls({name: np.ascontiguousarray(array) for name, array in arrays.items()}, *(rotary or ()))

    def next_step(self, tiles: Tiles, rotary: Rotation = None) -> NativePlan:
        """Return the plan of the next decode step."""
        return NativePlan(dict(self.arrays, lo=tiles.lo, hi=tiles.hi), *(rotary or ()))


def supports(dtype: torch.dtype, device: torch.device, rows: int, key_dim: int, value_dim: int, lead: int = 0) -> bool:
    """Whether the attention kernel supports a call with `rows` query rows per block and KV head."""
    if device.type != "cpu":
        return False
    if rows > MAX_ROWS and "avx2" not in _processor():
        return False
    is_half = dtype in (torch.bfloat16, torch.float16)
    if dtype != torch.float32 and not (is_half and not has_bfloat16()):
        return False
    if key_dim != value_dim or key_dim % 8 or lead % 8:
        return False
    return _library() is not None


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: NativePlan,
    kv_heads: int,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    leads: Tensor | None = None,
    quantized: QuantizedStorage | None = None,
) -> Tensor:
    """Attention of queries `[T, heads, head_dim]` to the blocks of a plan; sums are in float32.

    `keys` and `values` `[slots * kv_heads, head_dim]` are the storage of one layer, of the query's dtype, `sinks`
    `[heads]` the logits of its attention sinks, `softcap` as in `AttentionParams`. `leads` `[slots, lead]`, with one KV
    head: the first dimensions of the keys, to which `keys` are the others; queries have `lead + head_dim`. `quantized`
    are the blocks of the layer in 8 bits.

    Returns `[T, heads, head_dim]` of the query's dtype. The result of a query has the same bits whatever other queries,
    rows and blocks the plan has, and for any number of threads (`hf_parallel.kernels.tiles`).
    """
    library = _library()
    assert library is not None, "supports() was not checked"
    query = query if query.stride(2) == 1 else query.contiguous()
    tokens, heads, _ = query.shape
    lead = 0 if leads is None else leads.shape[1]
    dim = values.shape[1]
    out = query.new_empty(tokens, heads, dim, dtype=torch.float32)
    sums = query.new_empty(2, tokens, heads, dtype=torch.float32)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    layer = _Layer(
        query=query.data_ptr(),
        query_token=query.stride(0),
        query_head=query.stride(1),
        out=out.data_ptr(),
        best=sums.data_ptr(),
        total=sums.data_ptr() + 4 * tokens * heads,
        sinks=None if sinks is None else sinks.data_ptr(),
        storage=_StorageStruct(
            keys=keys.data_ptr(),
            values=values.data_ptr() if leads is None else leads.data_ptr(),
            format=FORMATS.index(query.dtype),
        ),
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        lead=lead,
        dim=dim,
        scale=scale,
        softcap=softcap or 0.0,
    )
    if quantized is not None:
        layer.quantized = _StorageStruct(
            keys=quantized.keys.data_ptr(),
            values=quantized.values.data_ptr(),
            scales=quantized.scales.data_ptr(),
            format=FORMATS.index(quantized.keys.dtype),
        )
    if library.attend(ctypes.byref(layer), ctypes.byref(plan.struct), torch.get_num_threads()):
        raise MemoryError(f"attention of {tokens} tokens x {heads} heads cannot allocate its partial sums")
    return out.to(query.dtype)


def latent_products(x: Tensor, weight: Tensor, absorbs: bool) -> Tensor:
    """Return the products of each head of `x` `[T, heads, inputs]` with its weights, float32 `[T, heads, outputs]`.

    `weight`: `[heads, inputs, outputs]` if it `absorbs`, else `[heads, outputs, inputs]`; its last dimension is a
    multiple of 8. A token's result has the same bits whatever other tokens there are.
    """
    library = _library()
    assert library is not None, "supports() was not checked"
    x = x.float()
    weight = weight.float()
    if x.stride(2) != 1:
        x = x.contiguous()
    if weight.stride(2) != 1 or weight.stride(1) != weight.shape[2]:
        weight = weight.contiguous()
    tokens, heads, inputs = x.shape
    outputs = weight.shape[2] if absorbs else weight.shape[1]
    out = x.new_empty(tokens, heads, outputs)
    strides = x.stride(0), x.stride(1), weight.stride(0), out.stride(0), out.stride(1)
    sizes = inputs, outputs, absorbs, torch.get_num_threads()
    library.latent_products(x.data_ptr(), weight.data_ptr(), out.data_ptr(), tokens, heads, *strides, *sizes)
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packing: str = "F32",
    *,
    by_inputs: bool = False,
    int8: bool = False,
) -> Tensor:
    """Return `x W^T + b`: float32 `[..., inputs]` to `[..., outputs]`.

    `weight` `[outputs, n]`, with contiguous rows, is packed as `packing` says; `by_inputs`: `[inputs, outputs]`, in a
    format without blocks. `bias` is float32 and contiguous. A token's result is the same to the last bit, whatever
    other tokens are computed with it, and whether the weights are packed. `int8`, for weights in `INTEGERS`: each block
    of 32 inputs of a token is rounded to 8 bits, with the scale `max|x| / 127`.
    """
    library = _library()
    assert library is not None, "is_available() was not checked"
    x = x.contiguous()
    inputs = x.shape[-1]
    outputs = weight.shape[1] if by_inputs else len(weight)
    out = x.new_empty(*x.shape[:-1], outputs)
    arguments = (
        _NUMBERS[packing],
        x.data_ptr(),
        weight.data_ptr(),
        weight.stride(0) * weight.element_size(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
    )
    num_threads = torch.get_num_threads()
    if int8:
        has_failed = library.linear_int8(*arguments, num_threads)
    else:
        has_failed = library.linear(*arguments, by_inputs, num_threads)
    if has_failed:
        raise MemoryError(f"a layer of {inputs} inputs cannot allocate memory for the inputs of {len(x)} tokens")
    return out


@torch.compiler.disable
def unpack(packed: Tensor, packing: str) -> Tensor:
    """Return packed weights, contiguous `[outputs, n]`, in float32: `[outputs, inputs]`."""
    library = _library()
    if library is None or packed.device.type != "cpu":
        reason = unavailable_reason() or f"got {packed.device}"
        raise RuntimeError(f"packed weights need C kernels on a CPU: {reason}")
    row_bytes = packed.shape[1] * packed.element_size()
    block_bytes, block_weights = PACKINGS[packing]
    inputs = row_bytes // block_bytes * block_weights
    out = packed.new_empty(len(packed), inputs, dtype=torch.float32)
    number = _NUMBERS[packing]
    library.unpack(number, packed.data_ptr(), row_bytes, out.data_ptr(), len(packed), inputs, torch.get_num_threads())
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return float32 `x / sqrt(mean(x^2) + eps) * (weight + offset)`, over the last dimension; no weight: `* 1`."""
    library = _library()
    assert library is not None, "is_available() was not checked"
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    weight_address = None if weight is None else weight.data_ptr()
    num_threads = torch.get_num_threads()
    rows = x.numel() // size
    library.rms_norm(x.data_ptr(), weight_address, out.data_ptr(), rows, size, eps, offset, num_threads)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """Return one of `ACTIVATIONS` of float32 numbers."""
    library = _library()
    assert library is not None, "is_available() was not checked"
    x = x.contiguous()
    out = torch.empty_like(x)
    kind = ACTIVATIONS.index(activation)
    library.activate(kind, x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate float32 queries and keys `[1, heads, T, head_dim]` by contiguous `cos` and `sin` `[1, T, rotary_dim]`."""
    library = _library()
    assert library is not None, "is_available() was not checked"
    _, _, tokens, dim = query.shape
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    arguments: list[int] = []
    for x in (query, key):
        if x.stride(3) != 1:
            x = x.contiguous()
        heads = x.shape[1]
        out = x.new_empty(1, tokens, heads, dim)
        inputs.append(x)  # keeps a copy until the call has returned
        outputs.append(out)
        arguments += [x.data_ptr(), out.data_ptr(), heads, x.stride(2), x.stride(1)]
    rotary_dim = cos.shape[2]
    num_threads = torch.get_num_threads()
    library.rotate_heads(*arguments, cos.data_ptr(), sin.data_ptr(), tokens, dim, rotary_dim, interleaved, num_threads)
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


_GENERATOR_BYTES = 5056
"""Size of the state of PyTorch's generator for the CPU, as the kernels read it."""
_generator_lock = threading.Lock()
_T = TypeVar("_T")


def _reset_lock() -> None:
    """Replace the lock, which a thread that a forked process does not have may hold."""
    global _generator_lock
    _generator_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)


def _with_generator(draw: Callable[[int], _T], generator: torch.Generator | None) -> _T:
    """Return `draw(address of the state)`, after which the generator has the state that it has written.

    `generator` is PyTorch's global one by default. Draws of other threads wait for this one. If the state has changed
    meanwhile, because another thread has seeded the generator or drawn from it, it draws again.
    """
    generator = torch.default_generator if generator is None else generator
    with _generator_lock:
        while True:
            before = generator.get_state()
            state = before.clone()
            drawn = draw(state.data_ptr())
            if _replace_state(generator, before, state):
                return drawn


def _replace_state(generator: torch.Generator, before: Tensor, state: Tensor) -> bool:
    """Set the state of a generator if it is still the one `before`; return whether it was.

    Comparing and setting are one call into C, so other Python threads hardly ever run in between. A seed that one sets
    at that moment is lost, which was seen under constant seeding only.
    """
    current = map(bytes, map(Tensor.numpy, map(torch.Generator.get_state, repeat(generator))))
    compare = partial(next, map({bytes(before.numpy()): None}.__getitem__, current))
    collects = gc.isenabled()
    gc.disable()  # before Python 3.12, a collection may begin in the call, and run finalizers in Python
    try:
        deque(map(partial.__call__, (compare, partial(generator.set_state, state))), maxlen=0)
    except KeyError:
        return False
    finally:
        if collects:
            gc.enable()
    return True


def has_known_generator() -> bool:
    """Whether the state of PyTorch's generator for the CPU has the size that the kernels know."""
    return torch.default_generator.get_state().numel() == _GENERATOR_BYTES


def multinomial(probs: Tensor, generator: torch.Generator | None = None) -> Tensor | None:
    """Draw a token of each row of contiguous float32 `probs` `[rows, vocabulary]`; None: they are no probabilities.

    `generator` is PyTorch's global one by default.
    """
    library = _library()
    assert library is not None, "is_available() was not checked"
    tokens = torch.empty(len(probs), dtype=torch.int64, device="cpu")
    threads = torch.get_num_threads()

    def draw(state: int) -> int:
        return library.multinomial(probs.data_ptr(), state, *probs.shape, tokens.data_ptr(), threads)  # type: ignore[no-any-return]

    return None if _with_generator(draw, generator) else tokens


def sample(scores: Tensor, settings: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sample a token of each row of contiguous float32 `scores` `[rows, vocabulary]`; see `kernels.sampling.sample`.

    `settings`, float32 `[rows or 1, 4]`, are temperature, top-k, 1 - top-p and min-p of each row or of all. Return
    tokens, marks (None: all probabilities are finite) and probabilities of the tokens.
    """
    library = _library()
    assert library is not None, "is_available() was not checked"
    rows, vocabulary = scores.shape
    drawn = torch.empty(2, rows, dtype=torch.int64, device="cpu")
    probs = torch.empty(rows, dtype=torch.float32, device="cpu")
    tokens, marks = drawn
    stride = int(len(settings) > 1)
    outputs = rows, vocabulary, tokens.data_ptr(), marks.data_ptr(), probs.data_ptr(), torch.get_num_threads()

    def draw(state: int | None) -> int:
        of_keys = None if keys is None else keys.data_ptr()
        return library.sample(scores.data_ptr(), settings.data_ptr(), stride, of_keys, state, *outputs)  # type: ignore[no-any-return]

    num_invalid = _with_generator(draw, None) if keys is None else draw(None)
    if num_invalid < 0:
        raise MemoryError("sampling needs memory for the tokens that its filters keep")
    return tokens, marks if num_invalid else None, probs


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax of contiguous float32 scores `[rows, vocabulary]`; NaN for rows that have none."""
    library = _library()
    assert library is not None, "is_available() was not checked"
    probs = torch.empty_like(scores)
    library.softmax(scores.data_ptr(), probs.data_ptr(), *scores.shape, torch.get_num_threads())
    return probs


def can_filter(scores: Tensor) -> bool:
    """Whether the kernels can remove scores; if not, PyTorch has to: on another device, or in another dtype."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and _library() is not None


def keep_probable(scores: Tensor, settings: Tensor) -> Tensor:
    """Apply top-p and min-p to scores `[rows, vocabulary]`: removed ones are -inf. `settings` are as in `sample`."""
    library = _library()
    assert library is not None, "can_filter() was not checked"
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    stride = int(len(settings) > 1)
    threads = torch.get_num_threads()
    if library.keep_probable(scores.data_ptr(), settings.data_ptr(), stride, out.data_ptr(), *scores.shape, threads):
        raise MemoryError("top-p and min-p need memory for a copy of a row of scores")
    return out


def race(probs: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor | None:
    """Draw a token of each row of contiguous float32 `probs` `[rows, n]`; see `hf_parallel.generation.sampling.rng`.

    `keys` are int64 `[rows]`, `ids` the tokens int64 `[n]`, by default 0, 1, .... None: the highest probability of a
    row is zero or not finite.
    """
    library = _library()
    assert library is not None, "is_available() was not checked"
    winners = torch.empty(len(probs), dtype=torch.int64, device="cpu")
    of_ids = None if ids is None else ids.data_ptr()
    threads = torch.get_num_threads()
    failed = library.race(probs.data_ptr(), of_ids, keys.data_ptr(), *probs.shape, winners.data_ptr(), threads)
    return None if failed else winners


def keep_top_k(scores: Tensor, counts: Sequence[int]) -> Tensor | None:
    """Return scores `[rows, vocabulary]` with -inf for those below the `counts[row]`-th highest of their row.

    None if PyTorch has to compute it: on another device, in another dtype, where many are kept, or with a NaN.
    """
    if not can_filter(scores) or max(counts) > scores.shape[1] // _MIN_SCORES_PER_KEPT:
        return None
    library = _library()
    assert library is not None, "can_filter() was checked"
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    numbers = np.array(counts)
    threads = torch.get_num_threads()
    failed = library.keep_top_k(scores.data_ptr(), numbers.ctypes.data, out.data_ptr(), *scores.shape, threads)
    return None if failed else out


def is_available() -> bool:
    """Whether the compiled kernels are available."""
    return _library() is not None


def row_sums(words: Tensor, multipliers: Tensor, out: Tensor) -> None:
    """Write sums of rows; see `hf_parallel.kernels.checksum`."""
    library = _library()
    assert library is not None, "is_available() was not checked"
    num_threads = torch.get_num_threads()
    library.row_sums(words.data_ptr(), multipliers.data_ptr(), out.data_ptr(), len(words), num_threads)


def release_threads() -> None:
    """End the idle OpenMP threads of the calling thread; its next parallel operation starts new ones.

    While two threads of a process have such threads, GCC's OpenMP lets idle ones sleep at once, and waking them takes
    longer than most operations of a decode step.
    """
    library = _library()
    pause = getattr(library, "omp_pause_resource_all", None)  # OpenMP 5.0
    if pause is None and library is not None and os.name == "posix":
        pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # a wheel's library uses PyTorch's OpenMP
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


def unavailable_reason() -> str:
    """Return why the compiled kernels are not available, empty if they are. Compiles them if necessary.

    Raises `ValueError` if `HF_PARALLEL_NATIVE` is unknown.
    """
    return _load()[1]


def is_prebuilt() -> bool:
    """Whether the kernels are those of the installed wheel; False: they were compiled here, or are not available."""
    library = _compiled_library()
    path = prebuilt.find(_processor().split())
    return library is not None and path is not None and library._name == str(path)


def run_program(program: ctypes.Array[Any], length: int, values: ctypes.Array[Any], tokens: int, threads: int) -> int:
    """Run instructions; see `hf_parallel.kernels.program`. Returns the result of `run_program` in `cpu_program.c`."""
    library = _compiled_library()
    assert library is not None, "is_available() was not checked"
    return int(library.run_program(program, length, values, tokens, threads))


class _KernelListener(threading.local):
    """The library that reports its calls in a thread; None: they are not reported."""

    library: Any = None


_recording = _KernelListener()


class _RecordedLibrary:
    """Calls the kernels and reports each call."""

    def __init__(self, library: ctypes.CDLL, report: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._library = library
        self._report = report

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            self._report(name, arguments)
            return result

        return call


@contextmanager
def calls_reported(report: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Report the name and arguments of each call of a kernel by this thread."""
    library = _compiled_library()
    assert library is not None, "is_available() was not checked"
    _recording.library = _RecordedLibrary(library, report)
    try:
        yield
    finally:
        _recording.library = None


def _library() -> Any:
    """The compiled kernels, see `_compiled_library`, or what reports their calls in this thread."""
    return _recording.library or _compiled_library()


@lru_cache
def _compiled_library() -> ctypes.CDLL | None:
    """The compiled kernels; None if they are disabled or, after one warning, not available."""
    library, reason = _load()
    if library is None and os.environ.get(NATIVE_VARIABLE) != "0":
        _logger.warning(f"CPU attention and linear layers are slower, as the C kernels could not be compiled: {reason}")
    return library


@lru_cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    choice = os.environ.get(NATIVE_VARIABLE, "")
    if choice not in NATIVE_CHOICES:
        raise ValueError(f"{NATIVE_VARIABLE} must be one of {NATIVE_CHOICES}, got {choice!r}")
    if choice == "0":
        return None, f"{NATIVE_VARIABLE}=0 disables them"
    try:
        library = (None if choice == "compile" else _open_prebuilt()) or _open()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, str(error)
    size = ctypes.c_int64
    pointer = ctypes.c_void_p
    library.attend.argtypes = [ctypes.POINTER(_Layer), ctypes.POINTER(_PlanStruct), ctypes.c_int]
    library.attend.restype = ctypes.c_int
    library.latent_products.argtypes = [*[pointer] * 3, *[size] * 9, ctypes.c_int, ctypes.c_int]
    library.latent_products.restype = None
    layer = ctypes.c_int, pointer, pointer, size, pointer, pointer, size, size, size
    library.linear.argtypes = [*layer, ctypes.c_int, ctypes.c_int]
    library.linear.restype = ctypes.c_int
    library.linear_int8.argtypes = [*layer, ctypes.c_int]
    library.linear_int8.restype = ctypes.c_int
    library.unpack.argtypes = [ctypes.c_int, pointer, size, pointer, size, size, ctypes.c_int]
    library.unpack.restype = None
    library.row_sums.argtypes = [*[pointer] * 3, size, ctypes.c_int]
    library.row_sums.restype = None
    library.rms_norm.argtypes = [*[pointer] * 3, size, size, ctypes.c_double, ctypes.c_double, ctypes.c_int]
    library.rms_norm.restype = None
    library.activate.argtypes = [ctypes.c_int, pointer, pointer, size, ctypes.c_int]
    library.activate.restype = None
    heads = pointer, pointer, size, size, size
    library.rotate_heads.argtypes = [*heads, *heads, pointer, pointer, *[size] * 4, ctypes.c_int]
    library.rotate_heads.restype = None
    library.run_program.argtypes = [pointer, size, pointer, size, ctypes.c_int]
    library.run_program.restype = ctypes.c_int
    library.multinomial.argtypes = [pointer, pointer, size, size, pointer, ctypes.c_int]
    library.multinomial.restype = ctypes.c_int
    library.sample.argtypes = [*[pointer] * 2, size, *[pointer] * 2, size, size, *[pointer] * 3, ctypes.c_int]
    library.sample.restype = size
    library.softmax.argtypes = [pointer, pointer, size, size, ctypes.c_int]
    library.softmax.restype = None
    library.keep_probable.argtypes = [pointer, pointer, size, pointer, size, size, ctypes.c_int]
    library.keep_probable.restype = ctypes.c_int
    library.race.argtypes = [*[pointer] * 3, size, size, pointer, ctypes.c_int]
    library.race.restype = ctypes.c_int
    library.keep_top_k.argtypes = [*[pointer] * 3, size, size, ctypes.c_int]
    library.keep_top_k.restype = ctypes.c_int
    return library, ""


def _open_prebuilt() -> ctypes.CDLL | None:
    """Load the library of the installed wheel for this processor; None if it has none that can be loaded here."""
    path = prebuilt.find(_processor().split())
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # an older glibc, or a PyTorch without OpenMP
        _logger.info(f"the C kernels of the wheel cannot be loaded, and are compiled: {error}")
        return None


def _open() -> ctypes.CDLL:
    """Load the shared library, from a temporary folder if the cache folder cannot hold it."""
    try:
        return load(_compile())
    except OSError as error:
        _logger.warning(f"the C kernels are compiled anew for this process, as they cannot be cached: {error}")
        with tempfile.TemporaryDirectory() as folder:
            return load(_compile(Path(folder)))


def _compile(folder: Path | None = None) -> Path:
    """Path of the shared library. Compiles it unless it is cached for these sources, compiler and processor."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler was found (set CC)")
    sources = [source.read_text() for source in _SOURCES]
    key = (*sources, compiler, platform.machine(), _processor(), *_FLAGS)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    command = [compiler, *_FLAGS, *map(str, _SOURCES), "-lm"]
    return compiled(folder or cache_folder(), f"cpu_kernels-{digest[:16]}", command)


def has_bfloat16() -> bool:
    """Whether the processor has instructions for products in bfloat16, which PyTorch then uses."""
    return not {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}.isdisjoint(_processor().split())


def has_float16() -> bool:
    """Whether the processor has instructions for products in float16, which PyTorch then uses."""
    return not {"avx512_fp16", "amx_fp16", "fphp"}.isdisjoint(_processor().split())


@lru_cache
def _processor() -> str:
    """String that is equal for processors with the same instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())

"""Decode steps captured as CUDA graphs and replayed with new inputs in the same device buffers.

A decode step of a small batch launches hundreds of kernels that run for microseconds each; replayed as one graph, they
follow each other without the CPU. The inputs that change between steps are in device buffers: token ids and positions
here, the integers of the attention plan in those of the kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.cache import BlockCache, ForwardPass
from hf_parallel.cache.placement import all_modules, weight_devices
from hf_parallel.kernels import AttentionPlan, DeviceBuffers, select_backend

RunModel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From token ids and positions, `int64 [T]` each, to logits `[T, vocabulary]`."""

SYNCHRONIZING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique",
    "_unique2",
    "unique_dim",
)
"""Operations whose result Python, or the CPU, needs before it continues."""
_COPIES = ("_to_copy", "copy_", "copy")

_capturing = threading.Lock()
"""Held during a capture: the start of another one synchronizes the device, which would break the first."""
_never_waits: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
"""Models whose decode step was checked by `NoSyncMode`, with the number of their modules and hooks at that time."""
_logger = logging.getLogger(__name__)


class CapturedGraph(NamedTuple):
    """A captured CUDA graph."""

    replay: Callable[[], None]
    output: torch.Tensor  # holds the result after a replay
    num_bytes: int  # memory that the graph reserves
    pool: Any  # memory pool, which later graphs can share


@dataclass(frozen=True, eq=False)
class _DecodeStep:
    """A captured decode step of up to `len(ids)` rows, with its input and output buffers."""

    graph: CapturedGraph
    ids: torch.Tensor
    positions: torch.Tensor
    buffers: tuple[DeviceBuffers, ...]
    storage: list[int]  # addresses of keys and values

    def load(self, plan: AttentionPlan) -> bool:
        """Load a plan into the buffers; return False if it does not fit."""
        for buffers in self.buffers:  # noqa: SIM110 (each step runs this)
            if not buffers.update(plan):
                return False
        return True


class DecodeGraphs:
    """CUDA graphs of decode steps over one cache, one per bucket of row counts.

    The graphs share one memory pool, so the output of one must be read before the next is replayed.
    """

    def __init__(self, cache: BlockCache, model: torch.nn.Module) -> None:
        self.num_bytes = 0  # memory that the graphs reserve
        self._cache = cache
        self._model = model
        self._steps: dict[int, _DecodeStep] = {}
        self._pool: Any = None
        self._failed = False

    @staticmethod
    def supports(model: torch.nn.Module, device: torch.device) -> bool:
        """Return whether a model's decode steps can be captured: on one GPU, with kernels that need no CPU input."""
        if device.type != "cuda" or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            return False
        return torch.device("meta") not in weight_devices(model) and select_backend(device) == "triton"

    def clear(self) -> None:
        """Drop the captured steps, as they read weights at addresses that no longer hold them."""
        self._steps = {}
        self._pool = None
        self.num_bytes = 0

    def logits(self, run_model: RunModel, step: ForwardPass, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits `[T, vocabulary]` of the prepared decode step for `ids`, `int64 [T]`.

        Captures a graph if none fits; runs eagerly if that fails. The next step overwrites the logits. `run_model` runs
        it on the prepared pass of the cache, and must be the same for every step.
        """
        rows = bucket_size(len(ids))
        if rows == 1 and self._steps and 1 not in self._steps:
            rows = 2  # padded: compiled layers have another graph for one row, which takes seconds to compile
        captured = self._steps.get(rows)
        is_loaded = captured is not None and captured.storage == self._storage() and captured.load(step.plan)
        if not is_loaded:
            captured = self._capture(run_model, step, rows)
        if captured is None:
            return run_model(ids, step.position_ids)
        captured.ids[: len(ids)] = ids
        captured.positions[: len(ids)] = step.position_ids
        captured.graph.replay()
        return captured.graph.output[: len(ids)]

    def _storage(self) -> list[int]:
        """Return the addresses of keys and values, which change when a layer's storage grows."""
        layers = self._cache.pool.arena.layers.values()
        return [address for layer in layers for address in layer.addresses]

    def _capture(self, run_model: RunModel, step: ForwardPass, rows: int) -> _DecodeStep | None:
        """Capture the prepared step for up to `rows` rows; padding rows write nothing and attend to nothing."""
        layers = self._cache.pool.arena.layers.values()  # all have storage, which a replay cannot allocate
        if self._failed or not layers or not all(layer.backend.capturable for layer in layers):
            return None
        ids, positions = step.position_ids.new_zeros(2, rows)
        num_parts = 0
        for module in all_modules(self._model):
            num_parts += 1 + len(module._forward_hooks) + len(module._forward_pre_hooks)
        is_checked = _never_waits.get(self._model) == num_parts
        try:
            graph = capture_graph(lambda: run_model(ids, positions), ids.device, self._pool, is_checked)
        except RuntimeError as error:
            self._failed = True
            self._steps = {}
            self.num_bytes = 0
            reason = error.__context__ or error  # ending a failed capture raises a second, less specific error
            _logger.warning("decode steps run without CUDA graphs, as they could not be captured: %s", reason)
            _logger.debug("traceback of the failed capture", exc_info=reason)
            return None
        self._pool = graph.pool
        _never_waits[self._model] = num_parts
        self.num_bytes += graph.num_bytes
        # `launch_for` (kernels/triton/launch.py) has left the buffers that the graph reads in `plan.derived`.
        # Only now releases an outdated graph: a pool can be shared only while it has a graph.
        self._steps[rows] = _DecodeStep(graph, ids, positions, step.plan.device_buffers, self._storage())
        return self._steps[rows]


def bucket_size(rows: int) -> int:
    """Return the row count of the graph for `rows` rows: at least `rows`, and less than a quarter more."""
    unit = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def capture_graph(
    function: Callable[[], torch.Tensor], device: torch.device, pool: Any = None, is_checked: bool = False
) -> CapturedGraph:
    """Capture the kernels that a function launches on a GPU; raises `RuntimeError` if that is not possible.

    The function runs once before, so that kernels are compiled and buffers allocated. It must launch the same kernels
    each time. `pool` is the memory pool of an existing graph of the same function, whose output the new graph
    overwrites. Unless `is_checked`, the function runs a second time to check that it never synchronizes.
    """
    # A failed capture leaves its own stream as the current one; the outer context restores it.
    with _capturing, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        function()
        if not is_checked:
            # Not compiled: Dynamo would mark all code that it meets under a dispatch mode as not to be compiled.
            with torch.compiler.set_stance("force_eager"), NoSyncMode():
                function()
        torch.cuda.empty_cache()  # a capture does this too, which would distort the difference below
        before = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may use the GPU during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local"):
            output = function()
        return CapturedGraph(graph.replay, output, torch.cuda.memory_reserved(device) - before, graph.pool())


class NoSyncMode(TorchDispatchMode):
    """Raises `RuntimeError` for operations that synchronize the CPU with a device.

    In a capture, such an operation would leave PyTorch's allocator in a state in which it never frees cached memory.
    """

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Run an operation unless it synchronizes."""
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(_is_mask(index) for index in args[1])
        if masked or name in SYNCHRONIZING:
            raise RuntimeError(f"the model waits for the device (aten::{name}{' with a mask' if masked else ''})")
        result = func(*args, **(kwargs or {}))
        if name in _COPIES:
            devices = {tensor.device.type for tensor in (result, *args) if isinstance(tensor, torch.Tensor)}
            if len(devices) > 1:
                raise RuntimeError("the model copies between the host and the device")
        return result


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a GPU; graphs share memory only if captured on one stream."""
    return torch.cuda.Stream(device)

"""DecodeGraphs: decode steps captured once as CUDA graphs, then replayed with new numbers in the same buffers.

A decode step of a small batch launches some hundred kernels that each run for microseconds; replayed as one graph they
follow each other without the host. What differs from step to step lies in device buffers: token ids and positions
here, the plan's integers in those of the kernel floor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.cache import BlockCache, ForwardPass
from hf_parallel.kernels import PlanOnDevice, select_backend
from hf_parallel.kernels.dispatch import replayable

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From ids and positions, `int64 [T]` each, to logits `[T, vocabulary]`."""

_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique", "_unique2", "unique_dim")
"""Operations whose results the host must have before it goes on."""
_COPIES = ("_to_copy", "copy_", "copy")

_recording = threading.Lock()
"""Held while a graph is captured: another capture begins by waiting for the device, which would break this one."""
_logger = logging.getLogger(__name__)


class Recording(NamedTuple):
    """What was captured: how to run it again, the tensor that then holds its result, and the memory that it keeps."""

    replay: Callable[[], None]
    result: torch.Tensor
    num_bytes: int
    pool: Any


@dataclass(frozen=True, eq=False)
class _Captured:
    """A decode step of `len(ids)` rows and the buffers that it reads and writes."""

    replay: Callable[[], None]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    buffers: tuple[PlanOnDevice, ...]
    storage: list[int]


class DecodeGraphs:
    """Graphs of one call of `generate`, one for each bucket of rows.

    They run one at a time, and what one gives is read before the next one runs: all share one pool of memory.

    Parameters
    ----------
    cache : BlockCache

    Attributes
    ----------
    num_bytes : int
        Memory that the graphs keep.
    """

    def __init__(self, cache: BlockCache) -> None:
        self.num_bytes = 0
        self._cache = cache
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None
        self._failed = False

    @staticmethod
    def serve(model: torch.nn.Module, device: torch.device) -> bool:
        """Whether decode steps of a model may be captured: on one GPU, with kernels that read nothing on the host."""
        spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        return device.type == "cuda" and not spread and select_backend(device) == "triton"

    def logits(self, forward: Forward, step: ForwardPass, ids: torch.Tensor) -> torch.Tensor:
        """Logits `[T, vocabulary]` of the prepared decode step; they are overwritten by the next one.

        Parameters
        ----------
        forward : callable
            Runs the model over the cache's prepared pass, the same for every step.
        step : ForwardPass
        ids : int64 [T]
        """
        rows = bucket(len(ids))
        if not self._goes_on(rows, step) and not self._capture(forward, step, rows):
            return forward(ids, step.position_ids)
        captured = self._captured[rows]
        captured.ids[: len(ids)] = ids
        captured.positions[: len(ids)] = step.position_ids
        captured.replay()
        return captured.logits[: len(ids)]

    def _goes_on(self, rows: int, step: ForwardPass) -> bool:
        """Whether there is a graph that can serve a step; if so its buffers hold the step's plan now."""
        captured = self._captured.get(rows)
        if captured is None or captured.storage != self._storage():
            return False
        return all(buffers.serve(step.plan) for buffers in captured.buffers)

    def _storage(self) -> list[int]:
        """Where the keys and values lie: a layer that grew has moved."""
        layers = self._cache.arena.layers.values()
        return [pointer for layer in layers for pointer in (layer.keys.data_ptr(), layer.values.data_ptr())]

    def _replayable(self) -> bool:
        """Whether every layer has storage, which a graph would not make, and kernels that a graph may hold."""
        layers = self._cache.arena.layers.values()
        return bool(layers) and all(replayable(layer.keys, layer.values) for layer in layers)

    def _capture(self, forward: Forward, step: ForwardPass, rows: int) -> bool:
        """Capture the prepared step for up to `rows` rows; those beyond the step's write and see nothing."""
        if self._failed or not self._replayable():
            return False
        ids = step.position_ids.new_zeros(rows)
        positions = step.position_ids.new_zeros(rows)
        try:
            recording = record(lambda: forward(ids, positions), ids.device, self._pool)
        except RuntimeError as error:
            self._failed = True
            self._captured.clear()
            self.num_bytes = 0
            reason = error.__context__ or error  # the end of a capture fails too, and says less
            _logger.warning("decode steps are launched kernel by kernel, they could not be captured: %s", reason)
            _logger.debug("where the capture failed", exc_info=reason)
            return False
        self._pool = recording.pool
        self.num_bytes += recording.num_bytes
        # A graph that was there goes only now: a pool without any graph cannot be shared.
        self._captured[rows] = _Captured(
            recording.replay, ids, positions, recording.result, step.plan.on_device, self._storage()
        )
        return True


def bucket(rows: int) -> int:
    """Rows of the graph that serves `rows`: less than a quarter more."""
    unit = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def record(function: Callable[[], torch.Tensor], device: torch.device, pool: Any = None) -> Recording:
    """Capture what a function launches on a GPU.

    It runs once before, so that kernels are compiled and buffers are made; it must do the same each time.

    Parameters
    ----------
    pool : optional
        Memory of an earlier recording of the same, that is still there. What that one gave is overwritten when this one
        runs. Without it the function runs once more, to see that it waits for nothing.

    Raises
    ------
    RuntimeError
        If the function does what cannot be captured, such as waiting for the GPU, or there is no memory for it.
    """
    # A capture that fails leaves its own stream behind as the current one: the outer context puts things right.
    with _recording, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        function()
        if pool is None:
            with NoSyncMode():
                function()
        torch.cuda.empty_cache()  # as a capture does when it begins, which would hide what it takes
        before = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local"):
            result = function()
        return Recording(graph.replay, result, torch.cuda.memory_reserved(device) - before, graph.pool())


class NoSyncMode(TorchDispatchMode):
    """Refuses what makes the host wait for a device, before a capture meets it.

    That would break it for good: PyTorch's allocator goes on believing that a capture is under way, and gives none of
    the memory that it holds back when there is too little.

    Raises
    ------
    RuntimeError
        When such an operation runs.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it waits."""
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(_is_mask(index) for index in args[1])
        if masked or name in _WAITING:
            raise RuntimeError(f"the model waits for the device (aten::{name}{' with a mask' if masked else ''})")
        result = func(*args, **(kwargs or {}))
        if name in _COPIES and len({t.device.type for t in (result, *args) if isinstance(t, torch.Tensor)}) > 1:
            raise RuntimeError("the model copies between the host and the device")
        return result


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a GPU's graphs are captured; memory is shared only between captures on one stream."""
    return torch.cuda.Stream(device)

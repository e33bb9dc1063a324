"""DecodeGraphs: decode steps captured once as CUDA graphs, then replayed with new numbers in the same buffers.

A decode step of a small batch launches some hundred kernels that each run for microseconds; replayed as one graph they
follow each other without the host. What differs from step to step lies in device buffers: token ids and positions
here, the plan's integers in those of the kernel floor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache import BlockCache, ForwardPass
from ..kernels import PlanOnDevice, select_backend

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From ids and positions, `int64 [T]` each, to logits `[T, vocabulary]`."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Captured:
    """A decode step of `len(ids)` rows and the buffers that it reads and writes."""

    replay: Callable[[], None]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    num_bytes: int
    buffers: tuple[PlanOnDevice, ...]
    storage: list[int]


class DecodeGraphs:
    """Graphs of one call of `generate`, one for each bucket of rows.

    Parameters
    ----------
    forward : callable
        Runs the model over the cache's prepared pass.
    cache : BlockCache
    """

    def __init__(self, forward: Forward, cache: BlockCache) -> None:
        self._forward, self._cache = forward, cache
        self._captured: dict[int, _Captured] = {}
        self._failed = False

    @property
    def num_bytes(self) -> int:
        """Memory that the graphs keep."""
        return sum(captured.num_bytes for captured in self._captured.values())

    @staticmethod
    def serve(model: torch.nn.Module, device: torch.device) -> bool:
        """Whether decode steps of a model can be captured: on one GPU, with kernels that read nothing on the host."""
        spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        return device.type == "cuda" and not spread and select_backend(device) == "triton"

    def logits(self, step: ForwardPass, ids: torch.Tensor) -> torch.Tensor:
        """Logits `[T, vocabulary]` of the prepared decode step; they are overwritten by the next one.

        Parameters
        ----------
        step : ForwardPass
        ids : int64 [T]
        """
        rows = bucket(len(ids))
        if rows in self._captured and not self._goes_on(self._captured[rows], step):
            del self._captured[rows]  # its memory serves the new one
        if rows not in self._captured and not self._failed:
            self._capture(step, rows)
        if self._failed:
            return self._forward(ids, step.position_ids)
        captured = self._captured[rows]
        captured.ids[: len(ids)] = ids
        captured.positions[: len(ids)] = step.position_ids
        captured.replay()
        return captured.logits[: len(ids)]

    def _goes_on(self, captured: _Captured, step: ForwardPass) -> bool:
        """Whether a graph can serve a step; if so its buffers hold the step's plan now."""
        same = captured.storage == self._storage()
        return same and all(buffers.serve(step.plan) for buffers in captured.buffers)

    def _storage(self) -> list[int]:
        """Where the keys and values lie: a layer that grew has moved."""
        layers = self._cache.arena.layers.values()
        return [pointer for layer in layers for pointer in (layer.keys.data_ptr(), layer.values.data_ptr())]

    def _capture(self, step: ForwardPass, rows: int) -> None:
        """Capture the prepared step for up to `rows` rows; those beyond the step's write and see nothing."""
        ids = step.position_ids.new_zeros(rows)
        positions = step.position_ids.new_zeros(rows)
        try:
            replay, logits, num_bytes = record(lambda: self._forward(ids, positions))
        except RuntimeError as error:
            self._failed = True
            _logger.warning("decode steps are launched kernel by kernel, they could not be captured: %s", error)
            return
        buffers, storage = step.plan.on_device, self._storage()
        self._captured[rows] = _Captured(replay, ids, positions, logits, num_bytes, buffers, storage)


def bucket(rows: int) -> int:
    """Rows of the graph that serves `rows`: less than a quarter more."""
    unit = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def record(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor, int]:
    """Capture what a function launches on the GPU.

    It runs once before, so that kernels are compiled; it must do the same each time.

    Returns
    -------
    (replay, result, num_bytes)
        How to run it again, the tensor that then holds its result, and the memory that the graph keeps.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result, torch.cuda.memory_reserved() - before

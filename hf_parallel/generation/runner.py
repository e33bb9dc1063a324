"""Forward passes of the model over packed tokens of a block cache."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from contextvars import copy_context
from typing import Any

import torch

from hf_parallel.cache import BlockCache, ForwardPass, Segment
from hf_parallel.cache.placement import execution_device
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.rows import PassInputs
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import to_device
from hf_parallel.models.attention import block_attention_enabled
from hf_parallel.models.capabilities import Capabilities
from hf_parallel.models.compiled import compiled_layers, num_moves
from hf_parallel.models.cuda_graph import DecodeGraphs

PREFILL_CHUNK = 4096
LARGE_PREFILL_CHUNK = 16384
"""New tokens per forward pass of a prefill; overridden by `generation_config.prefill_chunk_size`.

The larger one is for a GPU with at least `LARGE_MEMORY` bytes beside the weights: activations take more memory, and
fewer chunks have keys before them, which need a call of their own and a merge.
"""
LARGE_MEMORY = 24 << 30


class CachedModel:
    """A model with the cache over which its forward passes run.

    `cuda_graph` and `compile` are as in `ParallelConfig`; at most `steps` decode steps will run.
    """

    def __init__(
        self,
        model: Any,
        capabilities: Capabilities,
        cache: BlockCache,
        cuda_graph: bool,
        compile: bool | None = None,  # noqa: A002 (the name of the setting)
        steps: float = math.inf,
    ) -> None:
        self.model, self.cache, self.device = model, cache, execution_device(model)
        self._kwargs: dict[str, Any] = {"block_cache": cache} if capabilities.keyword else {}
        self.graphs = DecodeGraphs(cache) if cuda_graph and DecodeGraphs.supports(model, self.device) else None
        self._layers = compiled_layers(model, compile, steps)
        self._num_moves = num_moves(model)
        self._has_logits_to_keep = _has_logits_to_keep(model)

    def logits(self, forward: ForwardPass, ids: torch.Tensor, keep: Sequence[int] | None) -> torch.Tensor:
        """Run the prepared pass over packed tokens `ids`, `int64 [T]` on the device.

        Return the logits `[len(keep), vocabulary]` after the tokens with these indices (None: after all tokens).
        """
        if keep is None and forward.is_decode_step:
            if self.graphs is not None:
                if self._num_moves != num_moves(self.model):  # by another call, while a session kept its graphs
                    self.graphs.clear()
                    self._num_moves = num_moves(self.model)
                return self.graphs.logits(self._decode, forward, ids)
            return self._decode(ids, forward.position_ids)
        return self._forward(ids, forward.position_ids, None if keep is None else to_device(keep, self.device))

    @property
    def is_compiled(self) -> bool:
        """Whether decode steps run compiled layers."""
        return self._layers is not None and not self._layers.failed

    def token_bytes(self) -> int:
        """Compute passes of two rows and of one; return the bytes of the keys and values of a token.

        Compiled layers have a graph for one row and another for more, which are compiled here. The first pass allocates
        the storage, so that only the second can be captured: `DecodeGraphs` pads one row to two if none was captured.
        """
        for rows in (2, 1):
            blocks = self.cache.new_blocks(rows, 1)
            forward = self.cache.prepare([Segment([block], 1) for block in blocks])
            self.logits(forward, torch.zeros(rows, dtype=torch.int64, device=self.device), None)
            self.cache.commit()
            for block in blocks:
                self.cache.free(block)
        return self.cache.arena.bytes_per_token

    def _decode(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self._layers is None:
            return self._forward(ids, position_ids)
        return self._layers.run(lambda: self._forward(ids, position_ids))

    def _forward(self, ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        kwargs = dict(self._kwargs, input_ids=ids[None], position_ids=position_ids[None], past_key_values=self.cache)
        if keep is not None and self._has_logits_to_keep:
            kwargs["logits_to_keep"], keep = keep, None
        logits = copy_context().run(self._run_model, kwargs).logits[0]
        return logits if keep is None else logits.index_select(0, keep)

    def _run_model(self, kwargs: dict[str, Any]) -> Any:
        """Run the model in a context of its own, which ends with the forward pass, even if it is interrupted."""
        with block_attention_enabled(self.model, self.cache):
            return self.model(use_cache=True, return_dict=True, **kwargs)


def prefill_chunk(model: Any, device: torch.device) -> int:
    """Return the default number of new tokens per forward pass of a prefill."""
    if device.type != "cuda" or not _has_logits_to_keep(model):  # logits of all tokens take more than activations
        return PREFILL_CHUNK
    free = torch.cuda.get_device_properties(device).total_memory - model.get_memory_footprint()
    return LARGE_PREFILL_CHUNK if free >= LARGE_MEMORY else PREFILL_CHUNK


def _has_logits_to_keep(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


class ModelRunner:
    """Runs the model of a call over a block cache, and updates `stats`.

    In an engine, `call.executor` runs the passes, together with those of other calls.
    """

    def __init__(self, call: GenerationCall, cache: BlockCache, stats: GenerationStats) -> None:
        self.call, self.cache, self.stats = call, cache, stats
        self.device = call.input_ids.device
        chunk = call.generation_config.prefill_chunk_size
        self.model: CachedModel | None = None  # in an engine: None
        if call.executor is None:
            settings = call.cuda_graph, call.compile, call.max_new_tokens
            self.model = CachedModel(call.model, call.capabilities, cache, *settings)
            self.chunk_size = chunk or prefill_chunk(call.model, self.device)
        else:
            call.executor.stats = stats
            self.chunk_size = min(chunk or PREFILL_CHUNK, call.executor.chunk_size)

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Captured decode steps of the call, if there are any."""
        return None if self.model is None else self.model.graphs

    def forward(self, *passes: PassInputs, ends: Sequence[int] | None = None) -> torch.Tensor:
        """Run one forward pass over the inputs of one pass, or of several consecutive ones.

        Return the logits `[len(ends), vocabulary]` after segments of the last pass (None: after all tokens).
        """
        tokens = [token for inputs in passes for _, tokens in inputs for token in tokens]
        if ends is not None and len(passes) > 1:
            first = sum(len(inputs) for inputs in passes[:-1])
            ends = [first + end for end in ends]
        segments = [[segment for segment, _ in inputs] for inputs in passes]
        return self.run(segments, to_device(tokens, self.device), ends)

    def prefill(self, inputs: PassInputs) -> torch.Tensor:
        """Compute segments, none of which attends to a later one, in chunks that bound the memory of a pass.

        Return the logits after each segment, `[len(inputs), vocabulary]`.
        """
        began = time.perf_counter()
        logits: list[torch.Tensor] = []
        chunk: PassInputs = []
        ends: list[int] = []  # indices in the chunk of parts that complete a segment
        free = self.chunk_size

        def flush() -> None:
            nonlocal chunk, ends, free
            out = self.forward(chunk, ends=ends)
            logits.append(out if self.graphs is None else out.clone())  # a graph reuses its output buffer
            chunk, ends, free = [], [], self.chunk_size

        for segment, tokens in inputs:
            while len(tokens) > free:
                if free:
                    chunk.append((Segment(segment.view, free, segment.write), tokens[:free]))
                    tokens = tokens[free:]
                flush()
            chunk.append((Segment(segment.view, len(tokens), segment.write), tokens))
            ends.append(len(chunk) - 1)
            free -= len(tokens)
        if chunk:
            flush()
        self.stats.prefilled_tokens += sum(segment.num_tokens for segment, _ in inputs)
        self.stats.prefill_seconds += time.perf_counter() - began
        return torch.cat(logits)

    def run(self, passes: Sequence[Sequence[Segment]], ids: torch.Tensor, ends: Sequence[int] | None) -> torch.Tensor:
        """Run one forward pass over packed tokens `ids`, `int64 [T]` on the device; see `forward`."""
        if self.model is None:
            logits = self.call.executor.run(passes, ids, ends)  # type: ignore[union-attr]
        else:
            logits = self._run_alone(self.model, passes, ids, ends)
        self.stats.forward_passes += 1
        return logits

    def _run_alone(
        self, model: CachedModel, passes: Sequence[Sequence[Segment]], ids: torch.Tensor, ends: Sequence[int] | None
    ) -> torch.Tensor:
        began = time.perf_counter()
        try:
            forward = self.cache.prepare_run(passes)
            keep = None if ends is None or len(ends) == len(ids) else [forward.last_tokens[end] for end in ends]
            self.stats.plan_seconds += time.perf_counter() - began
            logits = model.logits(forward, ids, keep)
            self.stats.compiled_passes += keep is None and forward.is_decode_step and model.is_compiled
        except BaseException:
            self.cache.rollback()
            raise
        self.cache.commit()
        if self.cache.trace is not None:
            self.cache.trace.add_pass(passes, forward, ids)
        return logits

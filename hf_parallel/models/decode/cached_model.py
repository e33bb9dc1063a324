"""CachedModel: forward passes of a model over packed tokens of a block cache."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_parallel.cache import BlockCache, ForwardPass, Segment
from hf_parallel.cache.images import ImageSpan
from hf_parallel.cache.placement import execution_device
from hf_parallel.kernels import select_backend, to_device
from hf_parallel.models.cpu.linear import kernel_pass
from hf_parallel.models.decode.compiled import compiled_layers, num_moves
from hf_parallel.models.decode.cuda_graph import DecodeGraphs
from hf_parallel.models.decode.dense import dense_logits
from hf_parallel.models.decode.program import DecodePrograms, StepProgram, forget_program, record_step, supports
from hf_parallel.models.images import image_arguments
from hf_parallel.models.intercept.attention import block_attention_enabled
from hf_parallel.models.intercept.mixers import (
    keep_states,
    mixers_wrapped,
    packed_calls,
    takes_use_cache,
)
from hf_parallel.models.intercept.rotary import rotary_modules, rotating_to
from hf_parallel.models.probing.capabilities import Capabilities
from hf_parallel.models.probing.signature import cache_argument, parameters_of, takes

_logger = logging.get_logger(__name__)

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
        model: PreTrainedModel,
        capabilities: Capabilities,
        cache: BlockCache,
        cuda_graph: bool,
        compile: bool | None = None,  # noqa: A002 (the name of the setting)
        steps: float = math.inf,
        programs: bool = True,
    ) -> None:
        self.model = model
        self._capabilities = capabilities
        self.cache = cache
        self.device = execution_device(model)
        cache.reads = capabilities.reads
        cache.batch_invariant = capabilities.batch_invariant
        if capabilities.batch_invariant and compile:
            raise ValueError("compile=True needs a model that was enabled without batch_invariant=True")
        keep_states(cache, capabilities.mixers)
        self._cache_argument = cache_argument(model)
        self._kwargs: dict[str, object] = {"block_cache": cache} if capabilities.keyword else {}
        self._use_cache = takes_use_cache(capabilities.mixers)
        self._has_logits_to_keep = _has_logits_to_keep(model)
        self._has_positions = takes(model.forward, "position_ids")
        self._dense = capabilities.dense
        self._pads = capabilities.pads
        self._mixers = capabilities.mixers
        self._call_mixers = packed_calls(cache)
        counts = any(read.counts for read in capabilities.reads.values())
        self._scaled = capabilities.scaled or counts
        self._rotary_modules = rotary_modules(model) if self._scaled else []
        has_graphs = cuda_graph and not self._mixers and not self._dense and DecodeGraphs.supports(model, self.device)
        self._operations: Callable[[], AbstractContextManager[object]] = nullcontext
        if capabilities.batch_invariant and select_backend(self.device) == "triton":
            has_graphs = False
            # Triton is imported on a GPU only.
            self._operations = importlib.import_module("hf_parallel.models.gpu.invariant_ops").InvariantOps
        self.graphs = DecodeGraphs(cache, model) if has_graphs else None
        # A compiled layer passes keys and values of its heads to attention, not latents, and cannot ask for positions.
        is_eager = bool(self._mixers) or self._dense or capabilities.has_latents or counts
        is_eager |= capabilities.batch_invariant
        self._layers = None if is_eager else compiled_layers(model, compile, steps)
        if self._mixers and (compile or self.device.type == "cuda"):
            _logger.warning_once("decode steps of layers that keep a state run eagerly: neither compiled nor captured")
        elif is_eager and compile:
            _logger.warning_once(
                "decode steps of layers that cache latents, count positions or attend by themselves run uncompiled"
            )
        self._num_moves = num_moves(model)
        has_program = programs and self.graphs is None and not is_eager and not self._scaled and not compile
        if has_program and supports(model, self.device):
            self.programs: DecodePrograms | None = DecodePrograms(model, cache, self.record_program)
        else:
            self.programs = None
            if programs:
                forget_program(model)

    def record_program(self) -> StepProgram:
        """Return the program of the model's decode steps. Raises `NoProgramError` with the reason if there is none."""
        cache = BlockCache(self._capabilities.rotary, self.device)  # steps of later calls may be rotated
        return record_step(self.model, CachedModel(self.model, self._capabilities, cache, False, programs=False))

    def logits(self, forward: ForwardPass, ids: torch.Tensor, keep: Sequence[int] | None) -> torch.Tensor:
        """Run the prepared pass over packed tokens `ids`, `int64 [T]` on the device.

        Return the logits `[len(keep), vocabulary]` after the tokens with these indices (None: after all tokens).
        """
        if self._dense:
            return dense_logits(self.model, self.cache, forward, ids, keep, self._pads, self._mixers)
        if keep is not None or not forward.is_decode_step or forward.images:
            wanted = None if keep is None else to_device(keep, self.device)
            return self._forward(ids, forward.position_ids, wanted, forward.images)
        if self.programs is not None:
            return self.programs.logits(self._decode, forward, ids)
        if self.graphs is None or (self._scaled and forward.plan.rotates):
            return self._decode(ids, forward.position_ids)
        if self._num_moves != num_moves(self.model):  # by another call, while a session kept its graphs
            self.graphs.clear()
            self._num_moves = num_moves(self.model)
        return self.graphs.logits(self._decode, forward, ids)

    def expect_changes(self) -> None:
        """Let the next decode step compare all parts of the model with those of its program, as code may have run."""
        if self.programs is not None:
            self.programs.expect_changes()

    def compiles(self, forward: ForwardPass) -> bool:
        """Return whether a pass runs compiled layers."""
        return self._layers is not None and not self._layers.failed and forward.is_decode_step

    def token_bytes(self) -> int:
        """Compute passes of two rows and of one; return the bytes of the keys and values of a token.

        Compiled layers have a graph for one row and another for more, which are compiled here. The first pass allocates
        the storage, so that only the second can be captured: `DecodeGraphs` pads one row to two if none was captured.
        """
        for rows in (2, 1):
            blocks = self.cache.pool.new_blocks(rows, 1)
            forward = self.cache.prepare([Segment([block], 1) for block in blocks])
            self.logits(forward, torch.zeros(rows, dtype=torch.int64, device=self.device), None)
            self.cache.commit()
            for block in blocks:
                self.cache.pool.free(block)
        return self.cache.pool.arena.bytes_per_token

    def _decode(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self._layers is None:
            return self._forward(ids, position_ids)
        return self._layers.forward(lambda: self._forward(ids, position_ids))

    def _forward(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> torch.Tensor:
        kwargs = dict(self._kwargs)
        if images:
            kwargs.update(image_arguments(images))
        kwargs["input_ids"] = ids[None]
        kwargs[self._cache_argument] = self.cache
        rotated: AbstractContextManager[None] = nullcontext()
        if self._scaled:
            in_rows = self.cache.positions_in_rows(position_ids)
            if in_rows is not position_ids:
                rotated = rotating_to(self._rotary_modules, position_ids[None])
            self.cache.positions = in_rows
            position_ids = in_rows
        if self._has_positions:
            kwargs["position_ids"] = position_ids.unsqueeze(-2)
        if keep is not None and self._has_logits_to_keep:
            kwargs["logits_to_keep"] = keep
        with rotated:
            output = copy_context().run(self._run_model, kwargs)
        logits: torch.Tensor = output.logits[0]
        if keep is None or self._has_logits_to_keep:
            return logits
        return logits.index_select(0, keep)

    def _run_model(self, kwargs: dict[str, object]) -> Any:
        """Run the model in a context of its own, which ends with the forward pass, even if it is interrupted."""
        wrapped: AbstractContextManager[None] = nullcontext()
        if self._mixers:
            wrapped = mixers_wrapped(self.model, self._mixers, self._call_mixers)
        with block_attention_enabled(self.model, self.cache), wrapped, kernel_pass(), self._operations():
            return self.model(use_cache=self._use_cache, return_dict=True, **kwargs)


def prefill_chunk(model: PreTrainedModel, device: torch.device) -> int:
    """Return the default number of new tokens per forward pass of a prefill."""
    if device.type != "cuda" or not _has_logits_to_keep(model):  # logits of all tokens take more than activations
        return PREFILL_CHUNK
    free = torch.cuda.get_device_properties(device).total_memory - model.get_memory_footprint()
    return LARGE_PREFILL_CHUNK if free >= LARGE_MEMORY else PREFILL_CHUNK


def _has_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in parameters_of(model.forward)

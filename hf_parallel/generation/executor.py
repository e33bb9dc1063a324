"""Executor: what computes a call. It allocates caches, runs forward passes and samples.

In an engine, a request is the executor of its call: its passes run together with passes of other requests, over shared
storage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.cache.placement import execution_device
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.parts import Part
from hf_parallel.generation.sampling import NextTokens, Sampled, SamplingBatch, SamplingTask
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import RotarySpec
from hf_parallel.models.attention import gradient_checkpointing_disabled
from hf_parallel.models.cached_model import CachedModel, prefill_chunk
from hf_parallel.models.capabilities import Capabilities
from hf_parallel.models.elementwise import fast_layers

C = TypeVar("C", bound=SharedPrefixCache)

ASYNC_DEVICES = ("cuda",)
"""Device types that run asynchronously, so that the next pass can be queued before the sampled tokens are read."""


class AskedPasses(NamedTuple):
    """Consecutive passes over packed tokens `ids`, `int64 [T]`, that are computed as one forward pass.

    The logits after the segments with the indices `ends` are wanted (None: after all tokens), and `sampling` says what
    the caller will sample from them.
    """

    passes: Sequence[Sequence[Segment]]
    ids: Part
    ends: Sequence[int] | None = None
    sampling: SamplingTask | None = None


class Executor:
    """Computes one call that has the model to itself. `cuda_graph`, `compile` and `steps` as in `CachedModel`."""

    is_shared = False
    """Whether other calls use the same storage, and may compute what this call needs."""
    batch_rows = 0
    """Rows of all calls in the last pass; 0 if unknown."""
    preempted = False
    """Whether the call has lost its keys and values, and continues later."""
    is_done = False
    """Whether the call has ended."""

    def __init__(
        self,
        model: PreTrainedModel,
        capabilities: Capabilities,
        stats: GenerationStats,
        cuda_graph: bool,
        compile: bool | None,  # noqa: A002 (the name of the setting)
        steps: int,
    ) -> None:
        self.model, self._stats, self.device = model, stats, execution_device(model)
        self.runs_ahead = self.device.type in ASYNC_DEVICES
        """Whether a pass can be queued before the tokens of the pass before it are read."""
        self.cuda_graph, self._capabilities, self._compile, self._steps = cuda_graph, capabilities, compile, steps
        self._cached_model: CachedModel | None = None  # over the cache of the last pass

    @contextmanager
    def running(self, cache: BlockCache) -> Iterator[None]:
        """Let the call run the model over a cache: enable fast linear layers, and record the memory of CUDA graphs."""
        self.model_over(cache)  # before any pass is timed
        with gradient_checkpointing_disabled(self.model), fast_layers(self.model):
            yield
        graphs = None if self._cached_model is None else self._cached_model.graphs
        self._stats.graph_bytes = 0 if graphs is None else graphs.num_bytes

    def new_cache(self, cls: type[C], rotary: Mapping[int, RotarySpec | None] | None) -> C:
        """Return an empty cache of the call."""
        return cls(rotary, self.device)

    def prefill_chunk(self, asked: int | None) -> int:
        """Return the maximum number of new tokens in a pass of a prefill; `asked` is the caller's setting."""
        return asked or prefill_chunk(self.model, self.device)

    def model_over(self, cache: BlockCache) -> CachedModel:
        """Return the model over a cache, with its captured decode steps."""
        if self._cached_model is None or self._cached_model.cache is not cache:
            settings = self.cuda_graph, self._compile, self._steps
            self._cached_model = CachedModel(self.model, self._capabilities, cache, *settings)
        return self._cached_model

    def release(self) -> None:
        """Drop the captured decode steps."""
        self._cached_model = None

    def run(self, cache: BlockCache, asked: AskedPasses) -> NextTokens:
        """Run passes over a cache. Return the logits `[len(ends), vocabulary]`, which the next pass may overwrite.

        An executor that samples for several calls at once may sample now, and returns what it has sampled instead.
        """
        passes, ids, ends, _ = asked
        model, tokens = self.model_over(cache), ids.tensor
        began = time.perf_counter()
        try:
            forward, keep = cache.prepare_run(passes), None
            if ends is not None and len(ends) != len(tokens):
                last = forward.last_tokens
                keep = [last[end] for end in ends]
            self._stats.plan_seconds += time.perf_counter() - began
            logits = model.logits(forward, tokens, keep)
        except BaseException:
            cache.rollback()
            raise
        cache.commit()
        self._stats.compiled_passes += keep is None and model.compiles(forward)
        if cache.log is not None:
            cache.log.add_pass(passes, forward, tokens)
        return logits

    def sample(self, task: SamplingTask, logits: torch.Tensor) -> Sampled:
        """Sample one token for each row, given their logits `[rows, vocabulary]`, and append it to the table."""
        (sampled,) = SamplingBatch([task], [Part(logits)]).sample()
        return sampled

    def add_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Receive the tokens that rows have got in a step; rows as `ParallelStreamer.write_row` numbers them."""

    def fork(self, row: int, forks: Sequence[int]) -> None:
        """Receive that the rows `forks` have inherited the tokens of a row."""

    def add_text(self, row: int, text: str, event: str) -> None:
        """Receive text of a row, in modes that stream text; see `ParallelStreamer.write_row`."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the model. Offloaded weights do not count."""
        return fingerprint(self.model)

    def wait(self) -> None:
        """Let the other calls, if there are any, run for one step."""

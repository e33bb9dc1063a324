"""Host: the storage of a run, and the receivers of its tokens.

LocalHost drives the run of a call that has the model to itself: it computes forward passes and samples. In an engine,
the host is the request, and the engine computes what the runs of all requests want.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

from hf_parallel.cache import BlockCache
from hf_parallel.cache.fingerprint import fingerprint
from hf_parallel.cache.placement import execution_device
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.decoding.standing import Standing, TokenSink
from hf_parallel.generation.decoding.table import DecodeTable
from hf_parallel.generation.decoding.wants import Draw, Pass, Prefix, Steps, Wait, Want
from hf_parallel.generation.decoding.words import Words
from hf_parallel.generation.enabled import Claim
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import Sampled, SamplingBatch, SamplingTask
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import RotarySpec
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.decode.cached_model import CachedModel, prefill_chunk
from hf_parallel.models.intercept.modules import gradient_checkpointing_disabled
from hf_parallel.models.probing.capabilities import Capabilities

C = TypeVar("C", bound=SharedPrefixCache)
T = TypeVar("T")

ASYNC_DEVICES = ("cuda",)
"""Device types that run asynchronously, so that the next pass can be queued before the sampled tokens are read."""


class Host:
    """Where a call runs: the storage that it may use, and who else receives its tokens."""

    is_shared = False
    """Whether other calls use the same storage, and may compute what this call needs."""
    allows_standing = False
    """Whether rows may stand, see `Standing`; else their run takes each pass itself."""
    runs_ahead = False
    """Whether a pass can be queued before the tokens of the pass before it are read."""
    batch_rows = 0
    """Rows of all calls in the last pass; 0 if unknown."""
    preempted = False
    """Whether the call has lost its keys and values, and continues later."""
    is_done = False
    """Whether the call has ended."""
    cache_salt: str | None = None
    """Only calls of equal salt share what they have cached."""
    turn_is_over = False
    """Whether a call that computes without the model, as in a replay, is to let other calls continue (`Wait`)."""
    wanted_prefixes: dict[int, int] | None = None
    """Numbers of new tokens, by output row, that other calls want to continue: see `DecodeLoop.decode`."""

    sink: TokenSink | None = None
    """Where tokens of rows that stand go, step by step."""

    def running(self, cache: BlockCache) -> AbstractContextManager[None]:
        """Return a context in which the call runs the model over a cache."""
        raise NotImplementedError

    def new_cache(self, cls: type[C], rotary: Mapping[int, RotarySpec | None] | None) -> C:
        """Return an empty cache for the call."""
        raise NotImplementedError

    def begin_cache(
        self, cache: SharedPrefixCache, dtype: str | None, claim: Claim | None, weights: str | None
    ) -> None:
        """Start a call over a cache, in a `cache_dtype` if one is given.

        `weights`: fingerprint of the weights, if the cache outlives the call; see `SharedPrefixCache.begin_call`.
        """
        raise NotImplementedError

    def prefill_chunk(self, asked: int | None) -> int:
        """Return the maximum number of new tokens in a pass of a prefill; `asked` is the caller's setting."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return the fingerprint of the model. Offloaded weights do not count."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop what is kept from one step to the next, such as captured decode steps."""

    def add_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Receive the tokens that rows have got in a step; rows as `ParallelStreamer.write_row` numbers them."""

    def count_tokens(self, count: int) -> None:
        """Receive that rows have got tokens that may still be given up; see `show_tokens`."""

    def show_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Receive tokens of rows that were counted when they were generated."""

    def fork(self, row: int, forks: Sequence[int]) -> None:
        """Receive that the rows `forks` have inherited the tokens of a row."""

    def add_text(self, row: int, text: str, event: str) -> None:
        """Receive text of a row, in modes that stream text; see `ParallelStreamer.write_row`."""

    def take_words(self) -> Sequence[Words]:
        """Return the texts that were said to the run since the last call; see `ParallelConfig.listens_to`."""
        return ()


class LocalHost(Host):
    """Drives one call that has the model to itself. `cuda_graph`, `compile` and `steps` as in `CachedModel`."""

    def __init__(
        self,
        model: PreTrainedModel,
        capabilities: Capabilities,
        stats: GenerationStats,
        cuda_graph: bool,
        compile: bool | None,  # noqa: A002 (the name of the setting)
        steps: int,
    ) -> None:
        self.model = model
        self.device = execution_device(model)
        self.runs_ahead = self.device.type in ASYNC_DEVICES
        self.allows_standing = not self.runs_ahead
        self._stats = stats
        self._capabilities = capabilities
        self._cuda_graph = cuda_graph
        self._compile = compile
        self._steps = steps
        self._cached_model: CachedModel | None = None  # over the cache of the last pass
        self._batch: SamplingBatch | None = None  # of the last rows that were sampled

    @contextmanager
    def running(self, cache: BlockCache) -> Iterator[None]:
        """Let the call run the model over a cache: enable fast linear layers, and record the memory of CUDA graphs."""
        self.model_over(cache).expect_changes()  # before any pass is timed
        with gradient_checkpointing_disabled(self.model), fast_layers(self.model):
            yield
        graphs = None if self._cached_model is None else self._cached_model.graphs
        self._stats.graph_bytes = 0 if graphs is None else graphs.num_bytes

    def new_cache(self, cls: type[C], rotary: Mapping[int, RotarySpec | None] | None) -> C:
        return cls(rotary, self.device)

    def begin_cache(
        self, cache: SharedPrefixCache, dtype: str | None, claim: Claim | None, weights: str | None
    ) -> None:
        if dtype is not None:
            cache.pool.arena.cache_dtype = dtype
        cache.begin_call(self.model, claim, kept=weights is not None, weights=weights)

    def prefill_chunk(self, asked: int | None) -> int:
        return asked or prefill_chunk(self.model, self.device)

    def model_over(self, cache: BlockCache) -> CachedModel:
        """Return the model over a cache, with its captured decode steps."""
        if self._cached_model is None or self._cached_model.cache is not cache:
            self._cached_model = CachedModel(
                self.model, self._capabilities, cache, self._cuda_graph, self._compile, self._steps
            )
        return self._cached_model

    def release(self) -> None:
        self._cached_model = None
        self._batch = None

    def drive(self, steps: Steps[T]) -> T:
        """Run to the end of a run, and return its result."""
        value: Any = None
        step: Callable[[Any], Want] = steps.send
        try:
            while True:
                want = step(value)
                try:
                    value = self.compute(want)
                    step = steps.send
                except BaseException as error:
                    value = error
                    step = steps.throw
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            del value, step  # an error that refers to this frame would keep the keys and values of the run

    def compute(self, want: Want) -> Any:
        """Return what a run wants."""
        match want:
            case Pass(sampling=task):
                logits = self._forward(want)
                return logits if task is None else self._sample(task, logits)
            case Draw(task, logits):
                return self._sample(task, logits)
            case Standing():
                return self._decode(want)
            case Prefix() | Wait():
                return None  # there are no other runs

    def _decode(self, standing: Standing) -> None:
        """Decode rows that stand, until something happens to one of them."""
        table = DecodeTable(standing.cache)
        table.choose([standing])
        happened: list[tuple[int, BaseException | None]] = []
        while not happened:
            happened = table.advance(Part(self._forward(table.next_pass())))
        _, error = happened[0]  # of the only member
        if error is not None:
            raise error

    def _sample(self, task: SamplingTask, logits: torch.Tensor) -> Sampled:
        """Sample the next tokens of rows, in most steps of the same rows as before."""
        if self._batch is None or self._batch.tasks[0] != task:
            self._batch = SamplingBatch([task])
        (sampled,) = self._batch.sample([Part(logits)])
        return sampled

    def _forward(self, want: Pass) -> torch.Tensor:
        """Run a forward pass."""
        cache, passes, ids, ends, _ = want
        model = self.model_over(cache)
        tokens = ids.tensor
        began = time.perf_counter()
        try:
            forward = cache.prepare_run(passes)
            keep = None
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

    def fingerprint(self) -> str:
        return fingerprint(self.model)

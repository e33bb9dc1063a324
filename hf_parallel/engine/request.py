"""Request: one call of a mode in an engine, which computes what its run wants together with what others want.

The run is that of `model.generate`, a generator. The request advances it until it wants something that only the engine
can give: a forward pass, sampled tokens, rows that stand, or a step of the other requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hf_parallel.cache import Block, BlockCache, Segment
from hf_parallel.cache.batch import find_images
from hf_parallel.cache.pass_log import BlockCopy, LoggedSteps, PassLog
from hf_parallel.cache.pool import parts_of
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.state_plan import states_read
from hf_parallel.cache.tree import Node
from hf_parallel.engine.handle import HAS_ENDED, RequestCancelledError, RequestHandle
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.leases import Lease
from hf_parallel.engine.lent_prefixes import LentPrefixes
from hf_parallel.engine.passes import PendingPass
from hf_parallel.engine.storage import KVStorage
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.decoding.host import C, Host
from hf_parallel.generation.decoding.standing import Standing
from hf_parallel.generation.decoding.wants import Draw, Pass, Prefix, Steps, Wait, check_steps
from hf_parallel.generation.decoding.words import NotRunningError, Words
from hf_parallel.generation.enabled import Claim
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import SamplingTask
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import RotarySpec, to_device
from hf_parallel.models.decode.cached_model import PREFILL_CHUNK

logger = logging.getLogger(__name__)
TURN_SECONDS = 0.005
"""Seconds of a step in which a request may compute without the model, as in a replay of cached logits."""


class NonFiniteLogitsError(RuntimeError):
    """Raised if the model returned NaN. Prefixes that the request alone used are deleted, too."""


class Sampling(NamedTuple):
    """A request waits for the next token of each row of a task, given their logits."""

    task: SamplingTask
    logits: Part


class ForkPoint(NamedTuple):
    """Where a request is forked: the request, a row, and the number of the row's new tokens that forks continue."""

    request: Request
    row: int
    num_tokens: int


Awaited = PendingPass | Sampling | Standing | Wait
"""What a request waits for: a pass, a draw, or something that happens to rows that stand, or to another request."""


class Request(Host):
    """A request in an engine, which is the host of its call.

    `awaited` is what it waits for; None: it is not running. `preempted` says that it has lost its keys and values:
    until these are recomputed, `_suspended` is what it waited for.
    """

    is_shared = True
    allows_standing = True
    is_request = True

    def __init__(
        self,
        config: ParallelConfig,
        call: GenerationCall,
        handle: RequestHandle,
        priority: int,
        submitter: Any,
        hints: AgentHints,
        cache_salt: str | None = None,
        adapter: str | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.config = config
        self.handle = handle
        self.priority = priority
        self.submitter = submitter
        # Log-probabilities of a prompt need all of its logits: its prefixes are neither shared nor kept.
        self.is_private = any(getattr(processor, "prompt_top", None) is not None for processor in call.logits_processor)
        self.hints = hints
        self.cache_salt = cache_salt
        self.lease = lease
        self.adapter = adapter  # each adapter has prefixes of its own
        self.identity: Any = None  # of the prefixes that it shares, see `start`
        self._epoch = 0  # of the storage when it started
        self.call = replace(call, host=self)  # instead of the call's own
        handle.stats = call.stats
        self.sink = handle.sink
        self.chunk_size = 0
        self.batch_rows = 0
        self.number = -1  # in the order of submission
        self.account: Any = None  # its submitter's, see `Scheduler`
        self.num_tokens = 0  # tokens generated
        self._resumed = 0.0  # when its code began to run
        self.has_started = False  # whether it samples or has shown something, so that it cannot start again
        self.awaited: Awaited | None = None
        self.preempted = False
        self.is_done = False
        self._suspended: PendingPass | Standing | Wait | None = None
        self.open_nodes: dict[Node, int] = {}  # nodes that it was computing when it was preempted, with their lengths
        self._restored_for: set[Block] = set()  # whose states a pass needs for which others are computed again
        self._delayed: Any = None  # logits or tokens that it waited for when it was preempted
        self._storage: KVStorage
        self._caches: list[SharedPrefixCache] = []
        self._lengths: dict[Block, int] = {}  # of the blocks that it had when it was preempted
        self._stack: list[Steps[Any]] = []  # its run, and what runs in its name before the run continues
        self._recomputing: Steps[None] | None = None  # on top of the stack, if there is one
        self.log = PassLog()
        self.wanted_prefixes: dict[int, int] = {}
        self.parent: ForkPoint | None = None
        self._words: list[Words] = []  # said to its run, which has not read them yet
        self._words_lock = threading.Lock()

    @property
    def stats(self) -> GenerationStats:
        """Cost so far."""
        return self.call.stats

    @property
    def pending(self) -> PendingPass | None:
        """The pass that it waits for."""
        return self.awaited if isinstance(self.awaited, PendingPass) else None

    @property
    def needs_pass(self) -> bool:
        """Whether it waits for a forward pass."""
        return isinstance(self.awaited, PendingPass | Standing)

    @property
    def is_ready(self) -> bool:
        """Whether it waits for a forward pass or for sampling, and for no other request."""
        return self.needs_pass or isinstance(self.awaited, Sampling)

    # Forks

    @property
    def waits_for_parent(self) -> bool:
        """Whether the request that it continues is about to keep what it continues."""
        if self.parent is None:
            return False
        parent = self.parent.request
        return bool(parent.wanted_prefixes) and not (parent.preempted or parent.is_done)

    def want_prefix(self, row: int, num_tokens: int) -> None:
        """Keep the first new tokens of a row in the tree before the next pass, as a fork continues them.

        Not with `cache_dtype`, where they would be rounded for the row, too.
        """
        if num_tokens and not self.is_private and self._storage.arena.quantized is None:
            self.wanted_prefixes[row] = max(self.wanted_prefixes.get(row, 0), num_tokens)

    # Estimates

    @property
    def num_rows(self) -> int:
        """Number of rows that generate: those of the decode pass that it waits for, else the most that it may have."""
        awaited = self._suspended if self.awaited is None else self.awaited
        if isinstance(awaited, Standing):
            return len(awaited.rows)
        if isinstance(awaited, PendingPass) and not awaited.is_prefill:
            return awaited.num_segments
        return self.call.num_rows * self.config.max_rows_per_prompt

    @cached_property
    def max_tokens(self) -> int:
        """Maximum number of tokens whose keys and values it holds."""
        return self.config.max_kv_tokens(self.call)

    # The host of its call

    def new_cache(self, cls: type[C], rotary: Mapping[int, RotarySpec | None] | None) -> C:
        cache = cls(rotary, self.call.input_ids.device, lent=LentPrefixes(self._storage.tree, rotary, self))
        cache.log_to(self.log)
        self._caches.append(cache)
        return cache

    def begin_cache(
        self, cache: SharedPrefixCache, dtype: str | None, claim: Claim | None, weights: str | None
    ) -> None:
        """Check the dtype. The engine has checked the weights."""
        if dtype is not None and dtype != cache.pool.arena.cache_dtype:
            raise ValueError(
                f"cache_dtype={dtype!r}: an engine has one for all calls; open it with Engine(cache_dtype=)"
            )

    def running(self, cache: BlockCache) -> AbstractContextManager[None]:
        return nullcontext()  # the engine has prepared the model

    def prefill_chunk(self, asked: int | None) -> int:
        return min(asked or PREFILL_CHUNK, self.chunk_size)

    def add_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self.count_tokens(len(tokens))
        self.show_tokens(rows, tokens)

    def count_tokens(self, count: int) -> None:
        self.num_tokens += count
        self.has_started = True

    def show_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self.handle.add_tokens(rows, tokens)

    def fork(self, row: int, forks: Sequence[int]) -> None:
        self.handle.copy_row(row, forks)

    def add_text(self, row: int, text: str, event: str) -> None:
        self.has_started = True
        self.handle.add_text(row, text, event)

    def say(self, words: Words, num_tokens: int, check_budget: Callable[[Request, int], None]) -> None:
        """Let its run read a text, which may add `num_tokens` tokens to what it holds. Raises `NotRunningError`."""
        with self._words_lock:
            if self.is_done:
                raise NotRunningError(HAS_ENDED)
            check_budget(self, num_tokens)
            self.max_tokens += num_tokens
            self._words.append(words)

    def take_words(self) -> Sequence[Words]:
        if not self._words:
            return ()
        with self._words_lock:
            words = self._words
            self._words = []
        return words

    def fingerprint(self) -> str:
        if self.adapter is None:
            return self._storage.fingerprint
        return f"{self._storage.fingerprint} {self.adapter}"

    @property
    def turn_is_over(self) -> bool:  # type: ignore[override]
        """See `Host`: whether it has computed for `TURN_SECONDS` since it was resumed."""
        return time.perf_counter() - self._resumed > TURN_SECONDS

    def _wait_for_prefix(self, want: Prefix) -> Steps[None]:
        """Wait while others compute nodes of a prefix. Its own nodes come first: else two could wait for each other.

        Nodes that others have left without keys and values are computed here, one by one: in the pass of the mode, each
        would need a state at the same time.
        """
        tree = self._storage.tree
        is_own = False
        while matching := tree.matching(want.tokens, want.root, want.gap):
            if any(tree.is_computed_by_other(node, self) for node in matching):
                if is_own:
                    yield Wait()
                else:
                    yield from self._fill()
                    is_own = True
                continue
            evicted = [node for node in matching[:-1] if len(node.uncached) and node not in tree.computing]
            if not evicted or not tree.pool.states.in_use:
                return
            tree.pin(evicted[-1], self)
            yield from self._fill()

    # States that were dropped, see `PrefixTree.drop_states`

    @property
    def reads(self) -> set[Block]:
        """Blocks from whose states its next pass continues; see `Owner`."""
        if isinstance(self.awaited, PendingPass | Standing):
            return self._restored_for | states_read(self.awaited.passes)
        return self._restored_for

    def _lacks_states(self, passes: Sequence[Sequence[Segment]]) -> bool:
        """Return whether states were dropped from which passes continue."""
        return self._storage.pool.states.in_use and any(block.state < 0 for block in states_read(passes))

    def _with_states(self, want: Pass | Standing) -> Steps[Any]:
        """Compute a pass after the dropped states from which it continues. Return what the run is sent."""
        yield from self._restore_states(want.passes)
        return (yield want)

    def _restore_states(self, passes: Sequence[Sequence[Segment]]) -> Steps[None]:
        """Compute dropped states again from which passes continue, and keep them meanwhile."""
        restored_for = self._restored_for
        try:
            while self._lacks_states(passes):
                self._restored_for = states_read(passes)
                node = self._storage.tree.first_without_state(self, self._restored_for)
                if node is None:
                    return  # planning the pass raises `MissingStateError`
                tokens = node.tokens[: node.num_cached]
                segment = Segment(node.view, len(tokens), write=False, keeps_state=True)
                yield self._pass_of(segment, tokens)
        finally:
            self._restored_for = restored_for

    @property
    def is_recomputing(self) -> bool:
        """Whether its keys and values are computed again."""
        return self._recomputing is not None

    # Life, driven by the engine

    def start(self, storage: KVStorage, chunk_size: int) -> None:
        """Run until the first forward pass."""
        self._storage = storage
        self._epoch = storage.epoch
        self.identity = self if self.is_private else (self._epoch, self.adapter, self.cache_salt)
        self.chunk_size = chunk_size
        self.parent = None
        self.handle.times.started = self.handle.times.started or time.perf_counter()
        self._stack = [self._run_mode()]
        self._advance()

    def resume(self, answered: Awaited, value: Any = None) -> None:
        """Continue with what it has waited for, until it waits again: logits of a pass, sampled tokens, or None.

        A request that was preempted meanwhile continues once its keys and values are recomputed.
        """
        if self.preempted:
            if answered is self._suspended or answered is self.awaited:  # else of a recompute, which starts again
                self.awaited = None
                self._suspended = Wait()
                self._delayed = value
            return
        if value is None and self._recomputing is None:  # a recompute that has waited gets nothing
            value = self._delayed
            self._delayed = None
        self._advance(value)

    def _advance(self, value: Any = None, error: BaseException | None = None) -> None:
        """Let the run continue with a value or an error, until it wants something of the engine, or has ended."""
        self.awaited = None
        self._resumed = time.perf_counter()
        while self._stack:
            steps = self._stack[-1]
            try:
                want = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                self._stack.pop()
                value = end.value
                error = None
                if steps is self._recomputing:
                    self._recomputing = None
                    self.awaited = self._suspended
                    self._suspended = None
                    return
                continue
            except BaseException as raised:
                self._stack.pop()
                value = None
                error = raised
                if steps is self._recomputing:
                    self._recomputing = None
                continue
            value = None
            error = None
            match want:
                case Prefix():
                    self._stack.append(self._wait_for_prefix(want))
                case Pass() | Standing() if self._lacks_states(want.passes):
                    self._stack.append(self._with_states(want))
                case Pass():
                    self.awaited = PendingPass(want)
                    return
                case Draw(task, logits):
                    self.awaited = Sampling(task, Part(logits))
                    self.has_started = True
                    return
                case Standing():
                    self.log.add_steps(want.passes, want.steps, is_computed=False)
                    self.awaited = want
                    return
                case Wait():
                    self.awaited = want
                    return
        if not self.is_done:  # an error that is no error of the run, such as `GeneratorExit` of a processor
            self._end(error=error)

    def take_logits(self, task: SamplingTask, logits: Part) -> None:
        """Wait for the tokens that the engine samples from the logits of a pass."""
        if isinstance(self.awaited, Standing):
            self.awaited.steps.has_undrawn_pass = True
        self.awaited = Sampling(task, logits)
        self.has_started = True
        self._suspended = None

    def fail(self, error: BaseException) -> None:
        """Raise an error in the request, which ends it."""
        self._stop_recomputing()
        if self._stack:
            self._advance(error=error)
        if not self.is_done:  # it has not begun, or the mode has caught the error
            self._close()
            self._end(error=error)

    def _close(self) -> None:
        """Leave the run."""
        self.awaited = None
        stack = self._stack
        self._stack = []
        for steps in reversed(stack):
            try:
                steps.close()
            except Exception as error:  # of its clean-up; or it has caught `GeneratorExit`, and wants something
                logger.warning("the run of a request did not end well", exc_info=error)

    def _stop_recomputing(self) -> None:
        recomputing = self._recomputing
        self._recomputing = None
        while recomputing is not None:
            steps = self._stack.pop()
            steps.close()
            if steps is recomputing:
                return

    def abandon(self, cause: BaseException | None) -> None:
        """End it as the engine ends, or has stopped because of an error."""
        if self.is_done:
            return
        error: BaseException = RequestCancelledError("the engine was closed")
        if cause is not None:
            error = RuntimeError("the engine has stopped")
            error.__cause__ = cause
        try:
            self.fail(error)
        except BaseException:  # the state that the error has left
            self.handle.end(error=error)

    def _run_mode(self) -> Steps[None]:
        try:
            output: Any = yield from check_steps(self.config.make_run(self.call).generate())
            self._storage.check_weights(self.call.model, ending=self)
        except GeneratorExit:  # see `_close`
            raise
        except BaseException as error:
            self._end(error=error)
        else:
            self._end(output)

    def _end(self, output: Any = None, error: BaseException | None = None) -> None:
        self._release(keep=not isinstance(error, NonFiniteLogitsError), lease=self.lease if error is None else None)
        if error is not None:
            fail = getattr(self.call.streamer, "fail", None)
            if callable(fail):
                try:
                    fail(error)
                except BaseException as other:  # in a streamer of the caller's
                    error.__context__ = other
        with self._words_lock:
            self.is_done = True
        for words in self.take_words():
            words.fail(HAS_ENDED)
        self.handle.end(output, error)

    def _release(self, keep: bool = True, lease: Lease | None = None) -> None:
        if self._caches:
            for cache in self._caches:
                cache.reset()
            leaves = self._storage.tree.leaves.get(self, [])
            is_kept = keep and not self.is_private and self._epoch == self._storage.epoch
            self._storage.tree.unpin(self, is_kept)
            if lease is not None and is_kept:
                self._storage.leases.begin(lease, self.identity, leaves)
        self._caches = []

    # Preemption

    def restart(self) -> None:
        """Forget everything, to start again: it has neither sampled nor shown anything yet."""
        self._close()
        self._release()
        self.wanted_prefixes = {}
        self.log = PassLog()
        vars(self.stats).update(vars(GenerationStats()))  # in place, as the handle and the call share them

    def preempt(self) -> None:
        """Delete its keys and values. Nodes of the tree that it uses can be evicted from now on."""
        if self._recomputing is not None:
            self._stop_recomputing()
        else:
            if not isinstance(self.awaited, Sampling):  # which needs no keys
                self._suspended = self.awaited
            self._lengths = {block: block.length for block in self.blocks}
            pinned = self._storage.tree.pinned(self)
            self.open_nodes = {node: node.num_cached for node in pinned if len(node.uncached)}
        self._storage.tree.stop_computing(self, but=self.open_nodes)
        for block in self.blocks:
            self._storage.pool.release(block)
        self.preempted = True
        if not isinstance(self.awaited, Sampling):
            self.awaited = None

    @property
    def blocks(self) -> list[Block]:
        """Its blocks outside the tree."""
        return [block for cache in self._caches for block in cache.pool.blocks]

    @property
    def missing_lengths(self) -> list[int]:
        """Lengths of what a preempted request must compute to be resumed: its blocks, and uncached nodes."""
        of_blocks = [self._lengths.get(block, 0) for block in self.blocks]
        of_nodes = [len(node.uncached) for node in self._storage.tree.pinned(self)]
        return of_blocks + of_nodes

    def recompute(self) -> None:
        """Start to compute the keys and values again; the request continues where it was preempted."""
        self.preempted = False
        self._recomputing = self._recompute()
        self._stack.append(self._recomputing)
        self._advance()

    def _recompute(self) -> Steps[None]:
        yield from self._fill()
        yield from self._recompute_blocks()
        match self._suspended:
            case PendingPass(original=passes) | Standing(passes=passes):
                yield from self._restore_states(passes)
        self.open_nodes = {}

    def _fill(self) -> Steps[None]:
        """Compute nodes of the tree that it uses: new ones, and after a preemption those that were evicted."""
        tree = self._storage.tree
        while True:
            missing = [node for node in tree.pinned(self) if len(self._missing(node))]
            if not missing:
                return
            free = [node for node in missing if not self._waits_for_other(node)]
            if not free:
                yield Wait()
                continue
            tree.start_computing(free, self)
            tree.nodes_to_prefill(self)  # allocates blocks
            for node in free:
                while len(tokens := self._missing(node)):
                    size = tree.pool.images.chunk(tokens, self.chunk_size)
                    yield self._pass_of(Segment(node.view, size), tokens[:size])

    def _waits_for_other(self, node: Node) -> bool:
        """Return whether another request computes a node, or one before it."""
        tree = self._storage.tree
        return any(tree.is_computed_by_other(ancestor, self) for ancestor in node.path)

    def _pass_of(self, segment: Segment, tokens: np.ndarray) -> Pass:
        """Return the pass of one segment, with its tokens as the tree knows them, int64 `[num_tokens]`."""
        images = self._storage.pool.images
        segment, ids = find_images(segment, tokens.tolist(), images, self.call.placeholder)
        device = self.call.input_ids.device
        return Pass(self._storage.cache, [[segment]], Part(to_device(ids, device)), [0])

    def _missing(self, node: Node) -> np.ndarray:
        """Return the tokens of a node, int64, that were computed before the request was preempted and are not now."""
        stop = self.open_nodes.get(node, len(node.tokens))
        return node.tokens[node.num_cached : stop]

    def _recompute_blocks(self) -> Steps[None]:
        live = set(self.blocks)
        pool = self._storage.pool
        # Blocks that were freed are needed until the tokens moved out of them are computed. All others are the tree's.
        temporary = {block for block in self.log.needed(live, pool.blocks) - live if block.parts is None}
        pool.blocks |= temporary
        try:
            for block in temporary:
                pool.release(block)
            for passes, ids in self.log.recompute(live | temporary, self.chunk_size, self._copy):
                pool.touch()  # the log sets the lengths of blocks
                yield Pass(self._storage.cache, passes, Part(ids), [-1])
            for block, length in self._lengths.items():
                if block in live and block.length < length:
                    raise RuntimeError(f"{block!r} was recomputed with too few tokens: {length} are needed")
                block.length = min(block.length, length)
            for block in self.log.seen():
                if block.parts:  # split while its keys were evicted
                    block.length = sum(part.length for part in parts_of([block]))
        finally:
            pool.touch()
            for block in temporary & pool.blocks:
                pool.free(block)

    def _copy(self, event: BlockCopy) -> None:
        pool = self._storage.pool
        source = event.source
        target = event.target
        count = event.stop - event.start
        end = event.at + count
        pool.reserve([(target, end)])
        read = source.extent.range(source.first + event.start, count)
        written = target.extent.range(target.first + event.at, count)
        delta = (target.base + event.at) - (source.base + event.start)
        pool.arena.copy(read, written, delta, pool.rotary)
        target.length = end
        pool.move_state(source, target)


def record_passes(
    requests: Sequence[Request], pending: Sequence[PendingPass], num_rows: int, logged: LoggedSteps | None
) -> None:
    """Record passes of requests that were computed as one, with `num_rows` rows, in their logs.

    `logged` has the tokens of all of them, if they are decode steps that the next ones may continue.
    """
    begin = 0
    for request, computed in zip(requests, pending, strict=True):
        request.batch_rows = num_rows
        if logged is not None:
            request.log.add_steps(computed.original, logged, begin)
        elif not request.is_recomputing:
            request.log.add_steps(computed.original, LoggedSteps([computed.ids.tensor]))
        begin += computed.num_tokens

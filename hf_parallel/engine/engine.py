"""Engine: many callers, one model. Each step is one forward pass over the rows of all requests in flight."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from hf_parallel.cache import ForwardPass
from hf_parallel.cache.pass_log import LoggedSteps
from hf_parallel.cache.placement import cpu_as_default, execution_device
from hf_parallel.cache.state_plan import MissingStateError
from hf_parallel.engine.arguments import check_limits, check_request, split_arguments, submitter_key
from hf_parallel.engine.forks import SUBMIT_ARGUMENTS, Origin, fork_point, fork_settings, point_of, with_suffix
from hf_parallel.engine.handle import RequestCancelledError, RequestHandle, TokenDecoder
from hf_parallel.engine.hints import AgentHints
from hf_parallel.engine.leases import Lease
from hf_parallel.engine.passes import JoinedPasses, PendingPass, join_passes
from hf_parallel.engine.policies.base import EvictionPolicy
from hf_parallel.engine.ranks import Ranks
from hf_parallel.engine.request import ForkPoint, NonFiniteLogitsError, Request, Sampling, record_passes
from hf_parallel.engine.scheduler import BATCH_TOKENS, QueueFullError, Scheduler
from hf_parallel.engine.stats import EngineStats, engine_stats
from hf_parallel.engine.storage import STATE_INTERVAL, KVBudgetError, KVStorage, WeightsChangedError
from hf_parallel.engine.updates import ON_UPDATE, OnUpdate, Pause, WeightUpdates
from hf_parallel.generation.decoding.standing import Standing
from hf_parallel.generation.decoding.table import DecodeTable
from hf_parallel.generation.decoding.wants import Wait
from hf_parallel.generation.enabled import ENGINE_OPEN, Claim, enabled
from hf_parallel.generation.mixin import enable, unwrap
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.rng import CannotDrawError
from hf_parallel.generation.sampling.sampler import sample_together
from hf_parallel.generation.validation import check_choice
from hf_parallel.kernels.native import release_threads
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.decode.adapted_model import AdaptedModel
from hf_parallel.models.intercept.modules import gradient_checkpointing_disabled
from hf_parallel.models.loading.adapters import check_no_virtual_tokens


class PlannedStep(NamedTuple):
    """A step whose pass is planned: that of the rows that stand, then those of other requests."""

    decoding: list[Request]  # whose rows stand
    others: list[Request]
    pending: list[PendingPass]  # one for all rows that stand, if there are any, and one for each other request
    joined: JoinedPasses
    forward: ForwardPass

    @property
    def own_passes(self) -> list[PendingPass]:
        """The passes of the other requests."""
        return self.pending[len(self.pending) - len(self.others) :]


class Engine:
    """Serves `submit` calls of many threads or coroutines with one model.

    With a sharded model, every process opens an engine. The first one accepts requests; the others wait for it.

    Parameters
    ----------
    model : PreTrainedModel
        The engine has exclusive use of the model while it is open: other calls of `model.generate` with a mode raise an
        error. The model is enabled if necessary.
    tokenizer : PreTrainedTokenizerBase, optional
        Encodes text prompts, decodes text, and serves modes that need a tokenizer.
    max_kv_bytes : int, optional
        Budget of keys, values and states. When it is full, cached prefixes are evicted, then requests are preempted and
        recomputed later. Default: no limit.
    max_rows : int
        Maximum number of rows that are generated at the same time. A single request may have more.
    max_waiting : int
        Requests in the queue. When it is full, only submitters that hold less than their fair share can submit.
    max_batch_tokens : int, optional
        Maximum number of tokens per step; prompts are prefilled in chunks of at most this size. Default: 512 on a CPU,
        otherwise 4096.
    policy : EvictionPolicy, optional
        Order in which cached prefixes are evicted. Default: least recently used. A `SchedulingPolicy`, such as
        `ContributionPolicy`, also decides which requests of a submitter run first.
    cache_dtype : str, optional
        See `ParallelConfig`.
    state_interval : int, optional
        Number of tokens between kept states of recurrent layers. Later prompts can diverge at these states.

    Examples
    --------
    >>> with Engine(model, tokenizer) as engine:
    ...     handles = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]
    ...     print([handle.result().sequences for handle in handles])
    """

    error: BaseException | None = None
    """The error that has stopped the engine; None: it runs, or was closed."""
    is_closing = False
    """Whether the engine accepts no more requests."""
    leads: bool
    """Whether this process takes requests: the only one, or the first of several that compute the model."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        max_kv_bytes: int | None = None,
        *,
        max_rows: int = 64,
        max_waiting: int = 1024,
        max_batch_tokens: int | None = None,
        policy: EvictionPolicy | None = None,
        state_interval: int | None = STATE_INTERVAL,
        cache_dtype: str | None = None,
    ) -> None:
        limits = {"max_rows": max_rows, "max_waiting": max_waiting}
        optional = {"max_kv_bytes": max_kv_bytes, "max_batch_tokens": max_batch_tokens}
        check_limits(limits, **optional, state_interval=state_interval)
        check_no_virtual_tokens(model)
        self.model = unwrap(enable(model, tokenizer=tokenizer))
        self._ranks = Ranks(self.model)
        self.leads = self._ranks.leads
        self.tokenizer: Any = tokenizer or enabled(self.model).tokenizer
        self.max_waiting = max_waiting
        device = execution_device(self.model)
        rotary = enabled(self.model).capabilities.rotary
        self._storage = KVStorage(rotary, device, max_kv_bytes, policy, self._free_memory, cache_dtype)
        self._storage.tree.state_interval = state_interval
        self.has_policy = policy is not None
        """Whether a policy was given; without one, the engine evicts the least recently used prefix."""
        self._scheduler = Scheduler(self._storage, max_rows, max_batch_tokens or BATCH_TOKENS.get(device.type, 4096))
        self._current: Request | None = None  # whose code is running
        self._changed = threading.Condition()
        self._submitted: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._posted: list[Callable[[], None]] = []
        self._claim: Claim | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._draining = False
        self._work = EngineStats()
        self._known_seconds = 0.0  # of the running step, in the model and in the code of requests
        self._logged_steps: LoggedSteps | None = None  # of the last pass
        self._table = DecodeTable(self._storage.cache)
        self.weights_version = 0
        """Number of updates of the weights since the engine was made; see `updating_weights`."""
        self._unmarked: set[Request] = set()  # whose next tokens are the first of this version
        self._updates = WeightUpdates()

    def __enter__(self) -> Self:
        """Start the engine. Raises `RuntimeError` if another call uses the model."""
        if self._thread is not None:
            raise RuntimeError("an Engine can be entered only once: make a new one")
        release_threads()
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), name="hf_parallel-engine", daemon=True)
        try:
            self._thread.start()
            started.wait()
            if self.error is not None:
                raise self.error
            atexit.register(self.close, drain=False)  # a thread that computes while the process ends would abort it
        except BaseException:  # also Ctrl-C: the thread gives the model back before the process may end
            self.close(drain=False)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Close the engine; wait for its requests, unless the body has raised an error."""
        self.close(drain=error is None)
        if not self.leads and self.error is not None and error is None:
            raise self.error

    def close(self, drain: bool = True) -> None:
        """Close the engine. `drain`: finish the submitted requests first; otherwise cancel them.

        Does nothing in a fork of the process that opened it. Raises `RuntimeError` in the body of `updating_weights`.
        """
        if self._process != os.getpid():
            return
        self.check_blocking()
        atexit.unregister(self.close)
        with self._changed:
            self.is_closing = True
            self._draining = drain
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join()

    def submit(
        self,
        prompt: Any,
        generation_mode: str | None = None,
        *,
        priority: int = 0,
        submitter: Any = None,
        agent_hints: AgentHints | Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        lease: Lease | None = None,
        parent: ForkPoint | None = None,
        **settings: Any,
    ) -> RequestHandle:
        """Submit a request and return its handle.

        Parameters
        ----------
        prompt : str, list of dict, list of int, tensor or mapping
            Text, a chat, token ids `[length]` or `[rows, length]`, or `input_ids` with `attention_mask`. The chat
            template is applied to a chat, and to text if the mode has a prompt builder (see `build_prompt`).
        generation_mode : str, optional
            None: as plain `generate`, with the same tokens.
        priority : int
            Requests of higher priority run first.
        submitter : hashable, optional
            Submitters with equal priority get the same number of tokens.
        agent_hints : AgentHints or mapping, optional
            The agent that submits the request, for eviction policies.
        cache_salt : str, optional
            Only requests with the same salt share cached prefixes and the logits of a `LogitsCache`, so that others
            cannot find out what is cached.
        adapter : str, optional
            Name of a LoRA adapter of PEFT; "__base__": none. Default: the active ones. Each adapter has its own
            prefixes.
        lease : Lease, optional
            Keeps the prompt and the answer cached after the request has ended, for forks; see `Lease`.
        parent : ForkPoint, optional
            A running request whose tokens the prompt begins with, as `RequestHandle.point` returns it.
        **settings
            Arguments of `model.generate`, such as settings and a streamer; `chat_template_kwargs` as in `build_prompt`.

        Raises
        ------
        ValueError
            For unknown, contradictory or unsupported settings.
        KVBudgetError
            If the request alone may not fit into `max_kv_bytes`.
        QueueFullError
            If `max_waiting` requests wait, and this submitter has its fair share of them or more.
        RuntimeError
            If the engine is not open.
        """
        request = self.prepare(
            prompt,
            generation_mode,
            priority=priority,
            submitter=submitter,
            agent_hints=agent_hints,
            cache_salt=cache_salt,
            adapter=adapter,
            lease=lease,
            parent=parent,
            **settings,
        )
        (handle,) = self.submit_together([request])
        return handle

    def prepare(
        self,
        prompt: Any,
        generation_mode: str | None = None,
        *,
        priority: int = 0,
        submitter: Any = None,
        agent_hints: AgentHints | Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        lease: Lease | None = None,
        parent: ForkPoint | None = None,
        **settings: Any,
    ) -> Request:
        """Return a request for `submit_together`. Arguments and errors are the same as for `submit`."""
        self.check_open()
        check_request(priority, cache_salt)
        self._cached_model.check(adapter)
        key = submitter_key(submitter)
        hints = AgentHints.of(agent_hints)
        config, arguments = split_arguments(self.model, self.tokenizer, prompt, generation_mode, settings)
        assert self._claim is not None
        call = self.model.prepare_call(config, arguments, self._claim)
        decoder = None if config.traits.streams_text else lambda: TokenDecoder(call.tokenizer, call.hidden_tokens)
        handle = RequestHandle(
            lambda: self._cancel(request), self._check_wait, decoder, lambda text, to: self._inject(request, text, to)
        )
        handle.check_blocking = self.check_blocking
        handle.end_tokens = call.eos_token_ids
        request = Request(config, call, handle, priority, key, hints, cache_salt, adapter, lease)
        self._scheduler.check_budget(request)
        submission = {
            **settings,
            "generation_mode": generation_mode,
            "priority": priority,
            "submitter": submitter,
            "agent_hints": agent_hints,
            "cache_salt": cache_salt,
            "adapter": adapter,
        }
        origin = Origin.of(request, call, submission)
        handle.make_forks = partial(self._fork, origin)
        handle.point = partial(point_of, origin)
        request.parent = parent
        return request

    def submit_together(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """Submit requests of `prepare` at once, for the next step to start together, and return their handles.

        Raises `QueueFullError` if the queue has no room for one of them, and `RuntimeError` if the engine is not open.
        In both cases, none is submitted.
        """
        with self._changed:
            self.check_open()
            submitted = list(self._submitted)
            for request in requests:
                if not self._scheduler.has_place(submitted, request.submitter, self.max_waiting):
                    raise QueueFullError(f"{self.max_waiting} requests wait already (max_waiting)")
                submitted.append(request)
            self._submitted.extend(requests)
            self._changed.notify_all()
        return [request.handle for request in requests]

    def _fork(
        self,
        origin: Origin,
        handle: RequestHandle,
        n: int | None,
        at: int | None,
        row: int,
        suffix: Any,
        children: Sequence[Mapping[str, Any]] | None,
        changes: Mapping[str, Any],
    ) -> list[RequestHandle]:
        """Submit forks of a request; see `RequestHandle.fork`."""
        tokens, num_new = fork_point(origin, handle, row, at)
        requests = []
        for settings in fork_settings(origin, n, children, {"suffix": suffix, **changes}):
            template = settings.pop("chat_template_kwargs", None)
            tokenizer = settings.get("tokenizer") or self.tokenizer
            prompt = with_suffix(tokens, settings.pop("suffix"), tokenizer, template)
            of_submit = {name: settings.pop(name) for name in SUBMIT_ARGUMENTS if name in settings}
            requests.append(self.prepare(prompt, **of_submit, parent=handle.point(row, num_new), **settings))
        return self.submit_together(requests)

    @contextmanager
    def updating_weights(self, running: OnUpdate = "recompute") -> Iterator[None]:
        """Let the body change the model's weights in place, while the engine waits between two forward passes.

        Parameters
        ----------
        running : "recompute", "finish" or "drop"
            What happens to requests that have begun to generate. `recompute`: they keep their tokens and recompute the
            keys and values with the new weights. `finish`: they keep their keys and values, which no other request
            uses. `drop`: they fail with `WeightsChangedError`. Requests that have not begun start again, and cached
            prefixes and leases are deleted.

        Raises
        ------
        ValueError
            If the model is sharded over several processes, or `running` is invalid.
        RuntimeError
            If the engine is not open, or if waiting would never end: inside the body of another update of the same
            thread, or in the code of a request.

        Notes
        -----
        Each token records the version of the weights that sampled it (`RequestHandle.token_versions`); the version
        counts the updates. The body cannot wait for a request nor close the engine, which raises `RuntimeError`.
        Gradients may be computed outside of it, while requests run.
        """
        check_choice("running", running, ON_UPDATE)
        if self._ranks.are_several:
            raise ValueError("weights cannot be updated in an open engine whose model several processes compute")
        if threading.current_thread() is self._thread:
            raise RuntimeError("weights cannot be updated in code of a request")
        with self._updates.begin():
            self.check_open()
            pause = Pause(partial(self._use_new_weights, running))
            self._post(pause.hold)
            pause.begin(self.check_open)
            try:
                yield
            finally:
                pause.end(self._check_running)

    def _use_new_weights(self, running: OnUpdate) -> None:
        """Let requests continue as `updating_weights` says, after the weights have changed."""
        scheduler = self._scheduler
        scheduler.standing = None
        self.weights_version += 1
        if running == "finish":
            self._storage.epoch += 1
        for request in list(scheduler.running):
            if running == "drop" and request.has_started:
                self._call(request, request.fail, WeightsChangedError("the weights were updated while the request ran"))
            elif not request.preempted and (running != "finish" or not request.has_started):
                scheduler.preempt(request)
        self._unmarked = {request for request in scheduler.running if request.has_started}
        if self._storage.take_weights(self.model):
            self._cached_model = self._new_model()

    def renew(self, lease: Lease) -> None:
        """Let the time of a lease begin again."""
        self._post(partial(self._storage.leases.renew, lease))

    def release(self, lease: Lease) -> None:
        """End a lease. Its prefix stays cached like any other prefix."""
        self._post(partial(self._storage.leases.release, lease))

    def _post(self, function: Callable[[], None]) -> None:
        """Let the engine's thread call a function between two steps. Does nothing once the engine is closed."""
        with self._changed:
            if not self.is_closing:
                self._posted.append(function)
                self._changed.notify_all()

    def _check_running(self) -> None:
        """Raise `RuntimeError` if an error has stopped the engine."""
        if self.error is not None:
            raise RuntimeError("the engine has stopped") from self.error

    def check_open(self) -> None:
        """Raise `RuntimeError` if the engine accepts no requests."""
        self._check_running()
        if self._thread is None or self.is_closing:
            raise RuntimeError("the engine is not open: use it as `with Engine(...) as engine:`")
        self._check_process()

    @property
    def policy(self) -> EvictionPolicy:
        """The policy by which prefixes are evicted."""
        return self._storage.policy

    def use_policy(self, policy: EvictionPolicy) -> None:
        """Evict and schedule by another policy from now on. It knows nothing of earlier requests.

        Raises `ValueError` for an object that is no policy.
        """
        self._storage.use_policy(policy)
        self.has_policy = True

    @property
    def stats(self) -> EngineStats:
        """State of the engine, and its work so far."""
        return engine_stats(self._scheduler, self._work, len(self._submitted))

    def _check_process(self) -> None:
        if self._process != os.getpid() or not self.leads:
            raise RuntimeError("the engine runs in the (first) process that opened it, not in a fork of it")

    def _check_wait(self) -> None:
        """Raise an error where waiting for a request would never end."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise RuntimeError("code of a request cannot wait for another request of its engine: all run in one thread")

    def check_blocking(self) -> None:
        """Raise `RuntimeError` in the body of `updating_weights`: the engine waits for it, so it cannot wait back."""
        if self._updates.are_by_this_thread:
            raise RuntimeError("the engine waits for the end of updating_weights: its body cannot wait for the engine")

    def _cancel(self, request: Request) -> None:
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify_all()

    def _inject(self, request: Request, text: object, to: object) -> Future[int]:
        """Say something to the rows of a request; see `RequestHandle.inject`."""
        words, num_tokens = request.config.listens_to(request.call, text, to)
        request.say(words, num_tokens, self._scheduler.check_budget)
        return words.heard

    def _main(self, started: threading.Event) -> None:
        claim = Claim(ENGINE_OPEN)
        try:
            prepared = gradient_checkpointing_disabled(self.model), fast_layers(self.model)
            with torch.no_grad(), cpu_as_default(), self.model.claimed(claim), prepared[0], prepared[1]:
                self._claim = claim
                self._open_storage()
                started.set()
                self._ranks.run(self._run, self._storage.cache, self._open_storage, lambda: self._cached_model)
        except BaseException as error:
            self.error = error
            if started.is_set():
                logging.getLogger(__name__).error("the engine has stopped", exc_info=error)
        finally:
            claim.active = False
            started.set()
            self._abandon()

    def _open_storage(self) -> None:
        """Delete all keys and values. Compute a few tokens to measure the bytes of their keys and values."""
        storage = self._storage
        storage.reset()
        storage.cache.device = execution_device(self.model)
        self._cached_model = self._new_model()
        storage.check_all_weights(self.model)
        storage.set_token_size(self._cached_model.token_bytes())
        self._ranks.begin(storage.arena)

    def _new_model(self) -> AdaptedModel:
        return AdaptedModel(self.model, enabled(self.model).capabilities, self._storage.cache, cuda_graph=True)

    def _run(self) -> None:
        while self._accept():
            self._step()

    def _accept(self) -> bool:
        """Wait for work, and take what was submitted, canceled and posted. Return False if the engine is to end."""
        with self._changed:
            while not self._submitted and not self._scheduler.is_busy and not self._posted:
                if self.is_closing:
                    return False
                if not self._changed.wait(self._storage.leases.seconds_left()):
                    break  # a lease has expired
            if self.is_closing and not self._draining:
                return False
            submitted = list(self._submitted)
            self._submitted.clear()
            for request in submitted:
                self._scheduler.add(request)
            cancelled = self._cancelled
            self._cancelled = []
            posted = self._posted
            self._posted = []
        for function in posted:
            function()
        self._storage.leases.expire()
        for request in cancelled:
            if not request.is_done:
                self._call(request, request.fail, RequestCancelledError("the request was canceled"))
        self._keep_forked(submitted)
        return True

    def _keep_forked(self, submitted: Sequence[Request]) -> None:
        """Let requests keep what their forks continue: rows that stand now, others before their next pass.

        Rows that stood when their request was preempted stand again once it is recomputed.
        """
        for request in submitted:
            if request.parent is not None:
                parent, row, num_tokens = request.parent
                if parent.has_started and not parent.is_done:
                    parent.want_prefix(row, num_tokens)
        parents: dict[Request, None] = {}
        for request in self._scheduler.waiting:
            if request.parent is not None and request.waits_for_parent:
                parents[request.parent.request] = None
        for parent in parents:
            if isinstance(parent.awaited, Standing):
                self._call(parent, parent.resume, parent.awaited)

    def _abandon(self) -> None:
        """End all requests, as the engine ends."""
        with self._changed:
            self.is_closing = True  # nothing is submitted from now on
        for request in [*self._scheduler.waiting, *self._scheduler.running, *self._submitted]:
            request.abandon(self.error)
        self._storage.reset()

    def _step(self) -> None:
        """Resume what waits, admit requests, and run one forward pass."""
        began = time.perf_counter()
        self._known_seconds = 0.0
        scheduler = self._scheduler
        self._storage.tree.clock += 1
        if scheduler.standing is None:
            for request in list(scheduler.running):
                if isinstance(request.awaited, Wait) and not request.preempted:
                    self._call(request, request.resume, request.awaited)
            for request in scheduler.resumable():
                self._call(request, request.recompute)
        admitted = scheduler.admit()
        if admitted:
            self._check_weights(admitted)
            self._cached_model.expect_changes()
        for request in admitted:
            if request in scheduler.running:  # else it was preempted by one before it
                request.handle.versions = [(0, self.weights_version)]
                self._call(request, request.start, self._storage, scheduler.max_batch_tokens)
        batch = scheduler.next_batch()
        if batch:
            self._compute(batch)
        if scheduler.standing is None and not self._sample_waiting() and not batch and scheduler.is_busy:
            time.sleep(0.001)  # requests wait for each other
        elapsed = time.perf_counter() - began
        self._work.step_seconds += elapsed
        self._work.overhead_seconds += elapsed - self._known_seconds

    def _check_weights(self, new: Sequence[Request]) -> None:
        """End the requests that run, except new ones, and delete all prefixes, if the model's weights have changed."""
        try:
            self._storage.check_weights(self.model)
        except WeightsChangedError as error:
            started = [request for request in self._scheduler.running if request not in new]
            for request in started:
                self._call(request, request.fail, WeightsChangedError(*error.args))
            self._ranks.broadcast(())
            self._open_storage()

    def _call(self, request: Request, function: Callable[..., None], *arguments: Any) -> None:
        """Run a part of a request's code, until its next pass or its end."""
        began = time.perf_counter()
        num_tokens = request.num_tokens
        self._current = request
        self._scheduler.standing = None
        try:
            function(*arguments)
        finally:
            self._current = None
            self._known_seconds += time.perf_counter() - began
        new_tokens = request.num_tokens - num_tokens
        if new_tokens:
            self._scheduler.charge(request, new_tokens)
        has_exceeded = self._storage.has_exceeded
        self._storage.has_exceeded = False
        if has_exceeded and not request.is_done:
            self._scheduler.preempt(request)
        if request.is_done:
            self._unmarked.discard(request)
            self._work.add(request.stats, request.handle.error)
            self._scheduler.remove(request)
        elif new_tokens:
            request.handle.notify()

    def _free_memory(self) -> bool:
        """Free memory for the request whose code is running, in the order of `_fit`. Return False if it runs alone."""
        current = self._current
        victim = None if current is None else self._scheduler.victim_of([current])
        if current is not None and victim is current:
            self._storage.exceed()  # until its code wants something: then it is preempted
        elif victim is not None:
            self._scheduler.preempt(victim)
        return victim is not None

    def _fit(self, batch: list[Request]) -> PlannedStep | None:
        """Plan the passes of a batch as one. Remove requests from it until memory suffices; None: all of them."""
        table = self._table
        while batch:
            members = [request.awaited for request in batch if isinstance(request.awaited, Standing)]
            decoding = batch
            others: list[Request] = []
            pending: list[PendingPass] = []
            if len(members) < len(batch):
                decoding = [request for request in batch if isinstance(request.awaited, Standing)]
                for request in batch:
                    if isinstance(request.awaited, PendingPass):
                        others.append(request)
                        pending.append(request.awaited)
                        request.awaited.expand_views()
            table.choose(members)
            if members:
                pending.insert(0, PendingPass(table.next_pass()))
            joined = join_passes(pending)
            try:
                forward = self._storage.cache.prepare_run(joined.passes)
            except (KVBudgetError, torch.OutOfMemoryError) as error:
                self._storage.cache.rollback()
                victim = self._scheduler.victim_of(batch)
                if victim is not None:
                    self._scheduler.preempt(victim)
                else:
                    victim = batch[0]
                    self._call(victim, victim.fail, error)
                if victim in batch:
                    batch.remove(victim)
            else:
                return PlannedStep(decoding, others, pending, joined, forward)
        return None

    def _compute(self, batch: list[Request]) -> None:
        """Run one forward pass for the requests of a batch, and continue those to which something has happened."""
        began = time.perf_counter()
        logits = None
        error = None
        try:
            step = self._fit(batch)
            if step is None:
                return
            logits = self._forward(step.joined, step.forward, batch[0].adapter)
        except Exception as raised:
            self._storage.cache.rollback()
            self._table.choose(())
            if isinstance(raised, NonFiniteLogitsError):
                self._storage.pool.clear_unused()  # where the pass has written
            elif self._ranks.are_several:  # which are not at the same place any more
                raise RuntimeError("a pass failed in one of the processes that compute the model") from raised
            if len(batch) == 1 or isinstance(raised, MissingStateError):  # a defect, which a second try would hide
                error = raised
        self._known_seconds += time.perf_counter() - began
        if logits is None and (error is not None or self._storage.pool.states.in_use):
            if error is not None:
                for request in batch:
                    self._call(request, request.fail, error)
            self._scheduler.isolate([request for request in batch if not request.is_done])
            return
        if logits is None:
            middle = len(batch) // 2  # find the request that fails
            self._compute(batch[:middle])
            self._compute([request for request in batch[middle:] if request.needs_pass])
            return
        assert step is not None
        isolated = self._scheduler.isolated
        if isolated:
            isolated.difference_update([request for request in batch if not request.is_recomputing])
        self._record(step)
        if self._unmarked:
            self._mark_version(step)
        parts = [Part(logits, part) for part in step.joined.parts]
        if step.decoding:
            self._decode(step.decoding, parts.pop(0))
        for request, computed, part in zip(step.others, step.own_passes, parts, strict=True):
            if request.pending is not computed and not request.preempted:
                continue  # it was restarted by one before it
            if computed.sampling is not None:
                request.take_logits(computed.sampling, part)
            else:
                self._call(request, request.resume, computed, part.tensor)

    def _mark_version(self, step: PlannedStep) -> None:
        """Record the version of the weights for requests whose first pass by it this is, other than to recompute."""
        computed = [*step.decoding, *(request for request in step.others if not request.is_recomputing)]
        for request in self._unmarked.intersection(computed):
            request.handle.mark_version(self.weights_version)
            self._unmarked.discard(request)

    def _record(self, step: PlannedStep) -> None:
        """Record a pass in the logs of its requests. Rows that stand have one entry, made when they began."""
        is_step_of_others = not step.decoding and step.forward.is_decode_step
        if is_step_of_others and step.forward.continues and self._logged_steps is not None:
            self._logged_steps.ids.append(step.joined.ids)
            return
        shared: LoggedSteps | None = None  # by the others
        if is_step_of_others and not any(request.is_recomputing for request in step.others):
            shared = LoggedSteps([step.joined.ids])
        num_rows = sum(computed.num_segments for computed in step.pending)
        record_passes(step.others, step.own_passes, num_rows, shared)
        self._logged_steps = shared

    def _decode(self, requests: Sequence[Request], logits: Part) -> None:
        """Sample for the rows that stand, given their logits, and resume requests to which something has happened."""
        began = time.perf_counter()
        table = self._table
        members = table.members
        try:
            happened = table.advance(logits)
        except CannotDrawError:  # each by itself, to find out which
            self._scheduler.standing = None
            for request, member, part in zip(requests, members, table.parts(logits), strict=True):
                request.take_logits(member.task, part)
            return
        except Exception as error:  # generators may have advanced, so that nothing can be repeated
            happened = [(index, error) for index in range(len(requests))]
        finally:
            self._known_seconds += time.perf_counter() - began
        self._scheduler.charge_all(requests, table.sizes)
        for request, size in zip(requests, table.sizes, strict=True):
            request.num_tokens += size
            if request.handle.waiting:
                request.handle.notify()
        for index, cause in happened:
            request = requests[index]
            if cause is None:
                self._call(request, request.resume, members[index])
            else:
                self._call(request, request.fail, cause)

    def _sample_waiting(self) -> bool:
        """Sample the next tokens of all requests that wait for them; continue each. Return whether there were any."""
        has_sampled = False
        while waiting := [request for request in self._scheduler.running if isinstance(request.awaited, Sampling)]:
            began = time.perf_counter()
            awaited = [request.awaited for request in waiting if isinstance(request.awaited, Sampling)]
            tasks = [sampling.task for sampling in awaited]
            logits = [sampling.logits for sampling in awaited]
            sampled = sample_together(tasks, logits)
            self._known_seconds += time.perf_counter() - began
            for request, sampling, result in zip(waiting, awaited, sampled, strict=True):
                if isinstance(result, BaseException):
                    self._call(request, request.fail, result)
                else:
                    self._call(request, request.resume, sampling, result)
            has_sampled = True
        return has_sampled

    def _forward(self, joined: JoinedPasses, forward: ForwardPass, adapter: str | None) -> torch.Tensor:
        """Run a pass that is planned. Return its logits; raise an error for NaN."""
        self._ranks.send(forward, joined.ids, joined.logits_to_keep, adapter)
        logits = self._cached_model.logits(forward, joined.ids, joined.logits_to_keep, adapter)
        self._work.steps += 1
        are_finite = logits.amax(-1).isfinite().all()
        if not bool(are_finite):
            raise NonFiniteLogitsError("the model's logits are not finite")
        self._storage.commit()
        # A graph overwrites its last output, from which a request may sample after another pass (preemption, failures).
        return logits if self._cached_model.graphs is None else logits.clone()

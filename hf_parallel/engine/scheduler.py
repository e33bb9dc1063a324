"""Scheduler: which requests run, and which of their passes are computed together in the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from hf_parallel.cache.pool import Budget
from hf_parallel.engine.passes import PendingPass
from hf_parallel.engine.request import Request
from hf_parallel.engine.storage import KVBudgetError, KVStorage
from hf_parallel.generation.decoding.standing import Standing

BATCH_TOKENS = {"cpu": 512}
"""Maximum number of tokens of a step, by device type; others: 4096."""
EXPECTED_TOKENS = 32
"""New tokens per row that must fit into the budget before a request is admitted, unless its maximum is less."""
HEAD_START = 64
"""Number of earlier requests that a request of contribution 1 may overtake, compared with one of contribution 0."""


class QueueFullError(RuntimeError):
    """Raised at submission if the queue is full and the submitter has its fair share of it or more."""


def has_place(counts: Counter[Any], submitter: Any, most: int) -> bool:
    """Return whether a submitter may add a request to those that are there, by submitter.

    It may if there are fewer than `most`, or if it has less than an equal share of these: no submitter can keep all
    others out.
    """
    submitters = counts.keys() | {submitter}
    return counts.total() < most or counts[submitter] * len(submitters) < most


@dataclass
class Account:
    """Tokens that a submitter was served, and number of its requests that wait or run."""

    served: float = 0.0  # tokens
    num_requests: int = 0


class Scheduler:
    """Admits requests, chooses the passes of a step, and preempts.

    The next request is that of the highest priority; among equals, of the submitter that was served the fewest tokens;
    then the oldest, where a policy may give requests a head start. A step computes all decode passes, and prefills up
    to `max_batch_tokens` tokens, but at least one. All passes of a step use the same adapter. Adapters take turns.
    """

    def __init__(self, storage: KVStorage, max_rows: int, max_batch_tokens: int) -> None:
        self.storage = storage
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.submitters: dict[Any, Account] = {}
        self._num_active = 0  # submitters with requests
        self._fair = 0.0  # tokens served to a submitter that was never idle (virtual time)
        self.preemptions = 0
        self.isolated: set[Request] = set()  # see `isolate`
        self.standing: list[Request] | None = None
        """All running requests, in their order, if the rows of each stand and nothing has happened to one since."""
        self._submitted = 0
        self._last_step: dict[str | None, int] = {}  # in which passes of an adapter were computed

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def check_budget(self, request: Request, more_tokens: int = 0) -> None:
        """Raise `KVBudgetError` if a request alone, with `more_tokens` tokens, does not fit into memory."""
        budget = self.storage.pool.budget
        prompt = request.call.prompt_tokens
        if budget is None:
            return
        interval = self.storage.tree.state_interval
        states = 0
        if budget.state_bytes:
            states = request.config.max_states(request.call)
            if interval:
                states += (request.max_tokens + more_tokens) // interval
        max_tokens = request.max_tokens + more_tokens
        needed = budget.cost(max_tokens, states)
        if needed > budget.bytes:
            and_states = f"; and {states} states of {budget.state_bytes}" if states else ""
            raise KVBudgetError(
                f"max_kv_bytes={budget.bytes}, but this request may need {needed} bytes: {max_tokens} tokens "
                f"of {budget.token_bytes}, {prompt} of the prompt, and {max_tokens - prompt} of up to "
                f"{request.num_rows} rows with max_new_tokens={request.call.max_new_tokens}{and_states}"
            )

    def has_place(self, submitted: Collection[Request], submitter: Any, most: int) -> bool:
        """Return whether a submitter may add a request to the queue and to those that were `submitted` since."""
        if len(submitted) + len(self.waiting) < most:
            return True
        counts = Counter(request.submitter for request in (*submitted, *self.waiting))
        return has_place(counts, submitter, most)

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        account = self.submitters.setdefault(request.submitter, Account())
        request.account = account
        if not account.num_requests:  # one that was idle has no advantage over the others
            account.served = max(account.served, self._fair)
            self._num_active += 1
        account.num_requests += 1
        request.number = self._submitted
        self._submitted += 1
        self.waiting.append(request)

    def charge(self, request: Request, tokens: int) -> None:
        """Count tokens that a request was served."""
        self.charge_all([request], [tokens])

    def charge_all(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """Count tokens that requests were served."""
        for request, count in zip(requests, tokens, strict=True):
            request.account.served += count
        self._fair += sum(tokens) / self._num_active

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.isolated.discard(request)
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)
        request.account.num_requests -= 1
        if request.account.num_requests:
            return
        self._num_active -= 1
        self.submitters = {  # without those that would begin as new ones
            submitter: account
            for submitter, account in self.submitters.items()
            if account.num_requests or (self._num_active and account.served > self._fair)
        }

    def resumable(self) -> list[Request]:
        """Return the preempted requests whose keys and values fit into memory again, the oldest first."""
        preempted = sorted((request for request in self.running if request.preempted), key=self._age)
        if not preempted:
            return []
        is_busy = any(request.needs_pass for request in self.running)
        resumed: list[Request] = []
        needed = 0
        budget = self.storage.pool.budget
        for request in preempted:
            if budget is not None:
                needed += _cost(budget, request.missing_lengths)
                needed += budget.cost(request.num_rows * EXPECTED_TOKENS, 0)
                if (is_busy or resumed) and needed > self._available_bytes(budget, [*resumed, request]):
                    break
            resumed.append(request)
        return resumed

    def admit(self) -> list[Request]:
        """Move waiting requests to `running`, as far as memory suffices, and return them. Preempted ones go first."""
        if not self.waiting or any(request.preempted for request in self.running):
            return []
        admitted: list[Request] = []
        rows = sum(request.num_rows for request in self.running)
        startable = [request for request in self.waiting if not request.waits_for_parent]
        while startable and (rows < self.max_rows or not self.running):
            request = min(startable, key=self._order)
            has_place = rows + request.num_rows <= self.max_rows
            if self.running and not (has_place and self._fits([*admitted, request])):
                break
            startable.remove(request)
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append(request)
            rows += request.num_rows
            if request.handle.times.started is None:  # else it starts again
                self.charge(request, request.call.prompt_tokens)
        return admitted

    def next_batch(self) -> list[Request]:
        """Return the requests whose passes are computed in the next step."""
        if self.standing is not None:
            self._last_step[self.standing[0].adapter] = self.storage.tree.clock
            return list(self.standing)
        ready = [request for request in self.running if isinstance(request.awaited, (PendingPass, Standing))]
        if self.isolated:
            alone = [request for request in ready if request in self.isolated]
            if alone:
                return alone[:1]
        batch: list[Request] = []
        adapters = {request.adapter for request in ready}
        adapter = min(adapters, key=lambda adapter: self._last_step.get(adapter, 0), default=None)
        self._last_step[adapter] = self.storage.tree.clock
        prefills: dict[Request, int] = {}  # with their numbers of tokens
        free = self.max_batch_tokens
        for request in ready:
            if request.adapter != adapter:
                continue
            awaited = request.awaited
            if isinstance(awaited, Standing):
                batch.append(request)
                free -= len(awaited.rows)
            elif isinstance(awaited, PendingPass) and awaited.is_prefill:
                prefills[request] = awaited.num_tokens
            elif isinstance(awaited, PendingPass):
                batch.append(request)
                free -= awaited.num_tokens
        for index, request in enumerate(sorted(prefills, key=self._age)):
            if index == 0 or prefills[request] <= free:
                batch.append(request)
                free -= prefills[request]
        batch.sort(key=attrgetter("number"))
        if batch and len(batch) == len(self.running) and all(isinstance(r.awaited, Standing) for r in batch):
            self.standing = list(batch)
        return batch

    def victim(self, but: Request | None = None) -> Request | None:
        """Return the request to preempt, unless it is the only one that runs.

        It is the youngest of the least priority. Where a policy gives requests a head start, it is the one of the same
        submitter and priority whose turn is last.
        """
        running = [request for request in self.running if not request.preempted]
        candidates = [request for request in running if request is not but]
        if not candidates or len(running) == 1:
            return None
        youngest = max(candidates, key=self._age)
        equals = [
            request
            for request in candidates
            if request.priority == youngest.priority and request.submitter == youngest.submitter
        ]
        return max(equals, key=self._turn)

    def victim_of(self, batch: list[Request]) -> Request | None:
        """Return the request to preempt so that the requests of a batch can continue; None: there is none."""
        victim = self.victim()
        if batch != [victim]:
            return victim
        others_wait = not any(request.is_ready for request in self.running if request is not victim)
        if others_wait:
            return self.victim(but=victim)  # one that waits for it: else it would be resumed and preempted for ever
        return victim

    def preempt(self, request: Request) -> None:
        """Delete the keys and values of a request. One that has not started to generate starts again."""
        self.preemptions += 1
        self.standing = None
        if request.has_started:
            request.preempt()
        else:
            request.restart()
            self.running.remove(request)
            self.waiting.append(request)

    def isolate(self, batch: Sequence[Request]) -> None:
        """Preempt the requests of a failed pass. Each is then computed alone until one of its passes succeeds."""
        self.isolated.update(batch)
        for request in batch:
            self.preempt(request)
        self.storage.tree.discard_stateless()

    def _order(self, request: Request) -> tuple[Any, ...]:
        return -request.priority, request.account.served, self._turn(request)

    def _turn(self, request: Request) -> float:
        """Return a request's place among those of its submitter: they come in order, with a head start by contribution.

        The head start is bounded, so every request has its turn.
        """
        policy = self.storage.scheduling
        if policy is None:
            return request.number
        return request.number - HEAD_START * policy.contribution(request)

    @staticmethod
    def _age(request: Request) -> tuple[int, int]:
        return -request.priority, request.number

    def _available_bytes(self, budget: Budget, resumed: Collection[Request] = ()) -> int:
        """Return the number of bytes that are free or can be freed by evicting, with these requests resumed."""
        blocks = list(chain.from_iterable(request.blocks for request in self.running))
        blocks += self.storage.used_blocks(resumed)
        return budget.bytes - budget.held(blocks)

    def _fits(self, requests: list[Request]) -> bool:
        budget = self.storage.pool.budget
        tree = self.storage.tree
        if budget is None:
            return True
        needed = _cost(budget, [len(node.uncached) for node in tree.pins])
        needed += sum(_least_bytes(request, budget) for request in requests)
        return needed <= self._available_bytes(budget)


def _cost(budget: Budget, lengths: Sequence[int]) -> int:
    """Return the bytes of the keys, values and states of blocks with these lengths."""
    return budget.cost(sum(lengths), sum(length > 0 for length in lengths))


def _least_bytes(request: Request, budget: Budget) -> int:
    call = request.call
    new_tokens = request.num_rows * min(call.max_new_tokens, EXPECTED_TOKENS)
    tokens = min(call.prompt_tokens + new_tokens, request.max_tokens)
    states = request.num_rows + 2  # before the last token of a prompt, and at its end
    return budget.cost(tokens, states)

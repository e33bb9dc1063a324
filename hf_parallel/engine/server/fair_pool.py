"""FairPool: a thread pool that serves its submitters round-robin."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class FairPool:
    """Runs jobs in threads, round-robin by submitter, and one job of each submitter at a time."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="hf_parallel-submit")
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[tuple[Future[Any], Callable[[], object]]]] = {}  # of busy submitters

    def submit(self, submitter: Hashable, job: Callable[[], T]) -> Future[T]:
        """Queue a job of a submitter and return its future."""
        future: Future[T] = Future()
        with self._lock:
            if submitter in self._waiting:
                self._waiting[submitter].append((future, job))
            else:
                self._executor.submit(self._run, submitter, future, job)
                self._waiting[submitter] = deque()
        return future

    def _run(self, submitter: Hashable, future: Future[Any], job: Callable[[], object]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            waiting = self._waiting[submitter]
            while waiting and waiting[0][0].cancelled():
                waiting.popleft()
            if waiting:
                future, job = waiting.popleft()
                self._executor.submit(self._run, submitter, future, job)  # after jobs of other submitters
            else:
                del self._waiting[submitter]

    def shutdown(self) -> None:
        """Cancel what waits, and wait for what runs."""
        with self._lock:
            for waiting in self._waiting.values():
                for future, _ in waiting:
                    future.cancel()
        self._executor.shutdown()

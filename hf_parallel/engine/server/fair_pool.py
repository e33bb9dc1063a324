"""FairPool: threads that serve clients round-robin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class FairPool:
    """Runs jobs in threads, and one job of each submitter at a time: the others of it queue behind other submitters."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="hf_parallel-submit")
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def run(self, submitter: Hashable, job: Callable[[], T], abandon: Callable[[Future[T]], None]) -> T:
        """Run a job and return its result. If the caller is cancelled, `abandon` receives the future when it ends."""
        turn = self._turns.setdefault(submitter, asyncio.Lock())
        async with turn:
            future = self._threads.submit(job)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                future.add_done_callback(abandon)
                raise

    def shutdown(self) -> None:
        """Cancel what waits, and wait for what runs."""
        self._threads.shutdown(cancel_futures=True)

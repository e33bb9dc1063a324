"""DrainingServer: what happens to running requests after SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import sys
import threading
from socket import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from hf_parallel.engine import Engine
from hf_parallel.engine.server.connections import BACKLOG, Connections, QuietFilter
from hf_parallel.engine.server.limits import Limits
from hf_parallel.models.ranks import num_ranks

ANSWER_SECONDS = 10  # time in which clients can read the errors of requests that were canceled
IDLE_SECONDS = 75  # of a connection. Clients close theirs sooner (httpx after 5 s): else a request meets the close


class DrainingServer(uvicorn.Server):
    """A server whose running requests may finish for `drain_seconds` after the first signal.

    Then, or at a second signal, the engine cancels them: clients receive an error of status 503, or an event with the
    error in a stream. A third signal breaks off the connections.
    """

    def __init__(self, app: ASGIApp, engine: Engine, drain_seconds: float, limits: Limits | None = None) -> None:
        connections = Connections(limits or Limits())
        config = uvicorn.Config(
            app,
            http=connections.make,  # type: ignore[arg-type]
            ws="none",  # such a connection would be none of `connections`
            backlog=BACKLOG,
            log_level="warning",
            timeout_graceful_shutdown=int(drain_seconds) + ANSWER_SECONDS,
            timeout_keep_alive=IDLE_SECONDS,
            server_header=False,
        )
        logging.getLogger("uvicorn.error").addFilter(QuietFilter())
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._is_cancelled = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.should_exit and not self._is_cancelled:
            threading.Thread(target=self._cancel).start()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end: also if the engine has stopped, for whose end other processes wait."""
        ends = await super().on_tick(counter)
        has_stopped = self._engine.error is not None and num_ranks(self._engine.model) > 1
        return ends or has_stopped

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Accept no more connections, and wait for the running requests."""
        running = self._engine.stats.running + self._engine.stats.waiting
        if running:
            words = f"Stopping: {running} requests may finish within {self._drain_seconds:g} s; Ctrl-C cancels them"
            print(words, file=sys.stderr, flush=True)
        timer = threading.Timer(self._drain_seconds, self._cancel)
        timer.start()
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._engine.close(drain=False)

"""Connections of a server: a limit of their number, and an end of those whose client reads nothing.

Requests are parsed by h11, whichever parsers are installed: unlike httptools, it limits the size of the headers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hf_parallel.engine.server.limits import Limits

RESERVED_FILES = 256
"""Descriptors that connections leave to the process: its own files, and connections that are accepted at once."""
BACKLOG = 128  # connections that are accepted at once
QUIET_SECONDS = 60  # in which one kind of warning is logged once
SMALL_CHUNKS = 4096  # of a body may have any size
MIN_CHUNK_BYTES = 256  # mean size of further chunks
_logger = logging.getLogger(__name__)


class Connections:
    """The open connections of a server, by the time of their last data.

    Above the limit, the one that was idle longest is closed. If all others have open requests, one of the client that
    has most is closed: the new one, unless another client has more.
    """

    def __init__(self, limits: Limits) -> None:
        self.most = min(limits.connections, _most_by_files())
        self.unread_seconds = limits.unread_seconds
        self._open: OrderedDict[Connection, None] = OrderedDict()

    def make(self, **settings: Any) -> Connection:
        """Return the protocol of a new connection, for `uvicorn.Config(http=...)`."""
        return Connection(self, **settings)

    def add(self, connection: Connection) -> None:
        """Add a connection that was accepted, and close one above the limit."""
        self._open[connection] = None
        if len(self._open) > self.most:
            _logger.warning("more than %d connections are open; one of them is closed", self.most)
            surplus = self._surplus(connection)
            self.remove(surplus)
            surplus.transport.abort()

    def _surplus(self, new: Connection) -> Connection:
        """Return the connection to close, after a new one has exceeded the limit."""
        idle = next(other for other in self._open if other.is_idle)
        if idle is not new:
            return idle
        busy = [other for other in self._open if other is not new]
        counts = Counter(other.owner for other in busy)
        owner, most = counts.most_common(1)[0]
        if most <= counts[new.owner] + 1:
            return new
        return next(other for other in reversed(busy) if other.owner == owner)  # the newest has done the least

    def touch(self, connection: Connection) -> None:
        """Move a connection that has received data to the end."""
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is closed."""
        self._open.pop(connection, None)


class Requests(h11.Connection):
    """Parser of the requests of a connection.

    A chunk of a body takes as long as a read of many bytes, in which no client is served. `refuse` is called if a body
    consists of too many small ones; nothing is read after it.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__(h11.SERVER)
        self._refuse = refuse
        self._chunks = 0
        self._bytes = 0
        self._is_refused = False

    def next_event(self) -> Any:
        """See `h11.Connection`."""
        if self._is_refused:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS + self._bytes // MIN_CHUNK_BYTES:
                self._is_refused = True
                self._refuse()
                return h11.NEED_DATA
        return event


class Connection(H11Protocol):
    """A connection, which ends if its client reads nothing of an answer for `Limits.unread_seconds`."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self.conn = Requests(self._refuse)
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None

    @property
    def owner(self) -> Hashable:
        """The client, as `Gate` tells them apart: by key or address."""
        address = self.client and self.client[0]
        return address if self.cycle is None else self.cycle.scope.get("submitter", address)

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._connections.touch(self)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._connections.remove(self)
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for the client: the transport holds more than it should."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """End the wait for the client, which has read."""
        self._stop_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """End a connection whose client breaks the protocol, if possible with an error. The application sends none."""
        if not self.is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _refuse(self) -> None:
        self.send_400_response("The body has too many small chunks.")

    def _wait(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self._connections.unread_seconds, self._check, unread)

    def _check(self, before: int) -> None:
        """Close the connection unless its client has read a part."""
        if self.transport.get_write_buffer_size() < before:
            self._wait()
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class QuietFilter(logging.Filter):
    """Drops warnings without a traceback whose kind was logged in the last minute: anybody can cause them."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}  # by the message without its arguments

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if record.levelno > logging.WARNING or record.exc_info:
            return True
        now = time.monotonic()
        if now - self._logged.get(record.msg, -QUIET_SECONDS) < QUIET_SECONDS:
            return False
        self._logged[record.msg] = now
        return True


_logger.addFilter(QuietFilter())


def _most_by_files() -> int:
    """Return the number of connections for which the process has descriptors."""
    try:
        import resource
    except ImportError:  # Windows
        return 2**31
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if files == resource.RLIM_INFINITY else max(files - RESERVED_FILES, files // 2)

"""Connections of a server: a limit of their number, and an end of those whose client reads nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hf_parallel.engine.server.limits import Limits

RESERVED_FILES = 256
"""Descriptors that connections leave to the process: its own files, and connections that are accepted at once."""
BACKLOG = 128  # connections that are accepted at once
QUIET_SECONDS = 60  # in which one kind of warning is logged once
_logger = logging.getLogger(__name__)


class Connections:
    """The open connections of a server, by the time of their last data.

    Above the limit, the one that was idle longest is closed; if all others have open requests, the new one.
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
            _logger.warning("more than %d connections are open; the one that was idle longest is closed", self.most)
            idle = next(other for other in self._open if other.is_idle)  # the new one is
            self.remove(idle)
            idle.transport.abort()

    def touch(self, connection: Connection) -> None:
        """Move a connection that has received data to the end."""
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is closed."""
        self._open.pop(connection, None)


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection, which ends if its client reads nothing of an answer for `Limits.unread_seconds`."""

    def __init__(self, owner: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._owner = owner
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._owner.add(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._owner.touch(self)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._owner.remove(self)
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

    def _wait(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self._owner.unread_seconds, self._check, unread)

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

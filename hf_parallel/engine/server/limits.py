"""Limits: limits of a server, and the ASGI middleware that checks API key, content type, size and time of a body."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_parallel.engine.scheduler import has_place
from hf_parallel.engine.server.errors import APIError

request_logger = logging.getLogger("hf_parallel.requests")
"""Logs a line of level INFO for each request that has ended."""
MAX_LOGGED = 200  # characters of a path or an address
OPEN_PATHS = ("/", "/health")  # paths that need no API key


PROMPT_FACTOR = 4
"""Characters of all prompts of a request, by bytes of its body: the server may repeat parts of a body in them."""


@dataclass(frozen=True)
class Limits:
    """Limits per client. The engine limits the number of waiting requests (`max_waiting`).

    `hf-parallel serve` applies `connections` and `unread_seconds`; another ASGI server has limits of its own.
    """

    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    """Time limit for receiving a body."""
    open_requests: int = 1024
    """Requests of all clients whose responses are not complete. Above the limit, only clients with less than an equal
    share are served."""
    open_bytes: int = 1 << 28
    """Bytes of the bodies of open requests. Above the limit, only clients with less than an equal share are served."""
    connections: int = 1024
    """Open connections, with or without requests; fewer if the process may open fewer files. Above the limit, the one
    that was idle longest is closed."""
    unread_seconds: float = 60.0
    """Seconds after which an answer is canceled if its client reads nothing."""
    rows: int = 64
    """Rows of a request: answers times rows of the mode per answer."""
    tokens: int | None = None
    """Tokens of a row, prompt included. Default: the context length of the model."""
    default_tokens: int = 512
    """Default of `max_tokens`."""
    log_probs: int = 1 << 20
    """Log-probabilities of a response: tokens of its answers, and of prompts if requested, each with its
    alternatives."""
    lease_ttl: float = 600.0
    """Seconds for which the prefix of a stored response stays cached for forks, from its end or its last fork."""
    max_leases: int = 32
    """Responses of a key whose prefixes stay cached for forks. Above this number, the least recently used one is
    released."""
    max_lease_bytes: int | None = None
    """Bytes of keys, values and states of all these prefixes of a key together. Default: the engine's budget."""
    images: int = 16
    """Images of a request."""
    image_bytes: int = 4 << 20
    """Bytes of an image's file."""
    image_pixels: int = 1 << 25
    """Pixels of all images of a request together, before the processor resizes them."""


def check_keys(keys: Sequence[str]) -> None:
    """Raise `ValueError` for keys that a header cannot hold, and for a string instead of a list of strings."""
    are_valid = all(isinstance(key, str) and key and key == key.strip() for key in keys)
    if isinstance(keys, str) or not are_valid:
        raise ValueError("api_keys must be a list of keys that are not empty, and have no space around them")


class Gate:
    """ASGI middleware that rejects requests before their body is parsed."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        api_keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
        on_response: Callable[[str, int], None] | None = None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.on_response = on_response
        self._keys = [sha256(key.encode()).digest() for key in api_keys]
        self._hosts = [host.encode() for host in hosts]
        self._open: Counter[Hashable] = Counter()
        self._bytes: Counter[Hashable] = Counter()  # of the bodies of open requests
        self._most_bytes = max(limits.open_bytes, limits.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application, or send an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        begin = time.monotonic()
        status: int | None = None

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.on_response is not None:
                    self.on_response(getattr(scope.get("route"), "path", "other"), status)
            await send(message)

        try:
            await self._pass(scope, receive, counting_send)
        finally:
            if request_logger.isEnabledFor(logging.INFO):
                self._log(scope, status, time.monotonic() - begin)

    def _log(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Log a request that has ended: no text of it but its path. Special characters are escaped.

        A proxy's header may name the client's address, which can then be any text.
        """
        address = (scope.get("client") or ("-",))[0]
        client = quote(address, safe=":")[:MAX_LOGGED]
        if self._keys:
            client += f" key {scope['submitter']}" if "submitter" in scope else " without key"
        request = f"{scope['method']} {quote(scope['path'])[:MAX_LOGGED]}"
        tokens = ""
        usage = scope["usage"]() if "usage" in scope else {}
        if usage:
            tokens = f", {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
        request_logger.info("%s %s %s, %.3f s%s", client, request, status or "disconnected", seconds, tokens)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        submitter = None
        opened = 0
        size = 0
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            if b"content-length" in headers and b"transfer-encoding" in headers:  # request smuggling
                raise APIError(400, "a request may have Content-Length or Transfer-Encoding, not both", code="framing")
            host = headers.get(b"host", b"").lower()
            if self._hosts and re.sub(rb"^\[|\]?(:\d*)?$", b"", host) not in self._hosts:
                raise APIError(400, f"this server does not answer for the host {host.decode('latin-1')[:100]!r}")
            if scope["path"] not in OPEN_PATHS:
                submitter = scope["submitter"] = self._submitter(scope, headers)
                scope["cache_salt"] = f"{self._keys[submitter].hex()}:" if self._keys else ""
            if scope["method"] == "POST" and scope["path"] not in OPEN_PATHS:
                if not has_place(self._open, submitter, self.limits.open_requests):
                    message = f"{self.limits.open_requests} requests are open already"
                    raise APIError(429, message, code="too_many_requests")
                opened = 1
                self._open[submitter] += opened
                receive, size = await self._with_body(submitter, headers, receive)
        except APIError as error:
            await error.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)
        finally:
            self._open -= Counter({submitter: opened})  # keeps positive counts only
            self._bytes -= Counter({submitter: size})

    def _submitter(self, scope: Scope, headers: dict[bytes, bytes]) -> Any:
        """Check the API key. Return the client for fair scheduling: the index of its key or, without keys, its host."""
        if not self._keys:
            return (scope.get("client") or ("",))[0]
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [
            hmac.compare_digest(digest, accepted) for accepted in self._keys
        ]  # constant time: compare with all keys
        if kind.lower() != b"bearer" or not any(matches):
            raise APIError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        return matches.index(True)

    async def _with_body(
        self, submitter: Hashable, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[Receive, int]:
        """Receive the whole body. Return a `receive` that returns it again, and its size."""
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":  # browsers send a preflight request first
            raise APIError(415, "the request needs the header Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        limit = self.limits.body_bytes
        if length.isdigit() and int(length[:20]) > limit:
            raise APIError(413, f"the body has {length.decode()[:20]} bytes; at most {limit} are accepted")
        try:
            with anyio.fail_after(self.limits.body_seconds):
                body = await self._read(submitter, receive)
        except TimeoutError as error:
            raise APIError(408, f"the body did not arrive within {self.limits.body_seconds} seconds") from error
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        return receive_again, len(body)

    async def _read(self, submitter: Hashable, receive: Receive) -> bytes:
        """Receive the whole body. Its bytes count as those of the submitter, unless an error is raised."""
        limit = self.limits.body_bytes
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise APIError(499, "the client has disconnected")
                part = message.get("body", b"")
                if len(body) + len(part) > limit:
                    raise APIError(413, f"the body has more than {limit} bytes")
                if not has_place(self._bytes, submitter, self._most_bytes):
                    text = f"the bodies of open requests have {self._most_bytes} bytes already"
                    raise APIError(429, text, code="too_many_requests")
                body += part
                self._bytes[submitter] += len(part)
                if not message.get("more_body"):
                    return bytes(body)
        except BaseException:
            self._bytes -= Counter({submitter: len(body)})
            raise

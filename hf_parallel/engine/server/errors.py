"""Errors of the API, and their form in OpenAI's responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from starlette.responses import Response

from hf_parallel.engine import KVBudgetError, QueueFullError, RequestCancelledError
from hf_parallel.models.intercept.attention import UnsupportedModelError

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Type of an error by status; others: `invalid_request_error` below 500, else `server_error`."""
RETRY_SECONDS = 1
MAX_MESSAGE = 1000  # characters of a message, and of the name of a field: what a request holds may be long

PIECE_ITEMS = 16  # items of a long list that are encoded at once


class APIError(Exception):
    """An error that the client receives: status, message, the field that caused it (`param`) and a code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        if self.code == "framing":  # what follows on the connection cannot be trusted
            return {"Connection": "close"}
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def to_dict(self) -> dict[str, object]:
        """Return the body of the response."""
        kind = TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": str(self)[:MAX_MESSAGE],
            "type": kind,
            "param": None if self.param is None else self.param[:MAX_MESSAGE],
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """Return the response."""
        return json_response(self.to_dict(), self.status, self.headers)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON in ASCII: texts of requests, which messages quote, may hold surrogates."""
    return Response(to_json(body), status, headers, "application/json")


def to_json(body: object) -> str:
    """Return a value as one line of JSON. Iterators in it become lists."""
    return json.dumps(body, separators=(",", ":"), default=list)


def json_pieces(body: object) -> Iterator[str]:
    """Yield a value as one line of JSON, in pieces; iterators in it become lists, whose items are never stored.

    Encoding a value holds the interpreter until it ends, for seconds if it is large. Between two pieces, other threads
    run. A list of plain values is one piece, and so are `PIECE_ITEMS` items of an iterator.
    """
    if isinstance(body, dict) and body:
        opening = "{"
        for name, value in body.items():
            yield f"{opening}{to_json(str(name))}:"
            yield from json_pieces(value)
            opening = ","
        yield "}"
    elif isinstance(body, list) and any(isinstance(item, dict) for item in body):
        opening = "["
        for item in body:
            yield opening
            yield from json_pieces(item)
            opening = ","
        yield "]"
    elif isinstance(body, Iterator):
        opening = "["
        while items := list(islice(body, PIECE_ITEMS)):
            yield opening + to_json(items)[1:-1]
            opening = ","
        yield "[]" if opening == "[" else "]"
    else:
        yield to_json(body)


OF_ARGUMENTS = {"do_sample=True": "a temperature above 0", "num_return_sequences": "n"}
"""Arguments of `generate` that errors name, and the fields that set them."""


def api_error(error: BaseException, fields: Iterable[str] = ()) -> APIError | None:
    """Return the API's form of an error of the engine, or None if it is not the client's; `fields` may be its cause."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(429, f"{error}; try again later", code="queue_full")
    if isinstance(error, RequestCancelledError):
        return APIError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, KVBudgetError):
        return APIError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ValueError | TypeError | UnsupportedModelError):
        message = str(error)
        for argument, words in OF_ARGUMENTS.items():
            message = message.replace(argument, words)
        return APIError(400, message, _first_named(fields, message))
    return None


def _first_named(fields: Iterable[str], message: str) -> str | None:
    """Return the field that a message names first."""
    positions = {}
    for name in fields:
        match = re.search(rf"\b{re.escape(name)}\b", message)
        if match is not None:
            positions[name] = match.start()
    return min(positions, key=positions.__getitem__, default=None)

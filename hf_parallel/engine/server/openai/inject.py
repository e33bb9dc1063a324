"""`POST /v1/responses/{id}/inject`, and the same for chats: say something to the rows of a run while they write."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from typing import Annotated
from weakref import ref

from pydantic import BaseModel, ConfigDict, Field

from hf_parallel.engine import NotRunningError, RequestHandle
from hf_parallel.engine.server.errors import APIError, api_error
from hf_parallel.engine.server.openai import schema
from hf_parallel.engine.server.openai.schema import Text, read_body

MAX_KNOWN = 4096
"""Ids that are known, of runs that have ended: a text to one of them has another error than one to nobody."""
FIELDS = ("text", "to", "generation_mode")


def _kind(value: object) -> str | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return "a text" if isinstance(value, str) else "a number" if is_number else None


Receiver = Annotated[
    Annotated[Text, Field(max_length=1024), schema.Tag("a text")] | Annotated[schema.Int, schema.Tag("a number")],
    schema.one_of("all, or the name or the number of a worker", _kind),
]


class InjectBody(BaseModel):
    """Body of the route."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[Text, Field(min_length=1)]
    to: Receiver = "all"


class RunningResponses:
    """Responses that are being written, by client and id. The event loop alone uses it."""

    def __init__(self) -> None:
        self._handles: OrderedDict[tuple[str, str], ref[RequestHandle]] = OrderedDict()

    def add(self, salt: str, name: str, handle: RequestHandle) -> None:
        """Add a response; the oldest that have ended are forgotten."""
        self._handles[salt, name] = ref(handle)
        if len(self._handles) <= MAX_KNOWN:
            return
        ended = (key for key, known in self._handles.items() if _has_ended(known()))
        oldest = next(ended, None)
        if oldest is not None:
            del self._handles[oldest]

    def find(self, salt: str, name: str) -> RequestHandle:
        """Return the request of a response that is being written, to the client that asked for it."""
        known = self._handles.get((salt, name))
        if known is None:
            raise APIError(404, f"there is no response {name[:200]!r}", code="response_not_found")
        handle = known()
        if handle is None or _has_ended(handle):
            raise _conflict(f"the response {name[:200]!r} has ended: nobody reads the text")
        return handle


def _has_ended(handle: RequestHandle | None) -> bool:
    return handle is None or handle.done


def inject(handle: RequestHandle, content: bytes) -> tuple[InjectBody, Future[int]]:
    """Read a body, and say its text to the rows of a request. Return what `RequestHandle.inject` returns."""
    body = read_body(InjectBody, content)
    try:
        return body, handle.inject(body.text, body.to)
    except Exception as error:
        raise translated(error) from error


def translated(error: Exception) -> Exception:
    """Return the error that a client receives."""
    if isinstance(error, NotRunningError):
        return _conflict(str(error))
    return api_error(error, FIELDS) or error


def _conflict(message: str) -> APIError:
    return APIError(409, message, code="not_running")


def report(name: str, body: InjectBody, passes: int) -> dict[str, object]:
    """Return the body of the answer: `passes` passes had been computed when the rows got the text."""
    return {"id": name, "object": "injection", "to": body.to, "forward_pass": passes}

"""JSON of request bodies, read strictly: in UTF-8, and no object has two equal names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


class JSONRoute(APIRoute):
    """Route whose body is read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return a handler that passes on a request with strict JSON."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def parse_json(body: bytes) -> Any:
    """Return the value of JSON text.

    Python's `json.loads` also accepts UTF-16, and an object with two equal names, of which it ignores the first. Raises
    `ValueError`, or `RecursionError` for values that are nested too deeply. Fields reject NaN, and are named then.
    """
    return json.loads(body.decode("utf-8-sig"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {name[:200]!r} twice")
    return found

"""Bodies of requests, read strictly: JSON in UTF-8, no object has two equal names, and fields as the schema says."""

from __future__ import annotations

import json
from collections import Counter
from reprlib import repr as _shortened
from typing import TypeVar

from pydantic import ValidationError

from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.schema import Body

B = TypeVar("B", bound=Body)
MAX_PARTS = 1 << 15
"""Names, lists and objects of a body. Reading more would take a second, in which no other thread of Python runs."""
MAX_DEPTH = 256
"""Lists and objects inside each other."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_body(kind: type[B], content: bytes) -> B:
    """Return a body. Raises `APIError` that names the field, its value and what is allowed."""
    parts = _num_parts(content)
    if parts > MAX_DEPTH:  # at most, as texts may hold these characters
        outside = b"".join(content.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
        parts = _num_parts(outside)
        if parts > MAX_PARTS:
            raise APIError(400, f"the body may have at most {MAX_PARTS} names, lists and objects, got {parts}")
        if parts > MAX_DEPTH and (depth := _depth(outside)) > MAX_DEPTH:
            raise APIError(
                400, f"the body may have at most {MAX_DEPTH} lists and objects inside each other, got {depth}"
            )
    try:
        return kind.model_validate(parse_json(content))
    except ValidationError as error:
        raise _validation_error(error) from error
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from error


def _num_parts(text: bytes) -> int:
    return sum(map(text.count, (b":", b"[", b"{")))


def _depth(text: bytes) -> int:
    """Return how many lists and objects are inside each other at most."""
    depth = deepest = 0
    for byte in text.translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _validation_error(error: ValidationError) -> APIError:
    found = error.errors(include_url=False)[0]
    places = [str(place) for place in found["loc"] if str(place).isidentifier() or isinstance(place, int)]
    if not places:
        return APIError(400, f"the body must be a JSON object, got {_shortened(found['input'])}")
    given = "" if found["type"] == "missing" else f", got {_shortened(found['input'])}"
    name = next((place for place in places if place.isidentifier()), None)
    message = found["msg"].removeprefix("Value error, ")
    return APIError(400, f"{'.'.join(places)}: {message}{given}", name)


def parse_json(body: bytes) -> object:
    """Return the value of JSON text.

    Python's `json.loads` also accepts UTF-16, and an object with two equal names, of which it ignores the first. Raises
    `ValueError`, or `RecursionError` for values that are nested too deeply. Fields reject NaN, and are named then.
    """
    return json.loads(body.decode("utf-8-sig"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {name[:200]!r} twice")
    return found

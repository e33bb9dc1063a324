"""Check that a JSON schema has a finite instance; a linked list whose `next` is required has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hf_parallel.engine.server.schema_size import items_of, target_of

MAX_STEPS = 20_000
"""Maximum number of visited subschemas, about 0.1 s. Larger schemas are not checked."""
_SCALARS = frozenset(("boolean", "integer", "null", "number", "string"))


def check_finite(schema: Mapping[str, object]) -> None:
    """Raise `ValueError` if a schema has no finite instance, judged by its required parts."""
    try:
        is_finite = _Finite(schema).has_instance()
    except (RecursionError, _TooManyStepsError):
        return
    if not is_finite:
        raise ValueError("response_format holds a schema that no finite text satisfies: each instance contains another")


class _TooManyStepsError(Exception):
    pass


class _Finite:
    """Computes which subschemas have finite instances, as a least fixed point that starts with none.

    Conservative: unknown keywords are ignored.
    """

    def __init__(self, root: object) -> None:
        self.root = root
        self._finite: set[int] = set()  # ids of subschemas
        self._visited: set[int] = set()  # ids of subschemas in this round; they count as infinite until shown finite
        self._steps = 0

    def has_instance(self) -> bool:
        """Return whether the schema may have a finite instance."""
        known = -1
        while known < len(self._finite):
            known, self._visited = len(self._finite), set()
            if self._is_finite(self.root):
                return True
        return False

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooManyStepsError

    def _is_finite(self, part: object) -> bool:
        self._count_step()
        if not isinstance(part, dict):
            return part is not False
        if id(part) not in self._finite and id(part) not in self._visited:
            self._visited.add(id(part))
            if self._holds_beside([], part, frozenset()):
                self._finite.add(id(part))
        return id(part) in self._finite

    def _holds_beside(self, others: list[dict[str, object]], part: object, unions: frozenset[int]) -> bool:
        """Return whether a value can satisfy `part` and `others` together; `unions` (ids) are already resolved."""
        merged = list(self._merged(part, ()))
        if False in merged:
            return False
        parts = others + [one for one in merged if isinstance(one, dict)]
        for one in parts[len(others) :]:
            for union in filter(None, (items_of(one, name) for name in ("anyOf", "oneOf"))):
                inside = unions | {id(union)}
                if id(union) in unions or not any(self._holds_beside(parts, item, inside) for item in union):
                    return False
        return self._has_value(parts)

    def _merged(self, part: object, path: tuple[int, ...]) -> Iterator[object]:
        """Yield a part and what its `allOf` and `$ref` add; False for a part that contains itself."""
        self._count_step()
        yield part if id(part) not in path else False
        if isinstance(part, dict) and id(part) not in path:
            name = part.get("$ref")
            for more in [*items_of(part, "allOf"), *([target_of(self.root, name)] if isinstance(name, str) else ())]:
                yield from self._merged(more, (*path, id(part)))

    def _has_value(self, parts: Sequence[dict[str, object]]) -> bool:
        """Return whether a value can satisfy the keywords of all parts, except `allOf`, `anyOf`, `oneOf` and `$ref`."""
        if any("const" in part or "enum" in part for part in parts):
            return True
        given = [part["type"] for part in parts if "type" in part]
        types = [set(one) if isinstance(one, list) else {one} for one in given]
        if not types or any(all(one & {kind, "number"} for one in types) for kind in _SCALARS - {"number"}):
            return True
        return (all("object" in one for one in types) and self._has_object(parts)) or (
            all("array" in one for one in types) and self._has_array(parts)
        )

    def _has_object(self, parts: Sequence[dict[str, object]]) -> bool:
        required = {name for part in parts for name in items_of(part, "required") if isinstance(name, str)}
        return all(self._is_finite(_property(part, name)) for name in required for part in parts)

    def _has_array(self, parts: Sequence[dict[str, object]]) -> bool:
        counts = [count for part in parts if isinstance(count := part.get("minItems"), int)]
        places = min(max(counts, default=0), 1 + max(len(items_of(part, "prefixItems")) for part in parts))
        return all(self._is_finite(_item(part, place)) for place in range(places) for part in parts)


def _property(part: dict[str, object], name: str) -> object:
    properties = part.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return "patternProperties" in part or part.get("additionalProperties", True)


def _item(part: dict[str, object], place: int) -> object:
    first = items_of(part, "prefixItems")
    return first[place] if place < len(first) else part.get("items", True)

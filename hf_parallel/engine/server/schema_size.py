"""Limits of JSON schemas, checked before llguidance compiles them: short schemas can take minutes to compile or follow.

llguidance merges the items of `allOf`, and keywords beside `anyOf` or `$ref`: each alternative of one with each of the
others. Sizes here are those after merging.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import inf, prod
from typing import NamedTuple
from urllib.parse import unquote

MAX_SCHEMA = 1 << 14
"""Characters of a schema."""
MAX_MERGED = 1 << 15
"""Characters of the schemas that are merged, after merging."""
MAX_PATTERNS = 8
"""Different values of `pattern`, `patternProperties` and `format`: the time to intersect them is exponential."""
MAX_UNIONS = 32
"""Alternatives that may be arrays or objects, without the first of each union: each token is parsed by all of them."""
MAX_MULTIPLE = 10_000
"""Product of the numerators and denominators of the different values of `multipleOf`."""
_LARGEST = 10**12
_ANNOTATIONS = (
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "description",
    "discriminator",
    "examples",
    "title",
)
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref")
_SCALARS = ("boolean", "integer", "null", "number", "string")


class _Size(NamedTuple):
    alternatives: int
    unions: int
    """Alternatives that may be arrays or objects."""
    characters: int


def check_schema(schema: Mapping[str, object]) -> str:
    """Return a schema as JSON. Raises `ValueError` if it exceeds a limit."""
    try:
        text = json.dumps(schema)
        _check("characters", len(text), MAX_SCHEMA)
        _Sizes(schema).check()
    except RecursionError as error:
        raise ValueError("response_format holds a schema that is nested too deeply") from error
    return text


def _check(what: str, size: int, limit: int) -> None:
    if size > limit:
        found = str(size) if size < _LARGEST else "more than 10**12"
        raise ValueError(f"response_format may hold a schema with at most {limit} {what}, got {found}")


class _Sizes:
    """Sizes of the parts of a schema."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self.root = root
        self._found: dict[int, _Size] = {}  # by the id of a part

    def check(self) -> None:
        """Raise `ValueError` if the schema exceeds a limit."""
        parts = list(_objects(self.root))
        texts = [part.get(name) for part in parts for name in ("pattern", "format")]
        patterns = {text for text in texts if isinstance(text, str)}
        for part in parts:
            if isinstance(names := part.get("patternProperties"), dict):
                patterns |= names.keys()
            if part is not self.root and isinstance(part.get("$id"), str):
                raise ValueError("response_format holds a schema with $id in a part, which is not supported")
        _check("values of pattern, patternProperties and format", len(patterns), MAX_PATTERNS)
        given = [value for part in parts if isinstance(value := part.get("multipleOf"), int | float)]
        multiples = {Fraction(repr(value + 0)) for value in given if 0 < value < inf}  # True is 1
        product = prod(value.numerator * value.denominator for value in multiples)
        _check("as the product of the values of multipleOf", product, MAX_MULTIPLE)
        _check("arrays and objects as further alternatives", sum(map(self._unions, parts)), MAX_UNIONS)
        merged = sum(self._measure(part).characters for part in parts if _is_merged(part))
        _check("characters after merging allOf and the keywords beside anyOf and $ref", merged, MAX_MERGED)

    def _unions(self, part: dict[str, object]) -> int:
        """Return the number of alternatives that may be arrays or objects, without the first."""
        found = sum(isinstance(value, dict | list) for value in items_of(part, "enum"))
        if any(items_of(part, name) for name in _COMBINED):
            found += self._measure(part).unions
        return max(found - 1, 0)

    def _measure(self, part: object) -> _Size:
        """Return the size of a part after merging."""
        if not isinstance(part, dict):
            return _Size(1, 1, 1)
        if id(part) not in self._found:
            self._found[id(part)] = _Size(1, 1, 1)  # used in a cycle, which llguidance does not merge
            self._found[id(part)] = self._merge(part)
        return self._found[id(part)]

    def _merge(self, part: dict[str, object]) -> _Size:
        unions = [[self._measure(item) for item in items_of(part, name)] for name in ("anyOf", "oneOf")]
        merged = [_Size(*map(sum, zip(*sizes, strict=True))) for sizes in unions if sizes]
        merged += [self._measure(item) for item in items_of(part, "allOf")]
        if isinstance(name := part.get("$ref"), str):
            merged.append(self._measure(target_of(self.root, name)))
        alternatives = prod(size.alternatives for size in merged)
        characters = alternatives * len(json.dumps(_own(part)))
        characters += sum(size.characters * (alternatives // size.alternatives) for size in merged)
        is_scalar = _is_scalar(part) or any(size.unions == 0 for size in merged)
        nested = min([alternatives, *(size.unions for size in merged)]) if len(merged) == 1 else alternatives
        sizes = alternatives, 0 if is_scalar else nested, characters
        return _Size(*(min(size, _LARGEST) for size in sizes))  # references can square a number at each step


def target_of(root: object, name: str) -> object:
    """Return the part of a schema that a reference names."""
    found = root
    head, *places = unquote(name).split("/")
    for place in places:
        key = place.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    if head != "#" or not isinstance(found, dict | bool):
        raise ValueError(f"response_format holds a schema that is not supported: $ref={name[:200]!r} is not in it")
    return found


def _objects(value: object) -> Iterator[dict[str, object]]:
    """Yield all objects in a value: schemas, and those that hold schemas by name."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _objects(item)


def items_of(part: dict[str, object], name: str) -> list[object]:
    """Return the list of a keyword; empty if it is no list."""
    return value if isinstance(value := part.get(name), list) else []


def _own(part: dict[str, object]) -> dict[str, object]:
    """Return the keywords that are merged into each alternative."""
    return {name: value for name, value in part.items() if name not in _COMBINED and name not in _ANNOTATIONS}


def _is_merged(part: dict[str, object]) -> bool:
    """Return whether alternatives of a part are merged with others or with keywords beside them."""
    combined = [name for name in _COMBINED if name in part]
    return "allOf" in combined or len(combined) + bool(_own(part)) > 1 and bool(combined)


def _is_scalar(part: dict[str, object]) -> bool:
    """Return whether all values of a part are neither arrays nor objects."""
    types = part.get("type")
    types = types if isinstance(types, list) else [types]
    values = items_of(part, "enum") + ([part["const"]] if "const" in part else [])
    return (
        all(kind in _SCALARS for kind in types) or bool(values) and not any(isinstance(v, dict | list) for v in values)
    )

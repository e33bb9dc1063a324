"""Schemas of tools: what their parameters say about the arguments of a call, which are an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

APPLIED = {"$ref", "allOf", "anyOf", "oneOf", "const", "enum", "minProperties"}
"""Keywords of a schema that allow or need properties which its own `properties` do not name."""


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of the arguments of a function of a tool: the objects that match its parameters.

    Parameters that name their properties allow no others, unless `additionalProperties` says so. Those that consist of
    other schemas (`anyOf`, `allOf`, ...) allow what JSON Schema says. Raises `ValueError` for parameters that no object
    matches.
    """
    schema = _followed(function.get("parameters") or {})
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        name = function["name"]
        raise ValueError(f"tools: the parameters of {name!r} must be an object, got the type {types!r:.100}")
    schema["type"] = "object"
    if schema.keys().isdisjoint(APPLIED):
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", False)
    return schema


def _followed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with the definition that their `$ref` names in its place; recursive models consist of one."""
    schema = dict(parameters)
    followed: set[str] = set()
    reference = schema.get("$ref")
    while reference is not None and str(reference) not in followed:
        followed.add(str(reference))
        target = _definition(parameters, str(reference))
        if target is None or target.keys() & schema.keys() - {"$ref", "title", "description"}:
            break
        del schema["$ref"]
        schema = {**target, **schema}
        reference = schema.get("$ref")
    return schema


def _definition(root: Any, name: str) -> dict[str, Any] | None:
    """Return the part of a schema that a JSON pointer `#/...` names; None: there is none."""
    first, *keys = name.split("/")
    if first != "#" or not keys:
        return None
    definition = root
    for key in keys:
        if not isinstance(definition, Mapping):
            return None
        definition = definition.get(key.replace("~1", "/").replace("~0", "~"))
    return dict(definition) if isinstance(definition, Mapping) else None

"""Renders the reference of the pages from docstrings: a heading, the text, and tables of parameters and attributes.

`generated.py` puts it between the comments of a page. A comment names an object, and the members to show below it:

    <!-- reference hf_parallel.Engine: submit, close -->

In the tables, each of several names in one line gets its own default, long defaults are truncated, and the settings of
a mode include inherited ones. Fields and properties of a dataclass that are described one by one become a table, too.
"""

from __future__ import annotations

import functools
import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent
WIDTH = 80
"""Maximum number of characters of a signature in one line."""
MAX_LENGTH = 40
"""Maximum number of characters of a default."""


def render(name: str, members: tuple[str, ...] = ()) -> str:
    """Return the Markdown of an object and of some of its members."""
    obj = _find(name)
    parts = [f"### `{obj.name}`", *_described(obj)]
    for member in members:
        found = _resolved(obj.all_members[member])
        parts += [f"#### `{member}`", *_described(found)]
    return "\n\n".join(parts)


def _described(obj: griffe.Object) -> Iterator[str]:
    """Yield the signature of a function, and the sections of a docstring."""
    if isinstance(obj, griffe.Function):
        yield f"```text\n{_signature(obj)}\n```"
    for section in obj.docstring.parsed if obj.docstring is not None else ():
        yield SECTIONS[section.kind.value](section)


def _signature(function: griffe.Function) -> str:
    """Return a function's parameters, in one line if they fit."""
    parameters: list[str] = []
    kinds = [parameter.kind for parameter in function.parameters]
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        variadic = griffe.ParameterKind.var_positional in kinds
        if parameter.kind is griffe.ParameterKind.keyword_only and not variadic and "*" not in parameters:
            parameters.append("*")
        default = "" if star or parameter.default is None else f"={parameter.default}"
        parameters.append(f"{star}{parameter.name}{default}")
    line = f"{function.name}({', '.join(parameters)})"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{function.name}(", *(f"    {parameter}," for parameter in parameters), ")"])


def _text(section: Any) -> str:
    return inspect.cleandoc(section.value)


def _parameters(section: Any) -> str:
    rows = [(_code(row.name), _type(row.annotation), row.description, _code(row.value)) for row in section.value]
    return _table("name", "type", "description", "default", rows=rows)


def _attributes(section: Any) -> str:
    rows = [(_code(row.name), _type(row.annotation), row.description) for row in section.value]
    return _table("attribute", "type", "description", rows=rows)


def _returns(section: Any) -> str:
    return "\n".join(["Returns:", "", *(f"- {_kind(row)}{_line(row.description)}" for row in section.value)])


def _raises(section: Any) -> str:
    return "\n".join(["Raises:", "", *(f"- {_kind(row)}{_line(row.description)}" for row in section.value)])


def _kind(row: Any) -> str:
    return f"{_code(row.annotation)}: " if row.annotation else ""


def _examples(section: Any) -> str:
    parts = [text if kind.value == "text" else f"```text\n{text}\n```" for kind, text in section.value]
    return "\n\n".join(parts)


def _admonition(section: Any) -> str:
    return f"**{section.title}**\n\n{inspect.cleandoc(section.value.description)}"


SECTIONS = {
    "text": _text,
    "parameters": _parameters,
    "other parameters": _parameters,
    "attributes": _attributes,
    "returns": _returns,
    "yields": _returns,
    "raises": _raises,
    "examples": _examples,
    "admonition": _admonition,
}


def _table(*headings: str, rows: list[tuple[str, ...]]) -> str:
    """Return a table without the columns that are empty in all rows."""
    kept = [index for index in range(len(headings)) if any(row[index] for row in rows)]
    lines = [[headings[index] for index in kept], ["---"] * len(kept)]
    lines += [[_line(row[index]) for index in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(text: str) -> str:
    """Return a text as one line in which a vertical bar ends no cell."""
    return re.sub(r"(?<!\\)\|", "&#124;", " ".join(str(text).split()))


def _code(value: Any) -> str:
    """Return code that a table of GitHub and one of Python-Markdown show in the same way."""
    if value is None or str(value) == "":
        return ""
    text = " ".join(str(value).split())
    if "|" in text or "`" in text:
        return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"
    return f"`{text}`"


def _type(annotation: Any) -> str:
    return "" if annotation is None else html.escape(str(annotation), quote=False)


def _find(name: str) -> griffe.Object:
    package = _package()
    return _resolved(package[name.removeprefix("hf_parallel.")])


def _resolved(obj: griffe.Object | griffe.Alias) -> griffe.Object:
    return obj.final_target if isinstance(obj, griffe.Alias) else obj


@functools.cache
def _package() -> griffe.Module:
    """Return the package, read from its source, with completed tables."""
    package = griffe.load(
        "hf_parallel",
        search_paths=[ROOT],
        extensions=griffe.load_extensions("dataclasses"),
        docstring_parser="numpy",
        docstring_options={"warn_unknown_params": False},  # entries of **kwargs are described, too
    )
    for obj in list(_documented(package)):
        for name, row in _rows(obj).items():
            row.value = _short(obj.parameters[name].default) if name in obj.parameters else row.value
    for obj in list(_documented(package)):
        if isinstance(obj, griffe.Class) and "ParallelConfig" in [obj.name, *(base.name for base in obj.mro())]:
            _add_inherited(obj)
        elif isinstance(obj, griffe.Class) and "dataclass" in obj.labels:
            _add_attributes(obj)
    return package


def _documented(obj: griffe.Module | griffe.Class) -> Iterator[griffe.Class | griffe.Function]:
    for member in obj.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Class | griffe.Function) and member.docstring is not None:
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _documented(member)


def _section(obj: griffe.Object) -> list[griffe.DocstringParameter] | None:
    assert obj.docstring is not None
    kinds = (section for section in obj.docstring.parsed if section.kind is griffe.DocstringSectionKind.parameters)
    return next((section.value for section in kinds), None)


def _rows(obj: griffe.Object) -> dict[str, griffe.DocstringParameter]:
    return {row.name: row for row in _section(obj) or ()}


def _short(default: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return a default of at most `MAX_LENGTH` characters."""
    text = "" if default is None else str(default)
    return default if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


def _add_attributes(cls: griffe.Class) -> None:
    """Add the fields and properties that are described one by one to the table of attributes, if there is no other."""
    assert cls.docstring is not None
    sections = {section.kind: section for section in cls.docstring.parsed}
    table = sections.get(griffe.DocstringSectionKind.attributes)
    attributes = [one for one in cls.attributes.values() if {"instance-attribute", "property"} & one.labels]
    fields = [field for field in attributes if not field.is_private]
    if table is not None:
        present = {name.strip() for row in table.value for name in row.name.split(",")}
        fields = [field for field in fields if field.docstring and field.name not in present]
        fields.sort(key=lambda field: field.inherited)
    if griffe.DocstringSectionKind.parameters in sections or not any(field.docstring for field in fields):
        return
    rows = [
        griffe.DocstringAttribute(
            field.name,
            annotation=field.annotation,
            description="" if field.docstring is None else field.docstring.value,
        )
        for field in fields
    ]
    if table is None:
        cls.docstring.parsed.append(griffe.DocstringSectionAttributes(rows))
    else:
        table.value += rows


def _add_inherited(mode: griffe.Class) -> None:
    """Add the settings of the base classes of a mode."""
    own = _section(mode)
    if own is None:
        return
    for base in mode.mro():
        if base.docstring is not None:
            present = {row.name for row in own}
            own += [row for row in _section(base) or () if row.name not in present]

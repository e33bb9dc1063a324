"""Extension of griffe (see mkdocs.yml) that completes the tables of parameters in the documentation.

Each of several names in one line gets its own default, long defaults are truncated, and the settings of a mode include
inherited ones. Fields and properties of a dataclass that are described one by one become a table, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

MAX_LENGTH = 40
"""Maximum number of characters of a default."""


class SettingsTable(griffe.Extension):
    """Completes the tables of parameters and of fields of all docstrings."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Process all docstrings once all modules are loaded."""
        for obj in list(_documented(pkg)):
            for name, row in _rows(obj).items():
                row.value = _short(obj.parameters[name].default) if name in obj.parameters else row.value
        for obj in list(_documented(pkg)):
            if isinstance(obj, griffe.Class) and "dataclass" in obj.labels:
                _add_attributes(obj)
            if isinstance(obj, griffe.Class) and "ParallelConfig" in [base.name for base in obj.mro()]:
                _add_inherited(obj)


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

"""Completes the tables of parameters on the site: what griffe reads from docstrings, and what it leaves out.

Several names in one line each get their own default, a long default is cut, and the settings of a mode include those
that it inherits. An extension of griffe, named in mkdocs.yml.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

LONGEST = 40
"""Characters of a default that are shown."""


class SettingsTable(griffe.Extension):
    """See the module."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Go through all docstrings, when all modules are there."""
        for obj in list(_documented(pkg)):
            for name, row in _rows(obj).items():
                row.value = _short(obj.parameters[name].default) if name in obj.parameters else row.value
        for obj in list(_documented(pkg)):
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
    """A default as it is shown."""
    text = "" if default is None else str(default)
    return default if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _add_inherited(mode: griffe.Class) -> None:
    """Add to a mode's settings those of its bases."""
    own = _section(mode)
    if own is None:
        return
    for base in mode.mro():
        if base.docstring is not None:
            present = {row.name for row in own}
            own += [row for row in _section(base) or () if row.name not in present]

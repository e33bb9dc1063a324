"""Flowchart: a directed graph as Mermaid text, which GitHub, Jupyter and mermaid.live draw."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

STYLES = {
    "fork": "fill:#e3ebfb,stroke:#2457c5",
    "selected": "fill:#e2f3e6,stroke:#2c7a3f",
    "dropped": "stroke-dasharray:4 3",
}
_SPECIAL = re.compile(r'["#&;<>`\\]')


class Flowchart:
    """Lines of a flowchart, whose nodes have any hashable key."""

    def __init__(self) -> None:
        self._lines = ["flowchart TD", *(f"classDef {name} {style}" for name, style in STYLES.items())]
        self._ids: dict[Hashable, str] = {}

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        """Draw the nodes of this context in a box with a title."""
        self._lines.append(f"subgraph g{len(self._lines)}[{_label(title)}]")
        yield
        self._lines.append("end")

    def node(self, key: Hashable, *lines: str, style: str = "", rounded: bool = False) -> None:
        """Add a node with lines of text; `style` is a key of `STYLES`."""
        name = self._ids[key] = f"n{len(self._ids)}"
        text = _label(*lines)
        shape = f"([{text}])" if rounded else f"[[{text}]]" if style == "fork" else f"[{text}]"
        self._lines.append(f"{name}{shape}{f':::{style}' if style else ''}")

    def link(self, begin: Hashable, end: Hashable, label: str = "") -> None:
        """Add an arrow between two nodes."""
        words = f"|{_label(label)}|" if label else ""
        self._lines.append(f"{self._ids[begin]} -->{words} {self._ids[end]}")


def shorten(text: str, length: int) -> str:
    """Return a text on one line with at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}\u2026"


def count(number: int, unit: str) -> str:
    """Return a number with its unit: `1 token`, `2 tokens`."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _label(*lines: str) -> str:
    """Return lines as a quoted label; special characters of Mermaid and HTML become entities."""
    plain = ("".join(one for one in line if one.isprintable()) for line in lines)
    return f'"{"<br>".join(_SPECIAL.sub(lambda found: f"#{ord(found[0])};", line) for line in plain)}"'

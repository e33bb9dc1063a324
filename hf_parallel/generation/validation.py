"""Checks of single values. Each raises a `ValueError` that gives the name, the value and what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from string import Formatter
from typing import Any, TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer (NumPy's included) and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: object, at_least: int) -> None:
    """Raise `ValueError` unless `value` is an int of at least `at_least`."""
    if not is_int(value) or value < at_least:
        raise ValueError(f"{name} must be an int of at least {at_least}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        near = suggestion(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}{near}")


OTHER_NAMES = {
    "n": "num_return_sequences",
    "stop": "stop_strings",
    "max_tokens": "max_new_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "max_new_tokens": "max_tokens",
}
"""The same settings in OpenAI's API and in Transformers."""


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name that resembles a misspelled one; empty if none does."""
    name = str(name)
    known = list(known)
    other = OTHER_NAMES.get(name)
    if other in known:
        return f"; did you mean {other!r}?"
    if len(name) > 3 * max(map(len, known), default=0):  # it resembles none, and comparing a long one takes long
        return ""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def names_hint(name: object, known: Sequence[str], others: Iterable[str] = ()) -> str:
    """Return the end of a message about an unknown name: a similar name, if there is one, and the known names."""
    near = suggestion(name, [*known, *others])
    return f"{near}{' It' if near else '; it'} has {list(known)}" if known else near


def check_text(name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is a string that can be encoded as UTF-8, which tokenizers need."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        part = value[max(error.start - 20, 0) : error.start + 20]
        raise ValueError(f"{name} must be text without lone surrogates, got {part!r}") from error


def check_texts(name: str, value: object, may_be_empty: bool = False) -> None:
    """Raise `ValueError` unless `value` is a list of strings, non-empty ones by default."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(text, str) and (text or may_be_empty) for text in value
    ):
        raise ValueError(f"{name} must be a list of {'' if may_be_empty else 'non-empty '}strings, got {value!r}")
    for text in value:
        check_text(name, text)


MAX_REPEATS = 32
"""Number of times that a template may insert a value; more of a long one would exhaust the memory."""


def check_template(name: str, template: Any, /, **values: object) -> None:
    """Raise `ValueError` unless `template` is a string that `str.format` can fill with `values`.

    A field may be an item of a value, such as `{names[0]}`, but no attribute. Widths are limited to three digits: a
    larger one would exhaust the memory.
    """
    check_text(name, template)
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        for field, count in Counter(names).items():
            if count > MAX_REPEATS:
                raise ValueError(f"a field may occur at most {MAX_REPEATS} times, got more of {field!r}")
        for field in names:
            if "." in field:
                raise KeyError(field)  # a server accepts templates of others
        for _, _, spec, _ in Formatter().parse(template):
            if spec and re.search(r"\{|\d{4}", spec):
                raise ValueError(f"a width must be a number of at most three digits, got {spec!r}")
        template.format(**values)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        fields = " and ".join(f"{{{field}}}" for field in values)
        raise ValueError(f"{name} may hold {fields} and no other field, got {template!r} ({error!r})") from error


def template_uses(template: str, field: str) -> bool:
    """Return whether a template has a field, or an item of it."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    return any(name.partition("[")[0] == field for name in names)


def json_error(value: object) -> str:
    """Return why a value does not survive a round trip through JSON; empty if it does."""
    try:
        restored = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        return str(error)
    return "" if restored == value else f"JSON converts it to {restored!r}"

"""Classes of single objects: an object becomes an instance of a subclass that has the name of its class."""

from __future__ import annotations

from typing import Any

_PLAIN = "_hf_parallel_plain_class"


def namesake(plain: type, *mixins: type, **members: object) -> Any:
    """Return a subclass of a class under its name, so that files that hold the name of a class name the plain one."""
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (*mixins, plain), {**names, _PLAIN: plain, **members})


def plain_class(cls: type) -> Any:
    """Return the class from which `namesake` made a class; other classes themselves."""
    return getattr(cls, _PLAIN, cls)

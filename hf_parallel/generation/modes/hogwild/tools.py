"""Tools of workers: Python functions that run in threads, while the other workers continue."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which a call names a function."""
    return str(getattr(function, "__name__", type(function).__name__))


def call_in(text: str, added: str, tags: Sequence[str]) -> str | None:
    """Return the text of the call that `added`, the end of a text, completes; None: it completes none."""
    opening, closing = tags
    if not added:
        return None
    end = text.find(closing, max(len(text) - len(added) - len(closing) + 1, 0))
    begin = text.rfind(opening, 0, end) if end >= 0 else -1
    return None if begin < 0 else text[begin + len(opening) : end]


class WorkerCall:
    """A call that a worker has written, as JSON with `name` and `arguments`. It runs from now on, in a thread."""

    def __init__(self, text: str, functions: Sequence[Callable[..., Any]]) -> None:
        self.name = "?"
        self.result: Future[str] = Future()
        try:
            function, arguments = self._read(text, functions)
        except ValueError as error:
            self.result.set_result(f"error: {error}")
        else:
            run = threading.Thread(target=self._run, args=(function, arguments), name=f"tool-{self.name}", daemon=True)
            run.start()

    def _read(self, text: str, functions: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], dict[str, Any]]:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the call is not valid JSON: {error}") from error
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            raise ValueError("a call is a JSON object with name, and arguments as an object")
        self.name = str(call.get("name"))
        known = {name_of(function): function for function in functions}
        if self.name not in known:
            raise ValueError(f"the tools are {', '.join(known)}; there is no {self.name}")
        return known[self.name], call.get("arguments", {})

    def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            value = function(**arguments)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except BaseException as error:  # also `SystemExit`: else the worker would wait for ever
            text = f"error: {type(error).__name__}: {error}"
        self.result.set_result(text)

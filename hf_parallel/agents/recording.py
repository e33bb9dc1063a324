"""Recording: a run's completions and tool results on disk, for replay or resume."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_parallel.agents.errors import ReplayError, ToolError
from hf_parallel.agents.models import Completion
from hf_parallel.agents.state import fingerprint
from hf_parallel.files import COUNT, TEXT, TEXT_OR_NULL, Field, check_fields, parse_json, read_lines, write_atomically

FORMAT = "hf_parallel agents recording 1"
MAX_SHOWN = 500
"""Maximum number of characters of an operation's arguments in an error."""
_ANY = Field(lambda value: True, "a value")
_TEXTS = Field(lambda value: isinstance(value, list) and all(map(TEXT.is_valid, value)), "a list of texts")
_COMPLETION = {field.name: _TEXTS if field.name == "texts" else COUNT for field in fields(Completion)}


class Recording:
    """Results by operation key: one JSON object per line, appended as they arrive.

    A run with the same agents, arguments and seed reads its results and computes only what is missing. `model` is the
    fingerprint of the model; None if it is unknown, and then not compared.

    Raises
    ------
    ValueError
        If the file is not a recording, or has another seed or model.
    """

    def __init__(self, path: str | Path, seed: int, model: str | None = None) -> None:
        self.path = Path(path)
        self._results: dict[str, dict[str, Any]] = {}
        header: dict[str, object] = {"format": FORMAT, "seed": seed, "model": model}
        # A killed process may have written part of a line.
        whole, rest = read_lines(self.path) if self.path.exists() else ("", b"")
        if whole:
            self._load(whole.splitlines(), header)
        elif not json.dumps(header).encode().startswith(rest):
            raise ValueError(f"{self.path} must begin with {header}, got {rest[:80]!r}")
        else:
            write_atomically(self.path, json.dumps(header) + "\n")
        if whole and rest:
            os.truncate(self.path, len(whole.encode()))

    def _load(self, lines: list[str], header: dict[str, object]) -> None:
        first, *results = (parse_json(line, f"{self.path}, line {n},") for n, line in enumerate(lines, 1))
        given = first if isinstance(first, dict) else {}
        if given.get("format") != FORMAT:
            raise ValueError(f"{self.path} must begin with {header}, got {first!r}")
        if given.get("seed") != header["seed"]:
            raise ValueError(f"{self.path} has the seed {given.get('seed')!r:.80}, this Runtime {header['seed']}")
        model = given.get("model")
        if model != header["model"] and None not in (model, header["model"]):
            raise ValueError(f"{self.path} was recorded with another model, or with other weights or adapters")
        for number, found in enumerate(results, 2):
            result = _check_result(found, f"{self.path}, line {number}")
            self._results[result["key"]] = result

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str, operation: str, arguments: object = ()) -> list[Any] | None:
        """Return a list of the recorded result, or None. Raises the recorded `ToolError`.

        Raises `ReplayError`, which names the arguments, if another operation was recorded.
        """
        found = self._results.get(key)
        if found is None:
            return None
        if found["operation"] != operation:
            shown = repr(fingerprint(arguments))
            if len(shown) > MAX_SHOWN:  # the end of a conversation tells more than its middle
                shown = f"{shown[: MAX_SHOWN // 2]} ... {shown[-MAX_SHOWN // 2 :]}"
            raise ReplayError(
                f"{self.path} records {found['operation']!r} as {key}, but the run does {operation!r} with {shown}"
            )
        if found.get("error") is not None:
            raise ToolError(str(found["error"]))
        if operation.startswith("gen"):
            return [Completion(**{**found["value"], "texts": tuple(found["value"]["texts"])})]
        return [found["value"]]

    def put(self, key: str, operation: str, value: object = None, error: str | None = None) -> Any:
        """Append a result, and return it as `get` would. Raises `TypeError` if JSON cannot hold it."""
        value = value.to_dict() if isinstance(value, Completion) else value
        try:
            line = json.dumps({"key": key, "operation": operation, "value": value, "error": error})
        except TypeError as problem:
            raise TypeError(
                f"{operation.rpartition(' ')[0]} returned {type(value).__name__}, which a recording cannot hold"
            ) from problem
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._results[key] = json.loads(line)
        return None if error is not None else (self.get(key, operation) or [None])[0]


def _check_result(line: object, where: str) -> dict[str, Any]:
    """Return the result in a line; raise `ValueError` if there is none."""
    found = check_fields(line, {"key": TEXT, "operation": TEXT, "value": _ANY, "error": TEXT_OR_NULL}, where)
    if found["error"] is None and found["operation"].startswith("gen"):
        check_fields(found["value"], _COMPLETION, f"{where}: value")
        if unknown := found["value"].keys() - _COMPLETION.keys():
            raise ValueError(f"{where}: value has {sorted(unknown)}, which no completion has")
    return found

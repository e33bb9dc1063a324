"""Recording: completions and results of tools of a run, in a file from which it replays or goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_parallel.agents.errors import ReplayError, ToolError
from hf_parallel.agents.models import Completion

FORMAT = "hf_parallel agents recording 1"


class Recording:
    """Results by the key of their operation: one JSON object per line, appended as they come.

    A run with the same agents, arguments and seed finds its results and computes only what is missing.

    Raises
    ------
    ValueError
        If the file is not a recording, or of a run with another seed.
    """

    def __init__(self, path: str | Path, seed: int) -> None:
        self.path = Path(path)
        self._results: dict[str, dict[str, Any]] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # the process ended while it wrote
            lines = lines[:-1]
            self.path.write_text("".join(lines), encoding="utf-8")
        header = {"format": FORMAT, "seed": seed}
        if lines:
            self._load(lines, header)
        else:
            self.path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def _load(self, lines: list[str], header: dict[str, Any]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: not a recording of agents") from error
            if number == 1:
                if found != header:
                    raise ValueError(f"{self.path} must begin with {header}, got {found!r}")
            elif not isinstance(found, dict) or not isinstance(found.get("key"), str) or "operation" not in found:
                raise ValueError(f"{self.path}, line {number}: not an operation of an agent")
            else:
                self._results[found["key"]] = found

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str, operation: str) -> Any | None:
        """Return a recorded result in a list; None if there is none. Raise the recorded `ToolError`."""
        found = self._results.get(key)
        if found is None:
            return None
        if found["operation"] != operation:
            raise ReplayError(f"{self.path} records {found['operation']!r} as {key}, but the run does {operation!r}")
        if found.get("error") is not None:
            raise ToolError(str(found["error"]))
        if operation.startswith("gen"):
            return [Completion(**found["value"])]
        return [found["value"]]

    def put(self, key: str, operation: str, value: Any = None, error: str | None = None) -> Any:
        """Append a result, and return it as `get` will. Raises `TypeError` if JSON cannot hold it."""
        value = value.to_dict() if isinstance(value, Completion) else value
        try:
            line = json.dumps({"key": key, "operation": operation, "value": value, "error": error})
        except TypeError as problem:
            raise TypeError(f"{operation} returned {type(value).__name__}, which a recording cannot hold") from problem
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._results[key] = json.loads(line)
        return None if error is not None else (self.get(key, operation) or [None])[0]

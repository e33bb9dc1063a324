"""Recording: a run's completions and tool results on disk, for replay or resume."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_parallel.agents.errors import ReplayError, ToolError
from hf_parallel.agents.models import Completion
from hf_parallel.files import parse_json, read_lines, write_atomically

FORMAT = "hf_parallel agents recording 1"


class Recording:
    """Results by operation key: one JSON object per line, appended as they arrive.

    A run with the same agents, arguments and seed reads its results and computes only what is missing. `model` is the
    fingerprint of the model; None if it is unknown, and then not compared. Without a path, nothing is recorded.

    Raises
    ------
    ValueError
        If the file is not a recording, or has another seed or model.
    """

    def __init__(self, path: str | Path | None, seed: int, model: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._results: dict[str, dict[str, Any]] = {}
        if self.path is None:
            return
        if not self.path.exists():
            write_atomically(self.path, json.dumps({"format": FORMAT, "seed": seed, "model": model}) + "\n")
            return
        whole, rest = read_lines(self.path)
        lines = [parse_json(line, f"{path}, line {n},") for n, line in enumerate(whole.splitlines(), 1)]
        first, results = lines[0] if lines else None, lines[1:]
        if not isinstance(first, dict) or first.get("format") != FORMAT:
            raise ValueError(f"{path} must begin with the format {FORMAT!r}, got {first!r:.80}")
        if first.get("seed") != seed:
            raise ValueError(f"{path} has the seed {first.get('seed')!r:.80}, this Runtime {seed}")
        if first.get("model") != model and None not in (first.get("model"), model):
            raise ValueError(f"{path} was recorded with another model, or with other weights or adapters")
        for number, found in enumerate(results, 2):
            try:
                if found["operation"].startswith("gen") and found["error"] is None:
                    found["value"] = Completion(**{**found["value"], "texts": tuple(found["value"]["texts"])})
                self._results[found["key"]] = found
            except (AttributeError, LookupError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not a result: {error!r}") from error
        if rest:  # a killed process has written a part of a line
            os.truncate(self.path, len(whole.encode()))

    def get(self, key: str, operation: str) -> list[Any] | None:
        """Return a list of the recorded result, or None. Raises the recorded `ToolError`.

        Raises `ReplayError` if another operation was recorded.
        """
        found = self._results.get(key)
        if found is None:
            return None
        if found["operation"] != operation:
            raise ReplayError(f"{self.path} records {found['operation']!r} as {key}, but the run does {operation!r}")
        if found["error"] is not None:
            raise ToolError(str(found["error"]))
        return [found["value"]]

    def put(self, key: str, operation: str, value: Any = None, error: str | None = None) -> Any:
        """Append a result, and return it as `get` would. Raises `TypeError` if JSON cannot hold it."""
        if self.path is None:
            return value
        plain = asdict(value) if isinstance(value, Completion) else value
        try:
            line = json.dumps({"key": key, "operation": operation, "value": plain, "error": error})
        except TypeError as problem:
            name = operation.rpartition(" ")[0]
            raise TypeError(f"{name} returned {type(value).__name__}, which a recording cannot hold") from problem
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return value if isinstance(value, Completion) else json.loads(line)["value"]

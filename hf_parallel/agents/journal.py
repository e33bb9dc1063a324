"""Journal: completions, tool results and times of a run as JSON lines, from which a run that died continues."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_parallel.agents.errors import ReplayError, ToolError
from hf_parallel.agents.models import Completion
from hf_parallel.files import parse_json, read_lines, write_atomically

FORMAT = "hf_parallel agents journal"
VERSION = 1


class Journal:
    """Results of a run by the key of their operation, one JSON object per line, appended as they arrive.

    Raises
    ------
    ValueError
        If the file exists and is not a journal, is damaged, or belongs to a run with another seed.
    """

    def __init__(self, path: str | Path, seed: int) -> None:
        self.path = Path(path)
        self._entries: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self._read(seed)
        else:
            header = {"format": FORMAT, "version": VERSION, "seed": seed}
            write_atomically(self.path, json.dumps(header) + "\n")

    def _read(self, seed: int) -> None:
        text, unfinished = read_lines(self.path)
        entries = []
        for number, line in enumerate(text.split("\n")[:-1], 1):
            entries.append(parse_json(line, f"{self.path}, line {number},"))
        header = entries[0] if entries else None
        if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
            raise ValueError(f"{self.path} must have the format {FORMAT!r} and version {VERSION}, got {header!r:.80}")
        if header.get("seed") != seed:
            raise ValueError(
                f"{self.path} is of a run with the seed {header.get('seed')!r:.80}, this Runtime has {seed}"
            )
        for number, entry in enumerate(entries[1:], 2):
            if not isinstance(entry, dict) or not {"key", "operation", "value", "error"} <= entry.keys():
                raise ValueError(f"{self.path}, line {number}, must be an entry of a journal, got {entry!r:.80}")
            self._entries[entry["key"]] = entry
        if unfinished:  # the process died while it wrote a line
            os.truncate(self.path, len(text.encode()))

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str, operation: str) -> Any:
        """Return the result of an operation that the journal has.

        Raises
        ------
        ReplayError
            If the journal has another operation under this key.
        ToolError
            If the operation is a tool that failed.
        """
        entry = self._entries[key]
        if entry["operation"] != operation:
            raise ReplayError(
                f"{self.path} has {entry['operation']!r} at {key}, but the run calls {operation!r}: resume with the "
                "same agents and arguments, or delete the file"
            )
        if entry["error"] is not None:
            raise ToolError(entry["error"])
        return entry["value"]

    def add(self, key: str, operation: str, value: object = None, error: str | None = None) -> Any:
        """Append a result, and return it as `get` does. Raises `TypeError` if JSON cannot hold it."""
        entry = {"key": key, "operation": operation, "value": value, "error": error}
        try:
            line = json.dumps(entry)
        except TypeError as problem:
            raise TypeError(f"a journal holds only values of JSON, {operation} returned {value!r:.80}") from problem
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._entries[key] = json.loads(line)
        return self._entries[key]["value"]


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """Return a completion as plain data."""
    return asdict(completion)


def completion_from_json(data: dict[str, Any]) -> Completion:
    """Return the completion of `completion_to_json`."""
    return Completion(**{**data, "texts": tuple(data["texts"])})

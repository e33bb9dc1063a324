"""Check of the JSON schemas of a request in a process of its own, with limits of time and memory.

A short schema can take minutes. The process runs this file as a script. It compiles each schema for a vocabulary of
bytes and begins an answer that opens lists and objects wherever it can. The limits hold for all schemas of a request
together, which the server then compiles as one grammar.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

CPU_SECONDS = 2
MEMORY_BYTES = 1 << 31
WALL_SECONDS = 60  # only reached on a machine with much other work
STEPS = 64  # bytes of the answer
OPENING = b'[{"'
MAX_KNOWN = 4096  # requests whose results are kept


@dataclass(frozen=True)
class SchemaError:
    """Why the schemas of a request cannot be used: the one at `index`."""

    index: int
    reason: str


class _Known:
    """Results of the last checks, by the hash of their schemas: a schema may be as large as a body."""

    def __init__(self) -> None:
        self._results: OrderedDict[bytes, SchemaError | None] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> tuple[bool, SchemaError | None]:
        """Return whether there is a result, and the result."""
        with self._lock:
            if key not in self._results:
                return False, None
            self._results.move_to_end(key)
            return True, self._results[key]

    def add(self, key: bytes, result: SchemaError | None) -> None:
        """Keep a result; drop the least recently used one beyond the limit."""
        with self._lock:
            self._results[key] = result
            while len(self._results) > MAX_KNOWN:
                self._results.popitem(last=False)


_known = _Known()


def first_error(schemas: Sequence[str]) -> SchemaError | None:
    """Return the first error of the JSON schemas of a request; None: they can be used together."""
    text = json.dumps(schemas)
    key = sha256(text.encode()).digest()
    is_known, result = _known.get(key)
    if not is_known:
        result = _check(text)
        _known.add(key, result)
    return result


def _check(text: str) -> SchemaError | None:
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=WALL_SECONDS)
        output = done.stdout
        is_complete = not done.returncode
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
        is_complete = False
    errors = [json.loads(line) for line in output.splitlines()]
    for index, reason in enumerate(errors):
        if reason:
            return SchemaError(index, reason)
    if is_complete:
        return None
    reason = "it takes too long or too much memory"
    if errors:
        reason += ", with those before it"
    return SchemaError(len(errors), reason)


def _main() -> None:
    """Read a list of schemas from stdin, and write a line of JSON for each: its error, empty if it has none."""
    _limit()
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    for schema in json.loads(sys.stdin.read()):
        print(json.dumps(_error_of(schema, tokenizer)), flush=True)


def _error_of(schema: str, tokenizer: Any) -> str:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    except ValueError as error:
        return str(error)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    for step in range(STEPS):
        bits = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]
        if matcher.is_error() and step == 0:
            return str(matcher.get_error().partition("\n")[0])
        if matcher.is_error() or matcher.is_stopped() or not allowed:
            break
        matcher.consume_token(next((byte for byte in OPENING if byte in allowed), allowed[0]))
    return ""


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    _main()

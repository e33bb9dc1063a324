"""Check of a JSON schema in a process of its own, with limits of time and memory: a short schema can take minutes.

The process runs this file as a script. It compiles the schema for a vocabulary of bytes and begins an answer that opens
lists and objects wherever it can.
"""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

CPU_SECONDS = 2
MEMORY_BYTES = 1 << 31
WALL_SECONDS = 60  # only reached on a machine with much other work
STEPS = 64  # bytes of the answer
OPENING = b'[{"'


@lru_cache(maxsize=256)
def error_of(schema: str) -> str:
    """Return why a JSON schema cannot be used; empty if it can."""
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(command, input=schema, capture_output=True, text=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        return "it takes too long"
    if done.returncode:
        return "it takes too long or too much memory"
    return done.stdout


def _main() -> None:
    _limit()
    from llguidance import LLMatcher, LLTokenizer

    try:
        grammar = LLMatcher.grammar_from_json_schema(sys.stdin.read(), defaults={"whitespace_flexible": False})
    except ValueError as error:
        print(error, end="")
        return
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    for step in range(STEPS):
        bits = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]
        if matcher.is_error() and step == 0:
            print(matcher.get_error().partition("\n")[0], end="")
        if matcher.is_error() or matcher.is_stopped() or not allowed:
            break
        matcher.consume_token(next((byte for byte in OPENING if byte in allowed), allowed[0]))


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    _main()

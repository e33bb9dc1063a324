"""Forced calls: the text of a reply that a grammar made of calls, read as the grammar wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_parallel.engine.server.openai.replies import Parsed, ToolCall
from hf_parallel.engine.server.openai.reply_formats import around_arguments
from hf_parallel.engine.server.structured.json_scanner import JSONScanner


class ForcedCalls:
    """Reads the text of one answer under `grammar.call_grammar`, whose arguments these are.

    Only the texts that the grammar has put around the arguments are marks: arguments may hold the same texts. A call
    that the end of the answer has cut off is content.
    """

    def __init__(self, call: str, tools: Sequence[Mapping[str, Any]], between: str | None) -> None:
        names = [tool["function"]["name"] for tool in tools]
        self._marks = {name: around_arguments(call, name) for name in names}
        self._between = between or ""
        self._open: str | None = None  # name of the function whose arguments or closing mark are being read
        self._scanner = JSONScanner()
        self._held = ""  # text of the current call
        self._begin = 0  # where its arguments begin in this text
        self._end: int | None = None  # where they end
        self.calls = 0

    def add(self, text: str, ends: bool = False) -> Parsed:
        """Append text, the last of the answer if it `ends`. Return the calls that it completes."""
        parsed = Parsed()
        for character in text:
            self._held += character
            if self._open is None:
                self._open_call()
            elif self._end is None and self._scanner.add(character):
                self._end = len(self._held)
            if self._open is not None and self._end is not None:
                self._close_call(parsed)
        if ends:
            parsed.content = self._held
            self._held = ""
        return parsed

    def _open_call(self) -> None:
        """Begin to read arguments if the text of the call so far is what stands before them."""
        separator = self._between if self.calls else ""
        for name, (opening, _) in self._marks.items():
            if self._held == separator + opening:
                self._open = name
                self._scanner = JSONScanner()
                self._begin = len(self._held)
                self._end = None

    def _close_call(self, parsed: Parsed) -> None:
        """Add the call if its text is complete."""
        assert self._open is not None
        _, closing = self._marks[self._open]
        if self._held[self._end :] == closing:
            arguments = self._held[self._begin : self._end]
            parsed.calls.append(ToolCall(self.calls, self._open, arguments))
            self.calls += 1
            self._open = None
            self._held = ""

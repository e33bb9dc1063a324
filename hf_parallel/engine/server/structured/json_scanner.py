"""Scanner of JSON text: where strings and the outermost value end, known while the text grows."""

from __future__ import annotations

from string import punctuation

_PLAIN = set(punctuation) - {'"', "\\"}  # what a string may also hold as an escape


class JSONScanner:
    """Follows the text of a JSON object or list, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # whether a backslash stands before the next character

    def add(self, character: str) -> bool:
        """Append a character. Return whether it ends the outermost object or list."""
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def escape(self, character: str) -> str:
        """Return JSON for the next character that holds no mark: punctuation in strings becomes an escape."""
        if self._in_string and not self._is_escaped and character in _PLAIN:
            return f"\\u{ord(character):04x}"
        return character

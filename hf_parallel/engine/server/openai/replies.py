"""Replies: the text of an answer, parsed as it grows into content, reasoning and tool calls."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from hf_parallel.engine.server.openai.reply_formats import END, REASONING, ReplyFormat
from hf_parallel.engine.server.structured.json_scanner import JSONScanner

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Ids of calls are nine letters or digits: Mistral's chat templates accept no others, and other templates any text."""
MALFORMED = (KeyError, TypeError, ValueError, RecursionError)  # errors of the parser for a call that is none


@dataclass
class ToolCall:
    """A call that a model has written; `arguments` is a JSON object as text."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH)))

    def to_dict(self) -> dict[str, object]:
        """Return the call as OpenAI's API writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Parsed:
    """New parts of a reply."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class ReplySpec:
    """Contents of the replies to a request: they may call `tools`, at most `most_calls` times."""

    format: ReplyFormat
    tools: Sequence[Mapping[str, Any]] = ()
    most_calls: int | None = None

    def marks(self, names: Mapping[int, str]) -> set[int]:
        """Return the special tokens, given with their names, that the format needs in the text."""
        syntax = json.dumps(self.format.fields, ensure_ascii=False).replace("\\", "")
        syntax += self.format.call + self.format.between
        return {token for token, name in names.items() if name and name in syntax}


class Reply:
    """Parses the text of one answer. `prompt` is the end of the prompt's text, which may open the reasoning.

    A call that is not well-formed, or names no tool of the request, is content.
    """

    def __init__(self, spec: ReplySpec, prompt: str) -> None:
        self.spec = spec
        self.calls = 0
        self._template = load_response_template(spec.format.template)
        self._later_template = load_response_template(spec.format.later_template)
        self._names = {tool["function"]["name"] for tool in spec.tools}
        self._parser = self._make_parser(self._template, prompt)
        self._call: JSONScanner | None = None  # of the call that is being read, if its arguments are JSON
        self._held = ""  # text that was not returned yet: a mark, or a call
        self._after_mark = False

    def add(self, text: str, ends: bool = False) -> Parsed:
        """Append text, the last of the answer if it `ends`. Return what can be shown."""
        parsed = Parsed()
        for character in text:  # marks end where a text does, so that an invalid call can be returned as content
            self._held += character
            try:
                self._read(self._parser.feed(self._protect(character)), parsed)
            except MALFORMED:
                self._reject(parsed)
        if ends:
            try:
                self._read(self._parser.finalize()[1], parsed)
            except MALFORMED:
                self._reject(parsed)
        return parsed

    def _make_parser(self, template: ResponseTemplate, prompt: str) -> ResponseParser:
        # The parser casts strings to the types of a schema, which arguments in JSON already have.
        tools: list[Any] = []
        if not self.spec.format.has_json_calls:
            tools = [dict(tool) for tool in self.spec.tools]
        return ResponseParser(template, prefix=prompt, tools=tools)

    def _protect(self, character: str) -> str:
        """Return what the parser gets for the next character: nothing in a string of a call ends the call."""
        if self._call is None:
            return character
        protected = self._call.escape(character)
        is_last = self._call.add(character)
        return protected + END if is_last and self.spec.format.ends_calls else protected

    def _read(self, events: Sequence[Mapping[str, Any]], parsed: Parsed) -> None:
        is_new = False
        for event in events:
            name = event["field"]
            kind = event["type"]
            if name == "tool_calls":
                is_new = is_new or kind == "region_open"
                self._follow_call(event, is_new)
            if kind == "region_chunk" and name != "tool_calls":
                self._held = self._held[len(event["text"]) :]
                self._show(name, event["text"], parsed)
            elif kind == "region_close" and self._template.fields[name].open_re is not None:
                is_read = name != "tool_calls" or self._take(event["value"], parsed)
                if not is_read:
                    self._show("content", self._held, parsed)
                self._held = ""
                self._after_mark = is_read
            elif kind == "region_open" and name != "tool_calls" and self._template.fields[name].open_re is not None:
                self._held = ""

    def _follow_call(self, event: Mapping[str, Any], is_new: bool) -> None:
        """Update the scanner of the call that is being read; `is_new`: the last character has opened it."""
        if event["type"] == "region_open" and self.spec.format.has_json_calls:
            self._call = JSONScanner()
        elif event["type"] == "region_close":
            self._call = None
        elif self._call is not None and is_new:  # `_protect` has not seen the beginning of the arguments
            for character in event["text"]:
                self._call.add(character)

    def _show(self, name: str, text: str, parsed: Parsed) -> None:
        if self._after_mark:  # templates write line breaks around marks
            text = text.lstrip()
            self._after_mark = not text
        if name in REASONING:
            parsed.reasoning += text
        else:
            parsed.content += text

    def _take(self, value: Any, parsed: Parsed) -> bool:
        """Add one call, or a list of them, if they are well-formed."""
        calls = value if isinstance(value, list) else [value]
        functions = [call["function"] for call in calls]
        for function in functions:
            if function["name"] not in self._names or not isinstance(function["arguments"], dict):
                return False
        for function in functions:
            if self.calls != self.spec.most_calls:
                arguments = json.dumps(function["arguments"], ensure_ascii=False, allow_nan=False)
                parsed.calls.append(ToolCall(self.calls, function["name"], arguments))
                self.calls += 1
        return True

    def _reject(self, parsed: Parsed) -> None:
        self._show("content", self._held, parsed)
        self._held = ""
        self._call = None
        self._parser = self._make_parser(self._later_template, "")

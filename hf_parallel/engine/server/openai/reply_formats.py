"""Formats of replies: how models write reasoning and tool calls, as response templates of Transformers.

A tokenizer's own `response_template` comes first. Else marks in the chat template tell the format.

Patterns of marks repeat nothing without a limit: text that may begin a mark is held back, and read again with each
character.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_parallel.generation.prompts import END_THINK, THINK

ANCHOR = r"\A(?:.*(?=<think>\s*\Z)|.*\Z)"  # a prompt may open the reasoning
REASONING = {"thinking", "reasoning", "reasoning_content"}  # names of fields
END = "\x03"
"""Mark that ends calls whose format has none. The parser gets it after the arguments; no model writes it."""


OPENING = ("open", "open_pattern")  # keys of a field that say what opens it


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes the parts of a reply.

    `fields` has the form of a response template's. `call` is how it writes a call, with `NAME` and `ARGUMENTS` in their
    places; empty if the arguments are no JSON.
    """

    fields: dict[str, Any]
    call: str = ""
    between: str = ""  # text between two calls
    anchor: str = ANCHOR

    @property
    def template(self) -> dict[str, Any]:
        """The response template of an answer.

        Where all text outside of marks is content, reasoning can only be opened by the prompt, or by the beginning of
        the answer: later, the same marks are text.
        """
        opened = {name: _at_beginning(field) for name, field in self.fields.items() if name in REASONING}
        return self._template(self.fields | opened if self._has_plain_content else self.fields)

    @property
    def later_template(self) -> dict[str, Any]:
        """The response template of the rest of an answer."""
        plain = {name: field for name, field in self.fields.items() if name not in REASONING}
        return self._template(plain if self._has_plain_content else self.fields)

    def _template(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"start_anchor_pattern": self.anchor, "fields": fields}

    @property
    def _has_plain_content(self) -> bool:
        """Whether a field other than reasoning begins without a mark."""
        unmarked = {name for name, field in self.fields.items() if field.keys().isdisjoint(OPENING)}
        return bool(unmarked - REASONING)

    @property
    def has_json_calls(self) -> bool:
        """Whether calls are JSON, with JSON's strings."""
        field = self.fields.get("tool_calls", {})
        return field.get("content") == "json" and "string_delims" not in field.get("content_args", {})

    @property
    def ends_calls(self) -> bool:
        """Whether `END` closes a call."""
        return bool(self.fields.get("tool_calls", {}).get("close") == END)

    @property
    def thinks(self) -> bool:
        """Whether replies may hold reasoning."""
        return bool(self.fields.keys() & REASONING)

    @property
    def thinking_marks(self) -> list[str]:
        """The first text that opens reasoning, and the first that closes it; less if there is none."""
        marks = []
        for field_name in self.fields.keys() & REASONING:
            for side in ("open", "close"):
                mark = self.fields[field_name].get(side)
                if mark:
                    marks.append(mark if isinstance(mark, str) else mark[0])
        return marks


def around_arguments(call: str, name: str) -> tuple[str, str]:
    """Return the texts before and after the arguments of a call of a function; `call` as in `ReplyFormat`."""
    opening, closing = call.split("ARGUMENTS")
    return opening.replace("NAME", name), closing


def _at_beginning(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field that only the beginning of a text opens."""
    pattern = field.get("open_pattern")
    if pattern is None:
        marks = field["open"]
        alternatives = [marks] if isinstance(marks, str) else marks
        pattern = "|".join(map(re.escape, alternatives))
    anchored = {key: value for key, value in field.items() if key not in OPENING}
    anchored["open_pattern"] = rf"\A\s{{0,64}}(?:{pattern})"
    return anchored


_DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FORMATS = {mark: ReplyFormat(**settings) for mark, settings in _DATA.items()}
"""By the first mark that is in a chat template: gpt-oss, DeepSeek, Mistral, Gemma 4, Qwen3-Coder, Llama 3."""
TEXT = FORMATS.pop("")
"""Hermes and Qwen; also that of models whose template knows no tools."""


def reply_format(tokenizer: Any) -> ReplyFormat:
    """Return the format in which a model replies."""
    source = str(getattr(tokenizer, "chat_template", None) or "")
    known_format = TEXT
    if "tool" in source:
        for mark, candidate in FORMATS.items():
            if mark in source:
                known_format = candidate
                break
    fields = known_format.fields
    anchor = known_format.anchor
    template = getattr(tokenizer, "response_template", None)
    if template is not None:
        fields = template["fields"]
        anchor = template.get("start_anchor_pattern") or re.escape(template["start_anchor"])
    elif THINK in source and not known_format.thinks:
        fields = {"thinking": {"open": THINK, "close": END_THINK}} | fields
    return replace(known_format, fields=fields, anchor=anchor)

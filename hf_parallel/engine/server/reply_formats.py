"""Formats of replies: how models write reasoning and tool calls, as response templates of Transformers.

A tokenizer's own `response_template` comes first. Else marks in the chat template tell the format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from hf_parallel.generation.prompts import END_THINK, THINK

ANCHOR = r"\A(?:.*(?=<think>\s*\Z)|.*\Z)"  # a prompt may open the reasoning
REASONING = {"thinking", "reasoning", "reasoning_content"}  # names of fields


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes the parts of a reply.

    `fields` are those of a response template. `call` is how it writes a call, with `NAME` and `ARGUMENTS` in their
    places; empty if the arguments are no JSON.
    """

    fields: dict[str, Any]
    call: str = ""
    anchor: str = ANCHOR
    reads_tools: bool = True  # whether the chat template describes tools to the model

    @property
    def template(self) -> dict[str, Any]:
        """The response template."""
        return {"start_anchor_pattern": self.anchor, "fields": self.fields}

    @property
    def thinks(self) -> bool:
        """Whether replies may hold reasoning."""
        return bool(self.fields.keys() & REASONING)


def _calls(open_pattern: str, name: str = "{name}", arguments: str = "{content}", **field: Any) -> dict[str, Any]:
    """Return fields of content and tool calls; `name` and `arguments`: where they are in what was parsed."""
    transform = {"type": "function", "function": {"name": name, "arguments": arguments}}
    calls = {"open_pattern": open_pattern, "repeats": True, "content": "json", "transform": transform, **field}
    return {"tool_calls": calls, "content": {}}


def _thinking(begin: str, end: str | list[str]) -> dict[str, Any]:
    return {"thinking": {"open": begin, "close": end}}


TEXT = ReplyFormat(
    _calls("<tool_call>", "{content.name}", "{content.arguments}", close="</tool_call>"),
    '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
)
"""Hermes and Qwen; also that of models whose template knows no tools."""
_XML = {"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"}
_GEMMA = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
_DEEPSEEK = r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>(?!function<)[\w.-]+)"
_HARMONY = r"<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+)[^<]*(?:<\|constrain\|>json)?<\|message\|>"
_ENDS = ["<|end|>", "<|return|>"]
_ANSWERS = ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"]
FORMATS: dict[str, ReplyFormat] = {
    "<|channel|>": ReplyFormat(  # gpt-oss
        {
            **_calls(_HARMONY, close="<|call|>"),
            **_thinking("<|channel|>analysis<|message|>", _ENDS),
            "content": {"open": _ANSWERS, "close": _ENDS},
        },
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
    ),
    "<｜tool▁calls▁begin｜>": ReplyFormat(  # DeepSeek
        _calls(rf"{_DEEPSEEK}(?:<｜tool▁sep｜>|\n```json\n)", close_pattern=r"(?:\n```)?<｜tool▁call▁end｜>")
        | {"text": {"open": "<｜tool▁calls▁end｜>"}},
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "[ARGS]": ReplyFormat(  # Mistral
        _calls(r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[ARGS\]|(?=\{))", close_pattern=r"(?=\[TOOL_CALLS\])"),
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    ),
    "[TOOL_CALLS]": ReplyFormat(  # Mistral's older models
        _calls(r"\[TOOL_CALLS\]", "{name}", "{arguments}", transform_each=True, repeats=False),
        '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    ),
    "<|tool_call>": ReplyFormat(  # Gemma 4
        _calls(r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)", close="<tool_call|>", content_args=_GEMMA)
        | _thinking("<|channel>thought\n", "<channel|>")
    ),
    "<function=": ReplyFormat(  # Qwen3-Coder
        _calls(
            r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
            close_pattern=r"</function>\s*</tool_call>",
            content="xml-inline",
            content_args=_XML,
        )
    ),
    '"parameters": ': ReplyFormat(  # Llama 3
        _calls(r'<\|python_tag\|>|\A\s*(?=\{\s*"name")', "{content.name}", "{content.parameters}"),
        '{"name": "NAME", "parameters": ARGUMENTS}',
    ),
}
"""By a mark in the chat template, the first that is found."""


def reply_format(tokenizer: Any) -> ReplyFormat:
    """Return the format in which a model replies."""
    source = str(getattr(tokenizer, "chat_template", None) or "")
    found = next((known for mark, known in FORMATS.items() if mark in source and "tool" in source), TEXT)
    own, fields, anchor = getattr(tokenizer, "response_template", None), found.fields, found.anchor
    if own is not None:
        fields, anchor = own["fields"], own.get("start_anchor_pattern") or re.escape(own["start_anchor"])
    elif THINK in source and not found.thinks:
        fields = _thinking(THINK, END_THINK) | fields
    return replace(found, fields=fields, anchor=anchor, reads_tools="tools" in source)

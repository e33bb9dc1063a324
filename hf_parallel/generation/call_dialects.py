"""Call dialects: formats of text in which a path is a call. It reads a prompt of its own, and returns text.

Adaptive Parallel Reasoning (Pan et al., 2025, arXiv 2504.15466, section 3) and AsyncThink (Chi et al., 2025, arXiv
2510.26658). The text after a call never sees the keys and values of the path, only the text that it returned.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from hf_parallel.generation.validation import check_bool, check_text

NUMBER = r"[0-9]+(?:\.[0-9]+)*"
"""Pattern of the number of a path."""
MAX_DIGITS = 16
"""Maximum length of a number in a tag."""


class Tag(NamedTuple):
    """A tag in the text of a model: `call` ends a call, `wait` waits for a path, `misspelled` opens a call."""

    kind: str
    start: int
    end: int
    number: str


class CallMessage(NamedTuple):
    """What a text sends to a new path."""

    number: str
    text: str


class Returned(NamedTuple):
    """What a path has returned; None: nothing."""

    message: CallMessage
    text: str | None


@dataclass(frozen=True)
class CallDialect:
    r"""Format in which a path is a call: it reads its own prompt, and returns text.

    `{number}` in a tag is the number of a path, which the model writes. Raises `ValueError` for tags that are empty or
    do not fit together.

    Parameters
    ----------
    call : pair of str
        Tags that open and close a call, such as `<FORK-{number}>` and `</FORK-{number}>`. The text between them is the
        message to the path. Without `{number}`, paths are numbered in order.
    wait : str
        Tag at which the text waits for a path to return, such as `<JOIN-{number}>`. Until then, both are generated at
        the same time. Default: the text waits at the call, for all of its paths.
    separator : str
        Text between the messages of a call, each of which begins a path. Default: a call has one message.
    prompt : str
        Prompt of a path, in which `{message}` is the message.
    system : str
        System message of a path. Needs `is_chat`.
    is_chat : bool
        Whether the chat template of the tokenizer, if it has one, renders the prompt of a path.
    returned : pair of str
        Tags around the text that a path returns. The closing tag ends the path. Default: it returns its whole text.
    joined : str
        Text that stands for a path after the call; `{text}`, `{number}` and `{message}` are replaced.
    around : pair of str
        Text before and after the `joined` texts of a call.
    keeps_call : bool
        Whether the text after a call sees the call. Otherwise, the joined text replaces it.
    is_nested : bool
        Whether paths may call.
    """

    is_separate: ClassVar[bool] = False
    positions: ClassVar[str] = "own"
    misspelled: ClassVar[str] = ""
    """Text that stands for the tag that opens a call, where a model writes it."""

    call: tuple[str, str]
    wait: str = ""
    separator: str = ""
    prompt: str = "{message}"
    system: str = ""
    is_chat: bool = False
    returned: tuple[str, str] = ("", "")
    joined: str = "{text}"
    around: tuple[str, str] = ("", "")
    keeps_call: bool = True
    is_nested: bool = False

    def __post_init__(self) -> None:
        for name in ("call", "returned", "around"):
            pair = getattr(self, name)
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"{name} must be a pair of texts, got {pair!r}")
            for text in pair:
                check_text(name, text)
            object.__setattr__(self, name, tuple(pair))  # lists in JSON
        for name in ("wait", "separator", "prompt", "system", "joined"):
            check_text(name, getattr(self, name))
        for name in ("is_chat", "keeps_call", "is_nested"):
            check_bool(name, getattr(self, name))
        opening, closing = self.call
        if not all(tag.replace("{number}", "") for tag in self.call) or opening == closing:
            raise ValueError(f"call must be two different tags, got {self.call!r}")
        if self.wait and not all("{number}" in tag for tag in (self.wait, opening)):
            raise ValueError(
                f"wait names its path by {{number}}, as call must, got wait={self.wait!r}, call={self.call!r}"
            )
        if self.wait and not (self.keeps_call and not self.separator and self.wait.replace("{number}", "")):
            raise ValueError("a dialect that waits for each path needs keeps_call=True, a tag and no separator")
        if "{number}" in closing and "{number}" not in opening:
            raise ValueError(f"call must have {{number}} in the opening tag, got {self.call!r}")
        if self.separator and "{number}" in opening:
            raise ValueError(f"a call with a separator numbers its paths itself, got call={self.call!r}")
        if self.returned[0] and not self.returned[1]:
            raise ValueError(f"returned must have a closing tag, got {self.returned!r}")
        if "{message}" not in self.prompt:
            raise ValueError(f"prompt must hold {{message}}, got {self.prompt!r}")
        if self.system and not self.is_chat:
            raise ValueError(f"system={self.system!r} needs is_chat=True")
        if not self.keeps_call and not self.joined_text([Returned(CallMessage("", ""), "")]):
            raise ValueError("what replaces a call must be some text: give around, or joined with a text of its own")

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that a tokenizer must be able to encode, where their number is 1."""
        tags = (*self.call, self.wait, *self.returned, *self.around, self.misspelled)
        return tuple(tag.replace("{number}", "1") for tag in tags if tag)

    @property
    def fork_text(self) -> str:
        """Text at which paths start, for messages."""
        return self.call[1]

    @cached_property
    def _opening(self) -> re.Pattern[bytes]:
        return re.compile(_numbered(self.call[0]).encode())

    @cached_property
    def _tags(self) -> re.Pattern[bytes]:
        """Pattern of the tags that `find` finds."""
        texts = {"call": self.call[1], "wait": self.wait, "misspelled": self.misspelled}
        patterns = [f"(?P<{kind}>{_numbered(text, kind)})" for kind, text in texts.items() if text]
        return re.compile("|".join(patterns).encode())

    @cached_property
    def _overlap(self) -> int:
        """Maximum number of bytes of a tag before the last token."""
        return max(len(tag.encode()) for tag in (self.call[1], self.wait, self.misspelled)) + MAX_DIGITS

    def find(self, text: bytes, begin: int, known: int) -> Tag | None:
        """Return the first tag from byte `begin` on that is complete only after `known` bytes, or None."""
        for match in self._tags.finditer(text, max(begin, known - self._overlap)):
            if match.end() > known:
                kind = str(match.lastgroup)
                number = match.groupdict().get(f"number_{kind}") or b""
                return Tag(kind, match.start(), match.end(), number.decode())
        return None

    def waits_at(self, text: str) -> int | None:
        """Return the character after the first tag at which a text waits for paths; None: it has none."""
        known = 0
        encoded = text.encode()
        while (tag := self.find(encoded, 0, known)) is not None:
            known = tag.end
            is_call = tag.kind == "call" and not self.wait and self.messages(encoded, tag, 1) is not None
            if is_call or tag.kind == "wait":
                return len(encoded[:known].decode())
        return None

    def opens_at(self, text: bytes, begin: int) -> int:
        """Return the byte from `begin` on at which a call may have been opened; the length of the text: none."""
        opening = self.call[0].partition("{number}")[0].encode()
        start = text.find(opening, begin)
        if start >= 0:
            return start
        for tag in (opening, self.misspelled.encode()):
            for length in range(min(len(tag) - 1, len(text) - begin), 0, -1):
                if text.endswith(tag[:length]):
                    return len(text) - length
        return len(text)

    def messages(self, text: bytes, tag: Tag, first_number: int) -> tuple[int, list[CallMessage]] | None:
        """Return the byte at which the call that a tag closes begins, and its messages; None: nothing opens it.

        `text` holds no call before it. `first_number` is that of the next path.
        """
        openings = list(self._opening.finditer(text, 0, tag.start))
        if not openings:
            return None
        opening = openings[-1]
        number = (opening.groupdict().get("number") or b"").decode()
        if tag.number and tag.number != number:
            return None
        inside = text[opening.end() : tag.start].decode(errors="replace")
        return opening.start(), self.split(inside, number, first_number)

    def split(self, inside: str, number: str, first_number: int) -> list[CallMessage]:
        """Return the messages in the text of a call. `number` is that of its tag, or empty."""
        texts = inside.split(self.separator) if self.separator else [inside]
        return [CallMessage(number or str(index), text) for index, text in enumerate(texts, first_number)]

    def prompt_of(self, message: CallMessage, text: str) -> str:
        """Return the prompt of a path, given what the text that calls it has seen, its own prompt included."""
        return self.prompt.replace("{message}", message.text)

    def result(self, text: str) -> str | None:
        """Return the text that a path returns, given its own text; None: nothing."""
        opening, closing = self.returned
        if not closing:
            return text
        inside, tag, _ = text.rpartition(closing)
        if not tag:
            return text  # it was ended before
        return inside.rpartition(opening)[2] if opening else inside

    def joined_text(self, returned: Sequence[Returned]) -> str:
        """Return the text that stands for what the paths of a call have returned."""
        joined = self.around[0]
        for (number, message), text in returned:
            values = {"number": number, "message": message, "text": text or ""}
            for part in re.split(r"(\{number\}|\{message\}|\{text\})", self.joined):
                joined += values.get(part.strip("{}"), part) if part.startswith("{") else part
        return joined + self.around[1]


def _numbered(tag: str, kind: str = "") -> str:
    """Return a pattern of a tag in which `{number}` is a number."""
    name = f"number_{kind}" if kind else "number"
    return re.escape(tag).replace(re.escape("{number}"), f"(?P<{name}>{NUMBER})", 1)


@dataclass(frozen=True)
class CountdownDialect(CallDialect):
    """Format of the models of Adaptive Parallel Reasoning, which search for arithmetic expressions (Countdown).

    As in github.com/Parallel-Reasoning/APR, src/eval/eval_apr.py and tinyrl/rollout/apr_utils.py: the prompt of a path
    is the state of the node that it searches, and a path returns the operations that have reached the goal. Where a
    model writes `<Sub Searches>`, the tag that opens a call replaces it.
    """

    misspelled: ClassVar[str] = "<Sub Searches>"

    call: tuple[str, str] = ("<Calling Sub Searches>", "<End Calling Sub Searches>")
    around: tuple[str, str] = ("<Sub Searches>\n", "<End Sub Searches>\n")
    keeps_call: bool = False

    def split(self, inside: str, number: str, first_number: int) -> list[CallMessage]:
        """See `CallDialect.split`. A message is the number of a node."""
        nodes = re.findall(rf"<Start Sub Search .*> Moving to Node #({_NODE})", inside)
        return [CallMessage(str(index), node) for index, node in enumerate(nodes)]

    def prompt_of(self, message: CallMessage, text: str) -> str:
        """See `CallDialect.prompt_of`. A token budget stays before the state; a budget of calls does not."""
        state = self._states(text).get(message.text)
        if state is None:
            raise ValueError(f"the text has no node #{message.text}")
        target, numbers, operations = state
        budget = text.partition("Moving to Node")[0].rpartition("\n")[2]
        if not budget.startswith("Token Budget: "):
            budget = ""
        return (
            f"{budget}Moving to Node #{message.text}\n"
            f"Current State: {target}:[{', '.join(map(str, numbers))}], Operations: {operations}"
        )

    def result(self, text: str) -> str | None:
        """See `CallDialect.result`. It is what follows `Goal Reached` for the last time but one."""
        before, found, last = text.rpartition("Goal Reached")
        _, found_before, path = before.rpartition("Goal Reached")
        return (path + found + last).strip() if found_before else None

    def joined_text(self, returned: Sequence[Returned]) -> str:
        """See `CallDialect.joined_text`."""
        text, after = self.around
        for (number, node), path in returned:
            what = "No Solution" if path is None else "Goal Reached"
            text += f"<{what} in Sub Search {number} at level 1 at Node #{node}>\n"
            text += "" if path is None else f"{path}\n"
        return text + after

    @staticmethod
    def _states(text: str) -> dict[str, tuple[str, list[int], list[str]]]:
        """Return the target, numbers and operations of each node in a text; the first mention of a node counts."""
        states: dict[str, tuple[str, list[int], list[str]]] = {}
        lines = text.split("\n")
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            moved = re.search(rf"Moving to Node #({_NODE})$", line)
            state = re.match(r"Current State: (\d+):\[([\d, ]*)\], Operations: (\[[^\[\]]*\])", following)
            if moved and state:
                states[moved[1]] = state[1], _numbers(state[2]), _operations(state[3])
        for line in lines:
            made = re.search(rf"Generated Node #({_NODE}): (\d+):\[([\d, ]*)\] Operation: (.*)", line)
            if made and made[1] not in states:
                parent = states.get(made[1].rpartition(",")[0])
                if parent is not None:
                    states[made[1]] = made[2], _numbers(made[3]), [*parent[2], made[4].strip()]
        return states


_NODE = r"\d+(?:,\d+)*"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _operations(text: str) -> list[str]:
    try:
        return [str(operation) for operation in ast.literal_eval(text)]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the operations of a node must be a list of texts, got {text!r}") from error


CALL_DIALECTS: dict[str, CallDialect] = {
    "apr": CountdownDialect(),
    "asyncthink": CallDialect(
        call=("<FORK-{number}>", "</FORK-{number}>"),
        wait="<JOIN-{number}>",
        is_chat=True,
        returned=("<RETURN>", "</RETURN>"),
        joined="{text}</JOIN-{number}>",
    ),
}
"""Call dialects of papers (docs/modes/fork_join.md).

- `apr`: see `CountdownDialect`.
- `asyncthink`: the actions of section 2 of the paper, whose code is not public. The tag after the returned text is that
  of accounts of the paper.
"""

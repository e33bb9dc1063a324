"""Format of a parallel block, and its byte-level parser (PDOS, section 3, stage 1).

    ####Title one:......
    ####Title two:......
    ####%%%%

A block opens with the branch marker. A title ends with the title end, and an ellipsis follows in place of the branch's
text. The terminator closes the block. Whitespace may precede ellipses and markers.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

from hf_parallel.generation.modes.branches.token_text import WHITESPACE
from hf_parallel.generation.validation import check_int, check_text

OUTSIDE = "outside"
TITLE = "title"
ELLIPSIS = "ellipsis"
GAP = "gap"
DONE = "done"
BROKEN = "broken"
"""Phases of a parser: before a block, in a title, before or in an ellipsis, after one, after the block, malformed."""


@dataclass
class BlockFormat:
    """Format of a parallel block.

    Parameters
    ----------
    branch_marker : str
        Opens a block, and each branch of it.
    title_end : str
        Ends a title.
    ellipsis : str
        Stands for the text of a branch.
    terminator : str
        Closes a block. It may begin with the branch marker.
    min_branches, max_branches : int
        Limits of the number of branches of a block.
    max_title_tokens : int
        Limit of the length of a title, which exceeds it only while it repeats an earlier title.
    """

    branch_marker: str = "####"
    title_end: str = ":"
    ellipsis: str = "......"
    terminator: str = "####%%%%"
    min_branches: int = 2
    max_branches: int = 16
    max_title_tokens: int = 24

    def __post_init__(self) -> None:
        self.validate()

    @property
    def markers(self) -> dict[str, str]:
        """The four markers by name."""
        return {name: getattr(self, name) for name in ("branch_marker", "title_end", "ellipsis", "terminator")}

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        for name, text in self.markers.items():
            is_text = isinstance(text, str) and text != ""
            if not is_text or text != text.strip() or len(text.splitlines()) != 1:
                raise ValueError(f"{name} must be one line of text without spaces at its ends, got {text!r}")
            check_text(name, text)
        marker = self.branch_marker
        if marker.startswith(self.terminator):
            raise ValueError(f"terminator must not be a prefix of branch_marker {marker!r}, got {self.terminator!r}")
        if marker in self.title_end[:-1]:
            raise ValueError(
                f"title_end must not contain branch_marker {marker!r} before its end, got {self.title_end!r}"
            )
        check_int("min_branches", self.min_branches, at_least=1)
        check_int("max_branches", self.max_branches, at_least=self.min_branches)
        check_int("max_title_tokens", self.max_title_tokens, at_least=1)


class SkeletonParser:
    """Incremental parser of an answer, byte by byte up to the end of its first block."""

    def __init__(self, fmt: BlockFormat) -> None:
        self.format = fmt
        texts = (fmt.branch_marker, fmt.title_end, fmt.ellipsis, fmt.terminator)
        self.marker, self.title_end, self.ellipsis, self.terminator = (text.encode() for text in texts)
        # The terminator after the marker that it begins with, parsed as a title until it is complete; else empty.
        self.rest = self.terminator.removeprefix(self.marker) if self.terminator.startswith(self.marker) else b""
        self.phase = OUTSIDE
        self.error = ""  # why the block is malformed
        self.offset = 0  # number of bytes parsed
        self.title = b""  # the incomplete title
        self.title_tokens = 0
        self.titles: tuple[str, ...] = ()
        self.spans: tuple[tuple[int, int], ...] = ()  # for each title the bytes from its marker to its title end
        self.terminator_start = 0  # byte
        self.matched = b""  # parsed part of a marker, ellipsis or terminator
        self.spaced = False  # whether whitespace precedes the next marker or ellipsis
        self._marker_start = 0

    @property
    def is_open(self) -> bool:
        """Whether a block has begun and not ended."""
        return self.phase in (TITLE, ELLIPSIS, GAP)

    @property
    def may_branch(self) -> bool:
        """Whether another branch may follow."""
        return len(self.titles) < self.format.max_branches

    @property
    def may_close(self) -> bool:
        """Whether the terminator may follow."""
        return len(self.titles) >= self.format.min_branches

    @property
    def may_be_terminator(self) -> bool:
        """Whether the incomplete title may still become the terminator."""
        return bool(self.rest) and self.rest.startswith(self.title)

    @property
    def expected(self) -> list[bytes]:
        """Texts that may follow, optionally after whitespace; empty if any text may."""
        if self.phase == ELLIPSIS:
            return [self.ellipsis[len(self.matched) :]]
        if self.phase == GAP:
            texts = []
            if self.may_branch:
                texts.append(self.marker)
            if self.may_close:
                texts.append(self.terminator)
            return [text[len(self.matched) :] for text in texts if text.startswith(self.matched)]
        if self.phase == TITLE and self.may_close and self.may_be_terminator and (self.title or not self.may_branch):
            return [self.rest[len(self.title) :]]
        return []

    def forced(self, separator: bytes = b"") -> bytes:
        """Return the longest text that is certain to follow, with `separator` before each marker."""
        parser = self
        text = b""
        while parser.expected:
            piece = os.path.commonprefix(parser.expected)
            if not piece:
                break
            if parser.phase == GAP and not parser.matched and not parser.spaced:
                piece = separator + piece
            parser = parser.after(piece)
            text = text + piece
        return text

    def feed(self, text: bytes) -> None:
        """Parse the text of one token."""
        for byte in text:
            if self.phase in (DONE, BROKEN):
                break
            self.offset += 1
            getattr(self, f"_parse_{self.phase}")(bytes([byte]))
        if self.phase == TITLE and self.title:
            self.title_tokens += 1

    def after(self, text: bytes) -> SkeletonParser:
        """Return a copy that has parsed `text` too."""
        parser = copy.copy(self)
        parser.feed(text)
        return parser

    def _parse_outside(self, byte: bytes) -> None:
        self.matched = (self.matched + byte)[-len(self.marker) :]
        if self.matched == self.marker:
            self._open_branch()
            return
        while not self.marker.startswith(self.matched):
            self.matched = self.matched[1:]

    def _parse_title(self, byte: bytes) -> None:
        self.title += byte
        if self.may_be_terminator:
            if self.title == self.rest:
                self._close()
        elif not self.may_branch:
            self._fail(f"there are more than {self.format.max_branches} branches")
        elif self.title.endswith(self.title_end):
            self._end_title(self.title[: -len(self.title_end)].decode(errors="replace"))
        elif self.title.endswith(self.marker):
            self._fail("a title contains the branch marker")
        elif byte in b"\r\n":
            self._fail("a title does not end on its line")

    def _end_title(self, title: str) -> None:
        if not title.strip():
            self._fail("a title is empty")
        elif _normalized(title) in map(_normalized, self.titles):
            self._fail(f"the title {title!r} is repeated")
        else:
            self.titles += (title,)
            self.spans += ((self._marker_start, self.offset),)
            self.phase = ELLIPSIS
            self.matched = b""
            self.spaced = False

    def _parse_ellipsis(self, byte: bytes) -> None:
        if self._skip_or_match(byte):
            return
        if self.matched == self.ellipsis:
            self.phase = GAP
            self.matched = b""
            self.spaced = False
        elif not self.ellipsis.startswith(self.matched):
            self._fail(f"no ellipsis follows the title {self.titles[-1]!r}")

    def _parse_gap(self, byte: bytes) -> None:
        if self._skip_or_match(byte):
            return
        if self.matched == self.marker:
            self._open_branch()
        elif self.matched == self.terminator:
            self._marker_start = self.offset - len(self.terminator)
            self._close()
        elif not (self.marker.startswith(self.matched) or self.terminator.startswith(self.matched)):
            self._fail(f"neither a branch nor the terminator follows the title {self.titles[-1]!r}")

    def _skip_or_match(self, byte: bytes) -> bool:
        """Skip whitespace before a marker or ellipsis (True), or append to `matched`."""
        if not self.matched and byte in WHITESPACE:
            self.spaced = True
            return True
        self.matched += byte
        return False

    def _open_branch(self) -> None:
        if not (self.may_branch or self.rest):
            self._fail(f"there are more than {self.format.max_branches} branches")
            return
        self._marker_start = self.offset - len(self.marker)
        self.phase = TITLE
        self.title = b""
        self.title_tokens = 0
        self.matched = b""

    def _close(self) -> None:
        if self.may_close:
            self.terminator_start = self._marker_start
            self.phase = DONE
        else:
            count = len(self.titles)
            self._fail("there is 1 branch" if count == 1 else f"there are {count or 'no'} branches")

    def _fail(self, error: str) -> None:
        self.error = error
        self.phase = BROKEN


def _normalized(title: str) -> str:
    return " ".join(title.split()).casefold()

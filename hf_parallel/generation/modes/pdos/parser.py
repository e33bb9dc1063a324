"""The format of a parallel block, and the reader that follows it byte by byte (PDOS, section 3, stage 1).

    ####Title one:......
    ####Title two:......
    ####%%%%

A block opens with the branch marker; each title ends with the title end; behind it stands an ellipsis in place of what
is left out; the terminator closes the block. Whitespace may stand before the ellipsis and before a marker.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

from hf_parallel.generation.config import check_int
from hf_parallel.generation.modes.pdos.token_text import WHITESPACE

OUTSIDE, TITLE, ELLIPSIS, GAP, DONE, BROKEN = "outside", "title", "ellipsis", "gap", "done", "broken"
"""Where a reader stands: before a block, in a title, before or in an ellipsis, behind one, at either end.

In all but the last two the method of that name takes the next byte.
"""


@dataclass
class BlockFormat:
    """What a parallel block looks like.

    Parameters
    ----------
    branch_marker : str
        Opens a block, and each branch of it.
    title_end : str
        Ends a title.
    ellipsis : str
        Stands for what a branch will hold.
    terminator : str
        Closes a block. It may begin with the branch marker.
    min_branches, max_branches : int
        Branches of a block.
    min_title_tokens, max_title_tokens : int
        Length of a title; a longer one is let pass only to keep it from repeating another.
    """

    branch_marker: str = "####"
    title_end: str = ":"
    ellipsis: str = "......"
    terminator: str = "####%%%%"
    min_branches: int = 2
    max_branches: int = 16
    min_title_tokens: int = 1
    max_title_tokens: int = 24

    def __post_init__(self) -> None:
        self.validate()

    @property
    def markers(self) -> dict[str, str]:
        """The four markers by name."""
        return {name: getattr(self, name) for name in ("branch_marker", "title_end", "ellipsis", "terminator")}

    def validate(self) -> None:
        """Check every setting.

        Raises
        ------
        ValueError
            Naming the setting, what was given and what is allowed.
        """
        for name, text in self.markers.items():
            if not isinstance(text, str) or not text or text != text.strip() or len(text.splitlines()) != 1:
                raise ValueError(f"{name} must be one line of text without spaces at its ends, got {text!r}")
            check_unicode(name, text)
        if self.branch_marker.startswith(self.terminator):
            raise ValueError(
                f"terminator must not be how branch_marker {self.branch_marker!r} begins, got {self.terminator!r}"
            )
        if self.branch_marker in self.title_end[:-1]:
            raise ValueError(
                f"title_end must not hold branch_marker {self.branch_marker!r} before its end, got {self.title_end!r}"
            )
        check_int("min_branches", self.min_branches, at_least=1)
        check_int("max_branches", self.max_branches, at_least=self.min_branches)
        check_int("min_title_tokens", self.min_title_tokens, at_least=1)
        check_int("max_title_tokens", self.max_title_tokens, at_least=self.min_title_tokens)


class Skeleton:
    """Reads an answer up to the end of its first block.

    Attributes
    ----------
    phase : str
        `outside`, `title`, `ellipsis`, `gap`, `done` or `broken`.
    broken : str
        Why what was read is no block.
    offset : int
        Bytes read; what comes behind the block's end is not.
    title : bytes
        The title that is being read.
    title_tokens : int
        Tokens that it has.
    titles : tuple of str
        Those that are complete.
    pieces : tuple of (int, int)
        For each of them, where its marker begins and where its title end has ended, in bytes.
    closed_from : int
        Where the terminator begins.
    matched : bytes
        Part of a marker, ellipsis or terminator that has been read.
    spaced : bool
        Whether whitespace stands before the marker or ellipsis to come.
    """

    def __init__(self, fmt: BlockFormat) -> None:
        self.format = fmt
        texts = (fmt.branch_marker, fmt.title_end, fmt.ellipsis, fmt.terminator)
        self.marker, self.title_end, self.ellipsis, self.terminator = (text.encode() for text in texts)
        shared = self.terminator.startswith(self.marker)
        self.rest = self.terminator[len(self.marker) :] if shared else b""
        self.phase = OUTSIDE
        self.broken = ""
        self.offset = 0
        self.title = b""
        self.title_tokens = 0
        self.titles: tuple[str, ...] = ()
        self.pieces: tuple[tuple[int, int], ...] = ()
        self.closed_from = 0
        self.matched = b""
        self.spaced = False
        self._from = 0  # where the last marker began

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
        """Whether what looks like a title may be part of the terminator."""
        return bool(self.rest) and self.rest.startswith(self.title)

    @property
    def expected(self) -> list[bytes]:
        """Texts of which one must come next, whitespace before it aside; empty where any text may."""
        if self.phase == ELLIPSIS:
            return [self.ellipsis[len(self.matched) :]]
        if self.phase == GAP:
            wanted = [self.marker] * self.may_branch + [self.terminator] * self.may_close
            return [text[len(self.matched) :] for text in wanted if text.startswith(self.matched)]
        if self.phase == TITLE and self.may_close and self.may_be_terminator and (self.title or not self.may_branch):
            return [self.rest[len(self.title) :]]
        return []

    def forced(self, separator: bytes = b"") -> bytes:
        """All text that must come next as far as it is known, `separator` being put before each marker."""
        reader, text = self, b""
        while reader.expected:
            piece = os.path.commonprefix(reader.expected)
            if not piece:
                break
            if reader.phase == GAP and not reader.matched and not reader.spaced:
                piece = separator + piece
            reader, text = reader.after(piece), text + piece
        return text

    def feed(self, text: bytes) -> None:
        """Read on; `text` is that of one token, of which the title's length is counted."""
        for byte in text:
            if self.phase in (DONE, BROKEN):
                break
            self.offset += 1
            getattr(self, f"_{self.phase}")(bytes([byte]))
        if self.phase == TITLE and self.title:
            self.title_tokens += 1

    def after(self, text: bytes) -> Skeleton:
        """What the reader would be after `text`."""
        reader = copy.copy(self)
        reader.feed(text)
        return reader

    def _outside(self, byte: bytes) -> None:
        self.matched = (self.matched + byte)[-len(self.marker) :]
        if self.matched == self.marker:
            self._open_branch()
            return
        while not self.marker.startswith(self.matched):
            self.matched = self.matched[1:]

    def _title(self, byte: bytes) -> None:
        self.title += byte
        if self.may_be_terminator:
            if self.title == self.rest:
                self._close()
        elif not self.may_branch:
            self._break(f"there are more than {self.format.max_branches} branches")
        elif self.title.endswith(self.title_end):
            self._end_title(self.title[: -len(self.title_end)].decode(errors="replace"))
        elif self.title.endswith(self.marker):
            self._break("a title holds the branch marker")
        elif byte in b"\r\n":
            self._break("a title does not end on its line")

    def _end_title(self, title: str) -> None:
        if not title.strip():
            self._break("a title is empty")
        elif _plain(title) in map(_plain, self.titles):
            self._break(f"the title {title!r} is repeated")
        else:
            self.titles += (title,)
            self.pieces += ((self._from, self.offset),)
            self.phase, self.matched, self.spaced = ELLIPSIS, b"", False

    def _ellipsis(self, byte: bytes) -> None:
        if not self.matched and byte in WHITESPACE:
            self.spaced = True
            return
        self.matched += byte
        if self.matched == self.ellipsis:
            self.phase, self.matched, self.spaced = GAP, b"", False
        elif not self.ellipsis.startswith(self.matched):
            self._break(f"no ellipsis stands behind the title {self.titles[-1]!r}")

    def _gap(self, byte: bytes) -> None:
        if not self.matched and byte in WHITESPACE:
            self.spaced = True
            return
        self.matched += byte
        if self.matched == self.marker:
            self._open_branch()
        elif self.matched == self.terminator:
            self._from = self.offset - len(self.terminator)
            self._close()
        elif not any(text.startswith(self.matched) for text in (self.marker, self.terminator)):
            self._break(f"neither a branch nor the terminator follows the title {self.titles[-1]!r}")

    def _open_branch(self) -> None:
        if not (self.may_branch or self.rest):
            self._break(f"there are more than {self.format.max_branches} branches")
            return
        self._from = self.offset - len(self.marker)
        self.phase, self.title, self.title_tokens, self.matched = TITLE, b"", 0, b""

    def _close(self) -> None:
        if not self.may_close:
            number = f"{len(self.titles) or 'no'} branch{'es' * (len(self.titles) != 1)}"
            self._break(f"there {'is' if len(self.titles) == 1 else 'are'} {number}")
            return
        self.closed_from = self._from
        self.phase = DONE

    def _break(self, why: str) -> None:
        self.broken = why
        self.phase = BROKEN


def check_unicode(name: str, text: str) -> None:
    """Raise a `ValueError` unless a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text without lone surrogates, got {text!r}") from error


def _plain(title: str) -> str:
    """A title as it is compared."""
    return " ".join(title.split()).casefold()

"""Logits processors that force the format of a parallel block once one has opened (PDOS, section 3, stage 1).

Which tokens may come next is worked out on text: a token may if what it adds keeps the block well-formed, however the
tokenizer cuts the markers and whatever else a token holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor

from hf_parallel.generation.arguments import check_tokenizer
from hf_parallel.generation.config import check_int
from hf_parallel.generation.modes.pdos.parser import DONE, GAP, TITLE, BlockFormat, Skeleton
from hf_parallel.generation.modes.pdos.token_text import WHITESPACE, Vocabulary, vocabulary_of


class BlockMask:
    """Says which tokens may come next in a block.

    Parameters
    ----------
    fmt : BlockFormat
    vocabulary : Vocabulary
    banned : iterable of int
        Tokens that no title may hold, such as the end of a text; special ones are known.

    Raises
    ------
    ValueError
        If the vocabulary cannot spell a marker.
    """

    def __init__(self, fmt: BlockFormat, vocabulary: Vocabulary, banned: Iterable[int] = ()) -> None:
        markers = {name: text.encode() for name, text in fmt.markers.items()}
        for name, marker in markers.items():
            if vocabulary.spell(marker) is None:
                raise ValueError(f"{name} must be text that the tokenizer can spell, got {marker.decode()!r}")
        self.vocabulary = vocabulary
        whole = {token for token in vocabulary.special if vocabulary.texts[token] in markers.values()}
        self._banned = vocabulary.special.union(banned) - whole
        self._cached: dict[Any, torch.Tensor] = {}
        self._sort(Skeleton(replace(fmt, min_branches=1, max_branches=2**30)))
        line_end = vocabulary.spell(b"\n") or ()
        self._line_end = line_end[0] if len(line_end) == 1 else None

    def _sort(self, reader: Skeleton) -> None:
        """Tell tokens that may stand anywhere in a title from those that must be looked at."""
        self._plain = torch.zeros(len(self.vocabulary), dtype=torch.bool)  # nothing but text of a title
        self._blank = torch.zeros_like(self._plain)  # of these, whitespace alone
        self._ends: list[int] = []  # hold a title end, behind which the block may go on
        self._tails: list[int] = []  # begin within a character
        reader.feed(reader.marker)
        for token, text in enumerate(self.vocabulary.texts):
            if not text or token in self._banned:
                continue
            if 0x80 <= text[0] < 0xC0:
                self._tails.append(token)
            elif reader.title_end in text:
                if not reader.after(b"x" + text).broken:
                    self._ends.append(token)
            elif self._is_title(reader, text):
                self._plain[token] = True
                self._blank[token] = not text.decode(errors="replace").strip()

    @staticmethod
    def _is_title(reader: Skeleton, text: bytes) -> bool:
        markers = (reader.marker, reader.title_end, b"\n", b"\r")
        return _may_be_text(text) and not any(marker in text for marker in markers)

    def allowed(self, reader: Skeleton) -> torch.Tensor | None:
        """Tokens that may come next: bool `[vocabulary]` on the CPU, or None where any may."""
        if not reader.is_open:
            return None
        if not reader.expected:
            return self._in_title(reader)
        title = reader.title if reader.phase == TITLE else b""  # one that has ended makes no difference
        key = (reader.phase, reader.matched, title, reader.spaced, reader.may_branch, reader.may_close)
        if key not in self._cached:
            self._cached[key] = self._forced(reader)
        return self._cached[key]

    def _forced(self, reader: Skeleton) -> torch.Tensor:
        """Where the text that must come next is known."""
        first = {text[0] for text in reader.expected}
        allowed = self._fitting(reader, [t for byte in first for t in self.vocabulary.beginning_with(byte)])
        if reader.phase == GAP and not reader.matched and not reader.spaced and self._line_end is not None:
            allowed[self._line_end] = True
        return allowed

    def _in_title(self, reader: Skeleton) -> torch.Tensor:
        """In a title: any text that is no marker, until it ends."""
        unfinished = _unfinished(reader.title)
        allowed = self._continuing(reader, unfinished).clone() if unfinished else self._plain.clone()
        if not reader.title.strip():
            allowed &= ~self._blank
        begun = [reader.rest[len(reader.title) :]] if reader.may_be_terminator else []
        begun += [reader.marker[-1:]] if not reader.title else []
        begun += [marker[n:] for marker in (reader.marker, reader.title_end) for n in _overlaps(reader.title, marker)]
        doubtful = [token for text in begun for token in self.vocabulary.beginning_with(text[0])] + self._ends
        allowed[doubtful] = self._fitting(reader, doubtful)[doubtful]
        if reader.title_tokens >= reader.format.max_title_tokens:
            ending = self._ending(reader)
            return ending if ending.any() else allowed & ~self._blank  # whitespace would not make a title new
        return allowed

    def _ending(self, reader: Skeleton) -> torch.Tensor:
        """Tokens that end the title here; none if it may not end."""
        met = max(_overlaps(reader.title, reader.title_end), default=0)
        wanted = reader.title_end[met:]
        ending = []
        if not reader.after(wanted).broken:
            for token in self.vocabulary.beginning_with(wanted[0]):
                text = self.vocabulary.texts[token].lstrip(b"" if met else WHITESPACE)
                if text.startswith(wanted) or wanted.startswith(text):
                    ending.append(token)
        return self._fitting(reader, ending)

    def _continuing(self, reader: Skeleton, unfinished: bytes) -> torch.Tensor:
        """Tokens that go on with the character in the middle of which a title stands."""
        if unfinished not in self._cached:
            allowed = self._cached[unfinished] = torch.zeros_like(self._plain)
            for token in self._tails:
                allowed[token] = self._is_title(reader, unfinished + self.vocabulary.texts[token])
        return self._cached[unfinished]

    def _fitting(self, reader: Skeleton, tokens: Sequence[int]) -> torch.Tensor:
        allowed = torch.zeros_like(self._plain)
        allowed[[token for token in tokens if self._fits(reader, token)]] = True
        return allowed

    def _fits(self, reader: Skeleton, token: int) -> bool:
        """Whether a token keeps the block well-formed, gets on with it, and leads nowhere that cannot be spelled."""
        text, in_title = self.vocabulary.texts[token], reader.phase == TITLE
        after = reader.after(text)
        ended = len(after.titles) - len(reader.titles)
        if after.broken or token in self._banned or not (text.strip(WHITESPACE) or self._is_inside(reader, after)):
            return False
        if not _may_be_text(_unfinished(reader.title if in_title else reader.matched) + text):
            return False
        if ended > in_title or not self._is_clear(reader, after, text):  # a title of one token is not known to be new
            return False
        if ended and reader.title_tokens + _adds_to(reader.title, after.titles[-1]) < reader.format.min_title_tokens:
            return False
        if not after.expected:  # any text, unless in a marker that may not come here
            return after.phase in (TITLE, DONE)
        return any(self.vocabulary.spell(rest) for rest in after.expected)

    @staticmethod
    def _is_inside(reader: Skeleton, after: Skeleton) -> bool:
        """Whether whitespace that led from one to the other is part of a title or a marker."""
        if reader.phase == TITLE:
            return bool(reader.title.strip(WHITESPACE)) or after.may_be_terminator
        return bool(reader.matched)

    @staticmethod
    def _is_clear(reader: Skeleton, after: Skeleton, text: bytes) -> bool:
        """Whether nobody could take what `text` leads to for something else: a marker one byte later, a terminator."""
        if after.phase == DONE:
            return not _overshoots(after.rest or after.terminator, text[after.offset - reader.offset :])
        if reader.phase == TITLE and reader.expected and not after.expected:  # no longer the terminator
            return False
        if after.phase != TITLE or not after.title:
            return True
        if after.may_be_terminator:
            return after.may_close
        begins = reader.phase != TITLE or not reader.title
        return not (begins and _overshoots(after.marker, after.title))


_made: WeakKeyDictionary[Vocabulary, dict[Any, BlockMask]] = WeakKeyDictionary()


def mask_of(fmt: BlockFormat, vocabulary: Vocabulary, banned: Iterable[int] = ()) -> BlockMask:
    """The mask of a format, made once; see `BlockMask`."""
    masks = _made.setdefault(vocabulary, {})
    key = (*(getattr(fmt, f.name) for f in fields(BlockFormat)), frozenset(banned))
    if key not in masks:
        masks[key] = BlockMask(fmt, vocabulary, key[-1])
    return masks[key]


class ParallelBlockLogitsProcessor(LogitsProcessor):
    """Forces a parallel block that a model has opened to be well-formed, under plain `generate`.

    From the first branch marker that a row generates: a title, the ellipsis, the next branch marker or the terminator.
    Text outside of blocks is left alone. A processor serves one call of `generate`.

    Parameters
    ----------
    tokenizer
        Of the model.
    fmt : BlockFormat, optional
        Markers and bounds; or give the settings themselves as keyword arguments.
    prompt_length : int, optional
        Length of the padded prompts, in which nothing is looked for. Default: what the first call shows.

    Examples
    --------
    >>> processor = hf_parallel.ParallelBlockLogitsProcessor(tokenizer, max_branches=8)
    >>> model.generate(**prompt, logits_processor=[processor])
    """

    def __init__(
        self, tokenizer: Any, fmt: BlockFormat | None = None, prompt_length: int | None = None, **settings: Any
    ) -> None:
        check_tokenizer(tokenizer)
        if fmt is not None and (settings or not isinstance(fmt, BlockFormat)):
            raise ValueError(f"give a BlockFormat or its settings, got fmt={fmt!r} and {sorted(settings)}")
        if prompt_length is not None:
            check_int("prompt_length", prompt_length, at_least=0)
        self.tokenizer = tokenizer
        self.format = BlockFormat(**settings) if fmt is None else fmt
        self.prompt_length = prompt_length
        self._mask: BlockMask | None = None
        self._read: dict[int, tuple[list[int], Skeleton]] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]` with those of tokens that may not come next at minus infinity."""
        if self._mask is None or len(self._mask.vocabulary) != scores.shape[-1]:
            self._mask = mask_of(self.format, vocabulary_of(self.tokenizer, scores.shape[-1]))
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        rows = input_ids[:, self.prompt_length :].tolist()
        return force(scores, [self._mask.allowed(self._reader(i, tokens)) for i, tokens in enumerate(rows)])

    def _reader(self, row: int, tokens: list[int]) -> Skeleton:
        """A reader that has read all tokens of a row; what it read at the last step is not read again."""
        read, reader = self._read.get(row, ([], Skeleton(self.format)))
        if tokens[: len(read)] != read:
            read, reader = [], Skeleton(self.format)
        assert self._mask is not None
        for token in tokens[len(read) :]:
            text, before = self._mask.vocabulary.texts[token], reader.offset
            reader.feed(text)
            if reader.phase == DONE:
                left = text[reader.offset - before :]
                reader = Skeleton(self.format)
                reader.feed(left)
        self._read[row] = (tokens, reader)
        return reader


def force(scores: torch.Tensor, allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Forbid all tokens but those that a row is allowed.

    Parameters
    ----------
    scores : [rows, vocabulary]
    allowed : sequence of bool [vocabulary], or None
        None: the row is left alone.

    Returns
    -------
    torch.Tensor
        `[rows, vocabulary]`; a row all of whose allowed tokens were forbidden already gets them at equal scores.
    """
    forced = scores.clone()
    for row, mask in enumerate(allowed):
        if mask is not None:
            mask = mask.to(scores.device)
            masked = scores[row].masked_fill(~mask, -torch.inf)
            if torch.isneginf(masked).all():
                masked = torch.zeros_like(masked).masked_fill(~mask, -torch.inf)
            forced[row] = masked
    return forced


def _may_be_text(text: bytes) -> bool:
    """Whether bytes are UTF-8, or become it when the last character is complete."""
    missing = _missing(text)
    return any(_is_text(text + bytes([byte]) * missing) for byte in (0x80, 0xBF))


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _missing(text: bytes) -> int:
    """How many bytes the last character of a text lacks."""
    for n, byte in enumerate(text[:-4:-1], start=1):
        if byte >= 0xC0:
            return max(2 + (byte >= 0xE0) + (byte >= 0xF0) - n, 0)
        if byte < 0x80:
            break
    return 0


def _unfinished(text: bytes) -> bytes:
    """The bytes of a character that a text ends in the middle of."""
    if not _missing(text):
        return b""
    return text[max(text.rfind(bytes([byte])) for byte in text[-3:] if byte >= 0xC0) :]


def _overlaps(text: bytes, marker: bytes) -> list[int]:
    """How many bytes of a marker a text may end with the beginning of."""
    return [n for n in range(1, len(marker)) if text.endswith(marker[:n])]


def _overshoots(marker: bytes, behind: bytes) -> bool:
    """Whether a marker may as well begin one byte later, as with five `#` for `####`."""
    return (marker + behind)[1:].startswith(marker)


def _adds_to(begun: bytes, title: str) -> bool:
    """Whether a title has text besides what had been read of it."""
    return bool(title.encode()[len(begun) :].strip())

"""Logits processors that force the format of a parallel block once one has opened (PDOS, section 3, stage 1).

A token is allowed if its text keeps the block well-formed, however the tokenizer splits the markers.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from hf_parallel.detokenizer import check_tokenizer
from hf_parallel.generation.modes.branches.forcing import force
from hf_parallel.generation.modes.branches.token_text import WHITESPACE, Vocabulary, get_vocabulary
from hf_parallel.generation.modes.pdos.parser import DONE, GAP, TITLE, BlockFormat, SkeletonParser
from hf_parallel.generation.validation import check_int


class BlockMask:
    """Masks of the tokens that may follow in a block.

    Titles contain neither special tokens nor `banned` ones. A marker that cannot be encoded raises a `ValueError`.
    """

    def __init__(self, fmt: BlockFormat, vocabulary: Vocabulary, banned: Iterable[int] = ()) -> None:
        markers = {name: text.encode() for name, text in fmt.markers.items()}
        for name, marker in markers.items():
            if vocabulary.encode(marker) is None:
                raise ValueError(f"{name} must be text that the tokenizer can encode, got {marker.decode()!r}")
        self.vocabulary = vocabulary
        whole = {token for token in vocabulary.special if vocabulary.texts[token] in markers.values()}
        self._banned = vocabulary.special.union(banned) - whole
        self._cached: dict[object, torch.Tensor] = {}
        self._classify(SkeletonParser(replace(fmt, min_branches=1, max_branches=2**30)))
        line_end = vocabulary.encode(b"\n") or ()
        self._line_end = line_end[0] if len(line_end) == 1 else None

    def _classify(self, parser: SkeletonParser) -> None:
        """Separate tokens that may occur anywhere in a title from those that depend on the context."""
        self._plain = torch.zeros(len(self.vocabulary), dtype=torch.bool)  # title text only
        self._blank = torch.zeros_like(self._plain)  # whitespace only
        self._ends: list[int] = []  # contain a title end
        self._continuations: list[int] = []  # begin inside a character
        parser.feed(parser.marker)
        for token, text in enumerate(self.vocabulary.texts):
            if not text or token in self._banned:
                continue
            if 0x80 <= text[0] < 0xC0:
                self._continuations.append(token)
            elif parser.title_end in text:
                if not parser.after(b"x" + text).error:
                    self._ends.append(token)
            elif self._is_title(parser, text):
                self._plain[token] = True
                self._blank[token] = not text.decode(errors="replace").strip()

    @staticmethod
    def _is_title(parser: SkeletonParser, text: bytes) -> bool:
        markers = (parser.marker, parser.title_end, b"\n", b"\r")
        return _is_utf8_prefix(text) and not any(marker in text for marker in markers)

    def allowed(self, parser: SkeletonParser) -> torch.Tensor | None:
        """Return a mask of the tokens that may follow, bool `[vocabulary]` on the CPU, or None if any may."""
        if not parser.is_open:
            return None
        if not parser.expected:
            return self._allowed_in_title(parser)
        title = parser.title if parser.phase == TITLE else b""  # a complete title does not affect the mask
        key = (parser.phase, parser.matched, title, parser.spaced, parser.may_branch, parser.may_close)
        if key not in self._cached:
            tokens: list[int] = []
            for first_byte in {text[0] for text in parser.expected}:
                tokens += self.vocabulary.beginning_with(first_byte)
            mask = self._fitting(parser, tokens)
            if parser.phase == GAP and not parser.matched and not parser.spaced and self._line_end is not None:
                mask[self._line_end] = True
            self._cached[key] = mask
        return self._cached[key]

    def _allowed_in_title(self, parser: SkeletonParser) -> torch.Tensor:
        title = parser.title
        incomplete = _incomplete_character(title)
        allowed = (self._completing(parser, incomplete) if incomplete else self._plain).clone()
        if not title.strip():
            allowed &= ~self._blank
        continued = []  # what completes a marker that the title may have begun
        if parser.may_be_terminator:
            continued.append(parser.rest[len(title) :])
        if not title:
            continued.append(parser.marker[-1:])
        for marker in (parser.marker, parser.title_end):
            continued += [marker[length:] for length in _overlaps(title, marker)]
        uncertain = list(self._ends)
        for text in continued:
            uncertain += self.vocabulary.beginning_with(text[0])
        allowed[uncertain] = self._fitting(parser, uncertain)[uncertain]
        if parser.title_tokens < parser.format.max_title_tokens:
            return allowed
        ending = self._ending(parser)
        if ending.any():
            return ending
        return allowed & ~self._blank  # whitespace would not make the title unique

    def _ending(self, parser: SkeletonParser) -> torch.Tensor:
        """Mask of the tokens that end the title; empty if it may not end here."""
        matched = max(_overlaps(parser.title, parser.title_end), default=0)
        missing = parser.title_end[matched:]
        ending = []
        if not parser.after(missing).error:
            for token in self.vocabulary.beginning_with(missing[0]):
                text = self.vocabulary.texts[token]
                if not matched:
                    text = text.lstrip(WHITESPACE)
                if text.startswith(missing) or missing.startswith(text):
                    ending.append(token)
        return self._fitting(parser, ending)

    def _completing(self, parser: SkeletonParser, incomplete: bytes) -> torch.Tensor:
        """Mask of the tokens that continue an incomplete character."""
        if incomplete not in self._cached:
            allowed = torch.zeros_like(self._plain)
            self._cached[incomplete] = allowed
            for token in self._continuations:
                allowed[token] = self._is_title(parser, incomplete + self.vocabulary.texts[token])
        return self._cached[incomplete]

    def _fitting(self, parser: SkeletonParser, tokens: Sequence[int]) -> torch.Tensor:
        allowed = torch.zeros_like(self._plain)
        allowed[[token for token in tokens if self._fits(parser, token)]] = True
        return allowed

    def _fits(self, parser: SkeletonParser, token: int) -> bool:
        """Whether a token makes progress in a well-formed block that can still be completed."""
        text = self.vocabulary.texts[token]
        in_title = parser.phase == TITLE
        after = parser.after(text)
        if after.error or token in self._banned:
            return False
        if not text.strip(WHITESPACE) and not _is_inside(parser, after):
            return False
        incomplete = _incomplete_character(parser.title if in_title else parser.matched)
        if not _is_utf8_prefix(incomplete + text):
            return False
        whole_title = len(after.titles) - len(parser.titles) > in_title  # which may be a repeated one
        if whole_title or not _is_unambiguous(parser, after, text):
            return False
        if not after.expected:  # any text may follow; in another phase, a marker begins that may not occur
            return after.phase in (TITLE, DONE)
        return any(self.vocabulary.encode(expected) for expected in after.expected)


_masks: WeakKeyDictionary[Vocabulary, dict[object, BlockMask]] = WeakKeyDictionary()


def get_block_mask(fmt: BlockFormat, vocabulary: Vocabulary, banned: Iterable[int] = ()) -> BlockMask:
    """Return the cached mask of a format; see `BlockMask`."""
    masks = _masks.setdefault(vocabulary, {})
    key = (*(getattr(fmt, f.name) for f in fields(BlockFormat)), frozenset(banned))
    if key not in masks:
        masks[key] = BlockMask(fmt, vocabulary, key[-1])
    return masks[key]


class ParallelBlockLogitsProcessor(LogitsProcessor):
    """Forces parallel blocks that a model opens to be well-formed, under plain `generate`.

    Active from the branch marker that opens a block to its terminator; other text is unchanged. A processor
    serves one call of `generate`.

    Parameters
    ----------
    tokenizer
        Of the model.
    prompt_length : int, optional
        Length of the padded prompts, whose blocks are ignored. Default: the length at the first call.
    **settings
        Of the `BlockFormat`: markers and bounds.

    Examples
    --------
    >>> processor = hf_parallel.ParallelBlockLogitsProcessor(tokenizer, max_branches=8)
    >>> model.generate(**prompt, logits_processor=[processor])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int | None = None, **settings: Any) -> None:
        check_tokenizer(tokenizer)
        if prompt_length is not None:
            check_int("prompt_length", prompt_length, at_least=0)
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        self.format = BlockFormat(**settings)
        self._parsed: dict[int, tuple[list[int], SkeletonParser]] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[rows, vocabulary]`, minus infinity for forbidden tokens."""
        mask = get_block_mask(self.format, get_vocabulary(self.tokenizer, scores.shape[-1]))
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        allowed = []
        for row, tokens in enumerate(input_ids[:, self.prompt_length :].tolist()):
            parser = self._parser(mask, row, tokens)
            allowed.append(mask.allowed(parser))
        return force(scores, allowed)

    def _parser(self, mask: BlockMask, row: int, tokens: list[int]) -> SkeletonParser:
        """Return a parser that has parsed all tokens of a row, continuing the last step's parser."""
        parsed, parser = self._parsed.get(row, ([], SkeletonParser(self.format)))
        if tokens[: len(parsed)] != parsed:
            parsed = []
            parser = SkeletonParser(self.format)
        for token in tokens[len(parsed) :]:
            text = mask.vocabulary.texts[token]
            offset = parser.offset
            parser.feed(text)
            if parser.phase == DONE:
                following = text[parser.offset - offset :]
                parser = SkeletonParser(self.format)
                parser.feed(following)
        self._parsed[row] = (tokens, parser)
        return parser


def _is_inside(parser: SkeletonParser, after: SkeletonParser) -> bool:
    """Whether whitespace between two states is part of a title or a marker."""
    if parser.phase == TITLE:
        return bool(parser.title.strip(WHITESPACE)) or after.may_be_terminator
    return bool(parser.matched)


def _is_unambiguous(parser: SkeletonParser, after: SkeletonParser, text: bytes) -> bool:
    """Whether `text` cannot be parsed in another way: as a marker one byte later, or as a terminator."""
    if after.phase == DONE:
        return not _overshoots(after.rest or after.terminator, text[after.offset - parser.offset :])
    if parser.phase == TITLE and parser.expected and not after.expected:  # no longer the terminator
        return False
    if after.phase != TITLE or not after.title:
        return True
    if after.may_be_terminator:
        return after.may_close
    begins = parser.phase != TITLE or not parser.title
    return not (begins and _overshoots(after.marker, after.title))


def _is_utf8_prefix(text: bytes) -> bool:
    """Whether bytes are valid UTF-8, except that the last character may be incomplete."""
    try:
        _, length = codecs.utf_8_decode(text, "strict", False)
    except UnicodeDecodeError:
        return False
    return not (text[length : length + 1] == b"\xed" and text[length + 1 : length + 2] >= b"\xa0")  # begins a surrogate


def _incomplete_character(text: bytes) -> bytes:
    """Bytes of an incomplete character at the end of a text."""
    return text[codecs.utf_8_decode(text, "replace", False)[1] :]


def _overlaps(text: bytes, marker: bytes) -> list[int]:
    """Lengths of the proper prefixes of a marker that a text ends with."""
    return [n for n in range(1, len(marker)) if text.endswith(marker[:n])]


def _overshoots(marker: bytes, suffix: bytes) -> bool:
    """Whether a marker could also begin one byte later, as with five `#` for `####`."""
    return (marker + suffix)[1:].startswith(marker)

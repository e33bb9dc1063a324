"""Dialects: annotated text of models that work in parallel, as examples (docs/training.md).

A dialect is data: tags, the positions of branches, and how the text after them sees them. `parse` splits a text into
sequential pieces and regions of branches; `layout` lays them out in blocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import decode
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call_dialects import CALL_DIALECTS, CallDialect
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.dialects import DIALECTS, AnyDialect, Dialect, SkeletonDialect
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.validation import check_text


def get_dialect(dialect: str | AnyDialect | ParallelConfig) -> Dialect | SkeletonDialect:
    """Return a dialect by name (a mode or a paper), or from the settings of a mode.

    Raises `ValueError` for an unknown name, for the settings of a mode that writes no annotated text, and for a
    `CallDialect`, whose paths are texts of their own.
    """
    known: AnyDialect | None = None
    if isinstance(dialect, ParallelConfig):
        if dialect.traits.dialect is None:
            raise ValueError(f"the mode {dialect.mode!r} writes no annotated text: its settings are no dialect")
        known = dialect.traits.dialect(dialect)
    elif isinstance(dialect, AnyDialect):
        known = dialect
    elif isinstance(dialect, str):
        known = DIALECTS.get(dialect) or CALL_DIALECTS.get(dialect)
    if isinstance(known, CallDialect):
        raise ValueError(
            f"dialect={dialect!r} has no text that holds its paths: train on each path, and on the text that calls it, "
            "as ordinary examples"
        )
    if known is not None:
        return known
    modes = {name for name, cls in MODES.items() if cls.traits.dialect is not None}
    if not isinstance(dialect, str) or dialect not in modes:
        names = sorted(modes.union(DIALECTS))
        raise ValueError(f"dialect must be one of {names} or a Dialect, got {dialect!r}")
    return get_dialect(MODES[dialect]())


@dataclass
class Piece:
    """Sequential text, or the branches between two sequential texts, each a list of pieces."""

    text: str = ""
    branches: list[list[Piece]] = field(default_factory=list)


def parse(text: str, dialect: Dialect) -> list[Piece]:
    """Return the pieces of a text. Raises `ValueError`, with line and tag, if its tags are not balanced."""
    opened_by = {closing: opening for opening, closing in (dialect.region, dialect.branch)}
    pattern = _tag_pattern(dialect)
    is_separate = dialect.is_separate
    opener = dialect.branch[0] if is_separate else dialect.region[0]
    pieces: list[Piece] = [Piece()]
    stack: list[tuple[str, int, list[Piece]]] = []  # open tags, with their line and the pieces around them
    begin = 0
    for match in pattern.finditer(text):
        tag = match[0].removesuffix(dialect.gap)
        line = text.count("\n", 0, match.start()) + 1
        opens_branch = tag == dialect.branch[0]
        is_closing = tag in opened_by
        innermost = stack[-1][0] if stack else ""
        if is_separate and tag == dialect.region[0]:
            continue
        if is_separate:
            if opens_branch and not text[begin : match.start()].rstrip().endswith(dialect.region[0]):
                raise ValueError(f"line {line}: {tag} must follow {dialect.region[0]}")
        elif opens_branch and innermost != dialect.region[0]:
            raise ValueError(f"line {line}: {tag} must be directly in {dialect.region[0]}, but is in {_open(stack)}")
        if is_closing and innermost != opened_by[tag]:
            raise ValueError(f"line {line}: {tag} closes {_open(stack)}")
        if tag == dialect.region[0] and innermost == tag:
            raise ValueError(f"line {line}: {tag} must be in a branch, but is in {_open(stack)}")
        if tag == opener and stack and not dialect.is_nested:
            raise ValueError(f"line {line}: {tag} must not be in a branch, but is in {_open(stack)}")
        cut = match.start() if opens_branch else match.end()
        _append(pieces, text[begin:cut], is_separate)
        begin = cut
        if not is_closing:
            stack.append((tag, line, pieces))
        if opens_branch:
            pieces = [Piece()]
        elif is_closing:
            _, _, outer = stack.pop()
            if tag == dialect.branch[1]:
                if not outer[-1].branches:
                    outer.append(Piece())
                outer[-1].branches.append(pieces)
                pieces = outer
    if stack:
        tag, line, _ = stack[-1]
        raise ValueError(f"line {line}: {tag} is not closed")
    _append(pieces, text[begin:], is_separate)
    return pieces


def _tag_pattern(dialect: Dialect) -> re.Pattern[str]:
    """Return the pattern of the tags of a dialect. The gap after the end of a branch belongs to its tag."""
    patterns = []
    for tag in sorted(dialect.tags, key=len, reverse=True):
        pattern = re.escape(tag)
        if tag == dialect.branch[1]:
            pattern += f"(?:{re.escape(dialect.gap)})?"
        patterns.append(pattern)
    return re.compile("|".join(patterns))


def _append(pieces: list[Piece], text: str, keep: bool) -> None:
    """Append sequential text. Unless `keep`, whitespace between two branches is dropped: nothing would compute it."""
    if pieces[-1].branches:
        if not text.strip() and not (keep and text):
            return
        pieces.append(Piece())
    pieces[-1].text += text


def _open(stack: Sequence[tuple[str, int, list[Piece]]]) -> str:
    if not stack:
        return "nothing"
    tag, line, _ = stack[-1]
    return f"{tag} of line {line}"


@dataclass(frozen=True)
class Anchor:
    """Where text continues: what it sees, its position, and the token whose logits predict it (None: it is given)."""

    view: list[tuple[int, int, int]] = field(default_factory=list)
    position: int = 0
    last: int | None = None


class Builder:
    """Blocks, segments and targets of one text, in the form of `ParallelExample`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on_forced: bool) -> None:
        self.train_on_forced = train_on_forced
        self.encode = partial(encode, tokenizer)
        self.input_ids: list[int] = []
        self.position_ids: list[int] = []
        self.contents: list[list[int]] = []
        self.segments: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
        self.targets: list[tuple[int, int, int]] = []  # query, token, row
        self.new_row = partial(next, count(1))  # number of the next branch

    def append(self, at: Anchor, tokens: Sequence[int], row: int, is_target: bool = True) -> Anchor:
        """Append a block of tokens after a place. Return the place after it."""
        if not tokens:
            return at
        first = len(self.input_ids)
        num_tokens = len(tokens)
        end = at.position + num_tokens
        self.input_ids += tokens
        self.position_ids += range(at.position, end)
        indices = list(range(first, first + num_tokens))
        block = (len(self.contents), at.position, num_tokens)
        view = [*at.view, block]
        self.contents.append(indices)
        self.segments.append((first, num_tokens, at.position, view))
        if is_target:
            queries = [at.last, *indices[:-1]]
            for query, token in zip(queries, tokens, strict=True):
                if query is not None:
                    self.targets.append((query, token, row))
        return Anchor(view, end, indices[-1])


def lay_out(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    dialect: Dialect | SkeletonDialect,
    prompt: Sequence[int],
    train_on_forced: bool,
) -> Builder:
    """Return the blocks of a text after the tokens of a prompt; see `ParallelExample.from_text`."""
    check_text("text", text)
    for tag in dialect.tags:
        decoded = decode(tokenizer, encode(tokenizer, tag))
        if decoded.strip() != tag.strip():
            raise ValueError(f"the tokenizer cannot encode {tag!r} of the dialect: its tokens are those of {decoded!r}")
    builder = Builder(tokenizer, train_on_forced)
    at = builder.append(Anchor(), prompt, 0, is_target=False)
    if isinstance(dialect, Dialect):
        _place_pieces(builder, dialect, parse(text, dialect), at, 0)
    else:
        _place_answer(builder, dialect, text, at)
    if not builder.input_ids:
        raise ValueError("text and prompt must have at least one token")
    return builder


def _place_pieces(builder: Builder, dialect: Dialect, pieces: Sequence[Piece], at: Anchor, row: int) -> Anchor:
    """Append the pieces of `parse`. Each branch is a row of its own."""
    for piece in pieces:
        if not piece.branches:
            at = builder.append(at, builder.encode(piece.text), row)
            continue
        ends: list[Anchor] = []
        for first, *later in piece.branches:
            position = at.position
            if dialect.positions == "concatenated" and ends:
                position = ends[-1].position
            begin = Anchor(at.view, position, at.last)
            tag = dialect.opening_of(first.text)
            branch = builder.new_row()
            begin = builder.append(begin, builder.encode(tag), branch, builder.train_on_forced)
            content = [Piece(first.text.removeprefix(tag)), *later]
            ends.append(_place_pieces(builder, dialect, content, begin, branch))
        if dialect.is_separate:  # the text after it continues that before it
            continue
        if dialect.positions == "overlap":
            at = _moved(at, ends)
        elif dialect.positions == "reencode":  # the first branch follows the text before it
            tokens = _tokens(builder, dialect, piece.branches[1:])
            reencoded = builder.append(ends[0], tokens, row, is_target=False)
            at = Anchor(reencoded.view, reencoded.position)
        else:
            view = list(at.view)
            for end in ends:
                view += end.view[len(at.view) :]
            at = Anchor(view, max(end.position for end in ends))  # nothing predicts the token there
    return at


def _tokens(builder: Builder, dialect: Dialect, branches: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the tokens of branches, one after the other."""
    tokens: list[int] = []
    for branch in branches:
        tag = dialect.opening_of(branch[0].text)
        tokens += builder.encode(tag)
        texts = [piece.text for piece in branch]
        texts[0] = texts[0].removeprefix(tag)
        for piece, text in zip(branch, texts, strict=True):
            tokens += builder.encode(text)
            tokens += _tokens(builder, dialect, piece.branches)
    return tokens


def _moved(at: Anchor, ends: Sequence[Anchor]) -> Anchor:
    """Return the place after branches that are seen one after the other."""
    view = list(at.view)
    position = at.position
    for end in ends:
        shift = position - at.position
        view += [(block, start + shift, n) for block, start, n in end.view[len(at.view) :]]
        position += end.position - at.position
    return Anchor(view, position)


def _place_answer(builder: Builder, fmt: SkeletonDialect, text: str, at: Anchor) -> None:
    """Append an answer: a skeleton, which is dropped, its parts, and the text after them, any number of times."""
    begin = 0
    while True:
        opened = text.find(fmt.branch_marker, begin)
        if opened < 0:
            break
        line = text.count("\n", 0, opened) + 1
        closed = text.find(fmt.terminator, opened)
        if closed < 0:
            raise ValueError(f"line {line}: {fmt.branch_marker} opens a block that {fmt.terminator} does not close")
        at = builder.append(at, builder.encode(text[begin:opened]), 0)
        parts = _parts(fmt, text[opened:closed], line)
        at = _place_block(builder, fmt, parts, at)
        begin = closed + len(fmt.terminator)
    builder.append(at, builder.encode(text[begin:]), 0)


def _parts(fmt: SkeletonDialect, text: str, line: int) -> list[tuple[str, str]]:
    """Return prefix and content of each part of a block that begins in a line."""
    parts: list[tuple[str, str]] = []
    for part in text.split(fmt.branch_marker)[1:]:
        title, title_end, content = part.partition(fmt.title_end)
        if not title_end or "\n" in title:
            raise ValueError(f"line {line}: the title {title!r} does not end with {fmt.title_end!r} on its line")
        if not title.strip():
            raise ValueError(f"line {line}: the title before {fmt.title_end!r} is empty")
        parts.append((f"{fmt.branch_marker}{title}{fmt.title_end}", content))
        line += part.count("\n")
    if not parts:
        raise ValueError(f"line {line}: {fmt.terminator} closes nothing")
    return parts


def _place_block(builder: Builder, fmt: SkeletonDialect, parts: Sequence[tuple[str, str]], at: Anchor) -> Anchor:
    """Append a skeleton, a branch for each of its parts (prefix, content), and their joined text."""
    _place_skeleton(builder, fmt, [prefix for prefix, _ in parts], at)
    marker = builder.encode(fmt.branch_marker)[0]
    ends: list[Anchor] = []
    joined: list[int] = []
    for prefix, content in parts:
        row = builder.new_row()
        opening = builder.encode(prefix)
        tokens = builder.encode(content)
        begin = builder.append(at, opening, row, builder.train_on_forced)
        end = builder.append(begin, tokens, row)
        ends.append(end)
        builder.targets.append((end.last or 0, marker, row))
        joined += opening
        joined += tokens
    if fmt.join == "rotate":
        at = _moved(at, ends)
        joined = []
    closing = builder.encode(fmt.terminator)
    return builder.append(at, [*joined, *closing], 0, is_target=False)


def _place_skeleton(builder: Builder, fmt: SkeletonDialect, prefixes: Sequence[str], at: Anchor) -> None:
    """Append a skeleton. What the mode forces, ellipses and parts of markers, is no target."""
    # Ellipses as targets would contradict the branches: the first branch has the context of the first ellipsis
    marker = os.path.commonprefix([fmt.branch_marker, fmt.terminator])
    forced = builder.encode(f"{fmt.ellipsis}{fmt.branch_separator}{marker}")
    begun = ""
    for prefix in prefixes:
        at = builder.append(at, builder.encode(prefix.removeprefix(begun)), 0)
        at = builder.append(at, forced, 0, is_target=False)
        begun = marker
    closing = builder.encode(fmt.terminator.removeprefix(marker))
    at = builder.append(at, closing[:1], 0)
    builder.append(at, closing[1:], 0, is_target=False)

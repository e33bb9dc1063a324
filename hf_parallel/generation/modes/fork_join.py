"""`generation_mode="fork_join"`: models that were trained to think in parallel, in stock Transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.call_dialects import CALL_DIALECTS, CallDialect
from hf_parallel.generation.config import ModeTraits
from hf_parallel.generation.dialects import DIALECTS, AnyDialect, Dialect, SkeletonDialect, make_dialect
from hf_parallel.generation.modes.branches.calls import CallLane, CallRecords, CallRun
from hf_parallel.generation.modes.branches.lanes import Lane, OpenFork, Records
from hf_parallel.generation.modes.branches.output import BranchOutput, StageStats
from hf_parallel.generation.modes.branches.run import BranchRun
from hf_parallel.generation.modes.branches.settings import BranchRows, BranchSettings
from hf_parallel.generation.modes.branches.token_text import Vocabulary, ids, slice_tokens, text_of
from hf_parallel.generation.modes.pdos.config import PDOSConfig, PDOSRun
from hf_parallel.generation.outputs import ALWAYS
from hf_parallel.generation.validation import check_bool, check_choice, check_int
from hf_parallel.transcript.sections import TranscriptStyle

MAX_TITLE_TOKENS = 24
"""Maximum number of tokens of a title in a forced fork."""


@dataclass
class Path:
    """A path of a fork."""

    number: str
    """Its number, as the region's outline names it."""
    index: int
    """Its place among all paths of the answer, in the order in which they begin; streams name it `Path {index}`."""
    text: str
    """Its text, tags included, with the paths of its own forks in order."""
    tokens: list[int]
    """The tokens of this text."""
    ended_by: str
    """`tag` (its closing tag; in `pdos` the next marker), `eos`, `criterion` or `budget`. A path that ended otherwise
    gets the closing tag. A path that is a call may also be `cancelled`: the text that called it ended first."""
    forks: list[Fork] = field(default_factory=list)
    message: str = ""
    """What the call of the path says, in a `CallDialect`."""
    returned: str | None = None
    """What the path has returned, in a `CallDialect`; None: nothing."""


@dataclass
class Fork:
    """A fork in an answer or in a path."""

    start: int
    end: int
    """Slice of the paths' tokens in the tokens of the answer or path. In a `CallDialect`, of the tokens that stand for
    what the paths have returned; empty if the text has not waited for them."""
    paths: list[Path]


@dataclass
class ForkJoinOutput(BranchOutput):
    """Output of `generation_mode="fork_join"`.

    Attributes
    ----------
    forks : list of list of Fork
        The forks of each answer.
    transcripts : list of str
        Text of each answer, the thinking included and the paths of its forks in order.
    critical_path : list of int
        Decode steps of each answer: its own tokens, plus the longest path of each fork. Where a text is written on
        beside its paths, the longest chain of tokens that wait for each other.
    fallback : list of str or None
        Why an answer, or the last region that it opened, has not forked; None if all regions have forked.
    stages : dict of StageStats
        Cost of `skeleton` (the text up to the first fork), `branches` (the paths) and `continuation`; with `after` also
        of `thinking`.
    """

    item_names: ClassVar[Mapping[str, str]] = {"transcripts": "transcript"}

    forks: list[list[Fork]] = ALWAYS
    critical_path: list[int] = ALWAYS
    fallback: list[str | None] = ALWAYS
    stages: dict[str, StageStats] = ALWAYS

    def columns(self, prompt: int) -> list[str]:
        names: dict[int, str] = {}
        counts: Counter[str] = Counter()

        def add(forks: list[Fork], prefix: str) -> None:
            for fork in forks:
                for path in fork.paths:
                    number = path.number
                    if not number.startswith(prefix):
                        number = prefix + number
                    counts[number] += 1
                    name = f"Path {number}"
                    if counts[number] > 1:
                        name += f" ({counts[number]})"
                    names[path.index] = name
                    add(path.forks, f"{number}.")

        add(self.forks[prompt], "")
        return [name for _, name in sorted(names.items())]


class ForkJoinRows(BranchRows["ForkJoinConfig"]):
    """An answer and its paths."""

    style = TranscriptStyle("path", "answer", is_one_answer=True)


@dataclass
class ForkJoinConfig(BranchSettings[ForkJoinOutput]):
    """Answers of models that open parallel paths by themselves.

    The model writes an answer until it opens a fork in the format of its dialect. Its paths are decoded at the same
    time and joined as the model was trained to see them; then the answer continues. Text that is not well-formed stays
    text. `max_new_tokens` is the budget of the whole answer, paths and inserted tags included; if too
    few tokens are left, later paths end. With a `logits_cache`, an answer is replayed while logits are cached for all
    of its paths.

    Parameters
    ----------
    dialect : str, Dialect, SkeletonDialect or CallDialect
        `apar`, `apr`, `asyncthink`, `multiverse`, `npr`, `parallel_r1`, `pdos`, `threadweaver`, or a format of your
        own.
    after : str or compiled regular expression, optional
        Text that ends the thinking of a reasoning model, such as `"</think>"`. Until then, nothing is
        read as a fork or forced; then `opening` follows. If the prompt ends with it, there is no thinking. A regular
        expression ends the thinking with the first token after which it matches. Default: answers have no thinking.
    thinking_max_new_tokens : int, optional
        Maximum number of thinking tokens, which also count toward `max_new_tokens`. After them, the text `after` is
        inserted. Default: no limit.
    opening : str
        First text of every answer, for models that do not open a fork. If it contains one, its paths start at once.
    force : bool
        Whether every answer begins, after `opening`, with a fork of `paths` paths. The model writes the title of each,
        at most 24 tokens; the tags are inserted. For models that are not trained to fork. In `pdos`, blocks that the
        model opens later also have `paths` parts.
    paths : int
        Number of paths of a forced fork, and of forks in dialects without an outline, such as `parallel_r1`.
    path_max_new_tokens : int, optional
        Maximum number of tokens that a path generates. Default: the answer's.
    max_paths : int
        Maximum number of paths of an answer that are written at the same time; a fork with more stays text.
    max_depth : int
        Maximum depth of forks within paths; a deeper one stays text.
    """

    mode: ClassVar[str] = "fork_join"
    traits = ModeTraits(
        rows=ForkJoinRows,
        rows_setting="max_paths",
        keeps_states=True,
        streams_text=True,
        streams_tokens="when_final",
        dialect=lambda config: config.format,
    )

    dialect: str | Mapping[str, Any] | AnyDialect = "multiverse"
    force: bool = False
    paths: int = 2
    path_max_new_tokens: int | None = None
    max_paths: int = 32
    max_depth: int = 6

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        if isinstance(self.dialect, CallDialect) and self.dialect in CALL_DIALECTS.values():
            self.dialect = next(name for name, known in CALL_DIALECTS.items() if known == self.dialect)
        if type(self.dialect) in (Dialect, SkeletonDialect, CallDialect):
            self.dialect = asdict(self.dialect)  # type: ignore[arg-type] # as it is stored
        elif isinstance(self.dialect, str) and self.dialect.startswith("{"):  # of a command line
            try:
                self.dialect = json.loads(self.dialect)
            except ValueError as error:
                raise ValueError(f"dialect must be a name or JSON, got {self.dialect!r}: {error}") from error
        if not isinstance(self.dialect, Mapping | CallDialect):
            check_choice("dialect", self.dialect, sorted([*DIALECTS, *CALL_DIALECTS, PDOSConfig.mode]))
        if self.format.positions == "concatenated":
            raise ValueError("positions='concatenated' is for training: a path cannot start where another will end")
        check_bool("force", self.force)
        if self.force and (self.format.is_separate or isinstance(self.format, CallDialect)):
            raise ValueError(f"force=True needs a dialect whose paths are joined, got dialect={self.dialect!r}")
        for name in ("paths", "max_paths", "max_depth", "path_max_new_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        if self.force and self.paths > self.max_paths:
            raise ValueError(f"force needs paths of at most max_paths={self.max_paths}, got {self.paths}")
        if isinstance(self.format, SkeletonDialect):
            self._skeletons(self.format)
        if isinstance(self.format, CallDialect):
            end = self.format.waits_at(self.opening)
            if end is not None and self.opening[end:]:
                raise ValueError(f"opening must end where it waits for paths, got {self.opening[end:]!r} after that")
        if not isinstance(self.format, Dialect):
            return
        text, tag, after = self.opening.partition(self.format.fork_text)
        gap, _ = self.format.first_text("")
        if self.format.region[0] in text + tag and after not in ("", gap):
            raise ValueError(f"opening must end with {tag!r}, at which its paths start, got {after!r} after it")

    @property
    def format(self) -> AnyDialect:
        """The dialect."""
        if isinstance(self.dialect, AnyDialect):
            return self.dialect
        if self.dialect == PDOSConfig.mode:
            return PDOSConfig().format
        if isinstance(self.dialect, str):
            return CALL_DIALECTS.get(self.dialect) or DIALECTS[self.dialect]
        return make_dialect(self.dialect)

    @property
    def positions(self) -> str:
        """Positions of the dialect."""
        return self.format.positions

    @property
    def forces_format(self) -> bool:
        """See `BranchSettings.forces_format`."""
        return self.force

    @property
    def max_open_forks(self) -> int:
        """Maximum number of forks of an answer that are open at the same time."""
        if isinstance(self.format, CallDialect):
            return self.max_paths
        is_alone = not self.format.is_nested and not self.format.is_separate
        return 1 if is_alone else self.max_paths * self.max_depth

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of paths at the same time, beside the text that is written on where it does not wait."""
        return self.max_paths + (self.format.is_separate or isinstance(self.format, CallDialect))

    def make_run(self, call: GenerationCall) -> BranchRun:
        """See `ParallelConfig.make_run`."""
        if isinstance(self.format, Dialect):
            return ForkJoinRun(self, self.format, call)
        if isinstance(self.format, CallDialect):
            records = PathCalls(call, self.format.fork_text)
            limit = self.path_max_new_tokens
            return CallRun(self, self.format, call, records, limit, self.max_paths, self.max_depth)
        return PDOSRun(self._skeletons(self.format), call, PathRecords(call, self.format.branch_marker))

    def _skeletons(self, dialect: SkeletonDialect) -> PDOSConfig:
        """Return the settings of `pdos` for text with skeletons."""
        shared = {name: getattr(self, name) for name in BranchSettings.fields()}
        shared["opening"] += dialect.branch_marker if self.force else ""
        return PDOSConfig(
            **shared,
            **asdict(dialect),
            parallel_hint=self.force,
            min_branches=self.paths if self.force else min(2, self.max_paths),
            max_branches=self.paths if self.force else self.max_paths,
            branch_max_new_tokens=self.path_max_new_tokens,
        )


@dataclass
class _Titles:
    """What a lane has written of the titles of a forced fork: whole ones, and tokens of the next."""

    index: int = 0
    length: int = 0


class _TitleMask:
    """Masks of the tokens of a title, bool `[vocabulary]`: of the first, and of later ones, which may also end it.

    Titles contain no special token, no first character of a tag, and no line break.
    """

    def __init__(self, dialect: Dialect, after: str, vocabulary: Vocabulary) -> None:
        texts = [*dialect.tags, dialect.fork_text, dialect.outline, after, "\n"]
        stops = {text.strip()[:1] for text in texts} | {after[:1], "\n"}
        banned = [stop.encode() for stop in stops if stop]
        self.later = torch.zeros(len(vocabulary), dtype=torch.bool)
        self.first = self.later.clone()
        for token, text in enumerate(vocabulary.texts):
            is_whole = text.decode(errors="ignore").encode() == text != b""
            if is_whole and token not in vocabulary.special and not any(stop in text for stop in banned):
                self.later[token] = True
                self.first[token] = bool(text.strip())
            elif is_whole and after.startswith(text.decode()):
                self.later[token] = True


class ForkJoinRun(BranchRun):
    """One call of the mode, for text with tags."""

    def __init__(self, config: ForkJoinConfig, dialect: Dialect, call: GenerationCall) -> None:
        self.config: ForkJoinConfig
        self.dialect = dialect
        tag = self.dialect.branch[1].encode()
        closing = self.dialect.branch[1] + self.dialect.gap
        limit = config.path_max_new_tokens
        self.outline = self.dialect.planned(config.paths) if config.force else [""]
        opening = config.opening + self.outline[0]
        opening_name = "the plan of force" if config.force else "opening"
        records = PathRecords(call, self.dialect.fork_text)
        markers = [(tag, len(tag), "tag")]
        super().__init__(config, call, records, markers, closing, limit, opening, opening_name)
        for text in (self.dialect.fork_text, *self.dialect.branch, self.dialect.joined_text):
            self.tokens(text, "tags of the dialect")
        self.titles: _TitleMask | None = None
        if len(self.outline) > 1:
            self.titles = _TitleMask(self.dialect, self.outline[1], self.vocabulary)

    def new_reader(self, offset: int = 0) -> _Titles:
        """See `BranchRun.new_reader`."""
        return _Titles()

    def read(self, lane: Lane, text: bytes, ended: bool) -> None:
        """See `BranchRun.read`. Where a title of a forced fork ends, insert the text up to the next one."""
        is_opening = lane.num_samples == lane.first_sample
        if ended or is_opening or not self._is_planning(lane):
            return
        title = lane.reader
        following = self.outline[title.index + 1]  # from the end of this title to the next one
        title.length += 1
        is_end = title.length > 1 and following.startswith(text.decode())
        if is_end or title.length == MAX_TITLE_TOKENS:
            if is_end:
                following = following[len(text.decode()) :]
            tokens = self.tokens(following)
            title.index += 1
            title.length = 0
            if len(tokens) < lane.answer.left:
                self.insert(lane, tokens)
            else:
                lane.answer.fallback = "the budget is too small for the plan"
                title.index = len(self.outline)

    def _is_planning(self, lane: Lane) -> bool:
        """Whether a lane writes the titles of a forced fork."""
        if lane.parent is not None or lane.forks or lane.paths:
            return False
        return lane.reader.index < len(self.outline) - 1

    def allowed(self, lane: Lane) -> torch.Tensor | None:
        """See `BranchRun.allowed`."""
        if self.titles is None or not self._is_planning(lane):
            return None
        return self.titles.later if lane.reader.length else self.titles.first

    def find_fork(self, lane: Lane, known: int) -> OpenFork | None:
        """See `BranchRun.find_fork`."""
        dialect = self.dialect
        tag = dialect.fork_text.encode()
        start = lane.text.find(tag, max(known - len(tag) + 1, 0))
        if start < 0:
            return None
        end = start + len(tag)
        text = lane.text[:end].decode(errors="replace")
        begin = text.rfind(dialect.region[0])
        if begin < 0:
            return None
        numbers = dialect.numbers(text[begin:], 1 if dialect.is_separate else self.config.paths)
        reason = self._why_not(lane, len(numbers))
        if reason:
            lane.answer.fallback = reason
            return None
        gap, first_text = dialect.first_text("")
        if lane.text[end:].startswith(gap.encode()):
            end += len(gap.encode())
            gap = ""
        head = slice_tokens(lane.own, self.vocabulary, 0, end) + self.tokens(gap)
        if dialect.is_separate:
            *head, last = head
            number = str(lane.answer.num_paths + 1)
            path = [last, *self.tokens(first_text)]
            return OpenFork(head, [(number, path), ("", [last])], [], is_separate=True)
        paths = []
        for number in numbers:
            _, first_text = dialect.first_text(number)
            paths.append((number, self.tokens(first_text)))
        return OpenFork(head, paths, self.tokens(dialect.joined_text))

    def _why_not(self, lane: Lane, count: int) -> str:
        """Return why a lane may not fork; empty if it may."""
        if lane.path is not None and not self.dialect.is_nested:
            return "a path may not fork in this dialect"
        if lane.depth >= self.config.max_depth:
            return f"a fork would be deeper than max_depth={self.config.max_depth}"
        if not count:
            return "the region announces no path"
        if self.dialect.is_separate and lane.answer.num_paths >= self.config.max_open_forks:
            return f"an answer may have max_paths * max_depth={self.config.max_open_forks} paths in all"
        at_once = len(self.roots[lane.answer.output_row].writing()) - 1 + count
        if at_once > self.config.max_paths:
            return f"{at_once} paths at once are more than max_paths={self.config.max_paths}"
        return ""

    def path_end(self, text: bytes, end: int, cause: str) -> tuple[int, str]:
        """See `BranchRun.path_end`. A path without its closing tag gets it, and each the gap after it."""
        following = self.dialect.gap
        if cause != "tag":
            following = self.dialect.branch[1] + following
        if text[end:].startswith(following.encode()):
            return end + len(following.encode()), ""
        return end, following


class PathRecords(Records):
    """Forks of the answers, and their paths."""

    def __init__(self, call: GenerationCall, fork_text: str) -> None:
        self.call = call
        self.none = f"the model has not written {fork_text!r}"

    def record(self, lane: Lane, start: int, end: int) -> Fork:
        """See `Records.record`."""
        return Fork(start, end, [self._path(path) for path in lane.paths if not path.is_rest])

    def moved(self, forks: Sequence[Fork], offset: int) -> list[Fork]:
        """See `Records.moved`."""
        return [replace(fork, start=fork.start + offset, end=fork.end + offset) for fork in forks]

    def output(self, roots: Sequence[Lane]) -> tuple[type[ForkJoinOutput], dict[str, Any]]:
        """See `Records.output`."""
        forks = [root.forks for root in roots]
        steps = [root.steps for root in roots]
        fallback = [root.answer.fallback or (None if root.forks else self.none) for root in roots]
        return ForkJoinOutput, {"forks": forks, "critical_path": steps, "fallback": fallback}

    def _path(self, path: Lane) -> Path:
        text = text_of(path.tokens).decode(errors="replace")
        index = path.output_row // self.call.num_rows
        ended_by = "tag" if path.ended_by == "marker" else path.ended_by
        return Path(path.name, index, text, ids(path.tokens), ended_by, path.forks)


class PathCalls(PathRecords, CallRecords):
    """Calls in the answers, and the paths that they start."""

    def __init__(self, call: GenerationCall, fork_text: str) -> None:
        super().__init__(call, fork_text)
        self._forks: dict[CallLane, Fork] = {}
        self._paths: dict[CallLane, Path] = {}

    def called(self, paths: Sequence[CallLane], place: int) -> Fork:
        """See `CallRecords.called`."""
        fork = Fork(place, place, [])
        for path in paths:
            record = self._path(path)
            record.message = path.message.text
            fork.paths.append(record)
            self._forks[path] = fork
            self._paths[path] = record
        return fork

    def joined(self, path: CallLane, start: int, end: int) -> None:
        """See `CallRecords.joined`."""
        fork = self._forks[path]
        fork.start = start
        fork.end = end

    def ended(self, path: CallLane) -> None:
        """See `CallRecords.ended`."""
        record = self._paths[path]
        tokens = path.tokens[1:]  # the first is the last of its prompt
        record.text = text_of(tokens).decode(errors="replace")
        record.tokens = ids(tokens)
        record.ended_by = path.ended_by
        record.returned = path.result

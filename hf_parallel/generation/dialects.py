"""Dialects: formats of text that a model writes in parallel, for training data and for the modes that run it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from hf_parallel.generation.call_dialects import NUMBER, CallDialect
from hf_parallel.generation.validation import check_bool, check_choice, check_text, names_hint

POSITIONS = ("depth", "overlap", "concatenated", "reencode", "separate")
"""See `Dialect.positions`."""


@dataclass(frozen=True)
class Dialect:
    r"""Format of parallel text.

    Raises `ValueError` for tags that are empty or equal, and for unknown `positions`.

    Parameters
    ----------
    region : pair of str
        Tags that open and close a region with branches. Text in it, but outside of branches, is sequential. With
        `separate`, the tag after which a branch begins, and an empty text.
    branch : pair of str
        Tags that open and close a branch. They belong to the branch. A branch may contain regions.
    positions : str
        `depth`: all branches of a region start at the same position, and the text after them at the end of the longest.
        `overlap`: all start at the same position; the text after them sees them one after the other.
        `concatenated`: each starts where the one before it ends, though it does not see it; for training alone.
        `reencode`: all start at the same position; then they are computed again, one after the other, as plain text.
        `separate`: one branch starts; the text before it is continued at the same position, and never sees it.
    gap : str
        Text after the closing tag that belongs to the branch, such as a newline.
    fork : str
        Text at which the branches start, such as the end of an outline. Default: the tag that opens the region.
    outline : str
        Text before the number of each branch in the text of the region, such as `<Outline>` in `<Outline> 2: ...`.
        Empty: the caller says how many branches there are.
    opening : str
        First text of each branch, in which `{number}` is its number. Whitespace before its tag belongs to the text
        before the branches. Default: the opening tag.
    joined : str
        First text after the branches, which the model does not write. Default: the tag that closes the region.
    is_nested : bool
        Whether a branch may fork.
    plan : three str
        Text of a region up to the fork, as a model writes it: what comes before the outlines, an outline with
        `{number}` and `{title}`, and what comes after them. For models that are made to fork. Default: made of the
        tags, with each outline on a line.
    """

    region: tuple[str, str]
    branch: tuple[str, str]
    positions: str = "depth"
    gap: str = ""
    fork: str = ""
    outline: str = ""
    opening: str = ""
    joined: str = ""
    is_nested: bool = True
    plan: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        pairs = (self.region, self.branch)
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"region and branch must be pairs of tags, got {self.region!r} and {self.branch!r}")
        for name in ("region", "branch"):  # lists in JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        tags = (*self.region, *self.branch)
        if self.is_separate and (self.region[1] or self.fork or self.outline or self.joined or self.plan):
            raise ValueError("positions='separate' has no text that closes a region, plans branches or follows them")
        are_texts = all(isinstance(tag, str) for tag in tags)
        if not are_texts or len(set(self.tags)) != 4 - self.is_separate:
            count = "three" if self.is_separate else "four"
            raise ValueError(f"region and branch must be {count} different tags, got {tags!r}")
        for name in ("gap", "fork", "outline", "opening", "joined"):
            check_text(name, getattr(self, name))
        check_bool("is_nested", self.is_nested)
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {list(POSITIONS)}, got {self.positions!r}")
        if not (self.opening or self.branch[0]).lstrip().startswith(self.branch[0]):
            raise ValueError(f"opening must begin with {self.branch[0]!r}, got {self.opening!r}")
        if self.outline and not self.fork:
            raise ValueError(f"outline={self.outline!r} needs a fork, the text after the last outline, got ''")
        if self.plan is not None:
            if not isinstance(self.plan, list | tuple) or list(map(type, self.plan)) != [str] * 3:
                raise ValueError(f"plan must be three texts, got {self.plan!r}")
            object.__setattr__(self, "plan", tuple(self.plan))
            text = "x".join(self.planned(2))
            if not text.endswith(self.fork_text) or self.numbers(text, 2) != ["1", "2"]:
                raise ValueError(f"plan must announce its branches and end with {self.fork_text!r}, got {self.plan!r}")

    def planned(self, count: int) -> list[str]:
        """Return the text of a region with `count` branches up to the fork, split where their titles stand."""
        if self.plan is not None:
            opening, outline, closing = self.plan
        else:
            opening = self.region[0]
            outline = f"\n{self.outline} {{number}}:{{title}}" if self.outline else ""
            closing = f"\n{self.fork}" if self.fork else ""
        text = opening
        for number in range(1, count + 1):
            text += outline.replace("{number}", str(number))
        return (text + closing).split("{title}")

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that open and close a region and a branch; `separate` closes no region."""
        return tuple(tag for tag in (*self.region, *self.branch) if tag)

    @property
    def is_separate(self) -> bool:
        """Whether the text after a branch never sees it."""
        return self.positions == "separate"

    @property
    def fork_text(self) -> str:
        """Text at which the branches start."""
        return self.fork or self.region[0]

    @property
    def joined_text(self) -> str:
        """First text after the branches."""
        return self.joined or self.region[1]

    def first_text(self, number: str) -> tuple[str, str]:
        """Return the whitespace before the branches, and the first text of one of them."""
        text = (self.opening or self.branch[0]).replace("{number}", number)
        return text[: len(text) - len(text.lstrip())], text.lstrip()

    def opening_of(self, text: str) -> str:
        """Return the part of a branch's text that the model does not write: its opening, or its tag alone."""
        _, first_text = self.first_text("{number}")
        pattern = re.escape(first_text).replace(re.escape("{number}"), NUMBER)
        match = re.match(pattern, text)
        return match[0] if match else self.branch[0]

    def numbers(self, text: str, count: int) -> list[str]:
        """Return the numbers of the branches that a region's text announces; without an outline, 1 to `count`."""
        if not self.outline:
            return [str(number) for number in range(1, count + 1)]
        pattern = re.escape(self.outline) + rf"\s*({NUMBER})\s*:"
        return list(dict.fromkeys(re.findall(pattern, text)))


@dataclass(frozen=True)
class SkeletonDialect:
    """Format of text whose parts are announced by a skeleton of titles, which is dropped when the parts begin.

    A part begins with `branch_marker`, its title and `title_end`; in the skeleton `ellipsis` and `branch_separator`
    follow. `terminator` ends the parts. `join`: `reencode` or `rotate`, as in `PDOSConfig`. Parts do not fork.
    """

    is_nested: ClassVar[bool] = False
    is_separate: ClassVar[bool] = False

    branch_marker: str
    title_end: str
    ellipsis: str
    terminator: str
    join: str = "reencode"
    branch_separator: str = "\n"

    def __post_init__(self) -> None:
        check_choice("join", self.join, ("reencode", "rotate"))

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that a tokenizer must be able to encode."""
        return (self.branch_marker, self.title_end, self.ellipsis, self.terminator)

    @property
    def positions(self) -> str:
        """See `Dialect.positions`."""
        return "overlap" if self.join == "rotate" else "reencode"


AnyDialect: TypeAlias = Dialect | SkeletonDialect | CallDialect


def make_dialect(settings: Mapping[str, Any]) -> AnyDialect:
    """Return the dialect with some settings. Raises `ValueError` for an unknown setting, and for a missing one."""
    cls: type[AnyDialect] = Dialect
    if "branch_marker" in settings:
        cls = SkeletonDialect
    elif "call" in settings:
        cls = CallDialect
    names = sorted(field.name for field in fields(cls))
    for name in settings:
        if name not in names:
            raise ValueError(f"dialect has no {name!r}{names_hint(name, names)}")
    needed = [field.name for field in fields(cls) if field.default is MISSING]
    for name in needed:
        if name not in settings:
            raise ValueError(f"dialect must have {' and '.join(needed)}, {name} is missing in {settings!r}")
    return cls(**settings)


_DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
DIALECTS = {name: Dialect(**settings) for name, settings in _DATA.items()}
"""Dialects as the authors' code runs them: forks, inserted texts and positions (docs/modes/fork_join.md).

- `apar` (Liu et al., 2024): vllm/vllm/engine/llm_engine.py:404-420, training as in data/as_apar_format.py:51-57 and
  fastchat/fastchat/train/train.py:234-237. A thread ends with the end-of-sequence token.
- `multiverse` (Yang et al., 2025): Multiverse-Engine, sglang/python/sglang/srt/managers/schedule_batch.py:1560-1593 and
  scheduler.py:1541-1598. The training of Multiverse, train/utils.py:217-233, places paths one position earlier, and the
  text after them two.
- `npr` (Native Parallel Reasoner): the same engine in npr-rl/verl/workers/rollout, managers/schedule_batch.py:1624 and
  scheduler.py:1609; the block ends at `<takeaway>`, npr-rl/verl/workers/actor/mv_utils.py:222-232.
- `parallel_r1` (Unseen): verl/utils/dataset/parallel_thinking_sft_dataset.py:322-361, and inserted texts of
  verl/parallel_thinking_generation_v3/parallel_thinking_loop_v3.py:343,387-395.
- `threadweaver` (Lian et al., 2025): threadweaver_sft/src/simple_eval.py:493,650-661; positions in training as in
  prefix_tree_utils_v1.py:186-192.
"""

"""Settings of pdos, as its run reads them. `PDOSConfig` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_parallel.generation.modes.branches.settings import BranchSettings
from hf_parallel.generation.modes.pdos.output import PDOSOutput
from hf_parallel.generation.modes.pdos.parser import DONE, BlockFormat, SkeletonParser
from hf_parallel.generation.validation import (
    check_bool,
    check_choice,
    check_int,
    check_template,
    check_text,
    check_texts,
)


@dataclass
class PDOSSettings(BlockFormat, BranchSettings[PDOSOutput]):
    """Settings of blocks and branches: see `PDOSConfig`."""

    join: str = "reencode"
    parallel_hint: bool = True
    fill_in: bool = True
    max_blocks: int | None = None
    branch_max_new_tokens: int | None = None
    branch_stops: Sequence[str] = ()
    branch_separator: str = "\n"
    titles: Sequence[str] = ()
    format_prompt: str = (
        "Often an answer has parts that can be worked out without each other: items to check one after the other, "
        "aspects to look at, separate questions. Write such parts as one block. Each part is a line that begins with "
        "{branch_marker}, followed by a short title of its own and {title_end}. Behind the last part write "
        "{terminator}, and only then say what follows from the parts.\n\n"
        "First example. Task: Which of the three parcels, A of 4 kg, B of 9 kg and C of 6 kg, may be sent as a small "
        "parcel of at most 5 kg?\n"
        "Answer: I check each parcel.\n"
        "{branch_marker}Parcel A{title_end}{ellipsis}\n"
        "{branch_marker}Parcel B{title_end}{ellipsis}\n"
        "{branch_marker}Parcel C{title_end}{ellipsis}\n"
        "{terminator}\n"
        "So only parcel A may be sent as a small parcel.\n\n"
        "Second example. Task: Should our town build a tram line? Think of cost, noise and travel time.\n"
        "Answer: There are three aspects.\n"
        "{branch_marker}Cost{title_end}{ellipsis}\n"
        "{branch_marker}Noise{title_end}{ellipsis}\n"
        "{branch_marker}Travel time{title_end}{ellipsis}\n"
        "{terminator}\n"
        "All in all, the line is worth its cost.\n\n"
        "Third example. Task: Letters 1 and 2 are given above. Which of them says when the shop opens?\n"
        "Answer: I read both letters.\n"
        "{branch_marker}Letter 1{title_end}{ellipsis}\n"
        "{branch_marker}Letter 2{title_end}{ellipsis}\n"
        "{terminator}\n"
        "It is letter 2: the shop opens at nine.\n\n"
        "In these examples {ellipsis} stands for text that was left out. Where {ellipsis} follows a title, the part "
        "is written by somebody else: go on with the next title at once. Where nothing follows it, write the whole "
        "part, and no dots. Use titles that fit the task, leave no part out, and begin no other line with "
        "{branch_marker}."
    )

    def validate(self) -> None:
        BranchSettings.validate(self)
        BlockFormat.validate(self)
        check_choice("join", self.join, ("reencode", "rotate"))
        check_bool("parallel_hint", self.parallel_hint)
        check_bool("fill_in", self.fill_in)
        for name in ("max_blocks", "branch_max_new_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        check_texts("branch_stops", self.branch_stops)
        check_text("branch_separator", self.branch_separator)
        check_texts("titles", self.titles)
        self._check_block()
        check_template("format_prompt", self.format_prompt, **self.markers)

    def _check_block(self) -> None:
        """Raise `ValueError` unless the titles, if there are any, form a block."""
        parser, text = SkeletonParser(self), self.beginning.encode()
        parser.feed(text)
        complete = parser.phase == DONE and parser.offset == len(text)
        if self.titles and not (complete and parser.titles == tuple(self.titles)):
            why = parser.error or f"with opening={self.opening!r}, the titles would be {list(parser.titles)}"
            raise ValueError(f"titles must form one block after opening, got {self.titles!r}: {why}")

    @property
    def beginning(self) -> str:
        """First text of every answer: `opening`, and the block of `titles`, each on a line of its own."""
        if not self.titles:
            return self.opening
        gap = "\n" if self.opening and not self.opening[-1].isspace() else ""
        parts = "".join(f"{self.branch_marker}{title}{self.title_end}{self.ellipsis}\n" for title in self.titles)
        return f"{self.opening}{gap}{parts}{self.terminator}"

    @property
    def positions(self) -> str:
        """See `BranchSettings.positions`."""
        return "overlap" if self.join == "rotate" else "reencode"

    @property
    def positions_setting(self) -> str:
        """See `BranchSettings.positions_setting`."""
        return f"join={self.join!r}"

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of branches at the same time."""
        return self.max_branches

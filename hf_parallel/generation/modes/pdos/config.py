"""`generation_mode="pdos"`: independent parts of one answer decoded in parallel (Parallel Decoding in One Sequence)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModePrompt, ModeRows, ModeTraits, ParallelConfig, RowPlace
from hf_parallel.generation.modes.pdos.output import PDOSOutput
from hf_parallel.generation.modes.pdos.parser import DONE, BlockFormat, SkeletonParser
from hf_parallel.generation.modes.pdos.run import PDOSRun, TrunkFormatProcessor
from hf_parallel.generation.prompts import Chat, build_prompt
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import (
    check_bool,
    check_choice,
    check_int,
    check_template,
    check_text,
    check_texts,
)
from hf_parallel.transcript.sections import TranscriptStyle


class PDOSRows(ModeRows["PDOSConfig"]):
    """The trunk and its branches. A branch sees the trunk and itself."""

    style = TranscriptStyle("branch", "trunk")

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ModeRows.place`. Index 0 is the trunk, which spans the columns of all branches."""
        index, prompt = divmod(row, num_prompts)
        return RowPlace(prompt, index, index - 1 if index else None)

    def name(self, index: int) -> str:
        """Return the name of the trunk or of a branch."""
        return f"Branch {index}" if index else "Answer"


class PDOSPrompt(ModePrompt["PDOSConfig"]):
    """Instructions to write blocks. Branches start in the answer, so that there is no reasoning before it."""

    thinking = False

    def rules(self) -> str:
        """Return the `format_prompt` with the markers; empty without `parallel_hint`."""
        config = self.config
        return config.format_prompt.format(**config.markers) if config.parallel_hint else ""


@dataclass
class PDOSConfig(BlockFormat, ParallelConfig[PDOSOutput]):
    r"""Answers whose independent parts are generated in parallel.

    `max_new_tokens` is the budget of the returned answer, branches joined; a skeleton counts until its branches start.
    The branches of a block share the rest of the budget: each pass takes one token per branch, and if too few are left,
    later branches end.

    Parameters
    ----------
    branch_marker, title_end, ellipsis, terminator : str
        See `BlockFormat`, also for the bounds of branches and titles.
    join : str
        `reencode`: joined branches are prefilled again, so that each sees those before it (as in the paper). `rotate`:
        keys of the branches are rotated to their final positions instead.
    parallel_hint : bool
        Whether `pdos_prompt` asks for blocks, and logits processors force the format once a block has opened. If False,
        nothing is forced, and an answer without a well-formed block equals that of `generate`.
    fill_in : bool
        Whether forced text (ellipses followed by a `branch_separator`, branch markers, the terminator) is appended at
        once as soon as it is determined, instead of being generated.
    max_blocks : int, optional
        Maximum number of blocks; text after the last one is sequential. Default: any number.
    branch_max_new_tokens : int, optional
        Token budget of each branch. Default: that of the answer.
    branch_stops : list of str
        Texts that end a branch, such as a newline. The branch marker, the terminator and an end-of-sequence token do
        so too. Stops stay in the answer. A stop with only whitespace before it is ignored.
    branch_separator : str
        Appended to each branch that does not end with it. Empty: nothing is appended.
    opening : str
        First text of every answer, such as `"I check each of them.\n####"`, for models that do not open a block. Counts
        as part of the answer. If it contains a whole block, its branches start at once.
    titles : list of str
        Titles of the parts of every answer, for models that do not write them. The answer begins with `opening` and a
        block of these titles, whose branches start at once. Default: the model writes the titles.
    format_prompt : str
        Instructions of `pdos_prompt`; `{branch_marker}`, `{title_end}`, `{ellipsis}` and `{terminator}` are filled in.
    """

    mode: ClassVar[str] = "pdos"
    traits = ModeTraits(
        rows=PDOSRows,
        prompt=PDOSPrompt,
        streams_text=True,
        streams_tokens="when_final",
        text_markers={**BlockFormat().markers, "join": "reencode", "branch_separator": "\n"},
    )

    join: str = "reencode"
    parallel_hint: bool = True
    fill_in: bool = True
    max_blocks: int | None = None
    branch_max_new_tokens: int | None = None
    branch_stops: Sequence[str] = ()
    branch_separator: str = "\n"
    opening: str = ""
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
        """Check every setting; see `ParallelConfig.validate`."""
        ParallelConfig.validate(self)
        BlockFormat.validate(self)
        check_choice("join", self.join, ("reencode", "rotate"))
        check_bool("parallel_hint", self.parallel_hint)
        check_bool("fill_in", self.fill_in)
        for name in ("max_blocks", "branch_max_new_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        check_texts("branch_stops", self.branch_stops)
        for name in ("branch_separator", "opening"):
            check_text(name, getattr(self, name))
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

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer, and add a processor that forces the format after the caller's processors."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find blocks and branches")
        given = kwargs.get("logits_processor")
        if self.parallel_hint and (given is None or isinstance(given, list | tuple)):
            kwargs["logits_processor"] = LogitsProcessorList([*(given or ()), TrunkFormatProcessor()])

    def make_run(self, call: GenerationCall) -> PDOSRun:
        """See `ParallelConfig.make_run`."""
        return PDOSRun(self, call)

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of branches of a block."""
        return self.max_branches

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. An answer holds its branches, which are copied when they are joined."""
        return call.prompt_tokens + 2 * call.num_rows * call.max_new_tokens


def pdos_prompt(
    task: str | Chat, tokenizer: PreTrainedTokenizerBase, config: PDOSConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task with instructions to write independent parts as a parallel block (PDOS, section 3, appendix A).

    The instructions, with three examples, precede the task; with `parallel_hint=False` there are none. If the chat
    template has the variable `enable_thinking`, it is False by default, since branches start in the answer. Parameters,
    `chat_template_kwargs` included, return value and errors: see `build_prompt`.
    """
    return build_prompt(PDOSConfig, task, tokenizer, config, **settings)

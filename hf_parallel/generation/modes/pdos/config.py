"""`generation_mode="pdos"`: independent parts of one answer decoded in parallel (Parallel Decoding in One Sequence)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModePrompt, ModeTraits
from hf_parallel.generation.dialects import SkeletonDialect
from hf_parallel.generation.modes.branches.settings import BranchRows
from hf_parallel.generation.modes.pdos.run import PDOSRun, TrunkFormatProcessor
from hf_parallel.generation.modes.pdos.settings import PDOSSettings
from hf_parallel.generation.prompts import Chat, build_prompt
from hf_parallel.generation.settings import Arguments
from hf_parallel.transcript.sections import TranscriptStyle


class PDOSRows(BranchRows["PDOSConfig"]):
    """The trunk and its branches."""

    style = TranscriptStyle("branch", "trunk")


class PDOSPrompt(ModePrompt["PDOSConfig"]):
    """Instructions to write blocks. Branches start in the answer, so that there is no reasoning before it."""

    thinking = False

    def rules(self) -> str:
        """Return the `format_prompt` with the markers; empty without `parallel_hint`."""
        config = self.config
        return config.format_prompt.format(**config.markers) if config.parallel_hint else ""


@dataclass
class PDOSConfig(PDOSSettings):
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
        nothing is forced, and `generate` returns the same answer unless it contains a well-formed block.
    fill_in : bool
        Whether forced text (ellipses followed by a `branch_separator`, branch markers, the terminator) is appended at
        once as soon as it is determined, instead of being generated.
    max_blocks : int, optional
        Maximum number of blocks; text after the last one is sequential. Default: any number.
    branch_max_new_tokens : int, optional
        Token budget of each branch. Default: the answer's.
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
        keeps_states=True,
        streams_text=True,
        streams_tokens="when_final",
        dialect=lambda config: SkeletonDialect(
            **config.markers, join=config.join, branch_separator=config.branch_separator
        ),
    )

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer, and add a processor that forces the format after the caller's processors."""
        super().prepare(kwargs)
        given = kwargs.get("logits_processor")
        if self.parallel_hint and (given is None or isinstance(given, list | tuple)):
            kwargs["logits_processor"] = LogitsProcessorList([*(given or ()), TrunkFormatProcessor()])

    def make_run(self, call: GenerationCall) -> PDOSRun:
        return PDOSRun(self, call)


def pdos_prompt(
    task: str | Chat, tokenizer: PreTrainedTokenizerBase, config: PDOSConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task with instructions to write independent parts as a parallel block (PDOS, section 3, appendix A).

    The instructions, with three examples, precede the task; with `parallel_hint=False` there are none. If the chat
    template has the variable `enable_thinking`, it is False by default, since branches start in the answer. Parameters,
    `chat_template_kwargs` included, return value and errors: see `build_prompt`.
    """
    return build_prompt(PDOSConfig, task, tokenizer, config, **settings)

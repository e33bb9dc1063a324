"""Settings that modes with branches share."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LogitsProcessorList

from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ConfigT, ModeRows, OutputT, RowPlace
from hf_parallel.generation.decoding.replay.config import ReplayConfig
from hf_parallel.generation.modes.branches.forcing import FormatProcessor
from hf_parallel.generation.modes.branches.thinking import After, check_after
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import check_int, check_text
from hf_parallel.models.intercept.attention import UnsupportedModelError


class BranchRows(ModeRows[ConfigT]):
    """An answer and its branches. A branch sees the text before it, and itself."""

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ModeRows.place`. Index 0 is the answer, which spans the columns of all branches."""
        index, prompt = divmod(row, num_prompts)
        return RowPlace(prompt, index, index - 1 if index else None)

    def name(self, index: int) -> str:
        """Return the name of the answer or of a branch."""
        return f"{self.style.unit.capitalize()} {index}" if index else "Answer"


BATCH_DEPENDENT = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
"""Processors that index the prompts of a call by row, with the arguments of `generate` that create them."""


@dataclass
class BranchSettings(ReplayConfig[OutputT]):
    """Settings of an answer with branches: see the configs of the modes."""

    opening: str = ""
    after: After | None = None
    thinking_max_new_tokens: int | None = None

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        check_text("opening", self.opening)
        if self.after is not None:
            check_after("after", self.after)
        limit = self.thinking_max_new_tokens
        if limit is not None:
            check_int("thinking_max_new_tokens", limit, at_least=1)
            if not isinstance(self.after, str):
                raise ValueError(
                    f"thinking_max_new_tokens={limit} needs after to be a text, which is inserted at the limit, "
                    f"got {self.after!r}"
                )

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer, and add a processor that forces the format after the caller's processors."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find branches")
        processors = kwargs.get("logits_processor")
        if self.forces_format and (processors is None or isinstance(processors, list | tuple)):
            kwargs["logits_processor"] = LogitsProcessorList([*(processors or ()), FormatProcessor()])

    @property
    def forces_format(self) -> bool:
        """Whether a run forbids tokens; see `BranchRun.allowed`."""
        return False

    @property
    def positions(self) -> str:
        """Positions of branches, see `Dialect`."""
        raise NotImplementedError

    @property
    def positions_setting(self) -> str:
        """The setting that gives the positions, in error messages."""
        return f"positions={self.positions!r}"

    def check_call(self, call: GenerationCall) -> None:
        """Raise `UnsupportedModelError` if a model cannot place branches in this way, `ValueError` for a processor."""
        for processor in call.logits_processor:
            name = BATCH_DEPENDENT.get(type(processor).__name__)
            if name:
                raise ValueError(f"{name} cannot be honored by {self.mode}: branches are rows, but not prompts")
        reason = self._why_not(call, self.positions)
        if reason:
            raise UnsupportedModelError(f"{self.positions_setting} {reason}: use 'reencode'")

    def _why_not(self, call: GenerationCall, positions: str) -> str:
        """Return why a model cannot place paths in this way; empty if it can."""
        name = type(call.model).__name__
        capabilities = call.capabilities
        if positions == "overlap" and capabilities.rotary is None:
            return f"rotates keys to other positions ({capabilities.why_no_rotation})"
        if positions in ("depth", "overlap") and capabilities.mixers:
            mixer = capabilities.mixers[0].name
            return f"gives rows more than one sequence in order, but {name} keeps a state in {mixer}"
        if positions == "depth" and capabilities.has_window:
            return f"lets paths share positions, but the sliding windows of {name} count tokens"
        if positions == "depth" and capabilities.dense:
            return f"lets paths share positions, but {name} counts tokens in its own attention"
        return ""

    @property
    def max_open_forks(self) -> int:
        """Maximum number of forks of an answer that are open at the same time."""
        return 1

    def max_states(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_states`. An answer also has paused texts, ended branches that will be continued, and
        a block that keeps the state before it."""
        return super().max_states(call) + 2 * self.max_open_forks * call.num_rows

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. An answer holds its branches, which may be computed again when they are
        joined."""
        return call.prompt_tokens + 2 * call.num_rows * call.max_new_tokens

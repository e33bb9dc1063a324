"""`generation_mode="fork_join"`: models that were trained to think in parallel, in stock Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModeRows, ModeTraits, RowPlace
from hf_parallel.generation.modes.fork_join.run import ForkJoinRun
from hf_parallel.generation.modes.fork_join.settings import ForkJoinSettings
from hf_parallel.generation.settings import Arguments
from hf_parallel.transcript.sections import TranscriptStyle


class ForkJoinRows(ModeRows["ForkJoinConfig"]):
    """An answer and its paths. A path sees the text before its fork, and itself."""

    style = TranscriptStyle("path", "answer")

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ModeRows.place`. Index 0 is the answer, which spans the columns of all paths."""
        index, prompt = divmod(row, num_prompts)
        return RowPlace(prompt, index, index - 1 if index else None)

    def name(self, index: int) -> str:
        """Return the name of the answer or of a path."""
        return f"Path {index}" if index else "Answer"


@dataclass
class ForkJoinConfig(ForkJoinSettings):
    """Answers of models that open parallel paths by themselves.

    The model writes an answer until it opens a fork in the format of its dialect. The paths of the fork are decoded at
    the same time and then joined, as the model was trained to see them, and the answer goes on. Text that is not
    well-formed stays text. `max_new_tokens` is the budget of the whole answer, paths and inserted tags included; if too
    few tokens are left, later paths end.

    Parameters
    ----------
    dialect : str or Dialect
        `multiverse`, `npr`, `parallel_r1`, `threadweaver`, or a format of your own.
    opening : str
        First text of every answer, for models that do not open a fork. If it contains one, its paths start at once.
    paths : int
        Number of paths of a fork in dialects without an outline, such as `parallel_r1`.
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
        streams_text=True,
        streams_tokens="when_final",
        dialect=lambda config: config.format,
    )

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find forks and paths")

    def make_run(self, call: GenerationCall) -> ForkJoinRun:
        """See `ParallelConfig.make_run`."""
        return ForkJoinRun(self, call)

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of paths at the same time."""
        return self.max_paths

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. An answer holds its paths, which may be computed again when they join."""
        return call.prompt_tokens + 2 * call.num_rows * call.max_new_tokens

"""`generation_mode="fork_join"`: models that were trained to think in parallel, in stock Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModeTraits
from hf_parallel.generation.modes.branches.settings import BranchRows
from hf_parallel.generation.modes.fork_join.run import ForkJoinRun
from hf_parallel.generation.modes.fork_join.settings import ForkJoinSettings
from hf_parallel.transcript.sections import TranscriptStyle


class ForkJoinRows(BranchRows["ForkJoinConfig"]):
    """An answer and its paths."""

    style = TranscriptStyle("path", "answer")


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
        keeps_states=True,
        streams_text=True,
        streams_tokens="when_final",
        dialect=lambda config: config.format,
    )

    def make_run(self, call: GenerationCall) -> ForkJoinRun:
        """See `ParallelConfig.make_run`."""
        return ForkJoinRun(self, call)

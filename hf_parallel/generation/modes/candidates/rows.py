"""CandidateRows: places and names of candidates."""

from __future__ import annotations

from hf_parallel.generation.config import ConfigT, ModeRows
from hf_parallel.transcript.sections import TranscriptStyle


class CandidateRows(ModeRows[ConfigT]):
    """All candidates, returned or not; forks follow those that began at the prompt."""

    style = TranscriptStyle("candidate")

    @property
    def drawn_per_prompt(self) -> int:
        return self.config.max_rows_per_prompt

    def name(self, index: int) -> str:
        return f"Candidate {index + 1}"

"""Mixin that converts the record of a call to plain data and to an HTML page."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import check_tokenizer, decode
from hf_parallel.transcript.page import render
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.sections import (
    Section,
    cards_by_prompt,
    column_names,
    completion_sections,
    separate_overlapping,
    transcript_dict,
)


class Transcribable:
    """Mixin for outputs with the attributes `record`, `stats` and `sequences`."""

    record: Record | None
    stats: Any
    sequences: Any

    def to_dict(self, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, Any]:
        """Return the transcript of the call as plain data: which row generated which text at which forward pass.

        It can be saved as JSON, which `hf-parallel view` reads. The model's `tokenizer` adds the text of the prompts.
        Raises `ValueError` if the output has no record, or if a mode that streams no text lacks the `tokenizer`.
        """
        if self.record is None:
            raise ValueError("this output has no record: only calls with a `generation_mode` have transcripts")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        return transcript_dict(self.record, self.stats, self._sections(self.record, tokenizer))

    def to_html(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """Return the transcript as a self-contained HTML page: one column per row, forward passes on the vertical axis.

        Parameters and errors: see `to_dict`. In a notebook: `IPython.display.HTML(output.to_html())`.
        """
        return render(self.to_dict(tokenizer))

    def columns(self, prompt: int) -> list[str]:
        """Return names for a prompt's leftmost columns. The other columns are named after their rows."""
        return []

    def ranking(self, prompt: int) -> tuple[list[int], list[int]]:
        """Return a prompt's columns as a page orders them, best first, and the chosen ones. Empty: unranked."""
        return [], []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """Return further text about a prompt: pairs of heading and text."""
        return []

    def _sections(self, record: Record, tokenizer: PreTrainedTokenizerBase | None) -> list[Section]:
        if not record.events:
            if tokenizer is None:
                calls = "to_html(tokenizer) or to_dict(tokenizer)"
                raise ValueError(f"{record.mode} streams no text, so pass the tokenizer: {calls}")
            return completion_sections(record, self.sequences.tolist(), tokenizer)
        sections = []
        for prompt, cards in sorted(cards_by_prompt(record).items()):
            names = self.columns(prompt)
            names = [*names, *column_names(record, prompt, cards)[len(names) :]]
            separate_overlapping(cards, names, record.config.rows.style.spanning)
            tokens = record.prompts[prompt]
            text = None if tokenizer is None else decode(tokenizer, tokens.tolist())
            sections.append(Section(text, len(tokens), names, cards, self.notes(prompt), *self.ranking(prompt)))
        return sections

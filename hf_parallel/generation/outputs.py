"""What the modes return besides tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_parallel.generation.arguments import check_tokenizer
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.transcript.page import render
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.sections import (
    Section,
    as_dict,
    beside,
    completed_sections,
    written_cards,
)


@dataclass
class ParallelOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` and what the call cost.

    `past_key_values` is the cache of the run, `record` what `to_dict` and `to_html` tell of it.
    """

    stats: GenerationStats | None = None
    record: Record | None = None

    def to_dict(self, tokenizer: Any = None) -> dict[str, Any]:
        """Tell how the call came about: who wrote what at which forward pass, ready for JSON.

        Parameters
        ----------
        tokenizer : optional
            Of the model. Without one a prompt is not told; modes that know tokens alone (shared_prefix, resample)
            need it.

        Returns
        -------
        dict
            What `hf-parallel view` reads.

        Raises
        ------
        ValueError
            If the mode has written no text and there is no tokenizer; if the output was not made by a call.
        """
        if self.record is None:
            raise ValueError("this output has no record of its call, so there is nothing to tell")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        return as_dict(
            self.record, self.stats, self.record.config.transcript_style, self._sections(self.record, tokenizer)
        )

    def to_html(self, tokenizer: Any = None) -> str:
        """The same as one page of HTML that needs nothing else: columns against forward passes.

        Parameters, errors: see `to_dict`. In a notebook: `IPython.display.HTML(output.to_html())`.
        """
        return render(self.to_dict(tokenizer))

    def columns(self, prompt: int) -> list[str]:
        """Names of a prompt's columns, as far as the mode knows them."""
        return []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """What else is to be said of a prompt: headings and texts."""
        return []

    def _sections(self, record: Record, tokenizer: Any) -> list[Section]:
        if not record.events:
            if tokenizer is None:
                raise ValueError(f"{record.mode} knows tokens alone: give the tokenizer that turns them into text")
            return completed_sections(record, self.sequences.tolist(), tokenizer)
        sections, style = [], record.config.transcript_style
        for prompt, cards in sorted(written_cards(record, record.place, steps_stay=bool(style.past)).items()):
            tokens = record.prompts[prompt]
            names, count = self.columns(prompt), 1 + max((card.column or 0 for card in cards), default=0)
            names = [*names, *(f"{style.unit} {number + 1}" for number in range(len(names), count))]
            beside(cards, names, style.across)
            text = None if tokenizer is None else tokenizer.decode(tokens.tolist())
            sections.append(Section(text, len(tokens), names, cards, self.notes(prompt)))
        return sections

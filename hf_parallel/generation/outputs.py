"""What the modes return besides tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from .arguments import check_tokenizer
from .page import render
from .record import Record
from .transcript import Manner, Section, as_dict, beside, completed_sections, written_cards


@dataclass
class GenerationStats:
    """What a call cost. Benchmarks and tests read these.

    Attributes
    ----------
    forward_passes : int
        Forward passes of the model, prefill included.
    prefilled_tokens : int
        Tokens that were given (prompts, headers, inserted texts) and had to be computed.
    reused_tokens : int
        Tokens that were given and whose keys and values were held already, counted once per row.
    decoded_tokens : int
        Tokens that were generated, over all rows.
    replayed_tokens : int
        Generated tokens that needed no forward pass because their logits were remembered.
    drafted_tokens, accepted_tokens : int
        Tokens that were computed on trial (`draft_tokens`), and those of them that were generated then.
    kv_bytes : int
        Bytes of keys and values held at the end: unique tokens, once.
    reserved_bytes : int
        Bytes of storage for them at the end, used or not.
    graph_bytes : int
        Bytes that captured decode steps (CUDA graphs) kept while the call ran.
    prefill_seconds, decode_seconds : float
        Wall-clock time of either part, everything included.
    plan_seconds : float
        Part of it that went into laying out forward passes, outside the model.
    """

    forward_passes: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    replayed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes: int = 0
    reserved_bytes: int = 0
    graph_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    plan_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return asdict(self)


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
        return as_dict(self.record, self.stats, self.manner(self.record), self._sections(self.record, tokenizer))

    def to_html(self, tokenizer: Any = None) -> str:
        """The same as one page of HTML that needs nothing else: columns against forward passes.

        Parameters, errors: see `to_dict`. In a notebook: `IPython.display.HTML(output.to_html())`.
        """
        return render(self.to_dict(tokenizer))

    def place(self, row: int) -> tuple[int, int | None]:
        """Which prompt a row that was streamed belongs to, and its column; None: it is written across all."""
        return 0, row

    def columns(self, prompt: int) -> list[str]:
        """Names of a prompt's columns, as far as the mode knows them."""
        return []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """What else is to be said of a prompt: headings and texts."""
        return []

    def manner(self, record: Record) -> Manner:
        """How the mode lets its rows write, in the words of a page."""
        return Manner()

    def _sections(self, record: Record, tokenizer: Any) -> list[Section]:
        if not record.events:
            if tokenizer is None:
                raise ValueError(f"{record.mode} knows tokens alone: give the tokenizer that turns them into text")
            return completed_sections(record, self.sequences.tolist(), tokenizer)
        sections, manner = [], self.manner(record)
        for prompt, cards in sorted(written_cards(record, self.place, steps_stay=bool(manner.past)).items()):
            tokens = record.prompts[prompt]
            names, count = self.columns(prompt), 1 + max((card.column or 0 for card in cards), default=0)
            names = [*names, *(f"{manner.unit} {number + 1}" for number in range(len(names), count))]
            beside(cards, names, manner.across)
            text = None if tokenizer is None else tokenizer.decode(tokens.tolist())
            sections.append(Section(text, len(tokens), names, cards, self.notes(prompt)))
        return sections

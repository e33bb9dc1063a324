"""A call of `generate` that Ctrl-C or an error may end, and what it tells then: as of a call that came to its end.

A finished call has an output; an interrupted one has what its record and its streamer have kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hf_parallel.generation import GenerationStats, ParallelConfig, ParallelOutput
from hf_parallel.generation.modes.hogwild.config import HogwildOutput
from hf_parallel.pipelines import answer_records
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.sections import (
    GIVEN,
    Card,
    Section,
    as_dict,
    completed_sections,
    written_cards,
)

NOTE = ("Interrupted", "This is what had been written by then.")
_ROWS = {"hogwild": ("workers", "num_workers"), "self_consistency": ("texts", "num_answers")}
"""What records of a mode call the texts of its rows, and the setting that says how many they are."""


class InterruptibleCall:
    """One call of `generate`.

    Parameters
    ----------
    model : PreTrainedModel
        Enabled, if there is a mode.
    tokenizer
    config : ParallelConfig, optional
        None: no mode.
    arguments : dict
        The others of `generate`.

    Attributes
    ----------
    output : ModelOutput, optional
        None before the call has come to its end.
    interrupted : bool
        Whether Ctrl-C or an error ended it before.
    """

    def __init__(self, model: Any, tokenizer: Any, config: ParallelConfig | None, arguments: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.config, self.arguments = model, tokenizer, config, arguments
        self.output: Any = None
        self.interrupted = False
        self._record = Record()
        self._streamer: Any = None

    def run(self, streamer: Any) -> None:
        """Generate, until all is written or Ctrl-C is pressed; `streamer` is a `Floor` or a `LiveView`.

        What else ends it goes on to the caller: errors of the model, and of the streamer's output.
        """
        arguments = {**self.arguments, "tokenizer": self.tokenizer, "streamer": streamer}
        self._streamer = streamer
        try:
            if self.config is None:
                self.output = self.model.generate(**arguments)
            else:  # what `generate` does, which would keep the record to itself
                with self.model.prepared_call(self.config, arguments) as call:
                    self._record = call.record
                    self.output = self.config.make_run(call).generate()
        except KeyboardInterrupt:
            self.interrupted = True
        except BaseException:
            self.interrupted = True
            raise

    @property
    def stats(self) -> GenerationStats | None:
        """What it cost, if that was counted to the end."""
        return self.output.stats if isinstance(self.output, ParallelOutput) else None

    @property
    def has_written(self) -> bool:
        """Whether there is anything to tell."""
        if not self.interrupted:
            return self.output is not None
        return any(text for text, _ in self._so_far())

    @property
    def progress(self) -> str:
        """How far it came, in a line."""
        pieces = [piece for section in self._sections() for card in section.cards for piece in card.pieces]
        written = sum(origin != GIVEN for _, _, origin in pieces)
        return f"{self._record.passes} decode passes, {written} tokens written"

    def records(self, prompts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """An object per answer: prompt, text, and what the mode tells of it, under the names of the pipeline.

        After Ctrl-C an object per answer of which something was written: its text is all of that, and of the names
        there are `workers` in hogwild and `texts` in self-consistency.

        Parameters
        ----------
        prompts : sequence of str
        """
        told = list(self._so_far() if self.interrupted else self._answers())
        for number, (text, more) in enumerate(told):
            if text or not self.interrupted:
                yield {"prompt": prompts[number * len(prompts) // len(told)], "generated_text": text, **more}

    def to_dict(self) -> dict[str, Any]:
        """What `ParallelOutput.to_dict` tells, as far as the call came."""
        if not self.interrupted:
            return self.output.to_dict(self.tokenizer)
        record, sections = self._record, self._sections()
        for section in sections:
            section.notes.append(NOTE)
        return as_dict(record, None, self.config.transcript_style, sections) | {"interrupted": True}

    def _answers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Texts of a call that has come to its end, with what the mode tells of them."""
        output, begin = self.output, self.arguments["input_ids"].shape[1]
        told = answer_records(output) if isinstance(output, ParallelOutput) else ({} for _ in output.sequences)
        for number, more in enumerate(told):
            if isinstance(output, HogwildOutput):
                yield more["transcripts"], more
            else:
                yield self.tokenizer.decode(output.sequences[number, begin:], skip_special_tokens=True), more

    def _so_far(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What has been written of each sequence: finished parts in the order in which they ended, then the others."""
        sequences = self._cards()
        for cards in sequences:
            ended = sorted(cards, key=lambda card: math.inf if card.end is None or not card.ended else card.end)
            yield "\n\n".join(_text(card).rstrip() for card in ended), {**self._rows(cards), "interrupted": True}
        for text in () if sequences else self._streamer.written:
            yield text.text, {"interrupted": True}

    def _rows(self, cards: Sequence[Card]) -> dict[str, Any]:
        """What each row of a sequence wrote, in modes whose records tell it."""
        if self._record.mode not in _ROWS:
            return {}
        name, count = _ROWS[self._record.mode]
        rows = range(getattr(self.config, count))
        return {name: ["".join(_text(card) for card in cards if card.column == row) for row in rows]}

    def _cards(self) -> list[list[Card]]:
        """What each sequence's rows wrote, where a mode tells it as text; else nothing."""
        record, config = self._record, self.config
        if config is None or not record.events:
            return []
        count = len(record.prompts)
        found = written_cards(record, lambda row: config.place(row, count)[:2])
        return [found.get(sequence, []) for sequence in range(count)]

    def _sections(self) -> list[Section]:
        """The sections of the transcript of an interrupted call."""
        record, sequences, written = self._record, self._cards(), self._streamer.written
        if not sequences and written:
            record.lengths = [record.begin + len(text.tokens) for text in written]
            return completed_sections(record, [[0] * record.begin + text.tokens for text in written], self.tokenizer)
        sections = []
        for prompt, cards in zip(record.prompts, sequences, strict=False):
            columns = range(1 + max((card.column or 0 for card in cards), default=-1))
            names = [self.config.row_name(column) for column in columns]
            sections.append(Section(self.tokenizer.decode(prompt.tolist()), len(prompt), names, cards))
        return sections


def _text(card: Card) -> str:
    return card.given + "".join(text for _, text, _ in card.pieces)

"""Call of `generate` that keeps the text generated so far if Ctrl-C or an error interrupts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import decode
from hf_parallel.files import JSONObject
from hf_parallel.generation import GenerationStats, ParallelConfig, ParallelOutput
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.sections import GIVEN, Card, cards_by_prompt

NOTE = ("Interrupted", "This is the text generated until then.")


class InterruptibleCall:
    """One call of `generate` with `arguments`. A `config` needs an enabled model; without one, the call has no mode."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, config: ParallelConfig | None, arguments: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.config, self.arguments = model, tokenizer, config, arguments
        self.output: Any = None  # until the call has returned
        self.interrupted = False  # by Ctrl-C or an error
        self._record = Record(config)
        self._streamer: Any = None

    def run(self, streamer: Any) -> None:
        """Generate until the call returns or Ctrl-C is pressed; `streamer` is a `ConsoleStreamer` or a `LiveView`.

        Other exceptions, of the model or of the streamer's output, are raised.
        """
        arguments = {**self.arguments, "tokenizer": self.tokenizer, "streamer": streamer}
        self._streamer = streamer
        try:
            if self.config is None:
                self.output = self.model.generate(**arguments)
            else:  # like `generate`, but the record is available before the call returns
                with self.model.prepared_call(self.config, arguments) as call:
                    self._record = call.record
                    self.output = self.config.make_run(call).generate()
        except BaseException as error:
            self.interrupted = True
            if not isinstance(error, KeyboardInterrupt):
                raise

    @property
    def stats(self) -> GenerationStats | None:
        """Cost of the call, if it has returned."""
        return self.output.stats if isinstance(self.output, ParallelOutput) else None

    @property
    def has_text(self) -> bool:
        """Whether there is a finished output, or any text of an interrupted call."""
        return any(text for text, _ in self._partial_answers()) if self.interrupted else self.output is not None

    @property
    def progress(self) -> str:
        """Description of an interrupted call: its decode passes and generated tokens."""
        cards = [card for section in self.to_dict()["sections"] for card in section["cards"]]
        generated = sum(origin != GIVEN for card in cards for _, _, origin in card["pieces"])
        return f"{self._record.passes} decode passes, {generated} tokens"

    def records(self, prompts: Sequence[str]) -> Iterator[JSONObject]:
        """Yield one object per answer: its prompt, its text and the fields of the mode's output.

        `truncated` is True if the token budget of any of the answer's rows ended it.

        An interrupted call yields only answers that have text. Their text is everything generated so far, and of the
        mode's fields they have only the texts of the rows (`ModeTraits.rows_field`).
        """
        answers = list(self._partial_answers() if self.interrupted else self._answers())
        for index, (text, fields) in enumerate(answers):
            if text or not self.interrupted:
                yield {"prompt": prompts[index * len(prompts) // len(answers)], "generated_text": text, **fields}

    def to_dict(self) -> dict[str, Any]:
        """Return the transcript of the call, complete or not."""
        if not self.interrupted:
            return self.output.to_dict(self.tokenizer)
        record, completions = self._record, self._streamer.completions
        record.lengths = [record.begin + len(completion.tokens) for completion in completions]
        rows = [torch.tensor([0] * record.begin + completion.tokens) for completion in completions]
        sequences: Any = pad_sequence(rows, batch_first=True) if rows else torch.empty(0, 0)
        run = ParallelOutput(sequences=sequences, record=record).to_dict(self.tokenizer)
        for section in run["sections"]:
            section["notes"].append(NOTE)
        return run | {"interrupted": True}

    def _answers(self) -> Iterator[tuple[str, JSONObject]]:
        output, begin = self.output, self.arguments["input_ids"].shape[1]
        records = output.to_records() if isinstance(output, ParallelOutput) else [{} for _ in output.sequences]
        if self.config is None:  # nothing is recorded without a mode, and its streamer is a ConsoleStreamer
            truncated = self._streamer.truncated
        else:
            truncated = set(self._record.answers_of(self._record.truncated, self._answer_of).values())
        for index, record in enumerate(records):
            fields = {**record, "truncated": index in truncated}
            if self.config is not None and self.config.traits.merges_rows:
                yield fields["transcript"], fields
            else:
                yield decode(self.tokenizer, output.sequences[index, begin:], skip_special_tokens=True), fields

    def _answer_of(self, row: int) -> int:
        is_answer = self.config is not None and self.config.rows_per_prompt > 1 and not self.config.traits.merges_rows
        return row if is_answer else self._record.place(row)[0]

    def _partial_answers(self) -> Iterator[tuple[str, JSONObject]]:
        """Yield the answers of an interrupted call: cards in the order in which they ended, then unfinished ones."""
        if not self._record.events:
            for completion in self._streamer.completions:
                yield completion.text, {"interrupted": True}
            return
        found = cards_by_prompt(self._record)
        for sequence in range(len(self._record.prompts)):
            cards = found.get(sequence, [])
            ordered = sorted(cards, key=lambda card: math.inf if card.end is None or not card.ended else card.end)
            text = "\n\n".join(_text(card).rstrip() for card in ordered)
            yield text, {**self._row_texts(sequence, cards), "interrupted": True}

    def _row_texts(self, sequence: int, cards: Sequence[Card]) -> dict[str, object]:
        """Return the texts of the rows of a sequence under the name that the mode's output uses."""
        name = "" if self.config is None else self.config.traits.rows_field
        if not name:
            return {}
        places = map(self._record.place, {event.row for event in self._record.events})
        columns = sorted(column for prompt, column in places if prompt == sequence and column is not None)
        return {name: ["".join(_text(card) for card in cards if card.column == column) for column in columns]}


def _text(card: Card) -> str:
    return card.given + "".join(text for _, text, _ in card.pieces)

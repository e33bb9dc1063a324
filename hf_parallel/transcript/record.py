"""Record of one `generate` call: which row wrote which text at which forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import hidden_tokens

COMPUTED = "m"
DRAFTED = "d"
REPLAYED = "r"
HOTSPOT = "h"
"""Origins of a token, in this order: computed in a forward pass of its own; accepted as a draft token in the pass of an
earlier token; replayed from cached logits; sampled again from cached logits at a hotspot."""


class RowEvent(NamedTuple):
    """Text or event of a row, with the arguments of `ParallelStreamer.write_row`.

    `forward_pass` counts decode passes; 0 is before the first.
    """

    forward_pass: int
    row: int
    text: str
    event: str


@dataclass(eq=False)
class Record:
    """Record of one call: its settings, prompts and decode passes, and the text or the tokens of its rows."""

    config: Any = None  # a ParallelConfig; None without a mode
    settings: dict[str, object] = field(default_factory=dict)  # given by the caller
    prompts: Sequence[np.ndarray] = ()  # int64 [length] for each row of input_ids, without padding
    has_gaps: bool = False  # whether a sliding window counts masked tokens inside prompts
    images: Sequence[Sequence[str]] = ()  # thumbnails in each prompt, if any of them has images
    begin: int = 0  # index of the first generated token in a row of `sequences`
    end_tokens: Sequence[int] = ()  # that end a row
    lengths: list[int] = field(default_factory=list)  # of the rows of `sequences` without padding on the right
    passes: int = 0
    events: list[RowEvent] = field(default_factory=list)  # none in modes that stream no text
    truncated: set[int] = field(default_factory=set)  # rows that a token budget ended, as streamers number them
    errors: dict[int, str] = field(default_factory=dict)  # why rows ended early, by processors that say so
    end_reasons: dict[int, str] = field(default_factory=dict)  # why the mode dropped rows, such as "pruned"
    returned: list[int] = field(default_factory=list)  # rows of `sequences`, if they are not rows 0, 1, ...
    origins: dict[int, str] = field(default_factory=dict)  # a letter per new token of a row, with a LogitsCache
    log_probs: list[tuple[Sequence[int], Any]] = field(default_factory=list)
    """Rows that sampled a token in a step, and the `LogProbs` of these tokens, or None."""
    pass_log: Any = None  # a PassLog of the forward passes, if the call returns this record and its cache began empty

    @property
    def mode(self) -> str:
        """Name of the mode."""
        return "" if self.config is None else self.config.mode

    def hidden_tokens(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Return the tokens that texts of the call leave out."""
        return hidden_tokens(tokenizer, self.end_tokens, "" if self.config is None else self.config.format_texts)

    def place(self, row: int) -> tuple[int, int | None]:
        """Return the index of a row's prompt, and the row's column (None: it spans all columns)."""
        position = self.config.rows.place(row, len(self.prompts))
        prompt = position.prompt
        column = position.column
        if column is None:
            return prompt, None
        # Returned rows come first, in the order of the output.
        returned = []
        for other in self.returned:
            position = self.config.rows.place(other, len(self.prompts))
            if position.prompt == prompt and position.column is not None:
                returned.append(position.column)
        if column in returned:
            return prompt, returned.index(column)
        later = sum(other > column for other in returned)
        return prompt, column + later

    def images_of(self, prompts: Iterable[int]) -> list[str]:
        """Return the different thumbnails in prompts."""
        return list(dict.fromkeys(url for prompt in prompts if self.images for url in self.images[prompt]))

    def answers_of(self, rows: Iterable[int], answer_of: Callable[[int], int]) -> dict[int, int]:
        """Return the answer of each row that is returned; `answer_of` maps rows to answers where all are returned."""
        if not self.returned:
            return {row: answer_of(row) for row in rows}
        return {row: self.returned.index(row) for row in rows if row in self.returned}

    def write(self, row: int, text: str, event: str) -> None:
        """Append an event at the current decode pass."""
        self.events.append(RowEvent(self.passes, row, text, event))

    def sampled_log_probs(self, processed: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows, int64 `[N]`, and the log-probabilities, float32 `[N]`, of all sampled tokens in order.

        The values are the model's: the log-softmax of its unprocessed logits. NaN for tokens of a loaded session.
        `processed`: of the distributions that were sampled, after processors, temperature and the like, as importance
        ratios need them; NaN in calls with a `LogitsCache`, too.
        """
        all_rows: list[int] = []
        all_values: list[float] = []
        for rows, log_probs in self.log_probs:
            all_rows += rows
            if log_probs is None:
                all_values += [np.nan] * len(rows)
            elif processed:
                all_values += log_probs.sampling.tolist()
            else:
                all_values += log_probs.model.tolist()
        return np.array(all_rows, np.int64), np.array(all_values, np.float32)

    def add_origins(self, origins: Mapping[int, Sequence[str]], rows: Mapping[int, int] | None = None) -> None:
        """Append the origins of new tokens by row; `rows` maps the keys to rows of the call where they differ."""
        for index, letters in origins.items():
            row = index if rows is None else rows[index]
            earlier = self.origins.get(row, "")
            self.origins[row] = earlier + "".join(letters)

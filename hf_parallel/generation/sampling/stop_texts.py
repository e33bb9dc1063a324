"""Stop texts: a criterion that ends a row at one, and what removes it from the row's text.

Both search the text that the caller sees, which `StoppedText` makes of the tokens of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase, StoppingCriteria

from hf_parallel.detokenizer import IncrementalDetokenizer, hidden_tokens
from hf_parallel.generation.sampling.token_table import TokenTable


class StopTexts(StoppingCriteria):
    """Ends a row when its text after the prompt contains a stop text. Modes only: `RowStops` reads their rows.

    transformers' `StopStringCriteria` first compares each stop text with the whole vocabulary, which takes seconds.

    Parameters
    ----------
    stops
        The stop texts.
    hidden
        Tokens without a text. Default: special tokens, except those that a stop text names.
    marks
        Tokens with a text that the caller does not see, such as those before a call of a tool. The texts before and
        after one are searched separately.
    continues
        Whether the text continues the prompt's: its first word may have a space before it.
    """

    keeps_rows = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        hidden: Collection[int] | None = None,
        marks: Collection[int] = (),
        continues: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.hidden = hidden_tokens(tokenizer, (), "\n".join(stops)) if hidden is None else hidden
        self.marks = marks
        self.continues = continues

    def new_text(self, prompt: Sequence[int] = ()) -> StoppedText:
        """Return the empty text of a row, whose prompt ends with these tokens."""
        context = prompt if self.continues else ()
        detokenizer = IncrementalDetokenizer(self.tokenizer, self.hidden, context)
        return StoppedText(detokenizer, self.stops, self.marks)


class StoppedText:
    """Text of a row, token by token, up to its first stop text; `length` includes what is held back.

    See `StopTexts` for `marks`.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str], marks: Collection[int] = ()) -> None:
        self.detokenizer = detokenizer
        self.marks = marks
        self.length = 0
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether the text contains a stop text."""
        return self._filter.stopped

    def add(self, token: int) -> str:
        """Append a token. Return the text that can be shown now."""
        added = self.detokenizer.add([token])
        self.length += len(added)
        if token not in self.marks or self.stopped:
            return self._filter.add(added)
        return self._filter.flush() + added

    def flush(self) -> str:
        """Return what was held back, as the row has ended."""
        text = self.detokenizer.flush()
        self.length += len(text)
        return self._filter.add(text) + self._filter.flush()


@dataclass
class _ReadRow:
    """The text of a row, the number of its tokens that were read, and how often the row had been changed then."""

    text: StoppedText
    length: int
    changes: int


class RowStops:
    """The stop texts of one criterion in the rows of a table. Each token is read once."""

    def __init__(self, criterion: StopTexts, table: TokenTable) -> None:
        self.criterion = criterion
        self.table = table
        self._rows: dict[int, _ReadRow] = {}

    def has_stopped(self, row: int, token: int) -> bool:
        """Return whether the text of a row contains a stop text; `token` is its last one."""
        table = self.table
        read = self._rows.get(row)
        if read is None or read.changes != table.changes[row]:
            prompt = table.ids[row, : table.begin].tolist() if self.criterion.continues else ()
            read = _ReadRow(self.criterion.new_text(prompt), table.begin, table.changes[row])
            self._rows[row] = read
        length = table.lengths[row]
        new_tokens = [token]
        if read.length != length - 1:
            new_tokens = table.ids[row, read.length : length].tolist()
        for new_token in new_tokens:
            read.text.add(new_token)
        read.length = length
        return read.text.stopped


class StopFilter:
    """Cuts a growing text before its first stop text. Holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.stopped = False
        self._pending = ""

    def add(self, text: str) -> str:
        """Append text. Return what can be shown."""
        if self.stopped:
            return ""
        pending = self._pending + text
        first_stop = -1
        for stop in self.stops:
            index = pending.find(stop)
            if index >= 0 and (first_stop < 0 or index < first_stop):
                first_stop = index
        if first_stop >= 0:
            self.stopped = True
            self._pending = ""
            return pending[:first_stop]
        overlap = max((_overlap(pending, stop) for stop in self.stops), default=0)
        shown = len(pending) - overlap
        self._pending = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """Return what was held back, as the text has ended."""
        pending = self._pending
        self._pending = ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    for size in range(longest, 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

"""Log-probabilities of sampled tokens: under the model's distribution, and under the distribution that was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import LogitsProcessor

from hf_parallel.generation.sampling.parts import ALL
from hf_parallel.kernels import HostCopy, to_device


class LogProbs:
    """Log-probabilities of one sampled token per row, float32 `[rows]` each: the `rows` of what is given.

    `model` is the log-softmax of the model's unprocessed logits. `sampling` is that of the scores that were sampled,
    after processors and warpers; NaN for tokens that were not sampled from scores of this call, such as replayed ones.
    `top`: log-probabilities `[rows, k]` under the model, and tokens int64 `[rows, k]`, of the most probable tokens.
    """

    __slots__ = ("_model", "_rows", "_sampling", "top")

    def __init__(
        self,
        model: torch.Tensor,
        sampling: torch.Tensor,
        top: tuple[torch.Tensor, torch.Tensor] | None = None,
        rows: slice = ALL,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self.top = top
        self._rows = rows

    @property
    def model(self) -> torch.Tensor:
        """See the class."""
        return self._model[self._rows]

    @property
    def sampling(self) -> torch.Tensor:
        """See the class."""
        return self._sampling[self._rows]


class LogProbSteps:
    """Log-probabilities of consecutive steps of the same rows, float32 `[rows]` each; see `LogProbs`."""

    def __init__(self) -> None:
        self._model: list[torch.Tensor] = []
        self._sampling: list[torch.Tensor] = []
        self._joined: torch.Tensor | None = None  # all steps, float32 `[2, steps, rows]`, once they are read

    def __len__(self) -> int:
        return len(self._model)

    def append(self, model: torch.Tensor, sampling: torch.Tensor) -> None:
        """Append a step."""
        self._model.append(model)
        self._sampling.append(sampling)
        self._joined = None

    def of_rows(self, first: int, count: int) -> torch.Tensor:
        """Return those of `count` rows from a first one on, float32 `[2, steps, count]`: model and sampling."""
        if self._joined is None:  # rows that stood together are read one call after the other
            stacked = torch.stack((*self._model, *self._sampling))
            self._joined = stacked.view(2, len(self), -1)
        return self._joined.narrow(2, first, count)


class Drawn(NamedTuple):
    """Tokens that rows of a table sampled: their columns in the table, and how many the rows had sampled before."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    draws: tuple[int, ...]
    log_probs: LogProbs


class InheritedTokens(NamedTuple):
    """What a row of a table has inherited from its parent, the row that it continues."""

    parent: int
    columns: int  # first columns of the table
    draws: int  # number of sampled tokens in them


def model_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int = 0, labels: Sequence[int] = ()
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return `LogProbs.model` and `.top` for tokens int64 `[rows]`, given unprocessed logits `[rows, vocabulary]`.

    `top` is the number of the most probable tokens, `labels` are tokens that replace them.
    """
    every = logits.to(tokens.device).log_softmax(-1, dtype=torch.float32)
    of_tokens = every.gather(1, tokens[:, None]).squeeze(1)
    if labels:
        ids = to_device(labels, every.device).expand(len(every), -1)
        return of_tokens, (every.gather(1, ids), ids)
    if not top:
        return of_tokens, None
    values, ids = every.topk(min(top, every.shape[1]))
    return of_tokens, (values, ids)


def spread(
    drawn: Sequence[Drawn], rows: int, forks: Mapping[int, InheritedTokens], by_draw: bool = False
) -> torch.Tensor:
    """Return `LogProbs.model` as one tensor float32 `[rows, longest]`, NaN where a row sampled no token.

    Columns are those of the table, or with `by_draw` the number of tokens that the row had sampled before. `forks` are
    the rows that have inherited tokens, parents before their forks.
    """
    rows_of: list[int] = []
    positions: list[int] = []
    for step in drawn:
        rows_of += step.rows
        positions += step.draws if by_draw else step.columns
    device = drawn[0].log_probs.model.device if drawn else torch.device("cpu")
    longest = max(positions, default=-1) + 1
    values = torch.full((rows, longest), torch.nan, dtype=torch.float32, device=device)
    if drawn:
        log_probs = torch.cat([step.log_probs.model for step in drawn])
        values[to_device(rows_of, device), to_device(positions, device)] = log_probs
    for row, fork in forks.items():
        inherited = fork.draws if by_draw else fork.columns
        values[row, :inherited] = values[fork.parent, :inherited]
    return values


def padded_log_probs(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return rows as one tensor float32 `[rows, longest]`, padded with NaN."""
    longest = max(map(len, rows))
    padded = []
    for row in rows:
        padding = [torch.nan] * (longest - len(row))
        padded.append([*row, *padding])
    return torch.tensor(padded, dtype=torch.float32)


class TokenLogProbs(NamedTuple):
    """Log-probability of a token, and the most probable tokens with theirs."""

    log_prob: float
    top: list[tuple[int, float]]
    rank: int = 0  # among all tokens, from 1; only known for tokens of prompts


class TopLogProbs(LogitsProcessor):
    """Collects the log-probabilities of sampled tokens and of the `top` most probable ones, under the model.

    It changes no scores. Its place among the processors does not matter: the sampler passes it unprocessed logits.
    `labels` are tokens to collect instead of the most probable ones. `prompt_top`: collect log-probabilities of the
    tokens of prompts after the first, too, with that many of the most probable ones.
    """

    keeps_rows = False

    def __init__(self, top: int, prompt_top: int | None = None, labels: Sequence[int] = ()) -> None:
        self.top = top
        self.prompt_top = prompt_top
        self.labels = labels
        self.prompts: dict[int, list[TokenLogProbs]] = {}  # by row
        self._steps: dict[int, list[tuple[HostCopy, int]]] = {}  # by row: step, and index of the row in it

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` unchanged."""
        return scores

    def add(self, rows: Sequence[int], log_probs: LogProbs) -> None:
        """Add one token of each row, as `ParallelStreamer.write_row` numbers the rows."""
        columns = [log_probs.model[:, None]]
        if log_probs.top is not None:
            columns += [part[:, : self.top] for part in log_probs.top]  # float32 holds tokens below 2**24
        step = HostCopy(torch.cat(columns, dim=1))
        for index, row in enumerate(rows):
            self._steps.setdefault(row, []).append((step, index))

    def fork(self, row: int, forks: Sequence[int]) -> None:
        """Let `forks` inherit the tokens of a row."""
        for fork in forks:
            self._steps[fork] = list(self._steps.get(row, ()))

    def count(self, row: int) -> int:
        """Return the number of tokens that a row has sampled."""
        return len(self._steps.get(row, ()))

    def get(self, row: int, index: int) -> TokenLogProbs:
        """Return the log-probabilities of the token with this index among those that a row has sampled."""
        step, index_in_step = self._steps[row][index]
        log_prob, *top = step.values[index_in_step]
        count = len(top) // 2
        values = top[:count]
        tokens = map(int, top[count:])
        return TokenLogProbs(log_prob, list(zip(tokens, values, strict=True)))

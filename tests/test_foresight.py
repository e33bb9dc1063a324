"""DraftSampler: what a row would draw from remembered logits is what it does draw from the same ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from test_drafts import NEW, model, write
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel import LogitsCache
from hf_parallel.generation.resampling import drafts
from hf_parallel.generation.resampling.foresight import DraftSampler
from hf_parallel.generation.resampling.replay import Replayer
from hf_parallel.generation.rng import RowRNG, draw, draw_among

__all__ = ["model"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_a_row_knows_its_draws_ahead(ahead: int) -> None:
    shares, tokens = torch.rand(1, 50), torch.arange(50)
    knowing, drawing = RowRNG(3), RowRNG(3)
    foreseen = draw_among(tokens, shares[0], knowing.key(ahead))
    for _ in range(ahead):
        drawing.skip()
    assert draw(shares, [drawing]).tolist() == [foreseen]
    assert knowing.next() == RowRNG(3).next(), "no row has moved"


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.8}, {"top_k": 3, "min_new_tokens": 5}, {"temperature": 1.5}], ids="-".join
)
def test_from_a_states_own_logits_a_row_draws_ahead_what_it_draws(
    model: PreTrainedModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where replays draw, foresight must have drawn the same: it knows the same logits and the same noise."""
    settings = {"logits_processor": None, "temperature": 0.1, "eos_token_id": 5} | settings
    asked: list[bool] = []
    choose = Replayer.choose

    def comparing(self: Replayer, rows: Sequence[int], *args: Any) -> Any:
        foresight = DraftSampler(self.sampler, self._distributions, settings["temperature"])
        ahead = [foresight(row, self.state(row), 0) for row in rows]
        tokens, ended = choose(self, rows, *args)
        if not args:  # a replay
            asked.extend(one == other for one, other in zip(ahead, tokens, strict=True))
        return tokens, ended

    cache = LogitsCache()
    write(model, logits_cache=cache, seed=0, **settings)
    monkeypatch.setattr(Replayer, "choose", comparing)
    for seed in range(4):
        write(model, logits_cache=cache, seed=seed, **settings)
    assert len(asked) >= NEW
    if settings["temperature"] < 1 or "top_p" in settings:
        assert all(asked)
    else:  # of 128 tokens
        assert sum(asked) > len(asked) / 4


@pytest.mark.parametrize(
    "settings", [{"do_sample": False, "temperature": None}, {"seed": None}], ids=["greedy", "no seed"]
)
def test_nothing_is_drawn_ahead_without_noise_of_a_rows_own(
    model: PreTrainedModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ahead = DraftSampler.__call__
    monkeypatch.setattr(DraftSampler, "__call__", lambda *args: asked.append(args[1]) or ahead(*args))
    write(model, 1, logits_cache=LogitsCache(), **settings)
    assert not asked
    write(model, 1, logits_cache=LogitsCache(), seed=0)
    assert asked


def test_where_the_same_words_lead_on_alike_nearly_all_that_is_drawn_ahead_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    for name, weight in model.named_parameters():
        if "o_proj" in name:  # without attention, what follows hangs on the last token alone
            weight.data.zero_()
    hf_parallel.enable(model)
    # Where each token takes time, only what is likely is brought along.
    monkeypatch.setattr(drafts, "pass_cost", lambda tokens, computed_by: 0.9 + 0.1 * tokens)

    def share_and_passes() -> tuple[float, int]:
        settings = {"logits_cache": LogitsCache(), "logits_processor": None, "max_new_tokens": 60}
        stats = [write(model, 1, seed=seed, **settings).stats for seed in range(6)]
        drafted = sum(of.drafted_tokens for of in stats)
        return sum(of.accepted_tokens for of in stats) / drafted, sum(of.forward_passes for of in stats)

    share, passes = share_and_passes()
    monkeypatch.setattr(Replayer, "_foresight", lambda self: None)
    share_of_taken, passes_by_taken = share_and_passes()
    assert share > 0.9 > 0.6 > share_of_taken
    assert passes < 0.7 * passes_by_taken

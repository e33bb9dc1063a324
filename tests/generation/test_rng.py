"""Noise of rows: in no mode are two tokens of a call drawn with the same noise, nor does replaying change which."""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_hogwild_recall
import test_replay_baselines
import tiny
import torch
from workers import small_model

from hf_parallel import Hotspot, LogitsCache
from hf_parallel.generation.sampling import rng as noise
from hf_parallel.generation.sampling.rng import RowRNG, draw, draw_among_each, exponential_noise, mix, next_keys
from hf_parallel.kernels import native


def complete(**settings: Any) -> Any:
    ids, mask = tiny.left_pad(tiny.make_prompts([17, 9], seed=4))
    given: dict[str, Any] = {"do_sample": True, "seed": 0, "max_new_tokens": 9, "num_return_sequences": 3}
    given |= {"attention_mask": mask, "return_dict_in_generate": True}
    return small_model().generate(ids, generation_mode="shared_prefix", **(given | settings))


WRITERS = {
    "shared_prefix": complete,
    "hogwild": test_hogwild_recall.write,
    "self_consistency": test_replay_baselines.answer,
    "skeleton_of_thought": test_replay_baselines.outline,
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The keys with which tokens were drawn."""
    keys: list[int] = []
    several = noise.next_keys

    def all_noted(*given: Any) -> torch.Tensor:
        found = several(*given)
        keys.extend(found.tolist())
        return found

    monkeypatch.setattr(noise, "next_keys", all_noted)
    return keys


@pytest.mark.parametrize("mode", WRITERS)
def test_no_two_tokens_of_a_call_have_the_same_noise(mode: str, drawn: list[int]) -> None:
    out = WRITERS[mode]()
    assert len(drawn) == out.stats.decoded_tokens > 20
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("mode", WRITERS)
def test_replayed_tokens_have_the_noise_of_those_that_were_computed(mode: str, drawn: list[int]) -> None:
    cache = LogitsCache()
    WRITERS[mode](logits_cache=cache)
    first = sorted(drawn)
    drawn.clear()
    assert WRITERS[mode](logits_cache=cache).stats.forward_passes == 0
    assert sorted(drawn) == first
    drawn.clear()
    WRITERS[mode](logits_cache=cache, replay=Hotspot(threshold=2.0))
    assert set(drawn) < set(first), "tokens that are kept pass over their noise"


def test_noise_is_that_of_splitmix64() -> None:
    def plain(key: int, token: int) -> float:
        bits = (key + token * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return -math.log1p(-(((bits ^ (bits >> 31)) >> 32) + 0.5) / 2**32)

    keys, tokens = torch.tensor([0, 7, 2**63 - 1]), torch.tensor([0, 1, 150_000])
    expected = [[plain(key, token) for token in tokens.tolist()] for key in keys.tolist()]
    torch.testing.assert_close(exponential_noise(keys[:, None], tokens), torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spread", [0.2, 4.0, 30.0])
def test_leaving_out_tokens_that_cannot_win_changes_no_draw(
    spread: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(native, "is_available", lambda: False)
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(1)) * spread
    shares = logits.softmax(dim=-1)
    whole = shares / exponential_noise(torch.tensor([mix(seed, 0) for seed in range(64)])[:, None], torch.arange(3000))
    winners = whole.argmax(dim=-1).tolist()
    assert draw(shares, [RowRNG(seed) for seed in range(64)]).tolist() == winners
    some = [row.topk(2000).indices.sort().values for row in shares]
    candidates = [(tokens, row[tokens]) for tokens, row in zip(some, shares, strict=True)]
    expected = [int(tokens[row[tokens].argmax()]) for tokens, row in zip(some, whole, strict=True)]
    assert draw_among_each(candidates, [RowRNG(seed) for seed in range(64)]).tolist() == expected


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, 0.0])
def test_invalid_shares_raise(bad: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "is_available", lambda: False)
    rngs = [RowRNG(1), RowRNG(2)]
    with pytest.raises(RuntimeError, match="cannot draw"):
        draw(torch.tensor([[0.5, 0.5], [bad, bad]]), rngs)
    assert [rng.count for rng in rngs] == [0, 0]


def test_keys_of_many_rows_are_those_of_each_alone() -> None:
    """Also of rows that share a generator of seeds, and of seeds beyond 64 bits."""

    def key_of(rng: RowRNG) -> int:
        key = mix(rng.seed, rng.count)
        rng.skip()
        return key

    seeds = [0, 1, 2**63 - 1, 2**64 + 5, -3]
    together, alone = ([RowRNG(seed) for seed in seeds] for _ in range(2))
    for rows in ([0, 1, 2, 3, 4], [2, 2], [4, 0]):
        keys = next_keys([together[row] for row in rows], torch.device("cpu"))
        assert keys.tolist() == [key_of(alone[row]) for row in rows]

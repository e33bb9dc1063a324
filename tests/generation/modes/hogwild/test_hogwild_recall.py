"""Hogwild! with a LogitsCache: cached passes are replayed, and the text continues exactly as without a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from workers import SETTINGS, WORDY, small_model

from hf_parallel import Hotspot, LogitsCache
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS

PASSES = 13
PROMPTS = tiny.make_prompts([23, 11], seed=3)
BATCH, MASK = tiny.left_pad(PROMPTS)


def write(ids: torch.Tensor = BATCH, model: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {"max_new_tokens": PASSES, "do_sample": True, "temperature": 0.4, "seed": 0}
    given |= {"num_workers": 2, "return_dict_in_generate": True, "finisher_tokens": 3, **SETTINGS, **WORDY}
    given |= {"attention_mask": MASK} if ids is BATCH else {}
    return (model or small_model()).generate(ids, generation_mode="hogwild", **(given | settings))


_written: dict[str, Any] = {}


def plain(ids: torch.Tensor = BATCH, **settings: Any) -> Any:
    """Return the output without a cache, computed once per settings."""
    key = f"{ids.tolist()} {sorted(settings.items())}"
    if key not in _written:
        _written[key] = write(ids, **settings)
    return _written[key]


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for name in ("history", "texts", "answers", "conclusions", "transcripts"):
        assert getattr(one, name) == getattr(other, name)
    assert one.stats.decoded_tokens == other.stats.decoded_tokens


# Replay


@pytest.mark.parametrize(("layout", "num_workers"), [*((layout, 3) for layout in LAYOUTS), ("combined", 1)])
def test_the_same_seed_is_replayed_without_a_forward_pass(layout: str, num_workers: int) -> None:
    cache, settings = LogitsCache(), {"layout": layout, "num_workers": num_workers}
    expected = plain(**settings)
    cold = write(logits_cache=cache, **settings)
    warm = write(logits_cache=cache, **settings)
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert cold.stats.replayed_tokens == 0
    assert (warm.stats.forward_passes, warm.stats.prefilled_tokens) == (0, 0)
    assert warm.stats.replayed_tokens == warm.stats.decoded_tokens
    assert len([step for history in expected.history for step in history if step.forward_pass]) > 4


@pytest.mark.parametrize(("layout", "num_workers"), [("combined", 2), ("interleaved", 3), ("contiguous", 2)])
def test_another_seed_leaves_the_cached_passes_and_continues_exactly(layout: str, num_workers: int) -> None:
    cache, settings = LogitsCache(), {"layout": layout, "num_workers": num_workers}
    replayed = left = 0
    for seed in range(3):
        out, expected = write(logits_cache=cache, seed=seed, **settings), plain(seed=seed, **settings)
        assert_same(out, expected)
        assert out.stats.forward_passes <= expected.stats.forward_passes
        replayed += out.stats.replayed_tokens
        left += 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
    assert replayed > 0
    assert left > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 12, "eos_token_id": [ord("e"), ord("t")]},
        {"eos_token_id": [ord("e"), ord("t"), ord("o")], "stop_on_answer": "all"},
        {"do_sample": False},
        {"prefill_chunk_size": 8},
        {"step_move": "reencode"},
        {"output_logits": True, "output_scores": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_generation_settings_apply_in_replays(settings: dict[str, Any]) -> None:
    cache, replayed = LogitsCache(), 0
    for seed in (0, 1, 0):
        out, expected = write(logits_cache=cache, seed=seed, **settings), plain(seed=seed, **settings)
        assert_same(out, expected)
        replayed += out.stats.replayed_tokens
        for name in ("logits", "scores"):
            for one, other in zip(getattr(out, name) or (), getattr(expected, name) or (), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert out.stats.forward_passes == 0
    assert replayed > 0


def test_with_hotspots_only_these_are_sampled_anew() -> None:
    cache = LogitsCache()
    first = write(logits_cache=cache)
    kept = write(logits_cache=cache, seed=5, replay=Hotspot(threshold=1e9))
    assert_same(kept, first)
    assert kept.stats.forward_passes == 0
    drawn = write(logits_cache=cache, seed=5, replay=Hotspot(threshold=0.0))
    assert_same(drawn, plain(seed=5))
    some = [write(logits_cache=copy.copy(cache), seed=7, replay="hotspot") for _ in range(2)]
    assert_same(*some)


# Cache hits and misses


def test_other_settings_never_hit() -> None:
    cache, ids = LogitsCache(), PROMPTS[1][None]
    write(ids, logits_cache=cache)
    hits = cache.hits
    for other in (
        {"own_header": "[I]"},
        {"history_header": ""},
        {"layout": "contiguous"},
        {"layout": "interleaved"},
        {"num_workers": 3},
        {"worker_names": ["Ann", "Bob"]},
        {"step_prefix": "{name} {step}; "},
    ):
        given: dict[str, Any] = {"max_new_tokens": 7, "finisher_tokens": 0, **other}
        out = write(ids, logits_cache=cache, **given)
        assert (cache.hits, out.stats.replayed_tokens) == (hits, 0), other
        assert_same(out, plain(ids, **given))

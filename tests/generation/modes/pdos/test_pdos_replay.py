"""pdos in front of a cache of logits: random formats, whose blocks a random model opens by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import torch
from workers import TOKENIZER, encode, small_model

import hf_parallel

PROMPTS = ("Q: ", "And ", "So, then: ")


def random_call(rng: random.Random) -> dict[str, Any]:
    """Return a call in whose format single letters are markers, so that a random model opens a block now and then."""
    marker, title_end, ellipsis, end = rng.sample("etaoinshrb", 4)
    return {
        "branch_marker": marker,
        "title_end": title_end,
        "ellipsis": ellipsis,
        "terminator": rng.choice([end, marker + end]),
        "min_branches": rng.randint(1, 3),
        "max_branches": rng.randint(3, 5),
        "max_title_tokens": rng.randint(1, 4),
        "join": rng.choice(["reencode", "rotate"]),
        "parallel_hint": rng.random() < 0.8,
        "fill_in": rng.random() < 0.7,
        "max_blocks": rng.choice([None, 1, 2]),
        "branch_max_new_tokens": rng.choice([None, 3, 6]),
        "branch_stops": rng.choice([[], ["\n"], ["c"]]),
        "branch_separator": rng.choice(["", "\n"]),
        "opening": rng.choice(["", "So", f"So {marker}"]),
        "titles": rng.choice([[], [], ["1", "2", "3"]]),
        "max_new_tokens": rng.choice([25, 40]),
        "num_return_sequences": rng.choice([1, 1, 2]),
        "do_sample": True,
        "top_k": 3,
        "sequence_bias": {(ord(marker),): 4.0},
        "eos_token_id": rng.choice([tiny.EOS, ord("q")]),
    }


@pytest.mark.parametrize("cases", [range(1), pytest.param(range(1, 12), marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cached_logits_are_replayed_with_the_same_tokens_and_blocks(cases: range) -> None:
    """All of a call, then another seed, which leaves the cached contexts, then other text filled in."""
    model, replayed, blocks = hf_parallel.enable(small_model()), 0, 0
    for case in cases:
        settings, cache = random_call(random.Random(case)), hf_parallel.LogitsCache()
        if settings["titles"]:
            settings["opening"] = ""  # which might open a block already
        ids, mask = tiny.left_pad([torch.tensor(encode(prompt)) for prompt in PROMPTS[: 1 + case % 3]])
        given = {"attention_mask": mask, "generation_mode": "pdos", "tokenizer": TOKENIZER, **settings}
        given |= {"pad_token_id": tiny.PAD, "return_dict_in_generate": True}
        for seed, is_again in ((5, False), (5, True), (6, False), (5, False)):
            plain = model.generate(ids, **given, seed=seed)
            out = model.generate(ids, **given, seed=seed, logits_cache=cache)
            assert torch.equal(out.sequences, plain.sequences)
            assert (out.blocks, out.fallback) == (plain.blocks, plain.fallback)
            torch.testing.assert_close(out.log_probs, plain.log_probs, atol=1e-4, rtol=1e-4, equal_nan=True)
            if is_again:
                assert out.stats.forward_passes == 0
                assert out.stats.replayed_tokens == plain.stats.decoded_tokens
            replayed += seed > 5 and 0 < out.stats.replayed_tokens < out.stats.decoded_tokens
            blocks += sum(map(len, plain.blocks))
            if seed > 5:  # the same samples with other text between them
                given["fill_in"] = not given["fill_in"]
    assert replayed
    assert blocks >= len(cases)

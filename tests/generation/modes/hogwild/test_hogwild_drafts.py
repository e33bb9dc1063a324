"""Drafts of workers change no token: runs with and without them are the same, but for the number of passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from talks import PROMPT, TALK
from workers import TOKENIZER, write

import hf_parallel
from hf_parallel.engine import Engine
from hf_parallel.generation.decoding.runner import Runner
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS: dict[str, Any] = TALK | {"max_new_tokens": 60, "return_dict_in_generate": True, "generation_mode": "hogwild"}
REPETITIVE = {"do_sample": False, "sequence_bias": [[[ord("a")], 3.0], [[ord("b")], 3.0]]}


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")), batch_invariant=True)


def check_same(out: Any, expected: Any) -> None:
    assert torch.equal(out.sequences, expected.sequences)
    assert out.history == expected.history
    assert out.stats.decoded_tokens == expected.stats.decoded_tokens
    assert out.stats.prefilled_tokens == expected.stats.prefilled_tokens
    torch.testing.assert_close(out.log_probs, expected.log_probs, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("more", [{}, REPETITIVE], ids=["sampled", "greedy"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_the_same_with_and_without_drafts(
    model: Any, layout: str, num_workers: int, more: dict[str, Any]
) -> None:
    settings = SETTINGS | {"layout": layout, "num_workers": num_workers, **more}
    settings.pop("tokenizer", None)
    expected = model.generate(PROMPT, tokenizer=TOKENIZER, **settings)
    out = model.generate(PROMPT, tokenizer=TOKENIZER, draft_tokens=4, **settings)
    check_same(out, expected)
    with Engine(model, TOKENIZER) as engine:
        other = engine.submit(PROMPT, tokenizer=TOKENIZER, draft_tokens=3, **settings).result(600)
    check_same(other, expected)


def test_repeated_text_takes_fewer_passes() -> None:
    script = "The sum is five. " * 6
    expected = write(script, script, separator="\n\n", sentence_ends=["#"])
    out = write(script, script, separator="\n\n", sentence_ends=["#"], draft_tokens=5)
    assert out.texts == expected.texts
    assert out.stats.accepted_tokens > 60
    assert out.stats.forward_passes < expected.stats.forward_passes / 2


def test_a_draft_is_no_larger_than_a_chunk_of_a_prefill(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    forward = Runner.forward

    def counted(self: Runner, *passes: Any, **given: Any) -> Any:
        sizes.append(len(passes) - 1)
        return forward(self, *passes, **given)

    monkeypatch.setattr(Runner, "forward", counted)
    settings = {name: value for name, value in (SETTINGS | REPETITIVE).items() if name != "tokenizer"}
    model.generate(PROMPT, tokenizer=TOKENIZER, draft_tokens=50, prefill_chunk_size=8, **settings)
    assert 0 < max(sizes) <= 4


@pytest.mark.parametrize("more", [{"control_prompt": "Go? "}, {"logits_cache": hf_parallel.LogitsCache()}])
def test_drafts_that_cannot_be_raise(model: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="draft_tokens must be 0 with a"):
        model.generate(PROMPT, tokenizer=TOKENIZER, draft_tokens=2, **SETTINGS, **more)

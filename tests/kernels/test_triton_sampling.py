"""The Triton kernels of sampling keep the tokens that the warpers of Transformers keep, in Triton's interpreter.

These tests are collected only if `TRITON_INTERPRET=1` was set before Python started; `test_triton_compile.py` runs them
in such a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import one_layer
import pytest
import tiny
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_parallel import enable
from hf_parallel.generation.sampling.processors import split_warpers
from hf_parallel.generation.sampling.rng import exponential_noise, mix
from hf_parallel.kernels import BACKEND_VARIABLE
from hf_parallel.kernels.sampling import Warpers, sample

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    import interpreter  # noqa: F401

    from hf_parallel.kernels.triton import sampling as triton_backend

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]

VOCABULARY = 700
SEVERAL_CHUNKS = 5000
KEYS = torch.tensor([mix(7, row) for row in range(4)])
SETTINGS = {
    "none": Warpers(),
    "temperature": Warpers(temperature=0.7),
    "top_k": Warpers(temperature=1.5, top_k=5),
    "top_k of one": Warpers(top_k=1),
    "top_k of all": Warpers(top_k=10**5),
    "top_p": Warpers(top_p=0.9),
    "small top_p": Warpers(top_p=0.3),
    "top_p of zero": Warpers(top_p=0.0),
    "min_p": Warpers(min_p=0.1),
    "all": Warpers(0.6, 50, 0.9, 0.02),
}


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Select the backend, with NaN in memory that is allocated and not filled.

    A program searches more tokens at once than on a GPU: the interpreter takes as long for few as for many.
    """
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.setattr(triton_backend, "_WARPS", 32)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_scores(dtype: torch.dtype, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Rows without ties, with ties, with equal scores only, and with suppressed tokens and zeros of both signs."""
    scores = 2 * torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1))
    scores[1] = (2 * scores[1]).round() / 2
    scores[2] = 1.0
    scores[3, ::3] = -torch.inf
    scores[3, 1::3] = 0.0
    scores[3, 4::6] = -0.0
    return scores.to(dtype)


def warped(scores: torch.Tensor, warpers: Warpers) -> torch.Tensor:
    """Return the scores after Transformers' own warpers, with the stable sort of CUDA."""
    scores = TemperatureLogitsWarper(warpers.temperature)(None, scores.float())
    with patch.object(torch, "sort", partial(torch.sort, stable=True)):
        for number, off, warper in (
            (warpers.top_k, 0, TopKLogitsWarper),
            (warpers.top_p, 1.0, TopPLogitsWarper),
            (warpers.min_p, 0.0, MinPLogitsWarper),
        ):
            scores = scores if number == off else warper(number)(None, scores)
    return scores


def choose(scores: torch.Tensor, warpers: Warpers, noise: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor([warpers.numbers(scores.shape[1])])
    drawn, _ = triton_backend.sample(scores, numbers, None, noise, warpers.is_filter, not warpers.is_filter)
    return drawn[0]


CASES = [
    *((name, torch.float32, VOCABULARY) for name in SETTINGS),
    *((name, torch.bfloat16, VOCABULARY) for name in ("top_k", "top_p", "small top_p", "min_p", "all")),
    ("all", torch.float16, VOCABULARY),
    *((name, torch.bfloat16, SEVERAL_CHUNKS) for name in ("temperature", "top_p", "all")),
]


@pytest.mark.parametrize(("name", "dtype", "vocabulary"), CASES, ids=str)
def test_the_tokens_that_are_kept_are_those_of_transformers(name: str, dtype: torch.dtype, vocabulary: int) -> None:
    scores, warpers = random_scores(dtype, vocabulary), SETTINGS[name]
    expected = warped(scores, warpers)
    kept = expected.isfinite()
    assert warpers.is_filter == bool((~kept[:3]).any()) or name == "top_k of all"
    # The lowest kept scores win, the first or the last of those that are equal; removed tokens would win against them.
    lowest = torch.where(kept, expected, torch.inf)
    for order in (torch.arange(vocabulary), torch.arange(vocabulary).flip(0)):
        last = (lowest == lowest.amin(1, keepdim=True)).int()[:, order].argmax(1)
        noise = torch.where(kept, 1.0, 1e-35).scatter(1, order[last][:, None], 1e-18)
        assert choose(scores, warpers, noise).tolist() == order[last].tolist()


@pytest.mark.parametrize(("name", "dtype", "vocabulary"), CASES, ids=str)
def test_tokens_and_their_probabilities_are_those_of_the_noise(name: str, dtype: torch.dtype, vocabulary: int) -> None:
    scores = random_scores(dtype, vocabulary)
    probs = warped(scores, SETTINGS[name]).softmax(dim=-1)
    tokens, marks, found = sample(scores, SETTINGS[name], KEYS)
    expected = (probs / exponential_noise(KEYS[:, None], torch.arange(vocabulary))).argmax(dim=-1)
    assert torch.equal(tokens, expected)
    assert marks is not None
    assert not marks.any()
    torch.testing.assert_close(found, probs.gather(1, expected[:, None])[:, 0], rtol=1e-5, atol=0)


def test_rows_of_different_settings_sample_as_each_alone() -> None:
    several = list(SETTINGS.values())
    scores = random_scores(torch.float32)[:1].expand(len(several), -1)
    keys = torch.tensor([mix(3, row) for row in range(len(several))])
    together = sample(scores, several, keys)
    for row, one in enumerate(several):
        alone = sample(scores[row : row + 1], one, keys[row : row + 1])
        for of_all, of_row in zip(together, alone, strict=True):
            assert of_all is not None
            assert of_row is not None
            assert torch.equal(of_all[row : row + 1], of_row)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("warpers", [Warpers(), Warpers(top_k=3, top_p=0.9)], ids=["race", "filters"])
def test_rows_that_cannot_be_drawn_are_marked(bad: float, warpers: Warpers) -> None:
    scores = random_scores(torch.float32)
    scores[1, slice(None) if bad == -torch.inf else 5] = bad
    tokens, marks, _ = sample(scores, warpers, KEYS)
    assert marks is not None
    assert marks.tolist() == [0, 2, 0, 0]
    assert tokens[1] == 0


def test_warpers_are_split_off_in_the_order_of_generate_only() -> None:
    temperature, top_k, top_p, min_p = (
        TemperatureLogitsWarper(0.5), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1),
    )  # fmt: skip
    typical, two = TypicalLogitsWarper(0.5), TopPLogitsWarper(0.8, min_tokens_to_keep=2)
    assert split_warpers([typical, temperature, top_k, top_p, min_p]) == ([typical], Warpers(0.5, 9, 0.8, 0.1))
    assert split_warpers([top_p, temperature]) == ([top_p], Warpers(temperature=0.5))
    assert split_warpers([temperature, two, min_p]) == ([temperature, two], Warpers(min_p=0.1))
    assert split_warpers([temperature, top_k, typical]) == ([temperature, top_k, typical], Warpers())


# Calls

SAMPLED: dict[str, dict[str, Any]] = {
    "seed": {"seed": 4, "temperature": 1.5, "top_k": 0},
    "seed and filters": {"seed": 4, "temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "no seed": {"temperature": 0.9, "top_k": 0},
    "no seed and filters": {"top_k": 9, "top_p": 0.8},
    "processor before": {"seed": 4, "repetition_penalty": 1.3, "top_k": 7},
    "processor after": {"seed": 4, "typical_p": 0.7, "top_k": 9},
    "scores": {"seed": 4, "top_k": 7, "output_scores": True, "output_logits": True},
    "logits": {"seed": 4, "top_k": 7, "output_logits": True},
    "greedy": {"do_sample": False},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """One layer with one head, as the interpreter is slow."""
    return enable(one_layer.build(num_attention_heads=1, num_key_value_heads=1))


@pytest.mark.parametrize("name", SAMPLED)
def test_calls_return_what_they_return_without_the_kernels(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = tiny.left_pad(tiny.make_prompts([5, 3], seed=4))
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": 2, "return_dict_in_generate": True}
    settings |= {"attention_mask": mask, "generation_mode": "shared_prefix", **SAMPLED[name]}
    found = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        torch.manual_seed(5)
        found.append((model.generate(ids, **settings), torch.get_rng_state()))
    (expected, state), (ours, our_state) = found
    assert torch.equal(ours.sequences, expected.sequences)
    assert torch.equal(our_state, state)
    for (rows, probs), (same_rows, same) in zip(ours.record.log_probs, expected.record.log_probs, strict=True):
        assert rows == same_rows
        torch.testing.assert_close((probs.model, probs.sampling), (same.model, same.sampling), atol=1e-4, rtol=1e-4)
        assert probs.top is same.top is None
    for kind in ("scores", "logits"):
        for mine, its in zip(getattr(ours, kind) or (), getattr(expected, kind) or (), strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)

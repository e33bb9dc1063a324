"""Logits of whole models have the same bits in random schedules; a model whose code breaks this is named."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import tiny
import torch
from random_trees import LENGTHS, Pieces, RandomTree
from transformers import GPT2LMHeadModel

import hf_parallel
from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.placement import cpu_as_default
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.enabled import Claim, enabled
from hf_parallel.kernels import native
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.decode.cached_model import CachedModel
from hf_parallel.models.intercept.attention import UnsupportedModelError

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="needs the C kernels"),
    pytest.mark.filterwarnings("ignore"),
]
QUICK = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3")
OTHERS = {"mimo_v2_flash", "llama-dynamic", "llama-longrope"}
"""Keys and values of different sizes, and frequencies that depend on the length of a row."""
ALL = (*QUICK, "dbrx", *sorted({*tiny.ARCHITECTURES} - {*QUICK, *OTHERS}))
PLAIN = {"do_sample": True, "seed": 3, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": tiny.PAD}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextmanager
def passes_of(model: Any) -> Iterator[tuple[BlockCache, CachedModel]]:
    """A cache and the model over it, for passes of the test's own."""
    claim = Claim()
    cache = SharedPrefixCache()
    with ExitStack() as stack:
        for context in (torch.no_grad(), cpu_as_default(), model.claimed(claim), fast_layers(model)):
            stack.enter_context(context)
        cache.begin_call(model, claim, kept=False)
        yield cache, CachedModel(model, enabled(model).capabilities, cache, cuda_graph=False, compile=False)
    claim.active = False


def num_different(model: Any, seed: int, longest: int, lengths: Sequence[int] = LENGTHS) -> tuple[int, int]:
    """Number of tokens whose logits differ from those of their row alone, and of all."""
    tree = RandomTree(seed, longest, lengths)
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(5, size, (length,), generator=generator) for length in tree.lengths]

    def compute(cache: BlockCache, cached: CachedModel, segments: list[Segment], pieces: Pieces) -> torch.Tensor:
        forward = cache.prepare(segments)
        ids = torch.cat([texts[block][first:end] for block, first, end in pieces]).to(cached.device)
        keeps_all = forward.is_decode_step and tree.random.random() < 0.5
        logits = cached.logits(forward, ids, None if keeps_all else list(range(len(ids))))
        cache.commit()
        return logits

    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    with passes_of(model) as (cache, cached):
        for segments, pieces in tree.passes(cache):
            torch.set_num_threads(tree.random.randint(1, 2))
            logits = compute(cache, cached, segments, pieces)
            for part, (block, _, _) in zip(logits.split([e - f for _, f, e in pieces]), pieces, strict=True):
                parts[block].append(part)
    torch.set_num_threads(1)
    different = total = 0
    for leaf in tree.leaves:
        row = torch.cat([torch.cat(parts[block]) for block in tree.path(leaf)])
        with passes_of(model) as (cache, cached):
            segments = [Segment([cache.pool.new_block(len(row))], len(row))]
            alone = compute(cache, cached, segments, tree.alone(leaf))
        different += int((row != alone).any(dim=1).sum())
        total += len(row)
    return different, total


CASES = [(name, dtype) for name in QUICK for dtype in (torch.float32, torch.bfloat16)]
CASES += [pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in ALL if name not in QUICK]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_logits_have_the_same_bits_in_any_schedule(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and native.has_bfloat16():
        pytest.skip("PyTorch computes bfloat16 on this processor")
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name, dtype=dtype)), batch_invariant=True)
    for seed in range(4):
        different, total = num_different(model, seed, 200)
        assert different == 0, f"tree {seed}: {different} of {total}"


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "packed", "packed_int8"])
def test_logits_of_the_demo_model_have_the_same_bits_in_any_schedule(weights: str | None) -> None:
    given = {} if weights is None else {"weights": weights}
    model, _ = hf_parallel.load_embedded_model(preset=False, **given)
    hf_parallel.enable(model, batch_invariant=True)
    for seed in range(3):
        different, total = num_different(model, seed, 100)
        assert different == 0, f"tree {seed}: {different} of {total}"


def test_a_model_whose_code_breaks_it_is_named() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    plain = type(model.model.layers[1].mlp).forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:  # as a product that is computed otherwise for many tokens
        return plain(model.model.layers[1].mlp, hidden) * (1 + 1e-6 * (hidden.shape[1] > 20))

    model.model.layers[1].mlp.forward = forward
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp \(LlamaMLP\)"):
        hf_parallel.enable(model, batch_invariant=True)
    assert not hf_parallel.is_enabled(model)
    hf_parallel.enable(model)
    assert hf_parallel.is_enabled(model)


def test_a_model_of_few_positions_is_not_compared() -> None:
    config = copy.deepcopy(tiny.build("gpt2").config)
    config.n_positions = 100
    with pytest.raises(UnsupportedModelError, match=r"because of its 100 positions: 135 are needed"):
        hf_parallel.enable(GPT2LMHeadModel(config), batch_invariant=True)


def test_a_model_that_is_in_use_stays_as_it_was_enabled() -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    before = enabled(model).capabilities
    with passes_of(model), pytest.raises(RuntimeError, match="already generating in parallel"):
        hf_parallel.enable(model, batch_invariant=True)
    assert enabled(model).capabilities is before


def test_calls_over_kept_and_pickled_caches_have_the_same_bits() -> None:
    """A call alone; in chunks; rows of one prompt; over a cache of a call whose prompt forks; over a pickled one."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    (prompt,) = tiny.make_prompts([150], seed=5)
    other = torch.cat((prompt[:77], tiny.make_prompts([40], seed=6)[0]))

    def logits(ids: torch.Tensor, **given: Any) -> torch.Tensor:
        settings = {**PLAIN, "generation_mode": "shared_prefix", "output_logits": True, "return_dict_in_generate": True}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **{**settings, **given})
        return torch.stack(output.logits, dim=1)[0]

    alone = logits(prompt[None])
    assert torch.equal(logits(prompt[None], prefill_chunk_size=37), alone)
    assert torch.equal(logits(prompt[None].repeat(5, 1)), alone)
    cache = hf_parallel.SharedPrefixCache()
    logits(other[None], past_key_values=cache)
    assert torch.equal(logits(prompt[None], past_key_values=cache), alone)
    loaded = pickle.loads(pickle.dumps(cache))
    assert torch.equal(logits(prompt[None], past_key_values=loaded), alone)

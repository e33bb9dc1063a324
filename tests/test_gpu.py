"""On a GPU, every backend equals the oracle, and calls have the same tokens as on the CPU.

All tests need a CUDA device. They share layouts, problems and oracles with the CPU tests and with
`python -m benchmarks.gpu`, which measures more sizes.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny
import torch
from block_oracle import exact_attention
from gpu_problems import PROBLEMS, TOLERANCE, check, poisoned_memory
from hypothesis import HealthCheck, Phase, given, settings
from pages import EXECUTABLE, random_stand_in, run_on
from pages import name_of as name_of_path
from random_trees import RandomTree
from scenes import Scene, scenes
from small_tokenizers import make
from test_attention_bits import Case
from test_attention_bits import num_different as different_attention
from test_hogwild import StepsEnd
from test_same_bits import num_different, passes_of
from test_shared_prefix import CLEAR, clear_batch, shared
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from workers import SETTINGS

import hf_parallel
from hf_parallel.cache import Segment
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS
from hf_parallel.generation.sampling.processors import split_warpers
from hf_parallel.generation.sampling.rng import exponential_noise
from hf_parallel.kernels import (
    BACKEND_VARIABLE,
    AttentionParams,
    AttentionPlan,
    LayerStorage,
    backends,
    block_attention,
)
from hf_parallel.kernels.sampling import sample
from hf_parallel.training import DataCollatorForParallel, ParallelExample, prepare_model
from hf_parallel.training.attention import LayoutBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

DEVICE = torch.device("cuda")
HALVES = ["float16", "bfloat16"]
NAMES = ["llama", "gemma3_text", "opt"]  # one rotary table; two tables and windows; learned positions
GRAPHS = pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "graphs"])


# Attention


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of an available backend; skip the test if the machine does not have it."""
    (found,) = (backend for backend in backends() if backend.name == request.param)
    if not found.available:
        pytest.skip(found.reason)
    return found.name


def attend_on_device(scene: Scene, backend: str, dtype: torch.dtype) -> torch.Tensor:
    """Compute the last pass of a scene by the backend, with NaN in all memory that it allocates."""

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, params: AttentionParams
    ) -> torch.Tensor:
        query, keys, values = (x.to(DEVICE) for x in (query, keys, values))
        params = replace(params, sinks=None if params.sinks is None else params.sinks.to(DEVICE))
        # Scenes are laid out on the CPU, so the variable is set for this call alone.
        with poisoned_memory(), patch.dict(os.environ, {BACKEND_VARIABLE: backend}):
            return block_attention(query, keys, values, plan, params).cpu()

    return scene.attend(attend, dtype)


def exactly(scene: Scene, dtype: torch.dtype) -> torch.Tensor:
    """Compute the oracle in float64 from the same rounded numbers."""

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> torch.Tensor:
        return exact_attention(query.double(), keys.double(), values.double(), *rest)

    return scene.attend(attend, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@settings(max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(scene=scenes())
def test_backends_equal_the_oracle_on_any_layout(backend: str, dtype: str, scene: Scene) -> None:
    """Each layout compiles its own kernels: few examples, no shrinking."""
    kind = getattr(torch, dtype)
    out, expected = attend_on_device(scene, backend, kind), exactly(scene, kind)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(kind).eps, atol=TOLERANCE[dtype])


SIZES = [("bfloat16", 128), ("float16", 128), ("float32", 128), ("bfloat16", 64), ("bfloat16", 80), ("bfloat16", 256)]


@pytest.mark.parametrize(("dtype", "head_dim"), SIZES)
@pytest.mark.parametrize("problem", [*PROBLEMS, "append", "move"])
def test_large_problems_equal_the_oracle(problem: str, dtype: str, head_dim: int) -> None:
    """Uses the backend that dispatch selects: FlashAttention for long prefills, from its package if installed."""
    assert check(problem, dtype, DEVICE, head_dim) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float16", 64), ("bfloat16", 256)])
@pytest.mark.parametrize("problem", ["tree", "prefill"])
def test_the_flash_attn_package_equals_the_oracle(
    problem: str, dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flash_attn")
    monkeypatch.setenv("HF_PARALLEL_BACKEND", "flash")
    assert check(problem, dtype, DEVICE, head_dim) <= TOLERANCE[dtype]


# Whole calls, in float32


@cache
def on_cpu(name: str) -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)))


@cache
def on_device(name: str) -> PreTrainedModel:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)).to(DEVICE))


def sent(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


@GRAPHS
@pytest.mark.parametrize("name", NAMES)
def test_greedy_shared_prefix_equals_generate_on_the_cpu(name: str, cuda_graph: bool) -> None:
    batch = clear_batch(name)
    out = shared(on_device(name), **sent(batch.inputs), cuda_graph=cuda_graph)
    assert torch.equal(out.sequences.cpu(), batch.expected)
    assert out.stats is not None
    assert bool(out.stats.graph_bytes) == cuda_graph


@GRAPHS
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2"])
def test_compiled_layers_generate_as_on_the_cpu(name: str, cuda_graph: bool) -> None:
    """With fused projections (of Qwen2, with biases), for several rows and for one."""
    batch, model = clear_batch(name), on_device(name)
    weight = model.get_decoder().layers[0].self_attn.k_proj.weight
    for rows in (slice(None), slice(1)):
        inputs = {key: tensor[rows] for key, tensor in sent(batch.inputs).items()}
        out = shared(model, **inputs, cuda_graph=cuda_graph, compile=True)
        assert torch.equal(out.sequences.cpu(), batch.expected[rows])
        assert out.stats is not None
        assert out.stats.compiled_passes > 5
        assert bool(out.stats.graph_bytes) == cuda_graph
        assert weight.untyped_storage().nbytes() > weight.nbytes, "not fused"


def generate_hogwild(model: PreTrainedModel, ids: torch.Tensor, layout: str, **more: Any) -> Any:
    """Generate with three workers whose steps end at different times."""
    settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    settings |= {"num_workers": 3, "layout": layout, "finisher_tokens": 0, "logits_processor": [StepsEnd(4)]}
    return model.generate(ids, generation_mode="hogwild", **(settings | SETTINGS | more))  # type: ignore[operator]


@cache
def clear_problem(layout: str) -> tuple[torch.Tensor, Any]:
    """Return a prompt after which every greedy token has a clear margin, and the output on the CPU."""
    for seed in range(20):
        ids = tiny.make_prompts([17], seed=seed)[0][None]
        out = generate_hogwild(on_cpu("llama"), ids, layout)
        best = torch.stack(out.scores).topk(2).values
        if (best[..., 0] - best[..., 1]).min() > CLEAR:
            return ids, out
    raise AssertionError(f"no clear problem for {layout} among 20")


@GRAPHS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_workers_equal_those_on_the_cpu(layout: str, cuda_graph: bool) -> None:
    ids, expected = clear_problem(layout)
    out = generate_hogwild(on_device("llama"), ids.to(DEVICE), layout, cuda_graph=cuda_graph)
    assert torch.equal(out.sequences.cpu(), expected.sequences)
    assert out.history == expected.history
    assert len({step.forward_pass for step in out.history[0]}) > 3, "too few steps end"
    assert bool(out.stats.graph_bytes) == cuda_graph


# Randomness


def test_random_noise_on_a_gpu_equals_that_on_the_cpu() -> None:
    keys, tokens = torch.arange(0, 2**62, 2**53)[:, None], torch.arange(5000)
    ours = exponential_noise(keys.to(DEVICE), tokens.to(DEVICE)).cpu()
    torch.testing.assert_close(ours, exponential_noise(keys, tokens), rtol=1e-5, atol=0)


FILTERS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top_k, top_p": [TopKLogitsWarper(20), TopPLogitsWarper(0.95)],
    "top_p": [TopPLogitsWarper(0.9)],
    "all": [TemperatureLogitsWarper(1.5), TopKLogitsWarper(500), TopPLogitsWarper(0.8), MinPLogitsWarper(0.01)],
}
LARGE_VOCABULARY = 151_936


@pytest.mark.parametrize("spread", [1.3, 4.0], ids=["uncertain", "certain"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FILTERS)
def test_sampling_draws_what_transformers_warpers_and_multinomial_draw(name: str, dtype: str, spread: float) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    logits = torch.randn(64, LARGE_VOCABULARY, device=DEVICE, generator=generator).mul_(spread)
    logits = logits.to(getattr(torch, dtype))
    scores = logits.float()
    for warper in FILTERS[name]:
        scores = warper(None, scores)
    probs, settings = scores.softmax(dim=-1), split_warpers(FILTERS[name])[1]
    keys = torch.arange(64, device=DEVICE) * 2**40
    seeded = (probs / exponential_noise(keys[:, None], torch.arange(LARGE_VOCABULARY, device=DEVICE))).argmax(dim=-1)
    torch.manual_seed(2)
    unseeded = torch.multinomial(probs, num_samples=1).squeeze(1)
    after = torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    sample(logits, settings, keys)  # copies the settings
    torch.manual_seed(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours, by_generator = (sample(logits, settings, source) for source in (keys, None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), after)
    for (tokens, marks, found), expected in ((ours, seeded), (by_generator, unseeded)):
        assert not marks.any()
        same = tokens == expected
        assert float(same.float().mean()) > 0.98, "rounding may decide between two equal ratios"
        torch.testing.assert_close(found[same], probs.gather(1, expected[:, None])[same, 0], rtol=1e-4, atol=0)


@GRAPHS
def test_a_seeded_sample_on_a_gpu_equals_that_on_the_cpu(cuda_graph: bool) -> None:
    ids = tiny.make_prompts([17], seed=4)[0][None]
    sampled = {"do_sample": True, "seed": 5, "temperature": 1.5, "num_return_sequences": 6}
    expected = shared(on_cpu("llama"), ids, **sampled).sequences
    out = shared(on_device("llama"), ids.to(DEVICE), **sampled, cuda_graph=cuda_graph)
    assert len({tuple(row) for row in expected.tolist()}) == len(expected)
    assert torch.equal(out.sequences.cpu(), expected)


# The same bits in any schedule


class OnDevice(Case):
    """A random tree of blocks, whose attention is computed on the GPU."""

    def compute(self, query: torch.Tensor, layer: LayerStorage, plan: AttentionPlan) -> torch.Tensor:
        sinks = None if self.params.sinks is None else self.params.sinks.to(DEVICE)
        params = replace(self.params, sinks=sinks, batch_invariant=True)
        query, keys, values = (x.to(DEVICE) for x in (query, layer.keys, layer.values))
        with poisoned_memory():
            return block_attention(query, keys, values, plan, params).cpu()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("features", [{}, {"window": 200, "has_sinks": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_has_the_same_bits_in_any_schedule(dim: int, features: dict[str, Any], dtype: str) -> None:
    for seed in range(6):
        case = OnDevice(seed, heads=8, dim=dim, dtype=getattr(torch, dtype), tree=RandomTree(seed, 700), **features)
        assert different_attention(case) == 0, f"tree {seed}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_have_the_same_bits_for_any_number_of_rows(dtype: str) -> None:
    from hf_parallel.kernels.triton.invariant.products import product

    x = torch.randn(256, 4096, device=DEVICE).to(getattr(torch, dtype))
    weight = torch.randn(4096, 4096, device=DEVICE).to(x.dtype)
    out = product(x, weight.T)
    torch.testing.assert_close(out, (x.double() @ weight.double().T).to(x.dtype), rtol=1e-2, atol=1e-2)
    for rows in (1, 2, 3, 17, 64, 65, 255):
        assert torch.equal(product(x[:rows], weight.T), out[:rows]), f"{rows} rows"
        assert torch.equal(product(x[-rows:], weight.T), out[-rows:]), f"{rows} rows"


BITS = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@cache
def with_same_bits(name: str, dtype: str) -> PreTrainedModel:
    model = copy.deepcopy(tiny.build(name, dtype=getattr(torch, dtype))).to(DEVICE)
    return hf_parallel.enable(model, batch_invariant=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BITS)
def test_logits_have_the_same_bits_in_any_schedule(name: str, dtype: str) -> None:
    """In random trees, chunks and forks."""
    for seed in range(4):
        different, total = num_different(with_same_bits(name, dtype), seed, 200)
        assert different == 0, f"tree {seed}: {different} of {total}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BITS)
def test_logits_have_the_same_bits_for_1_to_256_rows(name: str, dtype: str) -> None:
    """Of a decode step after a prefix of 300 tokens, which rows share or have a copy of."""
    texts = [
        torch.cat(parts).to(DEVICE) for parts in zip([tiny.make_prompts([300])[0]] * 256, last_tokens(), strict=True)
    ]
    model = with_same_bits(name, dtype)

    def logits(rows: int, is_shared: bool) -> torch.Tensor:
        with passes_of(model) as (cache, cached):
            if is_shared:
                trunk = cache.pool.new_block(300)
                forward = cache.prepare([Segment([trunk], 300)])
                cached.logits(forward, texts[0][:300], [299])
                views = [[trunk, leaf] for leaf in cache.pool.new_blocks(rows, 1, base=300)]
            else:
                views = [[block] for block in cache.pool.new_blocks(rows, 301)]
                for first in range(0, rows, 16):
                    some = views[first : first + 16]
                    forward = cache.prepare([Segment(view, 300) for view in some])
                    cached.logits(forward, texts[0][:300].repeat(len(some)), [299])
                    cache.commit()
            cache.commit()
            forward = cache.prepare([Segment(view, 1) for view in views])
            return cached.logits(forward, torch.stack([text[300] for text in texts[:rows]]), None)

    alone = logits(1, is_shared=False)
    expected = logits(256, is_shared=True)
    for rows in (1, 2, 3, 8, 64, 255, 256):
        for is_shared in (True, False):
            out = logits(rows, is_shared)
            assert torch.equal(out[:1], alone), f"{rows} rows, shared: {is_shared}"
            assert torch.equal(out, expected[:rows]), f"{rows} rows, shared: {is_shared}"


def last_tokens() -> list[torch.Tensor]:
    """A token of each of 256 rows."""
    return list(tiny.make_prompts([256], seed=1)[0].split(1))


# Code of the pages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", EXECUTABLE, ids=name_of_path)
def test_code_of_pages_and_examples_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    run_on(path, random_stand_in(folder, DEVICE))


# Training


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_flex_attention_gives_loss_and_gradients_of_masks(name: str) -> None:
    """Layouts with moves, windows and sinks."""
    model = prepare_model(hf_parallel.enable(copy.deepcopy(tiny.build(name)).to(DEVICE)))
    prompt = torch.arange(5, 65, device=DEVICE)[None]
    call = {**SETTINGS, "generation_mode": "hogwild", "num_workers": 2, "max_new_tokens": 150, "do_sample": True}
    output = model.generate(prompt, return_dict_in_generate=True, **call)
    tree = ParallelExample.from_tree([[5] * 200] * 2, [[6] * 90, [7] * 40])
    given = [example.with_one_target_each() for example in (ParallelExample.from_output(output), tree)]
    batch = {key: value.to(DEVICE) for key, value in DataCollatorForParallel(make("split_marker"))(given).items()}
    found = []
    for flex in (False, True):
        model.zero_grad()
        loss = model(**{**batch, "past_key_values": LayoutBatch(given, DEVICE, flex=flex)}).loss
        loss.backward()
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-3, atol=1e-4)
    assert (found[1][1] - found[0][1]).norm() < 1e-2 * found[0][1].norm()

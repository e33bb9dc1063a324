"""The compiled CPU kernel equals a plain softmax, and PyTorch replaces it where it cannot be compiled."""

from __future__ import annotations

import os
import platform
import shutil
import threading
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from block_oracle import exact_attention

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import AttentionParams, AttentionPlan, RotarySpec, native, sampling, torch_attention

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None, reason="needs a C compiler, as the kernel itself does"
)


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    groups = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(groups, dim=0) for x in (k, v))
    scores = torch.einsum("mhd,hnd->mhn", q.double(), k) * scale
    return torch.einsum("mhn,hnd->mhd", scores.softmax(-1), v)


def plan_of(counts: list[int], queries: list[int], num_heads: int) -> native.NativePlan:
    """Blocks of `counts` keys, stored one after another, each with `queries` queries of its own, which see all keys."""
    blocks = len(counts)
    numbers = np.arange(blocks + 1)
    first = np.concatenate(([0], np.cumsum(counts)))
    first_pair = np.concatenate(([0], np.cumsum(queries)))
    arrays = {
        "level_blocks": np.array([0, blocks]),
        "row": first[:-1] * num_heads,
        "stride": np.array(counts),
        "quantized": np.zeros(blocks, np.int64),
        "before": np.zeros(blocks, np.int64),
        "first_piece": np.zeros_like(numbers),
        "first_pair": first_pair,
        "pieces": np.zeros((0, 4), np.int64),
        "query": np.arange(first_pair[-1]),
        "lo": np.zeros(first_pair[-1], np.int64),
        "hi": np.repeat(counts, queries),
    }
    return native.NativePlan(arrays)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries `[T, heads, dim]` over blocks of keys and values `[N, kv_heads, L, dim]`, as many queries for each."""
    blocks, kv_heads, length, dim = k.shape
    plan = plan_of([length] * blocks, [len(q) // blocks] * blocks, kv_heads)
    return native.attend(q, k.reshape(-1, dim), v.reshape(-1, dim), plan, kv_heads, scale, None)


@compiled
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 11, 16, 17, 40, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "num_keys"), [(9, 3, 64, 256), (4, 4, 80, 1001), (8, 1, 128, 777)]
)
def test_kernel_equals_softmax(tokens: int, heads: int, kv_heads: int, dim: int, num_keys: int) -> None:
    q, k, v = (
        torch.randn(tokens, heads, dim),
        torch.randn(kv_heads, num_keys, dim),
        torch.randn(kv_heads, num_keys, dim),
    )
    out = attend(q, k[None], v[None], scale=dim**-0.5)
    torch.testing.assert_close(out.double(), softmax(q, k, v, dim**-0.5), rtol=0, atol=1e-5)


@pytest.fixture
def compiled_for(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compile the kernels for another processor than this one, whose instructions it has."""
    flags = tuple(f"-march={request.param}" if flag == "-march=native" else flag for flag in native._FLAGS)
    caches = native._compiled_library, native._load
    monkeypatch.setattr(native, "_FLAGS", flags)
    monkeypatch.setenv("HF_PARALLEL_CACHE", str(tmp_path))
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


@compiled
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for older processors of this kind")
@pytest.mark.parametrize("compiled_for", ["x86-64", "sandybridge"], indirect=True)  # without AVX; without AVX2 and FMA
def test_kernels_are_right_on_processors_with_narrow_vectors(compiled_for: str) -> None:
    assert not native.unavailable_reason()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_keys in range(1, 80):
            q, k, v = torch.randn(2, 3, 16), torch.randn(3, num_keys, 16), torch.randn(3, num_keys, 16)
            q, k, v = (x.to(dtype) for x in (q, k, v))
            out = attend(q, k[None], v[None], scale=0.25)
            expected = softmax(q, k, v, 0.25).to(dtype)
            torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    x, weight = torch.randn(70, 100), torch.randn(50, 100)
    torch.testing.assert_close(native.linear(x, weight), x @ weight.T, rtol=0, atol=1e-4)


@compiled
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_half_precision_is_summed_in_float32(tokens: int, dtype: torch.dtype, threads: int) -> None:
    q, k, v = torch.randn(tokens, 6, 64), torch.randn(2, 700, 64), torch.randn(2, 700, 64)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = attend(q, k[None], v[None], scale=0.125)
    finally:
        torch.set_num_threads(before)
    expected = softmax(q, k, v, 0.125)
    torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@compiled
@pytest.mark.parametrize("blocks", [1, 3])  # lanes of rows, lanes of dimensions
def test_a_key_that_is_not_a_number_is_not_ignored(blocks: int) -> None:
    q, k, v = torch.randn(blocks, 2, 16), torch.randn(blocks, 1, 70, 16), torch.randn(blocks, 1, 70, 16)
    k[-1, 0, 66] = torch.nan
    out = attend(q, k, v, scale=0.25)
    assert out[-1].isnan().all()
    assert out[:-1].isfinite().all()


def computed_natively(plan: AttentionPlan) -> bool:
    """Whether the plan has calls for the compiled kernel."""
    return any(getattr(value, "native", None) is not None for value in plan.derived.values())


@compiled
@pytest.mark.parametrize("workers", [2, 4, 12], ids=["narrow", "wide", "wider than a tile"])
def test_a_query_may_see_several_blocks_of_one_call_and_one_block_several_times(workers: int) -> None:
    """Workers that see each other's blocks, with gaps between them: several results of one call belong to one row."""
    torch.manual_seed(0)
    cache = BlockCache({0: RotarySpec((1.0, 0.1))})
    own, gap = cache.pool.new_blocks(workers, 512), cache.pool.new_block()
    views = [[gap, gap, *(other for other in own if other is not mine), gap, mine] for mine in own]
    for segments in ([Segment([gap], 3)], *([Segment(view, tokens) for view in views] for tokens in (300, 1))):
        forward = cache.prepare(segments)
        new = torch.randn(2, 2, forward.plan.num_queries, 8)
        cache.pool.arena.write(0, new[0], new[1], forward.plan)
        cache.commit()
    layer, query, threads = cache.pool.arena.layers[0], torch.randn(workers, 6, 8), torch.get_num_threads()
    params = AttentionParams(2, 0.3, RotarySpec((1.0, 0.1)))
    expected = exact_attention(query, layer.keys, layer.values, forward.plan, params)
    try:
        torch.set_num_threads(4)
        for _ in range(50):
            out = torch_attention.TorchBackend().attend(query, layer.keys, layer.values, forward.plan, params)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("window", [None, 5, 1000], ids=str)
@pytest.mark.parametrize("tokens", [2, 3, 9, 15, 16, 17, 32, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (9, 3), (4, 4)])
def test_short_runs_are_causal(heads: int, kv_heads: int, tokens: int, window: int | None) -> None:
    """Two rows with a common prompt append a run each; one of them has tokens of its own already.

    For that row, the long window hides all keys of the first thread's part of the prompt.
    """
    torch.manual_seed(tokens)
    cache = BlockCache()
    prompt, *own = cache.pool.new_block(1500), *cache.pool.new_blocks(2, 500, base=1500)
    passes = [
        [Segment([prompt], 1500)],
        [Segment([prompt, own[0]], 400)],
        [Segment([prompt, block], tokens) for block in own],
    ]
    for segments in passes:
        forward = cache.prepare(segments)
        new = torch.randn(2, kv_heads, forward.plan.num_queries, 64)
        cache.pool.arena.write(0, new[0], new[1], forward.plan)
        cache.commit()
    layer, query = cache.pool.arena.layers[0], torch.randn(2 * tokens, heads, 64) * 3
    params = AttentionParams(kv_heads, 0.125, window=window)
    out = torch_attention.TorchBackend().attend(query, layer.keys, layer.values, forward.plan, params)
    expected = exact_attention(query, layer.keys, layer.values, forward.plan, params)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert computed_natively(forward.plan.windowed(window))


@compiled
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (4, None), (60, None), (None, 85)], ids=str)
def test_calls_are_carried_over_to_following_and_repeated_decode_steps(window: int | None, chunk: int | None) -> None:
    """Workers see each other's growing blocks, rotated by other angles in each step; each second step is repeated."""
    torch.manual_seed(0)
    rotary = RotarySpec((1.0, 0.3, 0.1, 0.02))
    cache = BlockCache({0: rotary})
    common, *own = cache.pool.new_block(50), *cache.pool.new_blocks(3, 40)
    views = [[common, *(other for other in own if other is not mine), mine] for mine in own]
    params = AttentionParams(2, 0.3, rotary, window=window, chunk=chunk)

    def step(segments: list[Segment]) -> AttentionPlan:
        plan = cache.prepare(segments).plan
        new = torch.randn(2, 2, plan.num_queries, 8)
        cache.pool.arena.write(0, new[0], new[1], plan)
        return plan

    for segments in ([Segment([common], 50)], *([Segment(view, n) for view in views] for n in (9, 1))):
        step(segments)
        cache.commit()
    layer, runs = cache.pool.arena.layers[0], set()
    for number in range(6):
        plan = step([Segment(view, 1) for view in views])
        query = torch.randn(3, 6, 8)
        expected = exact_attention(query, layer.keys, layer.values, plan, params)
        out = torch_attention.TorchBackend().attend(query, layer.keys, layer.values, plan, params)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert computed_natively(plan.windowed(window, chunk))
        runs.add(plan.lineage)
        cache.rollback() if number % 2 else cache.commit()
    assert len(runs) == 1


@compiled
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_equal_their_definition_in_any_memory_layout(interleaved: bool) -> None:
    heads, tokens, dim, rotated = 4, 1000, 24, 16
    cos, sin = torch.randn(2, 1, tokens, rotated)
    index = torch.arange(rotated)
    other = index ^ 1 if interleaved else (index + rotated // 2) % rotated
    sign = torch.where(other > index, -1.0, 1.0)
    for order in permutations(range(3)):
        inverse = [order.index(axis) + 1 for axis in range(3)]
        sizes = [(heads, tokens, dim)[axis] for axis in order]
        query, key = (torch.randn(1, *sizes).permute(0, *inverse) for _ in range(2))
        key = key[:, ::2]
        for x, found in zip((query, key), native.rotate_heads(query, key, cos, sin, interleaved), strict=True):
            turned = x[..., :rotated] * cos[:, None] + x[..., other] * sign * sin[:, None]
            torch.testing.assert_close(found, torch.cat((turned, x[..., rotated:]), dim=-1))


@compiled
def test_memory_of_ended_threads_is_freed() -> None:
    query, storage = torch.randn(2000, 8, 64), torch.randn(8 * 64, 64)
    plan = plan_of([64], [2000], num_heads=8)

    def held() -> int:
        return int(psutil.Process().memory_info().rss)

    for number in range(40):
        thread = threading.Thread(target=native.attend, args=(query, storage, storage, plan, 8, 0.125, None))
        thread.start()
        thread.join()
        if number == 3:
            before = held()
    assert held() - before < 40 << 20


@compiled
@pytest.mark.skipif(not sampling._has_own_noise(), reason="this PyTorch draws noise by MKL")
def test_a_seed_that_another_thread_sets_during_a_draw_holds() -> None:
    probs = torch.rand(16, 30_000).softmax(dim=-1)
    drawn = threading.Event()

    def draw() -> None:
        while not drawn.is_set():
            sampling.multinomial(probs)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for seed in range(20):
            torch.manual_seed(seed)
            threading.Event().wait(0.002)
            assert torch.initial_seed() == seed
    finally:
        drawn.set()
        thread.join()


@compiled
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 4099), (3, 50), (17, 1000)])
def test_the_highest_scores_are_those_of_topk_with_ties(rows: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, vocabulary, generator=generator)
    scores[:, ::3] = scores[:, ::3].round(decimals=1)  # many are equal
    scores[:, : vocabulary - 2 : 7] = -torch.inf
    scores[0, 1:] = -torch.inf  # fewer than are kept
    counts = torch.randint(1, vocabulary // 16 + 1, (rows,), generator=generator).tolist()
    expected = []
    for of_row, count in zip(scores, counts, strict=True):
        expected.append(of_row.masked_fill(of_row < of_row.topk(count).values[-1], -torch.inf))
    assert torch.equal(native.keep_top_k(scores, counts), torch.stack(expected))
    scores[-1, 5] = torch.nan
    assert native.keep_top_k(scores, counts) is None
    assert native.keep_top_k(scores[:, ::2], counts) is None
    assert native.keep_top_k(scores, [vocabulary // 4] * rows) is None

"""The compiled CPU kernel gives what a plain softmax gives, and PyTorch takes over where it cannot be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.kernels import AttentionPlan, RotarySpec, native, reference, torch_attention

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None, reason="needs a C compiler, as the kernel itself does"
)


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    groups = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(groups, dim=0) for x in (k, v))
    scores = torch.einsum("mhd,hnd->mhn", q.double(), k) * scale
    return torch.einsum("mhn,hnd->mhd", scores.softmax(-1), v), scores.logsumexp(-1)


def attend(
    q: torch.Tensor, *blocks: tuple[torch.Tensor, torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[T, heads, dim]` over calls of keys and values `[N, kv_heads, L, dim]`, laid one after another."""
    dim, offset, calls = q.shape[-1], 0, []
    for k, _ in blocks:
        count, heads, length, _ = k.shape
        places = {f"{name}_offset": offset for name in ("key", "value")}
        places |= {f"{name}_block": heads * length * dim for name in ("key", "value")}
        places |= {f"{name}_head": length * dim for name in ("key", "value")}
        calls.append({"blocks": count, "queries": len(q) // count, "num_keys": length, **places})
        offset += k.numel()
    keys, values = (torch.cat([block[i].reshape(-1, dim) for block in blocks]) for i in (0, 1))
    return native.attend(q, keys, values, native.Calls(calls), blocks[0][0].shape[1], scale)


@compiled
def test_a_compiler_is_enough_for_the_kernel() -> None:
    assert native.serves(torch.float32, CPU, rows=48, key_dim=64, value_dim=64)


@pytest.mark.parametrize(
    ("dtype", "rows", "key_dim", "value_dim"),
    [
        (torch.float64, 4, 64, 64),
        (torch.bfloat16, 4, 64, 64),
        (torch.float32, 1025, 64, 64),
        (torch.float32, 4, 60, 60),
        (torch.float32, 4, 64, 32),
    ],
)
def test_what_the_kernel_does_not_serve(dtype: torch.dtype, rows: int, key_dim: int, value_dim: int) -> None:
    assert not native.serves(dtype, CPU, rows, key_dim, value_dim)


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
    out, lse = attend(q, (k[None], v[None]), scale=dim**-0.5)
    expected, expected_lse = softmax(q, k, v, dim**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@compiled
@pytest.mark.parametrize("size", [1e-3, 30.0, 300.0])
def test_kernel_is_exact_for_flat_and_for_peaked_scores(size: float) -> None:
    """Scores of up to some thousands: the exponentials must neither overflow nor lose the maximum."""
    q, k, v = torch.randn(7, 6, 64) * size, torch.randn(2, 900, 64), torch.randn(2, 900, 64)
    k[:, 850:] *= 2  # the maximum comes late, when much has been summed
    out, lse = attend(q, (k[None], v[None]), scale=0.125)
    expected, expected_lse = softmax(q, k, v, 0.125)
    # Scores carry the rounding of float32, which the exponential turns into a relative error of the weights.
    tolerance = 1e-5 + 4e-6 * float((q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()) * 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=1e-5)


@compiled
@pytest.mark.parametrize("num_keys", [1, 7, 130])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_kernel_merges_blocks_with_what_was_seen_before(num_keys: int, tokens: int) -> None:
    """Four blocks, each with queries of its own, behind a prefix that all of them saw."""
    q, prefix, own = torch.randn(4 * tokens, 6, 64), torch.randn(2, 3, 300, 64), torch.randn(2, 4, 3, num_keys, 64)
    out, lse = attend(q, (prefix[0][None], prefix[1][None]), (own[0], own[1]), scale=0.125)
    for block in range(4):
        mine = slice(block * tokens, (block + 1) * tokens)
        k, v = torch.cat((prefix, own[:, block]), dim=2)
        expected, expected_lse = softmax(q[mine], k, v, 0.125)
        torch.testing.assert_close(out[mine].double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[mine].double(), expected_lse, rtol=0, atol=1e-5)


def shared_prompt(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
    """A decode step of five rows over one prompt, with a suffix each."""
    torch.manual_seed(0)
    cache = BlockCache()
    prompt, *own = cache.new_block(tokens), *cache.new_blocks(5, 8, base=tokens)
    for segments in ([Segment([prompt], tokens)], *[[Segment([prompt, block], 1) for block in own]] * 3):
        forward = cache.prepare(segments)
        new = torch.randn(2, 2, forward.plan.num_queries, 64)
        cache.arena.write(0, new[0], new[1], forward.plan)
        cache.commit()
    layer = cache.storage(0)
    return torch.randn(5, 6, 64), layer.keys, layer.values, forward.plan


@compiled
def test_torch_backend_uses_the_kernel_for_a_shared_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attend = native.attend
    monkeypatch.setattr(native, "attend", lambda q, *rest: asked.append(len(q)) or attend(q, *rest))
    query, keys, values, plan = shared_prompt(700)
    out = torch_attention.block_attention(query, keys, values, plan, num_kv_heads=2, scale=0.125)
    expected = reference.block_attention(query, keys, values, plan, num_kv_heads=2, scale=0.125)
    assert asked == [5]  # the prompt and all suffixes in one
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@compiled
@pytest.mark.parametrize("workers", [2, 4, 12], ids=["narrow", "wide", "wider than a tile"])
def test_a_query_may_meet_several_blocks_of_one_call_and_one_block_several_times(workers: int) -> None:
    """Workers that see each other's blocks, and gaps between them: results of one call go to the same rows."""
    torch.manual_seed(0)
    cache = BlockCache({0: RotarySpec((1.0, 0.1))})
    own, gap = cache.new_blocks(workers, 512), cache.new_block()
    views = [[gap, gap, *(other for other in own if other is not mine), gap, mine] for mine in own]
    for brought in ([Segment([gap], 3)], *([Segment(view, tokens) for view in views] for tokens in (300, 1))):
        forward = cache.prepare(brought)
        new = torch.randn(2, 2, forward.plan.num_queries, 8)
        cache.arena.write(0, new[0], new[1], forward.plan)
        cache.commit()
    layer, query, threads = cache.storage(0), torch.randn(workers, 6, 8), torch.get_num_threads()
    settings: dict[str, Any] = {"num_kv_heads": 2, "scale": 0.3, "rotary": cache.rotary[0]}
    expected = reference.block_attention(query, layer.keys, layer.values, forward.plan, **settings)
    try:
        torch.set_num_threads(4)
        for _ in range(50):
            out = torch_attention.block_attention(query, layer.keys, layer.values, forward.plan, **settings)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("window", [None, 5, 1000], ids=str)
@pytest.mark.parametrize("tokens", [2, 3, 9, 15, 16, 17, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (9, 3), (4, 4)])
def test_short_runs_see_no_token_that_follows(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, tokens: int, window: int | None
) -> None:
    """Two rows with a prompt in common and a run each, of which one has tokens in front of it already.

    The long window hides from that one all keys that the first thread's part of the prompt has.
    """
    torch.manual_seed(tokens)
    asked = []
    attend = native.attend
    monkeypatch.setattr(native, "attend", lambda q, *rest: asked.append(len(q)) or attend(q, *rest))
    cache = BlockCache()
    prompt, *own = cache.new_block(1500), *cache.new_blocks(2, 500, base=1500)
    segments = [
        [Segment([prompt], 1500)],
        [Segment([prompt, own[0]], 400)],
        [Segment([prompt, block], tokens) for block in own],
    ]
    for brought in segments:
        forward = cache.prepare(brought)
        new = torch.randn(2, kv_heads, forward.plan.num_queries, 64)
        cache.arena.write(0, new[0], new[1], forward.plan)
        cache.commit()
    layer, query = cache.storage(0), torch.randn(2 * tokens, heads, 64) * 3
    settings: dict[str, Any] = {"num_kv_heads": kv_heads, "scale": 0.125, "window": window}
    out = torch_attention.block_attention(query, layer.keys, layer.values, forward.plan, **settings)
    expected = reference.block_attention(query, layer.keys, layer.values, forward.plan, **settings)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    many = window == 1000 and 2 * tokens > torch_attention.NATIVE_RUN  # queries of one block under a mask
    assert asked == ([] if many else [2 * tokens])


WITHOUT = """
import sys; sys.path.insert(0, {tests!r})
import torch
from test_native import shared_prompt
from hf_parallel.kernels import native, reference, torch_attention
query, keys, values, plan = shared_prompt(700)
arguments = dict(num_kv_heads=2, scale=0.125)
for _ in range(2):
    out = torch_attention.block_attention(query, keys, values, plan, **arguments)
expected = reference.block_attention(query, keys, values, plan, **arguments)
print(native._library(), float((out - expected).abs().max()) < 1e-5)
"""


@pytest.mark.parametrize(
    ("environment", "warnings"), [({"CC": "no-such-compiler", "PATH": ""}, 1), ({"HF_PARALLEL_NATIVE": "0"}, 0)]
)
def test_without_the_kernel_results_are_the_same(environment: dict[str, str], warnings: int, tmp_path: Path) -> None:
    """A missing compiler is said once, with the reason; switching the kernel off needs no word."""
    code = WITHOUT.format(tests=str(Path(__file__).parent))
    root = str(Path(__file__).parent.parent)
    variables = {**os.environ, "HF_PARALLEL_CACHE": str(tmp_path), "PYTHONPATH": root, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=120)
    assert done.stdout.split() == ["None", "True"], done.stderr
    assert done.stderr.count("no C compiler was found") == warnings

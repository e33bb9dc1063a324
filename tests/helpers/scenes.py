"""Random layouts of blocks with one attention layer over them, and the expected output of that layer.

A `Scene` replaces a model with one layer. It keeps the unrotated keys of every token, so the expected output is
computed from positions alone and shares no code with the plan, the rotations and the schedule under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from hf_parallel.cache import Block, BlockCache, ForwardPass, Segment, view_length
from hf_parallel.kernels import AttentionParams, LatentHeads, QuantizedStorage, RotarySpec

STALE = 50.0
"""Value of unwritten slots: memory is not cleared when it is reused."""


@dataclass
class Features:
    """Dimensions and parameters of the attention layer."""

    kv_heads: int = 1
    groups: int = 1
    head_dim: int = 8
    value_dim: int = 8
    rotary: RotarySpec | None = None
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    chunk: int | None = None
    rank: int | None = None  # of latents from which the `groups` heads are expanded
    cache_dtype: str | None = None

    @property
    def lead(self) -> int:
        """Dimensions of the keys that are stored beside the latents, and rotated."""
        return 4 if self.rotary is None else self.rotary.rotary_dim


class Scene:
    """One layer over a block cache, with random queries, keys and values."""

    def __init__(self, features: Features, seed: int = 0) -> None:
        self.features = features
        self.cache = BlockCache({0: features.rotary})
        self.cache.pool.arena.cache_dtype = features.cache_dtype
        self.random = torch.Generator().manual_seed(seed)
        self.raw: dict[Block, torch.Tensor] = {}  # unrotated keys and values [kv_heads, length, head_dim + value_dim]
        self.heads: LatentHeads | None = None  # then rotated parts and latents
        self.split_at, self.width = features.head_dim, features.head_dim + features.value_dim
        if features.rank is not None:
            rest = features.head_dim - features.lead
            self.heads = LatentHeads(
                self.draw(features.groups, rest + features.value_dim, features.rank) * features.rank**-0.5, rest
            )
            self.split_at, self.width = features.lead, features.lead + features.rank
        self.sinks = self.draw(features.kv_heads * features.groups) if features.sinks else None
        self.forward: ForwardPass
        self.queries: torch.Tensor  # unrotated, [T, heads, head_dim]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def content(self, block: Block) -> torch.Tensor:
        return self.raw.get(block, torch.empty(self.features.kv_heads, 0, self.width, dtype=torch.float64))

    def step(self, segments: Sequence[Segment]) -> None:
        """A forward pass up to the point where attention starts."""
        f = self.features
        self.forward = self.cache.prepare(segments)
        total = sum(segment.num_tokens for segment in segments)
        self.queries = self.draw(total, f.kv_heads * f.groups, f.head_dim)
        new = self.draw(f.kv_heads, total, self.width)
        offset = 0
        for segment in segments:
            if segment.write:
                mine = new[:, offset : offset + segment.num_tokens]
                self.raw[segment.view[-1]] = torch.cat((self.content(segment.view[-1]), mine), dim=1)
            offset += segment.num_tokens
        keys = rotate_to(new[..., : self.split_at], self.forward.position_ids, f.rotary)
        stored = keys, new[..., self.split_at :].contiguous()
        self.cache.pool.arena.write(0, *(stored if self.heads is None else stored[::-1]), self.forward.plan)
        self.cache.commit()

    def split(self, block: Block, at: int) -> Block:
        tail = self.cache.pool.split(block, at)
        self.raw[block], self.raw[tail] = self.raw[block][:, :at], self.raw[block][:, at:]
        return tail

    def move(self, source: Block, target: Block) -> None:
        self.cache.pool.move(source, target)
        self.raw[target] = torch.cat((self.content(target), self.content(source)), dim=1)
        self.raw.pop(source, None)

    def quantize(self, block: Block) -> None:
        """Store a block in 8 bits; from now on, its keys and values are the rounded ones."""
        self.cache.pool.quantize(block)
        read = self.cache.pool.arena.layers[0].read(block.tokens)
        keys, rest = read if self.heads is None else read[::-1]
        unrotated = rotate_to(keys, -torch.arange(block.base, block.base + block.length), self.features.rotary)
        self.raw[block] = torch.cat((unrotated, rest), dim=-1)

    def attend(self, backend: Callable[..., torch.Tensor], dtype: torch.dtype, poison: bool = True) -> torch.Tensor:
        """Output of a backend for the last pass, in `dtype`."""
        f, layer = self.features, self.cache.pool.arena.layers[0]
        keys, values = layer.keys.clone(), layer.values.clone()
        quantized = layer.quantized and replace(layer.quantized, scales=layer.quantized.scales.clone())
        if poison:
            self._poison(keys, values, quantized)
        query = (
            rotate_to(self.queries.transpose(0, 1), self.forward.position_ids, f.rotary).transpose(0, 1).contiguous()
        )
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        heads = self.heads and self.heads._replace(weight=self.heads.weight.to(dtype))
        params = AttentionParams(f.kv_heads, f.head_dim**-0.5, f.rotary, f.softcap, sinks, f.window, f.chunk, heads)
        return backend(query.to(dtype), keys.to(dtype), values.to(dtype), self.forward.plan, params, quantized)

    def _poison(self, keys: torch.Tensor, values: torch.Tensor, quantized: QuantizedStorage | None) -> None:
        """Write NaN outside the extents of visible blocks, and `STALE` into the unwritten slots of those extents."""
        layer = self.cache.pool.arena.layers[0]
        seen = {block for segment in self.forward.segments for block in segment.view if block.length}
        if quantized is not None:
            packed = [layer.rows(block.tokens).reshape(-1) for block in seen if block.extent.is_quantized]
            outside = torch.ones(len(quantized.scales), dtype=torch.bool)
            outside[torch.cat([*packed, torch.empty(0, dtype=torch.int64)])] = False
            quantized.scales[outside] = math.nan
            seen = {block for block in seen if not block.extent.is_quantized}
        inside = torch.zeros(len(keys), dtype=torch.bool)
        written = torch.zeros(len(keys), dtype=torch.bool)
        for block in seen:
            inside[layer.rows(block.extent.range(0, block.extent.capacity)).reshape(-1)] = True
            written[layer.rows(block.tokens).reshape(-1)] = True
        for storage in (keys, values):
            storage[~inside] = math.nan
            storage[inside & ~written] = STALE

    def truth(self) -> torch.Tensor:
        """Plain softmax of every new token over its row's view, both at their true positions."""
        f, out, offset = self.features, [], 0
        for segment in self.forward.segments:
            n, length = segment.num_tokens, view_length(segment.view)
            content = torch.cat([self.content(block) for block in segment.view], dim=1)
            at = torch.arange(length)
            k, v = (x.repeat_interleave(f.groups, dim=0) for x in content.tensor_split([self.split_at], dim=-1))
            if self.heads is not None:
                expanded = torch.einsum("hnr,hdr->hnd", v, self.heads.weight)
                k, v = torch.cat((k, expanded[..., : -f.value_dim]), dim=-1), expanded[..., -f.value_dim :]
            k = rotate_to(k, at, f.rotary)
            q = rotate_to(self.queries[offset : offset + n].transpose(0, 1), at[length - n :], f.rotary)
            scores = q @ k.mT * f.head_dim**-0.5
            if f.softcap is not None:
                scores = f.softcap * torch.tanh(scores / f.softcap)
            distance = at[length - n :, None] - at
            visible = (distance >= 0) & (distance < (f.window or length + 1))
            if f.chunk is not None:
                visible &= at[length - n :, None] // f.chunk == at // f.chunk
            scores = scores.masked_fill(~visible, -math.inf).exp()
            total = scores.sum(-1) + (0 if self.sinks is None else self.sinks[:, None].exp())
            out.append((scores / total[..., None] @ v).transpose(0, 1))
            offset += n
        return torch.cat(out)


def rotate_to(x: torch.Tensor, positions: torch.Tensor, rotary: RotarySpec | None) -> torch.Tensor:
    """Rotate `[heads, n, head_dim]` to positions `[n]`, as complex numbers."""
    if rotary is None:
        return x
    angles = positions[:, None].double() * torch.tensor(rotary.inv_freq, dtype=torch.float64)
    dim = rotary.rotary_dim
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2)) if rotary.interleaved else (slice(dim // 2), slice(dim // 2, dim))
    )
    rotated = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)
    out = x.clone()
    out[..., first], out[..., second] = rotated.real, rotated.imag
    return out


# Random layouts


@st.composite
def features(draw: st.DrawFn) -> Features:
    head_dim = draw(st.sampled_from([8, 16, 12]))
    pairs = draw(st.sampled_from([0, 2, 4, head_dim // 2 - 1, head_dim // 2]))
    rank = draw(st.sampled_from([None, None, 8, 24]))
    frequencies = tuple(100.0 ** (-i / 4) for i in range(pairs))
    rotary = RotarySpec(frequencies, draw(st.booleans()), rank is not None) if pairs else None
    return Features(
        kv_heads=draw(st.integers(1, 3)) if rank is None else 1,
        groups=draw(st.integers(1, 4)),
        head_dim=head_dim + (4 if rank else 0),
        value_dim=draw(st.sampled_from([head_dim, head_dim, head_dim, 4])),
        rank=rank,
        rotary=rotary,
        softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 3, 17])),
        chunk=draw(st.sampled_from([None, None, None, 4, 19])),
        cache_dtype=draw(st.sampled_from([None, None, "int8", "fp8"])),
    )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Rows over a random layout after random cache operations; the last pass is ready for attention."""
    scene = Scene(draw(features()), draw(st.integers(0, 2**16)))
    views = draw(st.sampled_from([_tree, _workers, _anything]))(draw, scene)
    in_step = draw(st.booleans())  # one new token each
    passes = draw(
        st.lists(st.lists(st.sampled_from(views), min_size=1, unique_by=lambda v: id(v[-1])), min_size=1, max_size=3)
    )
    if scene.features.cache_dtype is not None:
        written = {view[-1] for rows in passes for view in rows}
        for block in [block for block in dict.fromkeys(b for view in views for b in view) if block.length]:
            if block not in written and draw(st.integers(0, 3)):
                scene.quantize(block)
    for rows in passes:
        scene.step([Segment(view, 1) if in_step else _segment(draw, view) for view in rows])
    return scene


def _segment(draw: st.DrawFn, view: list[Block]) -> Segment:
    held = view[-1].length
    if held and draw(st.integers(0, 4)) == 0:
        return Segment(view, draw(st.integers(1, min(held, 20))), write=False)
    return Segment(view, draw(st.one_of(st.integers(1, 3), st.integers(1, 40))))


def _fill(draw: st.DrawFn, scene: Scene, views: Sequence[list[Block]]) -> None:
    """One pass that appends to the last block of each view."""
    scene.step([Segment(view, draw(st.integers(1, 25))) for view in views])


def _spaced(draw: st.DrawFn, scene: Scene, count: int) -> list[Block]:
    """Blocks of one size with random gaps between them."""
    blocks = scene.cache.pool.new_blocks(count + draw(st.integers(0, 3)), draw(st.sampled_from([0, 8, 64])))
    while len(blocks) > count:
        scene.cache.pool.free(blocks.pop(draw(st.integers(0, len(blocks) - 1))))
    return blocks


def _tree(draw: st.DrawFn, scene: Scene) -> list[list[Block]]:
    """Prefixes, one of them possibly split without copying, and suffixes at their true positions."""
    root = scene.cache.pool.new_block(draw(st.integers(0, 30)))
    _fill(draw, scene, [[root]])
    path = [root]
    if root.length > 1 and draw(st.booleans()):
        path.append(scene.split(root, draw(st.integers(1, root.length - 1))))
    middle = scene.cache.pool.new_block(base=view_length(path))
    _fill(draw, scene, [[*path, middle]])
    paths = [[root], path, [*path, middle]]
    views = []
    for leaf in _spaced(draw, scene, draw(st.integers(1, 6))):
        above = draw(st.sampled_from(paths))
        leaf.base = view_length(above)
        views.append([*above, leaf])
    return views


def _workers(draw: st.DrawFn, scene: Scene) -> list[list[Block]]:
    """Workers that see each other's blocks before their own; one step has possibly been moved."""
    prompt, history, header = (scene.cache.pool.new_block() for _ in range(3))
    _fill(draw, scene, [[prompt], [prompt, history], [prompt, history, header]])
    own = _spaced(draw, scene, draw(st.integers(2, 5)))
    views = [[prompt, history, *(o for o in own if o is not mine), header, mine] for mine in own]
    _fill(draw, scene, views)
    if draw(st.booleans()):
        scene.move(own[0], history)
    return views


def _anything(draw: st.DrawFn, scene: Scene) -> list[list[Block]]:
    """Blocks of any base in any order, possibly several times in one view."""
    pool = [scene.cache.pool.new_block(base=draw(st.integers(0, 60))) for _ in range(draw(st.integers(1, 4)))]
    _fill(draw, scene, [[block] for block in pool])
    own = _spaced(draw, scene, draw(st.integers(1, 5)))
    for block in own:
        block.base = draw(st.integers(0, 60))
    return [[*draw(st.lists(st.sampled_from([*pool, *own]), max_size=5)), mine] for mine in own]

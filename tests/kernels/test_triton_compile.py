"""The Triton kernels without a GPU: compiled for two GPUs, and run in Triton's interpreter.

The compiled kernels are those that `block_attention`, `append` and `move` launch: their launches are recorded, not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from paths import PYTHONPATH, ROOT
from scenes import Features, Scene

from hf_parallel.cache import Segment
from hf_parallel.kernels import AttentionParams, LayerStorage, RotarySpec, TokenRange

pytest.importorskip("triton", reason="Triton has no wheels for this platform")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
__test__ = os.environ.get("TRITON_INTERPRET") != "1"
from triton import compile as compile_source  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_parallel.kernels.triton import attend as triton_attend  # noqa: E402
from hf_parallel.kernels.triton import attention as triton_attention  # noqa: E402
from hf_parallel.kernels.triton import launch  # noqa: E402
from hf_parallel.kernels.triton import sampling as triton_sampling  # noqa: E402
from hf_parallel.kernels.triton.invariant import parts, products, reductions  # noqa: E402
from hf_parallel.kernels.triton.launch import Tiling, select_tilings  # noqa: E402

SHARED_PER_PROGRAM = {80: 99 << 10, 90: 227 << 10}
"""Maximum bytes per program; 99 KB on the smaller GPUs of Ampere and Ada."""
SHARED_PER_PROCESSOR = {80: 164 << 10, 90: 228 << 10}
RESERVED_PER_PROGRAM = 1 << 10
REGISTERS_PER_PROCESSOR = 1 << 16

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
STYLES: dict[str, Callable[[int], RotarySpec | None]] = {
    "none": lambda dim: None,
    "half": lambda dim: RotarySpec((1.0,) * (dim // 2)),
    "interleaved": lambda dim: RotarySpec((1.0,) * (dim // 2), interleaved=True),
}


class Case(NamedTuple):
    """A layer whose attention kernel is compiled."""

    dtype: torch.dtype
    head_dim: int
    style: str = "half"
    softcap: float | None = None
    kv_heads: int = 2
    rank: int | None = None  # of latents, with one KV head; `head_dim` are then rotated, and as many are not
    chunk: int | None = None
    cache_dtype: str | None = None

    def tilings(self, capability: int) -> tuple[Tiling, ...]:
        if self.rank is not None:
            return select_tilings(self.rank, self.dtype, divmod(capability, 10))
        return select_tilings(self.head_dim, self.dtype, divmod(capability, 10))


ALL_TILINGS = [
    *(Case(torch.bfloat16, dim) for dim in (64, 128, 256, 512)),
    *(Case(torch.float32, dim) for dim in (128, 256)),
    *(Case(dtype, 64, "interleaved", kv_heads=1, rank=512) for dtype in (torch.bfloat16, torch.float32)),
    *(Case(torch.bfloat16, dim, cache_dtype="int8") for dim in (64, 128)),
    Case(torch.float16, 128, cache_dtype="fp8"),
]
"""Layers that are compiled with each of their tilings."""
LARGEST_TILING = [
    Case(torch.bfloat16, 96),
    Case(torch.float16, 128, "none", kv_heads=1),
    Case(torch.bfloat16, 128, "interleaved", softcap=30.0),
    Case(torch.bfloat16, 128, "interleaved", chunk=64),
]
"""Layers that are compiled with their largest tiling: padded heads, no RoPE, features with many registers, chunks."""


class Recorder:
    """Replaces a kernel: `kernel[grid](*args, **kwargs)` records the launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))

    def compiled(self, capability: int) -> Any:
        """Compile the kernel of the last launch for a GPU."""
        args, kwargs = self.launches[-1]
        names = self.kernel.arg_names
        constants = {name: value for name, value in kwargs.items() if name in names}
        signature, aligned = dict.fromkeys(constants, "constexpr"), {}
        for i, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
            elif value == 1 and name not in self.kernel.do_not_specialize:
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, torch.Tensor) or "stride" in name:  # all are multiples of 16 in practice
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, {name: signature[name] for name in names}, constants, aligned)
        options = {name: value for name, value in kwargs.items() if name not in names}
        return compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Resources of a compiled kernel: `REG` and `STACK` (to which registers are spilled)."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Recorders that replace all kernels, by name."""
    found = {}
    kernels = {
        triton_attend: ("attend", "merge", "merge_heads"),
        triton_attention: ("append", "move"),
        launch: ("advance",),
    }
    for module, names in kernels.items():
        for name in names:
            found[name] = Recorder(getattr(module, f"{name}_kernel"))
            monkeypatch.setattr(module, f"{name}_kernel", found[name])
    return found


def attend(case: Case, batch_invariant: bool = False) -> None:
    """Launch all kernels: a decode step of two workers, with keys stored, rotated and moved."""
    rotary = STYLES[case.style](case.head_dim)
    kv_heads, dim = case.kv_heads, case.head_dim
    features = Features(kv_heads=kv_heads, groups=4, head_dim=dim, value_dim=dim, rotary=rotary, rank=case.rank)
    features.cache_dtype = case.cache_dtype
    if case.rank is not None:
        features.head_dim += dim
    scene = Scene(features)
    blocks, other = scene.cache.pool.new_blocks(2, 4), scene.cache.pool.new_block(4)
    scene.step([*(Segment([blocks[1 - i], blocks[i]], 1) for i in range(2)), Segment([other], 1)])
    if case.cache_dtype is not None:
        scene.quantize(other)
    scene.step([Segment([blocks[1 - i], other, blocks[i]], 1) for i in range(2)])
    layer, plan = scene.cache.pool.arena.layers[0], scene.forward.plan
    quantized = layer.quantized
    layer = LayerStorage(layer.keys.to(case.dtype), layer.values.to(case.dtype), kv_heads)
    new = [layer.keys.new_zeros(kv_heads, 2, stored.shape[1]) for stored in (layer.keys, layer.values)]
    triton_attention.TritonBackend().append(layer.keys, layer.values, *new, plan)
    moved = (layer.keys, layer.values)[:: -1 if case.rank else 1]
    triton_attention.TritonBackend().move(*moved, kv_heads, TokenRange(0, 4, 0, 2), TokenRange(4, 4, 2, 2), 7, rotary)
    query = scene.queries.to(case.dtype)
    heads = scene.heads and scene.heads._replace(weight=scene.heads.weight.to(case.dtype))
    sinks = query.new_zeros(4 * kv_heads)
    params = AttentionParams(kv_heads, 0.1, rotary, case.softcap, sinks, chunk=case.chunk, latent=heads)
    params.batch_invariant = batch_invariant
    triton_attention.TritonBackend().attend(query, layer.keys, layer.values, plan, params, quantized)


@pytest.mark.parametrize(
    ("capability", "case", "tiling"),
    [
        (capability, case, tiling)
        for capability in (80, 90)
        for case in (*ALL_TILINGS, *LARGEST_TILING)
        if capability >= 89 or case.cache_dtype != "fp8"
        for tiling in case.tilings(capability)[0 if case in ALL_TILINGS else -1 :]
    ],
    ids=str,
)
def test_attention_compiles_without_spills_and_fits_a_processor(
    capability: int,
    case: Case,
    tiling: Tiling,
    recorders: dict[str, Recorder],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(launch, "select_tilings", lambda *_: (tiling,))
    attend(case)
    made = recorders["attend"].compiled(capability)
    used = resources(made.asm["cubin"], tmp_path)
    tiling = tiling if case.cache_dtype is None else tiling.for_quantized()
    assert used["STACK"] == used["LOCAL"] == 0
    assert made.metadata.shared <= SHARED_PER_PROGRAM[capability]
    together = tiling.programs * (made.metadata.shared + RESERVED_PER_PROGRAM)
    assert together <= SHARED_PER_PROCESSOR[capability]
    assert tiling.programs * used["REG"] * 32 * tiling.num_warps <= REGISTERS_PER_PROCESSOR


BY_PARTS = [
    *(Case(dtype, dim) for dtype in (torch.bfloat16, torch.float32) for dim in (64, 128, 256)),
    Case(torch.bfloat16, 128, "interleaved", softcap=30.0),
    Case(torch.bfloat16, 512),
    *(Case(dtype, 64, "interleaved", kv_heads=1, rank=512) for dtype in (torch.bfloat16, torch.float32)),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", BY_PARTS, ids=str)
def test_attention_by_parts_compiles_without_spills(
    case: Case, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the same tiling on all GPUs."""
    kernel = Recorder(parts.attend_part_kernel)
    monkeypatch.setattr(parts, "attend_part_kernel", kernel)
    monkeypatch.setattr(parts, "merge_kernel", Recorder(parts.merge_kernel))
    monkeypatch.setattr(parts, "advance_kernel", Recorder(parts.advance_kernel))
    for name in ("append", "move"):
        monkeypatch.setattr(triton_attention, f"{name}_kernel", Recorder(None))
    attend(case, batch_invariant=True)
    made = kernel.compiled(capability)
    used = resources(made.asm["cubin"], tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert made.metadata.shared <= SHARED_PER_PROGRAM[80]
    programs = parts.part_tiling(case.rank or case.head_dim, case.dtype).programs
    assert programs * (made.metadata.shared + RESERVED_PER_PROGRAM) <= SHARED_PER_PROCESSOR[80]
    assert programs * used["REG"] * 32 * made.metadata.num_warps <= REGISTERS_PER_PROCESSOR


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_and_sums_compile_without_spills(
    dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = {}
    for module, names in {
        products: ("product", "grouped_product"),
        reductions: ("sum_rows", "sum_columns", "softmax"),
    }.items():
        for name in names:
            kernels[name] = Recorder(getattr(module, f"{name}_kernel"))
            monkeypatch.setattr(module, f"{name}_kernel", kernels[name])
    x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(128, 4096, dtype=dtype)
    products.product(x, weight.T, x[0, :128])
    products.grouped_product(x, weight.T.expand(4, -1, -1), torch.zeros(4, dtype=torch.int32))
    reductions.total(x, [1])
    reductions.total(x, [0])
    reductions.softmax(x, -1, dtype, log=True)
    for recorder in kernels.values():
        made = recorder.compiled(capability)
        used = resources(made.asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0
        assert made.metadata.shared <= SHARED_PER_PROGRAM[80]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["merge", "merge_heads", "append", "move", "advance"])
def test_other_kernels_compile(
    name: str, capability: int, recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "merge_heads":
        monkeypatch.setattr(triton_attend, "MERGED_BY_HEAD", 0)
    attend(Case(torch.bfloat16, 128))
    made = recorders[name].compiled(capability)
    used = resources(made.asm["cubin"], tmp_path)
    assert made.metadata.shared <= 48 << 10
    if name in ("merge", "merge_heads", "append"):  # the others compute sines in float64, which need a stack
        assert used["STACK"] == used["LOCAL"] == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "noise"])
@pytest.mark.parametrize("vocabulary", [151_936, 262_208])
def test_sampling_compiles_without_spills(
    vocabulary: int,
    seeded: bool,
    dtype: torch.dtype,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """At least two programs that search a row fit on a processor."""
    names = ("race", "winner", "group", "choose")
    made = {name: Recorder(getattr(triton_sampling, f"{name}_kernel")) for name in names}
    for name in names:
        monkeypatch.setattr(triton_sampling, f"{name}_kernel", made[name])
    scores = torch.zeros(2, vocabulary, dtype=dtype)
    keys, noise = (torch.zeros(2, dtype=torch.int64), None) if seeded else (None, scores.float())
    triton_sampling.sample(scores, torch.zeros(2, 4), keys, noise, True, True)
    for name in names:
        kernel = made[name].compiled(capability)
        used = resources(kernel.asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0
        assert kernel.metadata.shared <= 48 << 10
        if name == "choose":
            assert 2 * used["REG"] * 32 * kernel.metadata.num_warps <= REGISTERS_PER_PROCESSOR


IN_THE_INTERPRETER = [f"tests/kernels/test_{name}.py" for name in ("triton", "triton_sampling")]
IN_THE_INTERPRETER.append("tests/models/test_cuda_graph.py")
RUN = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
FEW = """
import test_triton as tests
import torch
from hf_parallel.kernels.sampling import Warpers
from hf_parallel.kernels.triton import sampling

torch.use_deterministic_algorithms(True)  # fills memory with NaN
tests.check(tests.workers(tests.Features(groups=3, rotary=tests.ROTARY, window=7), 3, 2))
tests.check(tests.workers(tests.Features(kv_heads=2, sinks=True, softcap=2.0), 2, 3), torch.float16)
tests.test_padded_queries_are_zero_and_change_no_other()
tests.test_append_follows_decode_steps()
tests.test_move_does_what_the_torch_backend_does("half", 5, 37)
# The last token that `top_p` keeps wins the race; tokens that it removes would win against it.
scores = 2 * torch.randn(2, 700, generator=torch.Generator().manual_seed(1))
probs, order = scores.softmax(-1).sort(descending=True)
count = (probs.cumsum(-1) - probs < 0.9).sum(-1, keepdim=True)
noise = torch.full_like(scores, 1e-35).scatter(1, order, (torch.arange(700) < count).float() + 1e-35)
noise.scatter_(1, order.gather(1, count - 1), 1e-18)
sampling._WARPS = 32
drawn, _ = sampling.sample(scores, torch.tensor([Warpers(top_p=0.9).numbers(700)]), None, noise, True, False)
assert torch.equal(drawn[0], order.gather(1, count - 1)[:, 0])
# Attention by parts, and products, of a row alone and with others.
import interpreter
import test_triton_parts

with interpreter.products_row_by_row():
    test_triton_parts.parts.PART = 16
    case = test_triton_parts.PartsCase(3, tree=test_triton_parts.RandomTree(172, 4, (1, 2, 17)))
    assert test_triton_parts.num_different(case) == 0
    test_triton_parts.test_rows_of_a_product_have_the_same_bits_alone(37, 70, 65, torch.float16)
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-c", FEW], id="few"),
        pytest.param([*RUN, *IN_THE_INTERPRETER], id="all", marks=pytest.mark.slow),
        pytest.param([*RUN, "tests/kernels/test_triton_parts.py"], id="parts", marks=pytest.mark.slow),
        pytest.param([*RUN, "tests/models/test_gpu_bits.py"], id="models", marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_the_oracle_in_the_interpreter(command: list[str]) -> None:
    """Run tests in a process that selects the interpreter before torch imports Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{PYTHONPATH}:{Path(__file__).parent}"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

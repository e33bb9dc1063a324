"""A wheel brings the C kernels along: they load without a compiler, and compute the bits of compiled ones."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_parallel
from hf_parallel.kernels import native, prebuilt

ROOT = Path(__file__).parents[2]
CC = shutil.which(os.environ.get("CC") or "cc")
MAX_BYTES = 3 * 2**20
IMPORT_SECONDS = 0.3  # CPU time
PACKAGED = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
needs_compiler = pytest.mark.skipif(CC is None or sys.platform != "linux", reason="wheels with kernels are for Linux")


@pytest.fixture
def fresh_library() -> Any:
    """Forget the loaded kernels before and after a test."""
    caches = native._compiled_library, native._load
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# Which library


@pytest.mark.parametrize(
    ("level", "missing", "chosen"),
    [
        ("x86-64-v4-vnni", "", "x86-64-v4-vnni"),
        ("x86-64-v4-vnni", "avx512_vnni", "x86-64-v3"),
        ("x86-64-v3-vnni", "", "x86-64-v3-vnni"),
        ("x86-64-v3-vnni", "avx_vnni", "x86-64-v3"),
        ("x86-64-v3", "", "x86-64-v3"),
        ("x86-64-v3", "fma", "x86-64"),
        ("x86-64", "", "x86-64"),
    ],
)
def test_the_fastest_library_whose_instructions_the_processor_has_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, missing: str, chosen: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    levels = {level.name: level for level in prebuilt.LEVELS}
    for each in prebuilt.LEVELS:
        (tmp_path / prebuilt._name(each)).touch()
    features = {"flags", ":", "sse2"} | levels[level].needs - {missing}
    assert prebuilt.find(features, tmp_path) == tmp_path / prebuilt._name(levels[chosen])


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is of x86-64 compilers")
def test_a_level_that_a_compiler_does_not_know_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "older-cc"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mavxvnni*) exit 1;; esac\nexec {CC} "$@"\n')
    compiler.chmod(0o755)
    source = tmp_path / "cpu_small.c"
    source.write_text("int small(void) { return 1; }")
    monkeypatch.setattr(prebuilt, "SOURCES", (source,))
    built = prebuilt.build(str(compiler), tmp_path / "libraries")
    names = [level.name for level in prebuilt.LEVELS if level.machine == "x86_64" and "avx_vnni" not in level.needs]
    assert [path.name.split("-", 2)[2] for path in built] == [f"{name}.so" for name in names]


def test_libraries_of_other_sources_are_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in prebuilt.LEVELS:
        (tmp_path / prebuilt._name(level)).touch()
    features = native._processor().split()
    assert (prebuilt.find(features, tmp_path) is None) == (platform.machine() not in ("x86_64", "aarch64"))
    changed = tmp_path / "cpu_changed.c"
    changed.write_text("int changed;")
    monkeypatch.setattr(prebuilt, "SOURCES", (*prebuilt.SOURCES, changed))
    assert prebuilt.find(features, tmp_path) is None


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_compiled_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_library: None
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(prebuilt, "find", lambda features: broken)
    assert not native.unavailable_reason()
    assert not native.is_prebuilt()


@needs_compiler
@pytest.mark.parametrize(("choice", "loaded"), [("", True), ("1", True), ("compile", False)])
def test_a_users_choice_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_library: None, choice: str, loaded: bool
) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(native._compile(), copy)
    monkeypatch.setattr(prebuilt, "find", lambda features: copy)
    monkeypatch.setenv(native.NATIVE_VARIABLE, choice)
    assert native.is_available()
    assert native.is_prebuilt() == loaded


def test_an_unknown_choice_raises(monkeypatch: pytest.MonkeyPatch, fresh_library: None) -> None:
    monkeypatch.setenv(native.NATIVE_VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"HF_PARALLEL_NATIVE must be one of .*'compile'.*, got 'yes'"):
        native.unavailable_reason()


# The wheel


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files from which a source distribution is built, without what a checkout has beside them."""
    folder = tmp_path_factory.mktemp("sources")
    for name in PACKAGED:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "hf_parallel", folder / "hf_parallel", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def call_backend(folder: Path, hook: str, output: Path, **environment: str) -> Path:
    """Call a hook of the build backend as `python -m build --no-isolation` does; return the file that it wrote."""
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(output)]
    subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, capture_output=True, text=True)
    (file,) = output.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with kernels, from the source distribution."""
    if CC is None or sys.platform != "linux":
        pytest.skip("wheels with kernels are for Linux, and need a C compiler")
    archive = call_backend(sources, "build_sdist", tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return call_backend(folder, "build_wheel", tmp_path_factory.mktemp("wheel"), HF_PARALLEL_WHEEL="native")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel; other packages are those of this one.

    A line of a `.pth` file adds this environment's folder, but runs no `.pth` file in it, so that an editable install
    of the checkout there is not found.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    target = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (target / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return python


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., str]:
    """Return what the environment's Python prints, without a compiler and with an empty cache folder."""
    unset = ("CC", "PYTHONPATH", native.NATIVE_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PATH": str(installed.parent), "HF_PARALLEL_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str, **changed: str) -> str:
        command = [str(installed), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment | changed, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        return done.stdout

    return run


@pytest.mark.slow
def test_a_wheel_has_the_kernels_of_each_level_and_a_tag_that_its_glibc_needs(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_BYTES
    assert re.fullmatch(rf"hf_parallel-.*-py3-none-manylinux_2_\d+_{platform.machine()}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/WHEEL"))).decode()
    levels = [level for level in prebuilt.LEVELS if level.machine == platform.machine()]
    folder = "hf_parallel/kernels/libraries"
    assert {name for name in names if name.endswith(".so")} == {f"{folder}/{prebuilt._name(level)}" for level in levels}
    assert {name for name in names if name.endswith(".c")} == {
        f"hf_parallel/kernels/{path.name}" for path in prebuilt.SOURCES
    }
    assert "Root-Is-Purelib: false" in metadata


@pytest.mark.slow
def test_without_a_compiler_a_wheel_is_for_any_platform_unless_kernels_are_required(
    sources: Path, tmp_path: Path
) -> None:
    for number, (kind, path) in enumerate({"any": os.environ["PATH"], "": str(tmp_path)}.items()):
        output = tmp_path / str(number)
        output.mkdir()
        built = call_backend(sources, "build_wheel", output, HF_PARALLEL_WHEEL=kind, PATH=path, CC="")
        assert built.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(built) as archive:
            assert not [name for name in archive.namelist() if name.endswith(".so")]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        call_backend(sources, "build_wheel", tmp_path, HF_PARALLEL_WHEEL="native", PATH=str(tmp_path), CC="")
    assert "the C kernels cannot be built: no C compiler was found" in caught.value.stderr


USE = """
import json, os, shutil, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_parallel
from hf_parallel.kernels import native

assert Path(sys.prefix) in Path(hf_parallel.__file__).parents, hf_parallel.__file__
assert not any(map(shutil.which, ("cc", "gcc", "clang")))
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, pad_token_id=0, **sizes)).eval()
ids = torch.arange(1, 80)[None].expand(3, -1)
settings = {"max_new_tokens": 5, "do_sample": False}
expected = model.generate(ids, **settings)
hf_parallel.enable(model)
called = set()
with native.calls_reported(lambda name, arguments: called.add(name)):
    out = model.generate(ids, generation_mode="shared_prefix", **settings)
native.release_threads()
print(json.dumps({
    "equal": torch.equal(out, expected),
    "called": sorted(called),
    "prebuilt": native.is_prebuilt(),
    "library": native._compiled_library()._name,
    "cached": os.path.exists(os.environ["HF_PARALLEL_CACHE"]),
}))
"""


@pytest.mark.slow
def test_an_installed_wheel_generates_with_its_kernels_and_without_a_compiler(
    installed: Path, run: Callable[..., str]
) -> None:
    used = json.loads(run("-c", USE).splitlines()[-1])
    assert used["prebuilt"]
    assert installed.parents[1] in Path(used["library"]).parents
    assert {"attend", "linear", "rms_norm"} <= set(used["called"])
    assert used["equal"]
    assert not used["cached"]


@pytest.mark.slow
def test_the_import_of_an_installed_wheel_takes_little_time(run: Callable[..., str]) -> None:
    code = "import hf_parallel, sys, time; print(time.process_time(), 'torch' in sys.modules, hf_parallel.__version__)"
    outputs = [run("-c", code).split() for _ in range(5)]  # with the start of Python
    assert min(float(seconds) for seconds, _, _ in outputs) < IMPORT_SECONDS
    assert {tuple(rest) for _, *rest in outputs} == {("False", hf_parallel.__version__)}


BITS = """
import hashlib, sys
import gguf
import torch
import tiny
import hf_parallel
from hf_parallel.kernels import native

digest = hashlib.sha256()

def add(tensor):
    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

torch.manual_seed(0)
for threads in (1, 3):
    torch.set_num_threads(threads)
    for tokens in (1, 2, 7, 16, 40):
        x, weights, bias = torch.randn(tokens, 1056), torch.randn(200, 1056), torch.randn(200)
        for packing, dtype in {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}.items():
            add(native.linear(x, weights.to(dtype), bias, packing))
        for packing in ("Q4_0", "Q4_1", "Q8_0"):
            packed = torch.from_numpy(gguf.quantize(weights.numpy(), gguf.GGMLQuantizationType[packing]))
            add(native.linear(x, packed, bias, packing))
            add(native.linear(x, packed, bias, packing, int8=True))
        add(native.rms_norm(x, None, 1e-6, 0.0))
        for activation in native.ACTIVATIONS:
            add(native.activate(x, activation))
    for name in ("llama", "gemma3_text", "deepseek_v2"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            model = tiny.build(name, dtype=dtype)
            hf_parallel.enable(model)
            ids = torch.randint(1, 60, (1, 300)).expand(5, -1)
            settings = {"max_new_tokens": 8, "do_sample": False}
            settings |= {"output_logits": True, "return_dict_in_generate": True}
            out = model.generate(ids, generation_mode="shared_prefix", **settings)
            add(torch.stack(out.logits))
print(native.is_prebuilt(), digest.hexdigest())
"""


@pytest.mark.slow
def test_a_wheels_kernels_compute_the_bits_of_those_compiled_on_this_machine(run: Callable[..., str]) -> None:
    features = set(native._processor().split())
    if "avx512f" in features and not next(iter(prebuilt.LEVELS)).needs <= features:
        pytest.skip("vectors of a library compiled here are wider than those of the wheel's")
    helpers = {"PYTHONPATH": str(ROOT / "tests" / "helpers")}
    is_prebuilt, bits = run("-c", BITS, **helpers).split()
    compiler = {"PATH": os.environ["PATH"], "CC": str(CC), native.NATIVE_VARIABLE: "compile"}
    other_is_prebuilt, other_bits = run("-c", BITS, **helpers, **compiler).split()
    assert (is_prebuilt, other_is_prebuilt) == ("True", "False")
    assert bits == other_bits


def random_blocks(packing: str, outputs: int, inputs: int) -> torch.Tensor:
    """Rows of weights in a format of GGUF files, with random bits and scales of about 0.01."""
    generator = torch.Generator().manual_seed(outputs)
    size, per_block = native.PACKINGS[packing]
    blocks = torch.randint(0, 256, (outputs, inputs // per_block, size), dtype=torch.uint8, generator=generator)
    scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    places = {"Q6_K": (208,), "Q4_0": (0,), "Q8_0": (0,)}.get(packing, (0, 2))  # a scale, and a minimum's
    for at in places:
        blocks[:, :, at : at + 2] = scale
    return blocks.flatten(1)


@pytest.mark.slow
def test_products_and_samples_have_the_same_bits_in_each_library_of_a_wheel(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_library: None
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    features = set(native._processor().split())
    names = [prebuilt._name(level) for level in prebuilt.LEVELS if "fma" in level.needs and level.needs <= features]
    found: dict[tuple[str, int, bool], torch.Tensor] = {}
    for name in names:
        path = tmp_path / "hf_parallel" / "kernels" / "libraries" / name
        monkeypatch.setattr(prebuilt, "find", lambda features, path=path: path)
        native._compiled_library.cache_clear()
        native._load.cache_clear()
        assert native.is_prebuilt()
        for packing in native.INTEGERS:
            weights = random_blocks(packing, 200, 1024)
            for tokens in (1, 2, 3, 7, 16):
                x = torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(tokens))
                for int8 in (False, True):
                    result = native.linear(x, weights, None, packing, int8=int8)
                    assert torch.equal(found.setdefault((packing, tokens, int8), result), result), (
                        name,
                        packing,
                        tokens,
                    )
        probs = native.softmax(torch.randn(3, 999, generator=torch.Generator().manual_seed(0)) * 5)
        assert torch.equal(found.setdefault(("softmax", 3, False), probs), probs), name


@pytest.mark.slow
def test_the_kernels_of_a_wheel_pass_the_quick_tests_of_kernels(run: Callable[..., str], tmp_path: Path) -> None:
    copied = tmp_path / "tests"
    copied.mkdir()
    for name in ("conftest.py", "helpers", "kernels", "cache"):
        source = ROOT / "tests" / name
        if source.is_dir():
            shutil.copytree(source, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copied)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # settings of pytest
    (copied / "test_which.py").write_text(
        "from hf_parallel.kernels import native\n\n\n"
        "def test_the_library_is_that_of_the_wheel():\n"
        "    assert native.is_prebuilt()\n"
    )
    names = ("kernels/test_native.py", "kernels/test_attention_bits.py", "kernels/test_kernels.py")
    names += ("kernels/test_checksum.py", "test_which.py")
    compiler = {"PATH": os.environ["PATH"], "CC": str(CC)}  # without one, these tests are skipped
    options = ("-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow")
    output = run("-m", "pytest", *options, *(f"tests/{name}" for name in names), **compiler)
    assert re.search(r"\d{2,} passed", output), output

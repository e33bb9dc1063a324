"""The C kernels read and write only their tensors, and have no undefined behavior, in the tests of all kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CC = shutil.which(os.environ.get("CC") or "cc")
FLAGS = "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTS = ("kernels/test_native.py", "kernels/test_kernels.py", "kernels/test_checksum.py", "cache/test_cache_run.py")
TESTS += ("kernels/test_attention_bits.py", "models/test_same_bits.py")
TESTS += ("cache/test_decode_steps.py", "models/test_linear.py", "models/test_packed.py", "models/test_elementwise.py")
WITHOUT = (
    "ended_threads",  # AddressSanitizer keeps freed memory
    *("embedded", "64_greedy", "activations_in_8_bits", "cannot_be_packed"),  # need the demo model
)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizers' library, and a compiler that adds them to the kernels."""
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {CC} "$@" {FLAGS}\n')
    compiler.chmod(0o755)
    names = ("libasan.so", "libstdc++.so.6")  # C++ exceptions are intercepted where they are preloaded, too
    find = [[str(CC), f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in find]
    environment = os.environ | {
        "CC": str(compiler),
        "HF_PARALLEL_CACHE": str(folder),
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python itself
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CC is None:
        pytest.skip("needs a C compiler, as the kernels do")
    folder = tmp_path_factory.mktemp("sanitizers")
    code = "from hf_parallel.kernels import native; print(native.unavailable_reason() or 'compiled')"
    done = run(folder, "-c", code)
    if done.stdout.strip() != "compiled":
        pytest.skip(f"this compiler has no sanitizers: {(done.stdout + done.stderr)[-300:]}")
    return folder


@pytest.mark.slow
def test_reading_freed_memory_is_found(folder: Path) -> None:
    code = """
import torch
from hf_parallel.kernels import native
out = torch.empty(2, 512)
native._compiled_library().rms_norm(torch.randn(2, 512).data_ptr(), None, out.data_ptr(), 2, 512, 1e-6, 0.0, 1)
"""
    done = run(folder, "-c", code)
    assert done.returncode
    assert "heap-use-after-free" in done.stderr


@pytest.mark.slow
def test_kernels_pass_their_tests_under_sanitizers(folder: Path) -> None:
    chosen = " and ".join(f"not {name}" for name in WITHOUT)
    options = ["-q", "-x", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", chosen, "-m", "not slow"]
    done = run(folder, "-m", "pytest", *options, *(f"tests/{name}" for name in TESTS))
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]

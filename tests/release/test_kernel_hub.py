"""The repository for the Kernel Hub: generated from the package's files, it stands alone, loads and is right."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"torch", "triton", "numpy"} | set(sys.stdlib_module_names)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_hub_build", ROOT / "kernel_hub" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_repository_has_the_layout_of_a_kernel_and_imports_only_itself(tmp_path: Path) -> None:
    build = generator()
    build.write(tmp_path / "repo")
    package = tmp_path / "repo" / "torch-ext" / "block_attention"
    variant = tmp_path / "repo" / "build" / "torch-cuda"
    files = {path.name for path in package.iterdir()}
    assert {path.name for path in variant.iterdir()} == files | {"metadata.json"}
    for path in package.iterdir():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert f"{node.module}.py" in files
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in ALLOWED, (path, node.module)
            elif isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in ALLOWED for alias in node.names), path
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "block-attention"
    assert metadata["backend"] == {"type": "cuda"}
    manifest = (tmp_path / "repo" / "build.toml").read_text()
    assert 'name = "block-attention"' in manifest
    assert "[torch-noarch]" in manifest
    names = {
        path.relative_to(tmp_path / "repo").as_posix() for path in (tmp_path / "repo").rglob("*") if path.is_file()
    }
    assert {"README.md", "LICENSE", "tests/test_block_attention.py", "benchmarks/benchmark.py"} <= names


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="name a new or empty folder"):
        generator().write(tmp_path)
    with pytest.raises(ValueError, match="backend must be one of .*'tpu'"):
        generator().write(tmp_path / "new", "tpu")


@pytest.mark.slow
def test_the_repositorys_own_tests_pass_in_the_interpreter_without_the_package(tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="needs the extra kernel-hub")
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    command = [sys.executable, str(ROOT / "kernel_hub" / "build.py"), str(tmp_path / "repo"), "--backend", "cpu"]
    subprocess.run(command, check=True)
    (tmp_path / "repo" / "tests" / "conftest.py").write_text(
        "import sys\n\n\ndef pytest_sessionfinish():\n    assert 'hf_parallel' not in sys.modules\n"
    )
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path or ".").resolve() != ROOT]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "tests",
    ]
    done = subprocess.run(command, cwd=tmp_path / "repo", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "11 passed" in done.stdout

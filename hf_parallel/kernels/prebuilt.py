"""C kernels that a wheel brings along: a shared library for each level of the processor's instruction set.

`setup.py` builds them, and loads this file without the package, so it imports only the standard library. A library's
name has the digest of its sources: one of other sources is not used. Their OpenMP is the one that PyTorch has loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-fopenmp")
"""Compiler flags of the kernels for any processor; products are fused only where the sources say so."""
SOURCES = tuple(sorted(Path(__file__).parent.glob("cpu_*.c")))
FOLDER = Path(__file__).parent / "libraries"
"""Libraries of an installed wheel."""


@dataclass(frozen=True)
class Level:
    """Processors with at least the features `needs`, as the kernel names them in `/proc/cpuinfo`."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
LEVELS = (
    Level("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512),
    Level("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Level("x86-64", "x86_64", ("-march=x86-64",)),
    Level("armv8-a", "aarch64", ("-march=armv8-a",)),
)
"""Levels of the machines for which libraries are built, the fastest first."""


def find(features: Collection[str], folder: Path = FOLDER) -> Path | None:
    """Return the fastest library in `folder` for a processor of this machine with `features`; None: there is none."""
    if not folder.is_dir():  # an editable install, or a wheel for any platform
        return None
    for level in LEVELS:
        path = folder / _name(level)
        if level.machine == platform.machine() and level.needs <= set(features) and path.is_file():
            return path
    return None


def build(compiler: str, folder: Path) -> list[Path]:
    """Compile the libraries of the machine for which `compiler` compiles into `folder`, and return their paths.

    An older compiler may not know the instructions of a level, which is left out then.
    Takes about five minutes of CPU time. Raises `subprocess.CalledProcessError` if the compiler fails.
    """
    machine = target(compiler)
    folder.mkdir(parents=True, exist_ok=True)
    libraries = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = {}
        for level in LEVELS:
            if level.machine == machine and _compiles_for(compiler, level):
                objects = [Path(temporary, f"{level.name}-{source.stem}.o") for source in SOURCES]
                commands = [
                    [compiler, *FLAGS, *level.flags, "-c", str(source), "-o", str(output)]
                    for source, output in zip(SOURCES, objects, strict=True)
                ]
                compiling[level] = objects, [pool.submit(subprocess.run, command, check=True) for command in commands]
        for level, (objects, running) in compiling.items():
            for compilation in running:
                compilation.result()
            libraries.append(folder / _name(level))
            _link(compiler, objects, libraries[-1])
    return libraries


def target(compiler: str) -> str:
    """Return the machine for which `compiler` compiles, such as `x86_64`."""
    done = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
    return done.stdout.split("-")[0].strip()


def _compiles_for(compiler: str, level: Level) -> bool:
    """Whether a compiler knows the flags of a level."""
    command = [compiler, *level.flags, "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _link(compiler: str, objects: Sequence[Path], output: Path) -> None:
    """Link without `-fopenmp`: the library uses the OpenMP of PyTorch, whatever the name of its file."""
    subprocess.run([compiler, "-shared", "-s", *map(str, objects), "-lm", "-lpthread", "-o", str(output)], check=True)


def _name(level: Level) -> str:
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    return f"cpu_kernels-{digest}-{level.name}.so"

"""Builds the C kernels into wheels; everything else is in pyproject.toml.

On Linux with a C compiler (`CC`, else `cc`, which may be a cross compiler), a wheel holds the kernels for each level of
the instruction set, and is tagged `py3-none-manylinux_...` by the version of glibc that they need. Elsewhere
it is `py3-none-any`, and the kernels are compiled at first use. `HF_PARALLEL_WHEEL=native` makes a missing or failing
compiler an error, as releases need; `HF_PARALLEL_WHEEL=any` builds no kernels.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KIND = os.environ.get("HF_PARALLEL_WHEEL", "")
OLDEST_GLIBC = (2, 17)  # manylinux2014

if KIND not in ("", "any", "native"):
    raise SystemExit(f"HF_PARALLEL_WHEEL must be 'native' or 'any', got {KIND!r}")


class BuildKernels(build_py):
    """Adds the libraries of `hf_parallel/kernels/prebuilt.py` to the files of a wheel, not to those of the checkout."""

    libraries = ()
    machine = None

    def run(self):
        super().run()
        if self.editable_mode or KIND == "any":
            return
        kernels = runpy.run_path("hf_parallel/kernels/prebuilt.py")
        folder = Path(self.build_lib, "hf_parallel", "kernels", "libraries")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        try:
            if not sys.platform.startswith("linux"):
                raise FileNotFoundError(f"libraries are not built on {sys.platform}")
            compiler = shutil.which(os.environ.get("CC") or "cc")
            if compiler is None:
                raise FileNotFoundError("no C compiler was found (set CC)")
            self.libraries = kernels["build"](compiler, folder)
            self.machine = kernels["target"](compiler)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if KIND == "native":
                raise SystemExit(f"the C kernels cannot be built: {error}") from error
            self.warn(f"the C kernels are not built, and will be compiled at first use: {error}")


class Wheel(bdist_wheel):
    """Names the platform for which the libraries are, and no version of Python."""

    def write_wheelfile(self, *arguments, **settings):
        self.root_is_pure = not self._built().libraries
        super().write_wheelfile(*arguments, **settings)

    def get_tag(self):
        built = self._built()
        if not built.libraries:
            return "py3", "none", "any"
        versions = [OLDEST_GLIBC]
        for library in built.libraries:
            needed = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
            versions += [(int(major), int(minor)) for major, minor in needed]
        major, minor = max(versions)
        return "py3", "none", f"manylinux_{major}_{minor}_{built.machine}"

    def _built(self):
        return self.get_finalized_command("build_py")


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel})

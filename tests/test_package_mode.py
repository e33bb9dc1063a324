"""The modes of docs/new_mode.md, put into a copy of the package as the page describes, pass the tests for all modes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from paths import ROOT

PAGE = (ROOT / "docs" / "new_mode.md").read_text()
COPIED = ("hf_parallel", "tests", "docs", "examples", "benchmarks", *(path.name for path in ROOT.glob("*.*")))
OWN = {
    "openings": "",  # the page shows its test
    "varied": """\"\"\"Values of the mode for tests that hold for all modes.\"\"\"

EVERY_SETTING = {
    "seed": 1,
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "num_drawn": 3,
    "max_repeats": 1,
}
SMALL_CALL = {"num_drawn": 3, "do_sample": True, "seed": 7}
""",
    "survivors": """\"\"\"Values of the mode for tests that hold for all modes.\"\"\"

EVERY_SETTING = {
    "seed": 1,
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "num_drawn": 3,
    "fork_every": 2,
}
SMALL_CALL = {"num_drawn": 3, "fork_every": 3, "do_sample": True, "seed": 7}
""",
}
"""Tests of the modes, apart from what the page shows."""


def fenced(class_name: str) -> str:
    """Return the block of Python on the page that defines a class."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if f"class {class_name}:" in block]
    return found


def indented(start: str) -> str:
    """Return the block of the page, indented by four spaces, that holds a text."""
    blocks = re.findall(r"(?:^    .*\n|^\n)+", PAGE, re.MULTILINE)
    (found,) = [block for block in blocks if start in block]
    return textwrap.dedent(found)


def put_in(root: Path, mode: str) -> None:
    """Add the three files of a mode."""
    (root / "hf_parallel" / "generation" / "modes" / f"{mode}.py").write_text(fenced(f"{mode.title()}Run"))
    test = OWN[mode]
    if not test:
        docstring = '"""Comparison with `generate`."""\n\n'
        imports = "import tiny\nimport torch\nfrom workers import TOKENIZER, encode, small_model\n"
        test = docstring + imports + indented("EVERY_SETTING = {") + indented("def test_each_row_equals_generate")
    (root / "tests" / "generation" / "modes" / f"test_{mode}.py").write_text(test)
    name = f"hf_parallel.generation.modes.{mode}.{mode.title()}Config"
    reference = f"<!-- reference {name} -->\n<!-- end of reference -->\n"
    (root / "docs" / "modes" / f"{mode}.md").write_text(f"# `{mode}`\n\n## Settings\n\n{reference}")


@pytest.mark.slow
def test_modes_put_in_as_the_page_says_pass_the_tests_for_all_modes(tmp_path: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    for mode in OWN:
        put_in(tmp_path, mode)
        subprocess.run([sys.executable, "docs/generated.py"], cwd=tmp_path, check=True, timeout=600)
    of_modes = " or ".join(OWN)
    of_all = "test_representations_are_short or test_every_page_is_in_the_navigation or docstring"
    selected = ["-k", f"{of_modes} or {of_all}", "-m", "slow or not slow", "-p", "no:xdist", "-p", "no:cacheprovider"]
    surroundings = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *selected, "tests"],
        cwd=tmp_path,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    for mode in OWN:
        assert f"modes/{mode}.py" not in done.stdout  # no warning of its own
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 25 * len(OWN)

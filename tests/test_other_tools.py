"""The code of docs/other_tools.md runs with the libraries that are installed; `make compat` installs all of them."""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from pages import OTHER_TOOLS, ROOT, blocks_of, run, small_scale
from small_tokenizers import small_llama

from hf_parallel.generation import MODES

INTRODUCTION, *SECTIONS = OTHER_TOOLS.read_text().split("\n## ")
TITLES = [section.splitlines()[0] for section in SECTIONS]
LIBRARIES = {"trl", "peft", "lm_eval", "smolagents", "outlines", "lmformatenforcer"}


@pytest.fixture
def small(embedded: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """A random model of two layers for the embedded tokenizer, in place of those of the Hub."""
    tokenizer = copy.deepcopy(embedded[1])
    model = small_llama(tokenizer)
    with small_scale((model, tokenizer)):
        yield model, tokenizer


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modes that ran."""
    ran: list[str] = []
    for name in ("shared_prefix", "self_consistency"):
        cls = MODES[name]

        def make_run(config: Any, call: Any, make: Any = cls.make_run) -> Any:
            ran.append(config.mode)
            return make(config, call)

        monkeypatch.setattr(cls, "make_run", make_run)
    return ran


def refuse(*args: Any, **kwargs: Any) -> None:
    """Stand-in for AutoModelForImageTextToText with a text model; smolagents tries it first."""
    raise ValueError("Unrecognized configuration class")


@pytest.mark.parametrize(
    "section",
    [pytest.param(section, marks=[pytest.mark.slow] * section.startswith("TRL")) for section in SECTIONS],
    ids=TITLES,
)
def test_code_of_section_runs_in_the_modes_that_it_names(
    section: str, small: tuple[Any, Any], modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = blocks_of(section, "python")
    for block in code:
        for name in sorted(imported(block) & LIBRARIES):
            pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", refuse)
    namespace = run([*blocks_of(INTRODUCTION, "python"), *code], section.splitlines()[0])
    named = re.findall(r"generation_mode\W+(\w+)", "\n".join(code))
    assert set(modes) == set(named) != set()
    if cache := namespace.get("cache"):
        assert cache.kv_bytes > 0  # it was filled and kept


def imported(code: str) -> set[str]:
    """Return the top-level packages that a block imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_the_extra_compat_holds_the_libraries_of_the_page() -> None:
    extra = re.search(r"^compat = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert extra is not None
    listed = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', extra[1])}
    listed -= {"torchao", "ray"}  # weights in fewer bits, and replicas: no code of the page imports them
    used = set().union(*(imported(block) for block in blocks_of(OTHER_TOOLS.read_text(), "python")))
    own = {"hf_parallel", "torch", "transformers", "accelerate", *sys.stdlib_module_names}
    assert used - own == {"lmformatenforcer" if name == "lm_format_enforcer" else name for name in listed}

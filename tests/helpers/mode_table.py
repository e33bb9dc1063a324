"""Writes the table of `docs/modes/index.md` that says what each mode needs: `python tests/helpers/mode_table.py`.

What the settings and traits of a mode say is read from its class. What a model must have is tried: each mode runs on a
tiny model of each kind.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import small_call
from paths import ROOT

import hf_parallel
from hf_parallel.generation import MODES
from hf_parallel.generation.dialects import Dialect
from hf_parallel.models.intercept.attention import UnsupportedModelError

PAGE = ROOT / "docs" / "modes" / "index.md"
HEADER = "| mode and settings |"
"""Begins the table on the page."""
OVERLAP = Dialect(("<P>", "</P>"), ("<B>", "</B>"), "overlap")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "`shared_prefix`": ("shared_prefix", {}),
    "`resample`": ("resample", {}),
    "`best_of`": ("best_of", {}),
    "`search`": ("search", {}),
    "`self_consistency`": ("self_consistency", {}),
    "`skeleton_of_thought`": ("skeleton_of_thought", {}),
    "`hogwild`": ("hogwild", {}),
    "`async_reasoning`": ("async_reasoning", {}),
    "`pdos`": ("pdos", {}),
    '`pdos`, `join="rotate"`': ("pdos", {"join": "rotate"}),
    '`fork_join`, `dialect="multiverse"` (the default), `"npr"`': ("fork_join", {"dialect": "multiverse"}),
    '`fork_join`, `dialect="parallel_r1"`': ("fork_join", {"dialect": "parallel_r1"}),
    '`fork_join`, `dialect="threadweaver"`, `"pdos"`': ("fork_join", {"dialect": "threadweaver"}),
    '`fork_join`, `dialect="apar"`': ("fork_join", {"dialect": "apar"}),
    '`fork_join`, `dialect="apr"`, `"asyncthink"`': ("fork_join", {"dialect": "asyncthink"}),
    '`fork_join`, a dialect with `positions="overlap"`': ("fork_join", {"dialect": OVERLAP}),
}
"""Rows of the table: a mode and the settings on which its needs depend."""
KINDS = {
    "hybrid models": "lfm2",
    "sliding windows": "mistral",
    "own attention": "xglm",
    "no RoPE": "gpt2",
}
"""Columns of the table that say on which models a mode runs, with a tiny model of each kind."""
COLUMNS = ("mode and settings", "needs `tokenizer=`", "takes `logits_cache=`", *KINDS)


def table() -> str:
    """Return the table in Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(row_of, VARIANTS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table_of(page: str) -> str:
    """Return the table of the page's text."""
    found = re.search(rf"^{re.escape(HEADER)}(.*\n(?=\|))*.*\n", page, re.MULTILINE)
    assert found is not None, f"no line of docs/modes/index.md begins with {HEADER!r}"
    return found[0]


def row_of(variant: str) -> Sequence[str]:
    """Return the cells of a row."""
    mode, settings = VARIANTS[variant]
    cells = [
        needs_tokenizer(mode),
        takes_logits_cache(mode),
        *(runs_on(name, mode, settings) for name in KINDS.values()),
    ]
    return [variant, *("yes" if cell else "no" for cell in cells)]


def needs_tokenizer(mode: str) -> bool:
    """Return whether a call without a tokenizer raises."""
    try:
        MODES[mode]().prepare({})
    except ValueError as error:
        return "tokenizer" in str(error)
    return False


def takes_logits_cache(mode: str) -> bool:
    """Return whether a call with a `LogitsCache` runs."""
    try:
        return runs_on("llama", mode, {"logits_cache": hf_parallel.LogitsCache()})
    except ValueError as error:
        if "logits_cache" not in str(error):
            raise
        return False


def runs_on(architecture: str, mode: str, settings: dict[str, Any]) -> bool:
    """Return whether a mode runs on a tiny model of an architecture."""
    prompt = torch.arange(10, 30)[None]
    arguments = {**small_call(mode), **settings, "max_new_tokens": 12}
    if mode == "fork_join" and "dialect" in settings:
        arguments["opening"] = ""
    try:
        _enabled(architecture).generate(prompt, tokenizer=AsciiTokenizer(), **arguments)
    except UnsupportedModelError:
        return False
    return True


@cache
def _enabled(architecture: str) -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build(architecture)))


if __name__ == "__main__":
    sys.path += {str(test.parent) for test in (ROOT / "tests" / "generation").rglob("test_*.py")}  # `test_<mode>.py`
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(table_of(text), table()), encoding="utf-8")

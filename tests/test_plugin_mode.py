"""A mode of another package, with two rows per prompt, works everywhere: `generate`, command line, pipeline,
transcript, Hub. The package is the module of docs/new_mode.md with an entry point."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from paths import ROOT

import hf_parallel.pipelines
from hf_parallel.generation import MODES

PAGE = ROOT / "docs" / "new_mode.md"
OPENINGS = ["Yes,", "Nope:"]  # of different lengths
PROMPTS = ["Oslo or Rome?", "Is 12 a number?"]
NEW_TOKENS = 14

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package, installed in a folder on `sys.path`; it is not imported here."""
    other = MODES.pop("openings", None)  # of the same name, if there is one
    folder = tmp_path_factory.mktemp("site")
    info = folder / "some_openings-1.0.dist-info"
    info.mkdir()
    (module,) = re.findall(r"^```python\n(.*?class OpeningsRun.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "some_openings.py").write_text(module)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-openings\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hf_parallel.modes]\nopenings = some_openings:OpeningsConfig\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("some_openings", None)
    MODES.pop("openings", None)
    if other is not None:
        MODES["openings"] = other


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = copy.deepcopy(small_tokenizers.make("split_marker"))
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def generate(model: Any, tokenizer: Any, prompts: list[str] = PROMPTS, **settings: Any) -> Any:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    given = {"generation_mode": "openings", "openings": OPENINGS, "max_new_tokens": NEW_TOKENS, "tokenizer": tokenizer}
    return model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], return_dict_in_generate=True, **given | settings
    )


def texts(out: Any, tokenizer: Any, prompts: list[str] = PROMPTS) -> list[str]:
    begin = tokenizer(prompts, return_tensors="pt", padding=True)["input_ids"].shape[1]
    return tokenizer.batch_decode(out.sequences[:, begin:], skip_special_tokens=True)


def test_the_mode_is_listed_before_it_is_imported() -> None:
    assert "openings" in list(MODES)
    assert MODES["openings"].__module__ == "some_openings"
    with pytest.raises(ValueError, match=r"one of \[.*'openings'.*\]"):
        hf_parallel.enable(copy.deepcopy(tiny.build("llama"))).generate(torch.ones(1, 3).long(), generation_mode="no")


def test_every_row_equals_plain_generate(model: Any, tokenizer: Any) -> None:
    out = generate(model, tokenizer)
    assert len(out.sequences) == len(PROMPTS) * len(OPENINGS)
    rows = iter(texts(out, tokenizer))
    for prompt in PROMPTS:
        for opening in OPENINGS:
            ids = tokenizer(prompt + opening, return_tensors="pt")["input_ids"]
            count = NEW_TOKENS - len(tokenizer(opening)["input_ids"])
            plain = model.generate(ids, generation_mode=None, max_new_tokens=count, do_sample=False)
            assert next(rows) == opening + tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert out.stats.prefilled_tokens == sum(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)

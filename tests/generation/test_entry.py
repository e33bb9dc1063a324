"""`hf_parallel.generate`: settings and outputs with types."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from mode_cases import BUILT_IN, small_call, small_config
from mypy import api
from transformers import BatchEncoding
from workers import TOKENIZER

import hf_parallel
from hf_parallel import HogwildConfig, SharedPrefixConfig
from hf_parallel.generation import MODES

pytestmark = [pytest.mark.filterwarnings("ignore")]

IDS = torch.stack(tiny.make_prompts([9, 9], seed=1))
SKIPPED = "torch.*,numpy.*,transformers.*,jinja2.*,hf_parallel.kernels.*,hf_parallel.cache.*,hf_parallel.models.*"
"""Modules that the types of a call do not need; mypy takes a minute for them."""


def call(mode: str) -> Any:
    """Call a mode on a model that is not enabled."""
    others = {name: value for name, value in small_call(mode).items() if name not in MODES[mode].fields()}
    del others["generation_mode"]
    model = copy.deepcopy(tiny.build("llama"))
    return hf_parallel.generate(model, small_config(mode), IDS, tokenizer=TOKENIZER, **others)


def check_types(code: str, folder: Path) -> str:
    """Return what mypy says of a module."""
    (folder / "code.py").write_text(code)
    parts = f"[mypy-{SKIPPED},hf_parallel.hub,hf_parallel.pipelines]\nfollow_imports = skip\n"
    (folder / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n{parts}")
    options = ["--config-file", folder / "mypy.ini", "--cache-dir", folder / "cache", "--no-error-summary"]
    return api.run([*map(str, options), str(folder / "code.py")])[0]


@pytest.mark.slow
def test_mypy_knows_the_output_of_each_mode_and_finds_wrong_settings(tmp_path: Path) -> None:
    lines = ["import hf_parallel, torch", "model, ids = torch.nn.Linear(1, 1), torch.ones(1, 1)"]
    for mode in BUILT_IN:
        config = f"hf_parallel.{MODES[mode].__name__}(seed=0)"
        lines.append(f"reveal_type(hf_parallel.generate(model, {config}, ids, top_k=1))")
    right = [
        "out = hf_parallel.generate(model, hf_parallel.HogwildConfig(num_workers=3), ids)",
        "name: str = out.history[0][0].name",
        "hf_parallel.SharedPrefixConfig(logits_cache=hf_parallel.LogitsCache(), replay=hf_parallel.Hotspot())",
    ]
    wrong = {
        "hf_parallel.HogwildConfig(num_wrkers=2)": 'Unexpected keyword argument "num_wrkers"',
        "hf_parallel.HogwildConfig(num_workers='2')": 'Argument "num_workers" to "HogwildConfig" has incompatible type',
        "hf_parallel.SharedPrefixConfig(draft_tokens='2')": 'Argument "draft_tokens" to "SharedPrefixConfig" has',
        "text: str = out.history": 'Incompatible types in assignment (expression has type "list[list[Step]]"',
    }
    found = check_types("\n".join([*lines, *right, *wrong]) + "\n", tmp_path)
    revealed = re.findall(r'Revealed type is "(.*)"', found)
    outputs = [type(call(mode)) for mode in BUILT_IN]
    assert revealed == [f"{cls.__module__}.{cls.__qualname__}" for cls in outputs]
    errors = [line for line in found.splitlines() if ": error: " in line]
    assert len(errors) == len(wrong), found
    for error, (number, message) in zip(errors, enumerate(wrong.values(), len(lines) + len(right) + 1), strict=True):
        assert f"code.py:{number}: " in error
        assert message in error


def test_generate_equals_the_generate_of_the_model() -> None:
    model, mask = copy.deepcopy(tiny.build("llama")), torch.ones_like(IDS)
    config = SharedPrefixConfig(seed=3)
    settings = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 5}
    outs = [
        hf_parallel.generate(model, config, inputs, **settings)
        for inputs in (IDS, {"input_ids": IDS, "attention_mask": mask}, BatchEncoding({"input_ids": IDS}))
    ]
    assert hf_parallel.is_enabled(model)
    expected = model.generate(IDS, generation_mode="shared_prefix", seed=3, **settings)  # type: ignore[operator]
    assert all(torch.equal(out.sequences, expected) for out in outs)


@pytest.mark.parametrize(
    ("config", "inputs", "settings", "error", "message"),
    [
        (HogwildConfig, IDS, {}, TypeError, "config must be a ParallelConfig, such as HogwildConfig(num_workers=2)"),
        ("hogwild", IDS, {}, TypeError, "config must be a ParallelConfig"),
        (SharedPrefixConfig(), "text", {}, TypeError, "inputs must be a tensor of token ids or a mapping, got str"),
        (SharedPrefixConfig(), [[1]], {}, TypeError, "got list"),
        (SharedPrefixConfig(), IDS, {"return_dict_in_generate": False}, ValueError, "return_dict_in_generate=False"),
        (SharedPrefixConfig(), IDS, {"generation_mode": "pdos"}, ValueError, "generation_mode='pdos'"),
        (SharedPrefixConfig(), IDS, {"num_workers": 2}, ValueError, "'shared_prefix' has no setting 'num_workers'"),
        (SharedPrefixConfig(), IDS[0], {}, ValueError, "input_ids must have the shape [rows, length], got [9]"),
    ],
)
def test_wrong_arguments_raise(
    config: Any, inputs: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        hf_parallel.generate(copy.deepcopy(tiny.build("llama")), config, inputs, **settings)

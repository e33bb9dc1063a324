"""`hf_parallel.generate`: settings and outputs with types."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import tiny
import torch
from transformers import BatchEncoding

import hf_parallel
from hf_parallel import HogwildConfig, SharedPrefixConfig

pytestmark = [pytest.mark.filterwarnings("ignore")]

IDS = torch.stack(tiny.make_prompts([9, 9], seed=1))


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
        (SharedPrefixConfig(), "text", {}, TypeError, "inputs must be a tensor of token ids or a mapping, got str"),
        (SharedPrefixConfig(), IDS, {"return_dict_in_generate": False}, ValueError, "return_dict_in_generate=False"),
        (SharedPrefixConfig(), IDS, {"generation_mode": "pdos"}, ValueError, "generation_mode='pdos'"),
        (SharedPrefixConfig(), IDS, {"num_workers": 2}, ValueError, "'shared_prefix' has no setting 'num_workers'"),
    ],
)
def test_wrong_arguments_raise(
    config: Any, inputs: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        hf_parallel.generate(copy.deepcopy(tiny.build("llama")), config, inputs, **settings)

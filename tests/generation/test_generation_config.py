"""Every setting of `GenerationConfig` in a mode: the tokens of plain `generate`, or an error that names it."""

from __future__ import annotations

import copy
import string
from typing import Any

import pytest
import tiny
import torch
from tiny_tokenizer import TOKENIZER
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

import hf_parallel

IDS, MASK = tiny.left_pad(tiny.make_prompts([9, 6], seed=3))

HONORED: dict[str, tuple[Any, ...]] = {
    "max_length": (14,),
    "max_new_tokens": (3,),
    "min_length": (12,),
    "min_new_tokens": (5,),
    "max_time": (60.0, -1.0),
    "stop_strings": ([*string.ascii_lowercase], "word"),
    "do_sample": (True, False),
    "temperature": (0.5, 2.0),
    "top_k": (3, 0),
    "top_p": (0.5, 1.0),
    "min_p": (0.2,),
    "top_h": (0.4,),
    "typical_p": (0.4,),
    "epsilon_cutoff": (0.01,),
    "eta_cutoff": (0.01,),
    "repetition_penalty": (1.5,),
    "encoder_repetition_penalty": (1.5,),
    "no_repeat_ngram_size": (1, 2),
    "encoder_no_repeat_ngram_size": (2,),
    "bad_words_ids": ([[5], [6, 7]],),
    "renormalize_logits": (True,),
    "forced_bos_token_id": (5,),
    "forced_eos_token_id": (5, [5, 6]),
    "remove_invalid_values": (True,),
    "exponential_decay_length_penalty": ((2, 1.5),),
    "suppress_tokens": (list(range(5, 60)),),
    "begin_suppress_tokens": (list(range(5, 60)),),
    "sequence_bias": ({(5,): 4.0}, [[[5, 6], 2.0]]),
    "watermarking_config": (WatermarkingConfig(), {"greenlist_ratio": 0.5, "bias": 3.0}),
    "num_return_sequences": (3,),
    "output_attentions": (False, True),
    "output_hidden_states": (False, True),
    "output_scores": (True,),
    "output_logits": (True,),
    "return_dict_in_generate": (True,),
    "pad_token_id": (5,),
    "bos_token_id": (5,),
    "eos_token_id": (list(range(10, 40)), 5),
    "use_cache": (True,),
    "cache_implementation": ("dynamic", "static", "hybrid"),
    "prefill_chunk_size": (4,),
    "num_beams": (2,),
}
"""Values that change tokens, output or cost under plain `generate`."""
UNUSED: dict[str, tuple[Any, ...]] = {
    **{"early_stopping": (True,), "length_penalty": (2.0,), "diversity_penalty": (0.5,), "low_memory": (True,)},
    **{"decoder_start_token_id": (5,), "is_assistant": (False,), "speculation_type": (None,), "max_cache_len": (64,)},
    **{"num_assistant_tokens": (3,), "num_assistant_tokens_schedule": ("constant",), "assistant_lookbehind": (3,)},
    **{"assistant_confidence_threshold": (0.2,), "target_lookbehind": (3,), "assistant_ensemble_weight": (0.5,)},
    **{"max_matching_ngram_size": (2,), "cache_config": ({"nbits": 4},), "disable_compile": (True,)},
    "continuous_batching_config": (None,),
}
"""Values that do nothing in these calls: they belong to beams, assistants or other caches."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_cache": (False,),
    "num_beam_groups": (2,),
    "penalty_alpha": (0.6,),
    "dola_layers": ("high",),
    "constraints": ([object()],),
    "force_words_ids": ([[5]],),
    "prompt_lookup_num_tokens": (3,),
    "assistant_early_exit": (1,),
    "guidance_scale": (1.5,),
    "token_healing": (True,),
    "use_mtp": (True,),
    "compile_config": (CompileConfig(),),
    "cache_implementation": ("offloaded", "quantized", "offloaded_static"),
}
"""Values that no mode supports."""


@pytest.fixture(scope="module")
def model() -> Any:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    model.generation_config.generation_mode = "shared_prefix"
    model.generation_config.eos_token_id = None
    return model


FURTHER: dict[str, dict[str, Any]] = {
    "output_scores": {"return_dict_in_generate": True},
    "output_logits": {"return_dict_in_generate": True},
    "eos_token_id": {"do_sample": False},
    "stop_strings": {"do_sample": False, "eos_token_id": -1},
    "exponential_decay_length_penalty": {"do_sample": False, "eos_token_id": 5},
}
"""Further arguments; under sampling without `seed`, the random numbers differ after the first row has ended."""


def generate(model: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": True,
        "pad_token_id": tiny.PAD,
        "tokenizer": TOKENIZER,
    }
    if "max_length" in settings:
        del defaults["max_new_tokens"]
    return model.generate(IDS, attention_mask=MASK, **defaults | settings)


def table(values: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(n, value, id=f"{n}-{i}") for n, given in values.items() for i, value in enumerate(given)]


def test_every_setting_is_in_a_table() -> None:
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert settings <= HONORED.keys() | UNUSED.keys() | UNSUPPORTED.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value"), table({**HONORED, **UNUSED}))
def test_a_setting_acts_as_under_generate(model: Any, name: str, value: Any) -> None:
    settings = {name: value, **FURTHER.get(name, {})}
    plain, ours = generate(model, generation_mode=None, **settings), generate(model, **settings)
    assert type(ours) is torch.Tensor or isinstance(ours, type(plain))
    if isinstance(plain, torch.Tensor):
        plain, ours = {"sequences": plain}, {"sequences": ours}
    assert ours["sequences"].tolist() == plain["sequences"].tolist()
    for scores in plain.keys() & {"scores", "logits"}:
        torch.testing.assert_close(ours[scores], plain[scores], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value"), table(UNSUPPORTED))
def test_unsupported_settings_raise_and_name_plain_generation(model: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"(?s){name}.*generation_mode=None"):
        generate(model, **{name: value})


@pytest.mark.filterwarnings("ignore")
def test_equal_settings_follow_changes_of_the_models_configs(model: Any) -> None:
    """What was prepared for a call serves the next one with equal settings, but not after a change of the defaults."""
    model = copy.deepcopy(model)
    defaults = model.generation_config
    defaults.suppress_tokens = list(range(5, 30))

    def check() -> None:
        config = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=[3, 4])
        for settings in ({"do_sample": False}, {"generation_config": config}):
            plain = generate(model, generation_mode=None, **settings).tolist()
            assert generate(model, **settings).tolist() == plain
            assert generate(model, **settings).tolist() == plain
        config.eos_token_id[0] = 5  # in place
        plain = generate(model, generation_mode=None, generation_config=config).tolist()
        assert generate(model, generation_config=config).tolist() == plain
        config.label = "a field of its own"
        assert model._prepare_settings(config, {"label": "another"})[0].label == "another"

    check()
    defaults.suppress_tokens += range(30, 60)  # in place
    check()
    defaults.suppress_tokens = None
    defaults.repetition_penalty = 1.5
    check()
    model.generation_config = GenerationConfig(repetition_penalty=3.0, generation_mode="shared_prefix")
    check()
    model.config.temperature = 0.5
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        generate(model, do_sample=False)

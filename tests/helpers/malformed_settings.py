"""Malformed calls, part 2: modes and their settings, trees of levels, seeds, tokenizers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from malformed_cases import BATCH, DROP, MASK, ONE, TOKENIZER, VOCAB_SIZE, Case, both, hogwild, plain, shared
from transformers import GenerationConfig

from hf_parallel import HogwildConfig, ParallelConfig, SharedPrefixConfig

TUPLE = (ValueError, TypeError)


def _config(**attributes: Any) -> GenerationConfig:
    """Return a generation config with further attributes."""
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    for name, value in attributes.items():
        setattr(config, name, value)
    return config


IN_CONFIG = {"generation_mode": DROP, "max_new_tokens": DROP, "do_sample": DROP}

MODES = [
    shared("an unknown mode", ValueError, "generation_mode", generation_mode="magic"),
    shared("a mode with a hyphen", ValueError, "shared_prefix", generation_mode="shared-prefix"),
    shared("a mode in capitals", ValueError, "shared_prefix", generation_mode="SHARED_PREFIX"),
    shared("an empty mode", ValueError, "generation_mode", generation_mode=""),
    shared("a number as mode", ValueError, "generation_mode", generation_mode=1),
    shared("False as mode", ValueError, "generation_mode", generation_mode=False),
    shared("a list as mode", ValueError, "generation_mode", generation_mode=["shared_prefix"]),
    shared("a dict as mode", ValueError, "generation_mode", generation_mode={"mode": "shared_prefix"}),
    shared("bytes as mode", ValueError, "generation_mode", generation_mode=b"shared_prefix"),
    shared("a config class as mode", ValueError, "generation_mode", generation_mode=SharedPrefixConfig),
    plain("no mode: plain generation", generation_mode=None),
    plain("a setting without a mode", ValueError, "num_workers", num_workers=2),
    plain("a config without a mode", ValueError, "generation_mode", parallel_config={"num_workers": 2}),
    plain("a config against no mode", ValueError, "mode", generation_mode=None, parallel_config=HogwildConfig()),
    plain("None over a generation config that names a mode",
          generation_mode=None, generation_config=_config(generation_mode="hogwild"), max_new_tokens=DROP),
    shared("a generation config that names the mode", generation_config=_config(generation_mode="shared_prefix"),
           **IN_CONFIG),
    shared("a generation config that names an unknown mode", ValueError, "generation_mode",
           generation_config=_config(generation_mode="magic"), **IN_CONFIG),
    shared("a generation config that names a number", ValueError, "generation_mode",
           generation_config=_config(generation_mode=7), **IN_CONFIG),
    shared("stored settings as text", ValueError, "parallel_config",
           generation_config=_config(generation_mode="shared_prefix", parallel_config="fast"), **IN_CONFIG),
    shared("stored settings as a list", ValueError, "parallel_config",
           generation_config=_config(generation_mode="shared_prefix", parallel_config=["fast"]), **IN_CONFIG),
    shared("an unknown stored setting", ValueError, "speed",
           generation_config=_config(generation_mode="shared_prefix", parallel_config={"speed": 9}), **IN_CONFIG),
    shared("a bad stored value", ValueError, "keep_completions",
           generation_config=_config(generation_mode="shared_prefix", parallel_config={"keep_completions": 2}),
           **IN_CONFIG),
    hogwild("a wrong setting at the top of the generation config", ValueError, "num_workers",
            generation_config=_config(num_workers=0), max_new_tokens=DROP, do_sample=DROP),
]  # fmt: skip

SETTINGS = [
    hogwild("num_wokers", ValueError, "num_workers", num_wokers=2),
    hogwild("workers", ValueError, "workers", workers=2),
    shared("max_token", ValueError, "max_token", max_token=3),
    shared("keep_completion", ValueError, "keep_completions", keep_completion=True),
    shared("a setting of hogwild", ValueError, "num_workers", num_workers=2),
    shared("layout in shared_prefix", ValueError, "layout", layout="combined"),
    hogwild("a setting of shared_prefix", ValueError, "levels", levels=[[5], [6]]),
    hogwild("keep_completions in hogwild", ValueError, "keep_completions", keep_completions=False),
    shared("an unknown setting of None", ValueError, "magic", magic=None),
    hogwild("parallel_config as text", ValueError, "parallel_config", parallel_config="fast"),
    hogwild("parallel_config as a number", ValueError, "parallel_config", parallel_config=3),
    hogwild("parallel_config as a list", ValueError, "parallel_config", parallel_config=[("num_workers", 2)]),
    hogwild("parallel_config as a class", ValueError, "parallel_config", parallel_config=HogwildConfig),
    hogwild("parallel_config of another mode", ValueError, "HogwildConfig", parallel_config=SharedPrefixConfig()),
    shared("parallel_config against the mode", ValueError, "SharedPrefixConfig", parallel_config=HogwildConfig()),
    shared("parallel_config of no mode", ValueError, "SharedPrefixConfig", parallel_config=ParallelConfig()),
    plain("the base config alone", ValueError, "generation_mode", parallel_config=ParallelConfig()),
    hogwild("an unknown key", ValueError, "speed", parallel_config={"speed": 9}),
    hogwild("a near miss as key", ValueError, "num_workers", parallel_config={"num_worker": 3}),
    hogwild("a key that is no text", ValueError, "1", parallel_config={1: 2, "num_workers": 2}),
    hogwild("a wrong value in parallel_config", ValueError, "num_workers", parallel_config={"num_workers": 0}),
    hogwild("a keyword over a wrong value", num_workers=1, parallel_config={"num_workers": 0}),
    hogwild("a mapping as parallel_config", parallel_config=MappingProxyType({"num_workers": 1})),
    hogwild("parallel_config that names the mode", generation_mode=DROP, parallel_config=HogwildConfig()),
    shared("an empty parallel_config", parallel_config={}),
]

_BAD_TEXT: tuple[Any, ...] = (5, None, ["x"], "a\ud800b")
_BAD_TEXTS: tuple[Any, ...] = ("abc", 5, ["x", 5], [""], {"x": 1}, ["x", "\ud800"])
BAD_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "shared_prefix": {
        "seed": ("x", 1.5, True, [1, "x"], [None], {1: 2}),
        "cuda_graph": ("yes", 1, None),
        "compile": ("yes", 1),
        "levels": ("text", 5, {"root": [1]}, torch.tensor([1, 2])),
        "keep_completions": ("yes", 1, None),
        "logits_cache": ("logits.safetensors", {}, 5),
        "replay": ("sometimes", 5, None, ["stepwise"]),
        "prefetch": ("yes", 1),
        "draft_tokens": (-1, 2.0, True, "many"),
    },
    "hogwild": {
        "seed": ("x", [1.5, 1]),
        "cuda_graph": (0, "no"),
        "logits_cache": ("logits.safetensors", {}, 5),
        "replay": ("sometimes", 5, None, ["stepwise"]),
        "prefetch": ("yes", 1, True),
        "num_workers": (0, -1, 10**30, 2.0, "2", None, True, [2], torch.tensor(2)),
        "layout": ("diagonal", "", None, 3, ["combined"], np.array(["combined", "contiguous"])),
        "worker_names": (
            "AB",
            5,
            ["A"],
            ["A", "A"],
            ["A", ""],
            ["A", 3],
            ["A", "B", "C"],
            {"A": 1, "B": 2},
            ["A", "\udcff"],
        ),
        "history_header": _BAD_TEXT,
        "others_header": _BAD_TEXT,
        "own_header": _BAD_TEXT,
        "step_gap": _BAD_TEXT,
        "step_prefix": (
            *_BAD_TEXT,
            "{",
            "{who}",
            "{0}",
            "{name.x}",
            "{name[x]}",
            "{step:s}",
            "{name:>100000000000}",
            "{step:1000}",
            "{name:{step}}",
            "{name}" * 33,
        ),
        "separator": (*_BAD_TEXT, ""),
        "sentence_ends": (*_BAD_TEXTS, None),
        "code_fence": _BAD_TEXT,
        "redundancy_prompt": _BAD_TEXT,
        "redundancy_interval": (0, -5, 1.5, "x", None, True),
        "answer_pattern": (*_BAD_TEXT, "(", "[a-", "*", "((a{1000}){1000}){1000}", "a{100000000}"),
        "stop_on_answer": ("some", "", None, True, ["any"]),
        "finisher_prompt": _BAD_TEXT,
        "finisher_tokens": (-1, 1.5, "x", None, True),
        "collaboration_prompt": (
            *_BAD_TEXT,
            "{",
            "{who}",
            "{names.x}",
            "{count.real}",
            "{names[who]}",
            "{count:>100000000000}",
        ),
        "task_prompt": (*_BAD_TEXT, "{", "{who}", "{task.__class__}{task}", "Task:"),
    },
}
"""Values for which each setting must raise."""

FIELDS = [
    (shared if mode == "shared_prefix" else hogwild)(
        f"{name}={value!r}",
        ValueError,
        name,
        **{name: value, **({"input_ids": DROP} if name == "levels" else {})},
    )
    for mode, fields in BAD_VALUES.items()
    for name, values in fields.items()
    for value in values
]

_ITSELF: list[Any] = [[5, 6]]
_ITSELF.append(_ITSELF)
_DEEP: list[Any] = [5]
for _ in range(5000):
    _DEEP = [[5], _DEEP]


def _levels(name: str, error: Any, says: str, levels: Any, **given: Any) -> Case:
    return shared(f"levels: {name}", error, says, levels=levels, **{"input_ids": DROP, **given})


LEVELS = [
    _levels("none", ValueError, "levels", []),
    _levels("no roots", ValueError, "levels", ()),
    _levels("an empty branch", ValueError, "levels", [[5, 6], []]),
    _levels("an empty run of tokens", ValueError, "levels", [[], [5], [6]]),
    _levels("floats", ValueError, "levels", [[5, 6], [1.5, 2.5]]),
    _levels("bools", ValueError, "levels", [[5, 6], [True, False]]),
    _levels("None", ValueError, "levels", [[5, 6], None]),
    _levels("a dict", ValueError, "levels", [[5, 6], {"child": [7]}]),
    _levels("a number between branches", ValueError, "levels", [5, [6, 7]]),
    _levels("a branch among tokens", ValueError, "levels", [[5, [6]], [7]]),
    _levels("text among tokens", ValueError, "levels", [[5, 6], [7, "x"]]),
    _levels("text without a tokenizer", ValueError, "tokenizer", ["some text", [5, 6]]),
    _levels("text with a tokenizer that is none", ValueError, "tokenizer", ["some text", [5]], tokenizer="gpt2"),
    _levels("text with a lone surrogate", ValueError, "levels", ["a\ud800", [5]], tokenizer=TOKENIZER),
    _levels("empty text", ValueError, "levels", ["", [5]], tokenizer=TOKENIZER),
    _levels("a tensor of floats", ValueError, "levels", [torch.tensor([1.5, 2.5]), [5]]),
    _levels("a tensor of bfloat16", ValueError, "levels", [torch.ones(3, dtype=torch.bfloat16), [5]]),
    _levels("a tensor of two dimensions", ValueError, "levels", [ONE, [5]]),
    _levels("a tensor on the meta device", ValueError, "levels", [ONE[0].to("meta"), [5]]),
    _levels("a number too large", ValueError, "levels", [[5, 2**70], [6]]),
    _levels("a token outside the vocabulary", ValueError, "vocabulary", [[5, VOCAB_SIZE], [6]]),
    _levels("a negative token", ValueError, "vocabulary", [[5, 6], [-7]]),
    _levels("that hold themselves", ValueError, "levels", _ITSELF),
    _levels("5000 deep", ValueError, "levels", _DEEP),
    _levels("with input_ids", ValueError, "input_ids", [[5, 6], [7]], input_ids=ONE),
    _levels("with inputs", ValueError, "inputs", [[5, 6], [7]], inputs=ONE),
    _levels("with a mask", ValueError, "attention_mask", [[5, 6], [7]], attention_mask=torch.ones(1, 3)),
    _levels("with sequences", ValueError, "num_return_sequences", [[5, 6], [7]], num_return_sequences=2),
    _levels("with sequences in the generation config", ValueError, "num_return_sequences", [[5, 6], [7]],
            generation_config=GenerationConfig(num_return_sequences=2, do_sample=True), do_sample=DROP),
    _levels("seeds for other rows than the leaves", ValueError, "seed", [[5, 6], [7], [8]], seed=[1, 2, 3]),
]  # fmt: skip

SEEDS = [
    *both("a seed for each of too many rows", ValueError, "seed", seed=[1, 2, 3]),
    *both("no seeds in the list", ValueError, "seed", seed=[]),
    shared(
        "a seed per row, and one of them None", ValueError, "seed", input_ids=BATCH, attention_mask=MASK, seed=[1, None]
    ),
    shared("a huge seed", seed=2**80),
    shared("a negative seed", seed=-1),
    hogwild("a seed per worker", seed=[1, -2]),
]


class _Tokenizer:
    """An object with the attributes of the keyword arguments."""

    def __init__(self, **methods: Any) -> None:
        self.__dict__.update(methods)


class _Encodes(_Tokenizer):
    def __call__(self, text: str, **kwargs: Any) -> Any:
        return self.encodes(text)  # type: ignore[attr-defined]


def _decode(tokens: list[int], **kwargs: Any) -> str:
    return "x" * len(tokens)


TOKENIZERS = [
    hogwild("no tokenizer", ValueError, "tokenizer", tokenizer=DROP),
    hogwild("None as tokenizer", ValueError, "tokenizer", tokenizer=None),
    hogwild("the name of a tokenizer", ValueError, "tokenizer", tokenizer="gpt2"),
    hogwild("any object as tokenizer", ValueError, "tokenizer", tokenizer=object()),
    hogwild("a tokenizer's class", ValueError, "tokenizer", tokenizer=type(TOKENIZER)),
    hogwild("a function as tokenizer", ValueError, "decode", tokenizer=lambda text, **kwargs: {"input_ids": [5]}),
    hogwild("a tokenizer that only decodes", ValueError, "tokenizer", tokenizer=_Tokenizer(decode=_decode)),
    hogwild("a tokenizer that returns a list", ValueError, "tokenizer",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: [5, 6])),
    hogwild("a tokenizer that returns text", ValueError, "tokenizer",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": text})),
    hogwild("a tokenizer that returns a batch", ValueError, "tokenizer",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": [[5, 6]]})),
    hogwild("a tokenizer that returns no tokens", ValueError, "at least one token",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": []})),
    hogwild("a tokenizer that returns no tokens for step prefixes", ValueError, "'**Alice [1234567890]:**'",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": [5] * ("Alice" not in text)})),
    hogwild("a tokenizer that returns no tokens for its prompt", ValueError, "finish", finisher_prompt="finish",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": [5] * ("finish" not in text)})),
    hogwild("a tokenizer of a larger vocabulary", ValueError, "vocabulary",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": [5, VOCAB_SIZE]})),
    hogwild("a tokenizer that decodes to tokens", ValueError, "tokenizer",
            tokenizer=_Encodes(decode=lambda tokens, **kwargs: tokens, encodes=lambda text: {"input_ids": [5]})),
    hogwild("a tokenizer that encodes and decodes",
            tokenizer=_Encodes(decode=_decode, encodes=lambda text: {"input_ids": [5]})),
]  # fmt: skip

CASES = [*MODES, *SETTINGS, *FIELDS, *LEVELS, *SEEDS, *TOKENIZERS]

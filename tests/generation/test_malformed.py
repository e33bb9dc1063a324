"""Malformed calls raise typed, readable errors or work, and leave the model unchanged. So do interrupts."""

from __future__ import annotations

import copy
import logging
import pickle
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
import transformers
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from mode_cases import BUILT_IN
from tiny import PAD, REFUSED, VOCAB_SIZE, build, left_pad, make_prompts
from tiny_tokenizer import TOKENIZER
from torch import nn
from transformers import DynamicCache, GenerationConfig, LlamaModel, StaticCache, TextStreamer

import hf_parallel
from hf_parallel import (
    BlockCache,
    HogwildConfig,
    LogitsCache,
    SharedPrefixCache,
    SharedPrefixConfig,
    UnsupportedModelError,
)
from hf_parallel.generation import MODES
from hf_parallel.models.probing.signature import CACHE

PROMPTS = make_prompts([7, 4])
ONE = PROMPTS[0][None]
BATCH, MASK = left_pad(PROMPTS)
ONES = torch.ones_like(ONE)
GREEDY: dict[str, Any] = {"input_ids": BATCH, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
PLAIN: dict[str, Any] = {"input_ids": ONE, "max_new_tokens": 4, "do_sample": False}
SHARED = {**PLAIN, "generation_mode": "shared_prefix"}
HOGWILD = {
    **{**PLAIN, "generation_mode": "hogwild", "tokenizer": TOKENIZER, "num_workers": 2},
    **{"finisher_prompt": "\nIt is \\boxed{", "finisher_tokens": 2},
}
READABLE = (ValueError, TypeError, ImportError)
PACKAGES = [str(Path(module.__file__).parent) for module in (hf_parallel, transformers)]

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
any_example = settings(max_examples=25)


class OwnError(RuntimeError):
    """An error of the caller's code, which must reach the caller unchanged."""


def describe(model: Any) -> dict[str, Any]:
    """Return the state that no call may change."""
    return {
        "class": type(model),
        "attributes": sorted(vars(model)),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "weights": [(p.data_ptr(), p.dtype, p.requires_grad) for p in model.parameters()],
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Suppress warnings about intended errors."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(level)


class Bench:
    """An enabled model, and what it was and generated before any malformed call."""

    def __init__(self) -> None:
        self.plain = copy.deepcopy(build("llama"))
        self.model = hf_parallel.enable(copy.deepcopy(self.plain))
        self.before = describe(self.model)
        self.tokens = self.plain.generate(**{**GREEDY, "max_new_tokens": 2})

    def assert_unharmed(self) -> None:
        assert describe(self.model) == self.before
        after = {**GREEDY, "max_new_tokens": 2, "generation_mode": "shared_prefix"}
        assert torch.equal(self.model.generate(**after), self.tokens)
        assert describe(self.model) == self.before

    def assert_raises(self, call: Callable[[], object], says: str) -> None:
        """Assert that a call raises a readable error that names its cause, and changes nothing."""
        with pytest.raises(READABLE) as caught:
            call()
        assert says.lower() in str(caught.value).lower()
        assert not isinstance(caught.value, UnicodeError | NotImplementedError)
        file = caught.traceback[-1].path
        assert any(str(file).startswith(package) for package in PACKAGES), f"raised in {file}: {caught.value}"
        self.assert_unharmed()


@pytest.fixture(scope="module")
def shared_bench() -> list[Bench]:
    return []


@pytest.fixture
def bench(shared_bench: list[Bench]) -> Iterator[Bench]:
    """One bench for all tests: no call may affect the next. After a failure, a new one."""
    if not shared_bench:
        shared_bench.append(Bench())
    try:
        yield shared_bench[0]
        shared_bench[0].assert_unharmed()
    except BaseException:
        shared_bench.clear()
        raise


# Tensors

BAD_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a list": (torch.Tensor.tolist, "Tensor"),
    "an array": (torch.Tensor.numpy, "Tensor"),
    "text": (lambda x: "text", "Tensor"),
    "on the meta device": (lambda x: x.to("meta"), "meta"),
    "sparse": (torch.Tensor.to_sparse, "sparse"),
    "of one dimension": (lambda x: x[0], "[rows, length]"),
}
BAD_IDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    **BAD_TENSORS,
    "an encoding": (lambda x: TOKENIZER("a b", return_tensors="pt"), "Tensor"),
    "of floats": (torch.Tensor.float, "int64"),
    "of bools": (torch.Tensor.bool, "int64"),
    "without tokens": (lambda x: x[:, :0], "at least one token"),
    "without rows": (lambda x: x[:0], "at least one token"),
    "outside the vocabulary": (lambda x: x + VOCAB_SIZE, "vocabulary"),
    "negative": (torch.Tensor.neg, "vocabulary"),
    "nothing but padding": (lambda x: torch.full_like(x, PAD), "empty"),
    "padded on the right": (lambda x: torch.cat((x, x * 0), dim=1), "right"),
}
BAD_MASKS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    **{kind: (make, "attention_mask") for kind, (make, _) in BAD_TENSORS.items()},
    "of another length": (lambda x: x[:, :5], "attention_mask"),
    "of more rows": (lambda x: x.expand(3, -1), "attention_mask"),
    "of zeros": (torch.zeros_like, "empty"),
    "additive": (lambda x: x - 1e9, "0 and 1"),
    "of NaN": (lambda x: x * torch.nan, "0 and 1"),
}
BAD_POSITIONS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    **{kind: (make, "position_ids") for kind, (make, _) in BAD_TENSORS.items()},
    "shifted": (lambda x: x + 3, "position_ids"),
    "of another length": (lambda x: x[:, :5], "position_ids"),
    "of floats": (torch.Tensor.float, "position_ids"),
}
TENSORS = {
    "input_ids": (ONE, BAD_IDS),
    "attention_mask": (ONES, BAD_MASKS),
    "position_ids": (torch.arange(7)[None], BAD_POSITIONS),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (_, kinds) in TENSORS.items() for kind in kinds], ids=str
)
def test_malformed_tensors_raise(name: str, kind: str, bench: Bench) -> None:
    good, kinds = TENSORS[name]
    make, says = kinds[kind]
    for call in (SHARED, HOGWILD):
        bench.assert_raises(lambda call=call: bench.model.generate(**{**call, name: make(good)}), says)


# Settings of generate

NOT_NUMBERS = st.text(max_size=4) | st.lists(st.text(max_size=2), max_size=2) | st.dictionaries(st.text(), st.none())
FRACTIONS = st.integers(-9, 9).map(lambda n: n + 0.5)
NOT_INTS = NOT_NUMBERS | FRACTIONS | st.booleans()
NOT_BOOLS = NOT_NUMBERS | FRACTIONS | st.integers(2, 9)
NOT_TOKENS = st.text(max_size=4) | FRACTIONS | st.lists(FRACTIONS, min_size=1, max_size=2)
NEGATIVE = st.integers(max_value=-1)
WRONG_VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("max_new_tokens", "num_return_sequences", "prefill_chunk_size"), NOT_INTS | NEGATIVE | st.just(0)),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size", "top_k"), NOT_INTS | NEGATIVE),
    **dict.fromkeys(("temperature", "repetition_penalty"), NOT_NUMBERS | st.booleans() | NEGATIVE | st.just(0.0)),
    **dict.fromkeys(("top_p", "min_p"), NOT_NUMBERS | st.booleans() | NEGATIVE),
    **dict.fromkeys(("typical_p", "max_time"), NOT_NUMBERS | st.booleans()),
    **dict.fromkeys(("do_sample", "output_scores", "return_dict_in_generate"), NOT_BOOLS),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), NOT_TOKENS),
    "pad_token_id": NOT_TOKENS | st.lists(st.integers(0, 5), min_size=2, max_size=3),
    "suppress_tokens": NOT_TOKENS | st.integers(),
    "stop_strings": st.integers() | FRACTIONS | st.lists(st.integers(), min_size=1),
    "exponential_decay_length_penalty": st.text() | st.tuples(st.integers()) | st.tuples(st.integers(), st.text()),
    "watermarking_config": st.integers() | st.text(),
    "generation_config": st.text() | st.dictionaries(st.text(), st.integers()) | st.just(GenerationConfig),
}


@any_example
@given(st.data())
def test_settings_of_generate_of_a_wrong_kind_or_range_raise(bench: Bench, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WRONG_VALUES)))
    call = {**data.draw(st.sampled_from([SHARED, HOGWILD])), "do_sample": True, name: data.draw(WRONG_VALUES[name])}
    says = name.removeprefix("repetition_")
    bench.assert_raises(lambda: bench.model.generate(**call), says)


UNSUPPORTED: dict[str, Any] = {
    **{"assistant_model": "another", "negative_prompt_ids": ONE, "negative_prompt_attention_mask": ONES},
    **{"synced_gpus": True, "custom_generate": "someone/something", "labels": ONE, "logits_to_keep": 3},
    **{"encoder_outputs": (ONE,), "pixel_values": torch.zeros(1, 3, 4, 4), "adapter_names": ["a"]},
    **{"token_type_ids": ONES, "forced_bos_token_id": 10**6, "forced_eos_token_id": 10**6, "bad_words_ids": "x"},
    **{"output_attentions": True, "output_hidden_states": True, "past_key_values": ((torch.zeros(1),) * 2,)},
    **{"num_wokers": 2, "max_token": 3, "magic": None},
}
"""Arguments that no mode, or neither of the two, supports."""


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_arguments_that_no_mode_supports_raise(name: str, bench: Bench) -> None:
    for call in (SHARED, HOGWILD):
        changes = {"input_ids": ONE[:, :1], "return_dict_in_generate": True, name: UNSUPPORTED[name]}
        bench.assert_raises(lambda call=call, changes=changes: bench.model.generate(**{**call, **changes}), name)


def test_values_that_are_valid_only_together_with_others_raise(bench: Bench) -> None:
    for changes, says in (
        ({"inputs": ONE}, "input_ids"),
        ({"input_ids": None, "attention_mask": ONES}, "attention_mask"),
        ({"input_ids": BATCH, "attention_mask": MASK * torch.tensor([[1], [0]])}, "row 1"),
        ({"inputs_embeds": torch.zeros(1, 7, 64)}, "inputs_embeds"),
        ({"max_new_tokens": None, "max_length": 3}, "max_length"),
        ({"num_return_sequences": 2}, "num_return_sequences"),  # greedy
        ({"stop_strings": ["x"], "tokenizer": None}, "tokenizer"),
        ({"num_beams": 3, "low_memory": True}, "low_memory"),
    ):
        bench.assert_raises(lambda changes=changes: bench.model.generate(**{**SHARED, **changes}), says)


HOLE = torch.tensor([[1, 1, 0, 1, 0, 0, 1]])
UNUSUAL: dict[str, dict[str, Any]] = {
    "int32": {"input_ids": ONE.int()},
    "column by column": {"input_ids": BATCH.T.contiguous().T, "attention_mask": MASK},
    "one token": {"input_ids": ONE[:, :1]},
    "holes in the mask": {"input_ids": BATCH, "attention_mask": torch.cat((HOLE, MASK[1:]))},
    "only the last token is seen": {"attention_mask": torch.tensor([[0] * 6 + [1]])},
    "a mask of floats": {"input_ids": BATCH, "attention_mask": MASK.float()},
    "position_ids": {"input_ids": ONE.expand(2, -1), "position_ids": torch.arange(7)[None]},
    "an empty cache": {"past_key_values": DynamicCache()},
    "a NumPy integer": {"max_new_tokens": np.int64(3)},
    "no pad and no eos": {"pad_token_id": None, "eos_token_id": None},
    "no time": {"max_time": -1.0},
    "a tuple of processors": {"logits_processor": (lambda ids, scores: scores,)},
    "a criterion that returns one bool": {"stopping_criteria": [lambda ids, scores, **kwargs: False]},
}


@pytest.mark.parametrize("arguments", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_arguments_give_the_tokens_of_generate(arguments: dict[str, Any], bench: Bench) -> None:
    expected = bench.plain.generate(**copy.deepcopy({**PLAIN, **arguments}))
    assert torch.equal(bench.model.generate(**{**SHARED, **arguments}), expected)


# Modes and their settings


def config(**attributes: Any) -> GenerationConfig:
    """Return a generation config with further attributes."""
    made = GenerationConfig(max_new_tokens=4, do_sample=False)
    vars(made).update(attributes)
    return made


NOT_MODES: Sequence[Any] = ["magic", "shared-prefix", "SHARED_PREFIX", "", 1, False, ["hogwild"], {}, b"hogwild"]


def test_unknown_modes_raise(bench: Bench) -> None:
    for mode in (*NOT_MODES, SharedPrefixConfig, SharedPrefixConfig()):
        bench.assert_raises(lambda mode=mode: bench.model.generate(**{**SHARED, "generation_mode": mode}), "mode")
    for mode in ("magic", 7):
        stored = config(generation_mode=mode)
        bench.assert_raises(lambda stored=stored: bench.model.generate(ONE, generation_config=stored), "mode")


@pytest.mark.parametrize(
    ("call", "arguments", "says"),
    [
        *((HOGWILD, {"parallel_config": value}, "config") for value in ("fast", HogwildConfig)),
        (HOGWILD, {"parallel_config": SharedPrefixConfig()}, "HogwildConfig"),
        (PLAIN, {"parallel_config": {"num_workers": 2}}, "generation_mode"),
        (PLAIN, {"generation_mode": None, "parallel_config": HogwildConfig()}, "mode"),
        (PLAIN, {"num_workers": 2}, "num_workers"),
        (SHARED, {"num_workers": 2}, "num_workers"),
        (HOGWILD, {"parallel_config": {"num_worker": 3}}, "num_workers"),
        (PLAIN, {"generation_config": config(generation_mode="hogwild", num_workers=0)}, "num_workers"),
        *(
            (PLAIN, {"generation_config": config(generation_mode="shared_prefix", parallel_config=value)}, says)
            for value, says in (("fast", "parallel_config"), ({"speed": 9}, "speed"), ({"replay": 2}, "replay"))
        ),
    ],
)
def test_settings_that_are_not_those_of_the_mode_raise(
    call: dict[str, Any], arguments: dict[str, Any], says: str, bench: Bench
) -> None:
    bench.assert_raises(lambda: bench.model.generate(**{**call, **arguments}), says)


NOT_TEXTS = st.integers() | FRACTIONS | st.lists(st.text(), max_size=2) | st.just("a\ud800b")
NOT_LISTS_OF_TEXT = st.integers() | st.text(min_size=1) | st.lists(st.integers(), min_size=1) | st.just(["\ud800"])
WRONG_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: NOT_INTS | st.integers(max_value=-2),
    bool: NOT_BOOLS | st.integers(0, 1),
    str: NOT_TEXTS,
    Sequence: NOT_LISTS_OF_TEXT,
}
"""Values that no setting of a type accepts."""


def wrong_values(mode: str) -> dict[str, st.SearchStrategy[Any]]:
    """Return values that each setting of a mode must reject, by its type."""
    found = {}
    hints = get_type_hints(MODES[mode])
    for name in MODES[mode].fields():
        parts = get_args(hints[name]) if get_origin(hints[name]) in (Union, types.UnionType) else (hints[name],)
        kinds = [get_origin(part) or part for part in parts if part is not type(None)]
        if len(kinds) == 1 and kinds[0] in WRONG_BY_TYPE:
            found[name] = WRONG_BY_TYPE[kinds[0]]
    return found


@pytest.mark.parametrize("mode", BUILT_IN)
@any_example
@given(st.data())
def test_settings_of_a_wrong_type_raise_and_are_named(mode: str, data: st.DataObject) -> None:
    strategies = wrong_values(mode)
    name = data.draw(st.sampled_from(sorted(strategies)))
    with pytest.raises(ValueError, match=name):
        MODES[mode](**{name: data.draw(strategies[name])})


# Caches


def filled(model: Any) -> SharedPrefixCache:
    cache = SharedPrefixCache()
    model.generate(**SHARED, past_key_values=cache)
    return cache


def enabled_copy(name: str = "llama", seed: int = 0) -> Any:
    return hf_parallel.enable(copy.deepcopy(build(name, seed=seed)))


def test_caches_of_another_kind_or_model_raise(bench: Bench) -> None:
    model = bench.model
    dynamic = bench.plain.generate(**PLAIN, return_dict_in_generate=True).past_key_values
    for call, cache, says in (
        (SHARED, dynamic, "DynamicCache"),
        (SHARED, StaticCache(config=model.config, max_cache_len=32), "StaticCache"),
        (SHARED, "cache", "past_key_values"),
        (SHARED, LogitsCache(), "pass a LogitsCache as logits_cache="),
        (SHARED | {"generation_mode": "resample"}, LogitsCache(), "pass a LogitsCache as logits_cache="),
        (PLAIN, LogitsCache(), "pass a LogitsCache as logits_cache="),
        (SHARED, SharedPrefixCache, "SharedPrefixCache itself"),
        (SHARED, BlockCache(), "SharedPrefixCache"),
        (SHARED, filled(enabled_copy(seed=1)), "another model"),
        (SHARED, filled(enabled_copy("gemma")), "another model"),
        (HOGWILD, filled(model), "past_key_values"),
    ):
        for name in ("past_key_values", CACHE):
            bench.assert_raises(lambda call={**call, name: cache}: model.generate(**call), says)
    for value in (0, -1, 2.5, "1 GB", True):
        bench.assert_raises(lambda value=value: SharedPrefixCache(max_bytes=value), "max_bytes must be")
    bench.assert_raises(lambda: pickle.dumps(LogitsCache()), "save(path) writes it")


@pytest.mark.skipif(CACHE == "past_key_values", reason="Transformers has one name for a cache")
def test_a_cache_has_either_name_without_a_warning(bench: Bench) -> None:
    cache = SharedPrefixCache()
    for name, computed in (("past_key_values", ONE.shape[1]), (CACHE, 1)):
        both: dict[str, Any] = {"past_key_values": None, CACHE: None, name: cache}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = bench.model.generate(**SHARED, **both, return_dict_in_generate=True)
        assert out.past_key_values is cache
        assert out.stats.prefilled_tokens == computed
    twice: dict[str, Any] = {"past_key_values": cache, CACHE: SharedPrefixCache()}
    bench.assert_raises(lambda: bench.model.generate(**SHARED, **twice), "names of the same argument")


def test_caches_that_were_used_before_work(bench: Bench) -> None:
    expected = bench.plain.generate(**PLAIN)
    reset = filled(enabled_copy(seed=1))
    reset.reset()
    by_hogwild = bench.model.generate(**HOGWILD, return_dict_in_generate=True).past_key_values
    for cache in (filled(bench.model), reset, by_hogwild):
        assert torch.equal(bench.model.generate(**SHARED, past_key_values=cache), expected)


# Callbacks


class Streamer:
    """Raises in the `count`-th call of a method, counted from 0."""

    def __init__(self, method: str = "", count: int = 0) -> None:
        self.put = self.write_row = self.end = lambda *args: None
        if method:
            vars(self)[method] = failing_call(count + 1, lambda *args: None)


def failing_call(count: int, result: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises in its `count`-th call and returns `result(*arguments)` in earlier ones."""
    calls = iter(range(1, 10**6))

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            raise OwnError(f"call {count}")
        return result(*args, **kwargs)

    return function


def scores(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values


def not_done(ids: torch.Tensor, values: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


FAILING: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"put {n}": lambda n=n: {"streamer": Streamer("put", n)} for n in (0, 1, 3)},
    "end": lambda: {"streamer": Streamer("end")},
    **{f"processor {n}": lambda n=n: {"logits_processor": [failing_call(n, scores)]} for n in (1, 3)},
    "criterion": lambda: {"stopping_criteria": [failing_call(2, not_done)]},
    "allowed tokens": lambda: {"prefix_allowed_tokens_fn": failing_call(1, not_done)},
}


@pytest.mark.parametrize("kind", FAILING)
def test_errors_of_callbacks_reach_the_caller(kind: str, bench: Bench) -> None:
    for call in (SHARED, HOGWILD) if kind != "allowed tokens" else (SHARED,):
        with pytest.raises(OwnError):
            bench.model.generate(**call, **FAILING[kind]())
        bench.assert_unharmed()


BAD_CALLBACKS: dict[str, Sequence[Any]] = {
    "streamer": ("stdout", Streamer, type("Half", (), {"put": print})()),
    "logits_processor": (
        *(scores, [1, 2], [lambda ids, values: values[0]], [lambda ids, values: values.argmax(-1)]),
        [lambda ids, values: None],
    ),
    "stopping_criteria": (
        *(not_done, ["stop"], [lambda ids, values, **kwargs: None]),
        [lambda ids, values, **kwargs: torch.zeros(3, dtype=torch.bool)],
    ),
    "prefix_allowed_tokens_fn": ("any", lambda row, ids: []),
}


def test_malformed_callbacks_raise(bench: Bench) -> None:
    for name, values in BAD_CALLBACKS.items():
        for value in values:
            bench.assert_raises(lambda name=name, value=value: bench.model.generate(**SHARED, **{name: value}), name)
    one_row = {**SHARED, **GREEDY, "streamer": TextStreamer(TOKENIZER)}
    bench.assert_raises(lambda: bench.model.generate(**one_row), "ParallelStreamer for 2 rows")


def test_a_processor_may_call_the_model_but_not_a_mode_on_it(bench: Bench) -> None:
    def again(mode: str | None) -> Any:
        def process(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            bench.model.generate(**PLAIN, generation_mode=mode)
            bench.model(ids)
            return values

        return bench.model.generate(**SHARED, logits_processor=[process])

    assert torch.equal(again(None), bench.plain.generate(**PLAIN))
    with pytest.raises(RuntimeError, match="already"):
        again("shared_prefix")


class Tokens:
    """A tokenizer that encodes and decodes by two functions."""

    def __init__(self, encode: Callable[[str], Any], decode: Callable[..., Any] = lambda tokens, **_: "x") -> None:
        self.encode, self.decode = encode, decode

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return self.encode(text)


def test_malformed_tokenizers_raise(bench: Bench) -> None:
    for tokenizer in (
        *(None, "gpt2", object(), type(TOKENIZER), lambda text, **kwargs: {"input_ids": [5]}),
        *(Tokens(encode) for encode in (lambda text: [5], lambda text: {"input_ids": text})),
        *(Tokens(lambda text, ids=ids: {"input_ids": ids}) for ids in ([[5, 6]], [], [5, VOCAB_SIZE])),
        Tokens(lambda text: {"input_ids": [5] * ("Alice" not in text)}),
        Tokens(lambda text: {"input_ids": [5]}, lambda tokens, **kwargs: tokens),
    ):
        call = {**HOGWILD, "tokenizer": tokenizer}
        with pytest.raises(ValueError, match="token|vocabulary"):
            bench.model.generate(**call)
        bench.assert_unharmed()


# Models


def meta_model() -> Any:
    with torch.device("meta"):
        return type(build("llama"))(build("llama").config)


def int8_model() -> Any:
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(build("llama")), {nn.Linear}, dtype=torch.qint8)


def test_objects_that_are_no_models_raise(bench: Bench) -> None:
    for thing in (None, "llama", nn.Linear(2, 2), type(build("llama")), build("llama").config, TOKENIZER):
        bench.assert_raises(lambda thing=thing: hf_parallel.enable(thing), "PreTrainedModel")
        bench.assert_raises(lambda thing=thing: hf_parallel.disable(thing), "PreTrainedModel")
    bench.assert_raises(lambda: hf_parallel.enable(meta_model()), "meta")


def test_unsupported_models_raise_the_reason(bench: Bench) -> None:
    bench.assert_raises(lambda: hf_parallel.enable(LlamaModel(build("llama").config)), "head")
    bench.assert_raises(lambda: hf_parallel.enable(int8_model()), "quantized layers (Linear)")
    for name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=type(build(name)).__name__):
            hf_parallel.enable(build(name))
    for name, says in (("gpt2", "hogwild"), ("llama-dynamic", "dynamic")):
        with pytest.raises(UnsupportedModelError, match=says):
            enabled_copy(name).generate(**HOGWILD)


def test_offloaded_models_work(bench: Bench) -> None:
    expected = bench.plain.generate(**PLAIN)
    first = hf_parallel.enable(cpu_offload(copy.deepcopy(build("llama")), torch.device("cpu")))
    later = cpu_offload(enabled_copy(), torch.device("cpu"))
    for model in (first, later):
        assert torch.equal(model.generate(**SHARED), expected)
    bench.assert_raises(lambda: later.generate(**SHARED, logits_cache=LogitsCache()), "is offloaded")


def test_states_of_a_model_in_which_modes_work(bench: Bench) -> None:
    model, expected = bench.model, bench.plain.generate(**PLAIN)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(**SHARED), expected)
    with torch.inference_mode():
        assert torch.equal(model.generate(**SHARED), expected)
    model.train()
    assert torch.equal(model.generate(**SHARED), expected)
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(UnsupportedModelError, match="dropout"):
        model.generate(**SHARED)
    model.model.layers[1].self_attn.attention_dropout = 0.0
    model.eval()
    for _ in range(2):
        hf_parallel.disable(model)
    model.generation_config.generation_mode = "shared_prefix"
    assert torch.equal(model.generate(**PLAIN), expected)
    del model.generation_config.generation_mode
    for name, value in (("generation_mode", "shared_prefix"), ("num_workers", 2)):
        with pytest.raises(ValueError, match=name):
            model.generate(**PLAIN, **{name: value})
    hf_parallel.enable(hf_parallel.enable(model))


# Interrupts


@contextmanager
def failing(module: nn.Module, at: int, error: BaseException) -> Iterator[None]:
    """Raise in the `at`-th call of a module's forward, counted from 1, which must take place."""
    count = 0

    def raise_in_time(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise error

    handle = module.register_forward_pre_hook(raise_in_time)
    try:
        yield
    finally:
        handle.remove()
    assert count >= at, f"there were only {count} passes"

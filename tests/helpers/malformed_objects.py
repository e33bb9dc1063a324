"""Malformed calls, part 3: caches, failing callbacks, unsupported models, and states of the model."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload
from malformed_cases import BATCH, DEFAULTS, MASK, TOKENIZER, Case, Errors, Fresh, both, hogwild, shared
from tiny import REFUSED, build
from torch import nn
from transformers import DynamicCache, LlamaModel, StaticCache, TextStreamer

import hf_parallel
from hf_parallel import BlockCache, LogitsCache, SharedPrefixCache, UnsupportedModelError


class OwnError(RuntimeError):
    """An error of the caller's code, which must reach the caller unchanged."""


def _copy(name: str = "llama", seed: int = 0) -> Any:
    return hf_parallel.enable(copy.deepcopy(build(name, seed=seed)))


def _run(model: Any, mode: str = "shared_prefix", **given: Any) -> Any:
    return model.generate(**{**DEFAULTS[mode], **given})


def _filled(model: Any) -> SharedPrefixCache:
    cache = SharedPrefixCache()
    _run(model, past_key_values=cache)
    return cache


# Caches


def _with_cache(make: Callable[[Any], Any], mode: str = "shared_prefix") -> Callable[[Any], Any]:
    return lambda model: _run(model, mode, past_key_values=make(model))


def _plain_cache(model: Any) -> Any:
    return _run(model, "plain", return_dict_in_generate=True).past_key_values


def _hogwild_cache(model: Any) -> Any:
    return _run(model, "hogwild", return_dict_in_generate=True).past_key_values


def _returned_by_another(model: Any) -> Any:
    return _run(_copy(seed=1), return_dict_in_generate=True).past_key_values


def _reset_by_another(model: Any) -> Any:
    cache = _filled(_copy(seed=1))
    cache.reset()
    return cache


def _cast_after_filling(model: Any) -> Any:
    model = _copy()
    cache = _filled(model)
    return _run(model.to(torch.bfloat16), past_key_values=cache)


def _cache(name: str, error: Errors, says: str, call: Callable[[Any], Any]) -> Case:
    return Case(f"cache: {name}", call, error, says, DEFAULTS["plain"] if error is None else None)


CACHES = [
    _cache("an empty DynamicCache", None, "", _with_cache(lambda model: DynamicCache())),
    _cache("a filled DynamicCache", ValueError, "DynamicCache", _with_cache(_plain_cache)),
    _cache("a StaticCache", ValueError, "StaticCache",
           _with_cache(lambda model: StaticCache(config=model.config, max_cache_len=32))),
    shared("a tuple of keys and values", ValueError, "past_key_values", past_key_values=((torch.zeros(1),) * 2,)),
    shared("text as a cache", ValueError, "past_key_values", past_key_values="cache"),
    shared("a cache class", ValueError, "SharedPrefixCache itself", past_key_values=SharedPrefixCache),
    _cache("the base class of the caches", ValueError, "SharedPrefixCache", _with_cache(lambda model: BlockCache())),
    _cache("of a model of the same shape", ValueError, "another model", _with_cache(lambda _: _filled(_copy(seed=1)))),
    _cache("of a model of another shape", ValueError, "another model", _with_cache(lambda _: _filled(_copy("gemma")))),
    _cache("returned by another model", ValueError, "another model", _with_cache(_returned_by_another)),
    _cache("of the model before it became bfloat16", ValueError, "weights changed", _cast_after_filling),
    _cache("any cache for hogwild", ValueError, "past_key_values", _with_cache(_filled, "hogwild")),
    *[_cache(f"max_bytes={value!r}", ValueError, "max_bytes must be", lambda _, n=value: SharedPrefixCache(max_bytes=n))
      for value in (0, -1, 2.5, "1 GB", True)],
    _cache("a pickled LogitsCache", TypeError, "save(path) writes it", lambda _: pickle.dumps(LogitsCache())),
    _cache("of another model, reset", None, "", _with_cache(_reset_by_another)),
    _cache("used by hogwild", None, "", _with_cache(_hogwild_cache)),
    _cache("used before for the same", None, "", _with_cache(_filled)),
]  # fmt: skip


# Callbacks


class _Streamer:
    """Raises in the given calls of its methods."""

    def __init__(self, put: int | None = None, end: bool = False, row: bool = False) -> None:
        self.fail_at, self.fail_at_end, self.fail_at_row, self.count = put, end, row, -1

    def put(self, value: Any) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise OwnError(f"put {self.count}")

    def write_row(self, row: int, text: str, event: str) -> None:
        if self.fail_at_row:
            raise OwnError("row")

    def end(self) -> None:
        if self.fail_at_end:
            raise OwnError("end")


def _fail_at(count: int, result: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises in its `count`-th call and returns `result(*arguments)` in earlier ones."""
    calls = iter(range(1, 10**6))

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            raise OwnError(f"call {count}")
        return result(*args, **kwargs)

    return function


class _FailingTokenizer:
    """Raises in its `count`-th decoding."""

    def __init__(self, count: int) -> None:
        self.decode = _fail_at(count, TOKENIZER.decode)

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return TOKENIZER(text, **kwargs)


def _scores(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


def _first_row(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores[0]


def _choice(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(-1)


def _nothing(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> None:
    return None


def _three(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.bool)


def _false(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> bool:
    return False


def _not_done(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


def _again(mode: str | None) -> Callable[[Any], Any]:
    """Return a call with a processor that calls the generating model."""

    def call(model: Any) -> Any:
        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model.generate(**{**DEFAULTS["plain"], "generation_mode": mode})
            return scores

        return _run(model, logits_processor=[process])

    return call


def _forward_again(model: Any) -> Any:
    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + model(ids).logits[:, -1]

    return _run(model, logits_processor=[process])


CALLBACKS = [
    *both("text as a streamer", TypeError, "streamer", streamer="stdout"),
    shared("a streamer without end", TypeError, "end()", streamer=type("Half", (), {"put": print})()),
    shared("a streamer's class", TypeError, "streamer", streamer=_Streamer),
    shared("a streamer of one row for two", ValueError, "batch size 1",
           streamer=TextStreamer(TOKENIZER), input_ids=BATCH, attention_mask=MASK),
    *both("a streamer that fails at the prompt", OwnError, "put 0", streamer=Fresh(lambda: _Streamer(0))),
    *both("a streamer that fails at the first token", OwnError, "put 1", streamer=Fresh(lambda: _Streamer(1))),
    *both("a streamer that fails later", OwnError, "put 3", streamer=Fresh(lambda: _Streamer(3))),
    *both("a streamer that fails at its end", OwnError, "end", streamer=Fresh(lambda: _Streamer(end=True))),
    hogwild("a streamer that fails at a row's text", OwnError, "row", streamer=Fresh(lambda: _Streamer(row=True))),
    *both("a function for logits_processor", TypeError, "logits_processor", logits_processor=_scores),
    shared("numbers as logits processors", TypeError, "logits_processor", logits_processor=[1, 2]),
    shared("a tuple of logits processors", logits_processor=(_scores,)),
    *both("a processor that fails at once", OwnError, "call 1", logits_processor=Fresh(lambda: [_fail_at(1, _scores)])),
    *both("a processor that fails later", OwnError, "call 3", logits_processor=Fresh(lambda: [_fail_at(3, _scores)])),
    shared("a processor that returns one row", ValueError, "logits_processor", logits_processor=[_first_row]),
    shared("a processor that returns a token", ValueError, "logits_processor", logits_processor=[_choice]),
    *both("a processor that returns nothing", ValueError, "logits_processor", logits_processor=[_nothing]),
    Case("a processor that generates in parallel", _again("shared_prefix"), RuntimeError, "already"),
    Case("a processor that generates", _again(None), None, "", DEFAULTS["plain"]),
    Case("a processor that calls the model", _forward_again, None, "", DEFAULTS["plain"]),
    *both("a function for stopping_criteria", TypeError, "stopping_criteria", stopping_criteria=_not_done),
    shared("text among the criteria", TypeError, "stopping_criteria", stopping_criteria=["stop"]),
    *both("a criterion that returns nothing", ValueError, "stopping_criteria", stopping_criteria=[_nothing]),
    shared("a criterion that returns too many rows", ValueError, "stopping_criteria", stopping_criteria=[_three]),
    shared("a criterion that returns one bool", stopping_criteria=[_false]),
    *both("a criterion that fails", OwnError, "call 2", stopping_criteria=Fresh(lambda: [_fail_at(2, _not_done)])),
    shared("prefix_allowed_tokens_fn as text", TypeError, "prefix_allowed_tokens_fn", prefix_allowed_tokens_fn="any"),
    shared("prefix_allowed_tokens_fn that fails", OwnError, "call 1",
           prefix_allowed_tokens_fn=Fresh(lambda: _fail_at(1, _not_done))),
    shared("prefix_allowed_tokens_fn that allows nothing", ValueError, "prefix_allowed_tokens_fn",
           prefix_allowed_tokens_fn=lambda row, ids: []),
    hogwild("a tokenizer that fails at once", OwnError, "call 1", tokenizer=Fresh(lambda: _FailingTokenizer(1))),
    hogwild("a tokenizer that fails later", OwnError, "call 12", tokenizer=Fresh(lambda: _FailingTokenizer(12))),
]  # fmt: skip


# Models


class _Wrapper(nn.Module):
    """A wrapper like that of PEFT."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def generate(self, **kwargs: Any) -> Any:
        return self.base_model.generate(**kwargs)


def _enable(name: str, error: Errors, says: str, make: Callable[[], Any]) -> Case:
    return Case(f"enable: {name}", lambda _: hf_parallel.enable(make()), error, says)


def _meta_model() -> Any:
    with torch.device("meta"):
        return type(build("llama"))(build("llama").config)


def _disabled(model: Any, **given: Any) -> Any:
    hf_parallel.disable(model)
    try:
        return _run(model, "plain", **given)
    finally:
        hf_parallel.enable(model)


def _named_in_config_of_disabled(model: Any) -> Any:
    model.generation_config.generation_mode = "shared_prefix"
    try:
        return _disabled(model)
    finally:
        del model.generation_config.generation_mode


def _twice_disabled(model: Any) -> Any:
    for _ in range(2):
        hf_parallel.disable(model)
    return _run(hf_parallel.enable(hf_parallel.enable(model)))


def _training(model: Any, **given: Any) -> Any:
    model.train()
    try:
        return _run(model, **given)
    finally:
        model.eval()


def _dropout(model: Any) -> Any:
    attention = model.model.layers[1].self_attn
    attention.attention_dropout = 0.5
    try:
        return _training(model)
    finally:
        attention.attention_dropout = 0.0


def _inference_mode(model: Any) -> Any:
    with torch.inference_mode():
        return _run(model)


def _with_adapter_names(model: Any) -> Any:
    """PEFT passes an adapter per row to its layers by hooks."""
    hook = functools.partial(lambda module, args, kwargs, adapter_names: None, adapter_names=["one", "two"])
    handle = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        return _run(model)
    finally:
        handle.remove()


def _int8() -> Any:
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(build("llama")), {nn.Linear}, dtype=torch.qint8)


def _offloaded_then_enabled(model: Any) -> Any:
    return _run(hf_parallel.enable(cpu_offload(copy.deepcopy(build("llama")), torch.device("cpu"))))


def _enabled_then_offloaded(model: Any) -> Any:
    model = cpu_offload(_copy(), torch.device("cpu"))
    cache = SharedPrefixCache()
    _run(model, past_key_values=cache)
    return _run(model, past_key_values=cache)


def _logits_of_an_offloaded_model(model: Any) -> Any:
    return _run(cpu_offload(_copy(), torch.device("cpu")), logits_cache=LogitsCache())


def _works(name: str, call: Callable[[Any], Any]) -> Case:
    return Case(name, call, like=DEFAULTS["plain"])


MODELS = [
    _enable("None", TypeError, "PreTrainedModel", lambda: None),
    _enable("a name", TypeError, "PreTrainedModel", lambda: "llama"),
    _enable("a module", TypeError, "PreTrainedModel", lambda: nn.Linear(2, 2)),
    _enable("a model's class", TypeError, "PreTrainedModel", lambda: type(build("llama"))),
    _enable("a config", TypeError, "PreTrainedModel", lambda: build("llama").config),
    _enable("a tokenizer", TypeError, "PreTrainedModel", lambda: TOKENIZER),
    _enable("a wrapper such as PEFT's", TypeError, "PreTrainedModel", lambda: _Wrapper(build("llama"))),
    _enable("a model without a head", UnsupportedModelError, "head", lambda: LlamaModel(build("llama").config)),
    _enable("a model on the meta device", ValueError, "meta", _meta_model),
    _enable("a model of dynamically quantized int8", UnsupportedModelError, "quantized layers (Linear)", _int8),
    _works("an offloaded model", _offloaded_then_enabled),
    _works("a model that is offloaded later", _enabled_then_offloaded),
    Case("logits of an offloaded model", _logits_of_an_offloaded_model, ValueError, "is offloaded"),
    Case("an adapter per row by PEFT's hooks", _with_adapter_names, ValueError, "adapter_names=['one', 'two'] is not"),
    *[_enable(n, UnsupportedModelError, type(build(n)).__name__, lambda n=n: build(n)) for n in REFUSED],
    Case("disable: None", lambda _: hf_parallel.disable(None), TypeError, "PreTrainedModel"),
    Case("disable: a module", lambda _: hf_parallel.disable(nn.Linear(2, 2)), TypeError, "PreTrainedModel"),
    Case("disable: a model that is not enabled", lambda _: hf_parallel.disable(copy.deepcopy(build("llama")))),
    _works("enable and disable twice", _twice_disabled),
    _works("a disabled model", _disabled),
    _works("a disabled model whose config names a mode", _named_in_config_of_disabled),
    Case("a mode on a disabled model", lambda model: _disabled(model, generation_mode="shared_prefix"),
         ValueError, "generation_mode"),
    Case("a setting on a disabled model", lambda model: _disabled(model, num_workers=2), ValueError, "num_workers"),
    _works("a wrapper over an enabled model", lambda model: _Wrapper(model).generate(**DEFAULTS["shared_prefix"])),
    _works("a copy of an enabled model", lambda model: _run(copy.deepcopy(model))),
    _works("a pickled enabled model", lambda model: _run(pickle.loads(pickle.dumps(model)))),
    _works("a model in training mode", _training),
    _works("under inference mode", _inference_mode),
    Case("dropout in attention", _dropout, UnsupportedModelError, "dropout"),
    Case("hogwild over learned positions", lambda _: _run(_copy("gpt2"), "hogwild"), UnsupportedModelError, "hogwild"),
    Case("hogwild over RoPE that changes with length", lambda _: _run(_copy("llama-dynamic"), "hogwild"),
         UnsupportedModelError, "dynamic"),
]  # fmt: skip

CASES = [*CACHES, *CALLBACKS, *MODELS]

"""Decoder layers compiled by `torch.compile` for decode steps: one graph for all layers of a model.

A decode step of a few rows runs thousands of kernels that take microseconds each: norms, rotary embeddings, copies.
Compiled, they are fused into a few per layer. Attention, with the storage of new keys and values, is one operation of
the graph (`attention.py`), and the number of rows and the layer's index are dynamic, so that neither compiles again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from hf_parallel.cache.placement import execution_device, weight_devices
from hf_parallel.models.decode.fused import MERGE, FusedLinear, fuse

COMPILER = "inductor"
COMPILE_SECONDS = 10.0
SECONDS_SAVED = 60e-6
"""Estimates that `compile=None` uses: time to compile a model's layers, and time that a decode step saves per layer.

Measured with Qwen3-8B on an H200: 5 to 14 s, and 2.2 ms of a step of 36 layers.
"""
FUSING_DEVICES = ("cuda",)
"""Device types on which projections are fused. A CPU has a kernel of its own for them (`models/cpu/linear.py`)."""
MAX_GRAPHS = 64
"""Graphs per model: one for each kind of layer (sliding window, no rotary embedding) and class of cache, another for
passes of one row, which Dynamo compiles separately."""

_LAYER_INDEX = r".*layer_idx.*"
"""Source of the only number of a module that is dynamic: others, such as sizes of heads, are constants of a graph."""

_COMPILER_ERRORS = TorchDynamoException, FailOnRecompileLimitHit

_in_use: ContextVar[bool] = ContextVar("hf_parallel_compiled_layers", default=False)
_logger = logging.getLogger(__name__)


class InstalledCall(partial[object]):
    """Compiled call of a layer, installed only while decode steps run; other threads may see it then."""


class CompiledLayers:
    """The compiled decoder layers of one model. They are compiled at their first use."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = decoder_layers(model)
        self.num_steps = 0  # decode steps that could have used them
        self.failed = not self.layers
        self._is_compiled = False
        self._fused: list[FusedLinear] = []
        self._num_fused: int | None = None  # None: not tried yet

    def pays_off(self, steps: float) -> bool:
        """Return whether `steps` more decode steps are likely to save more time than compilation takes."""
        saved = (self.num_steps + steps) * len(self.layers) * SECONDS_SAVED
        return not self.failed and (self._is_compiled or saved > COMPILE_SECONDS)

    def forward(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `function`, a forward pass of the model, with compiled layers in this thread.

        If compilation fails, log the reason, and run `function` uncompiled, now and in later calls.
        """
        if self.failed:
            return function()
        try:
            with self._installed():
                result = function()
            self._is_compiled = True
            return result
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self._is_compiled and not isinstance(error, _COMPILER_ERRORS):
                raise
            result = function()  # if the compiler is not at fault, raises again
            self.failed = True
            reason = str(error).strip().partition("\n")[0]
            _logger.warning("decode steps run without compiled layers: %s: %s", type(error).__name__, reason)
            _logger.debug("traceback of the failed compilation", exc_info=error)
            return result

    def fuse(self, model: nn.Module) -> None:
        """Fuse projections on devices where that saves time; again after weights were replaced."""
        intact = self._intact()
        if execution_device(model).type not in FUSING_DEVICES or len(intact) == self._num_fused:
            return
        with torch.inference_mode(False):  # weights may be trained later
            fused, reason = fuse(model, self.layers)
        if fused:
            _num_moves[model] = num_moves(model) + 1
        if reason and self._num_fused is None:
            _logger.info("projections that are not fused: %s", reason)
        self._fused = [*intact, *fused]
        self._num_fused = len(self._fused)

    def separate(self, model: nn.Module) -> None:
        """Undo the fusion of projections."""
        with torch.inference_mode(False):
            for group in self._intact():
                group.separate()
                _num_moves[model] = num_moves(model) + 1
        self._fused = []

    def _intact(self) -> list[FusedLinear]:
        return [group for group in self._fused if group.is_intact()]

    @cached_property
    def _compiled(self) -> Callable[..., object]:
        # A function of its own, as Dynamo keeps graphs, and counts them, by the function's code.
        own = FunctionType(_call_layer.__code__.replace(), _call_layer.__globals__)
        options: Any = {"post_grad_custom_pre_pass": MERGE} if COMPILER == "inductor" else None
        return torch.compile(own, fullgraph=True, backend=COMPILER, options=options)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Let calls of the layers in this thread run compiled; other threads run them uncompiled."""
        token = _in_use.set(True)
        try:
            for layer in self.layers:
                vars(layer)["_compiled_call_impl"] = InstalledCall(self._call, layer)
            with (
                ExitStack() as stack,
                dynamo_config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=MAX_GRAPHS),
                torch.compiler.config.patch(dynamic_sources=_LAYER_INDEX),  # type: ignore[attr-defined]
            ):
                for group in self._intact():
                    stack.enter_context(group.installed())
                yield
        finally:
            for layer in self.layers:
                vars(layer).pop("_compiled_call_impl", None)
            _in_use.reset(token)

    def _call(self, layer: nn.Module, *args: object, **kwargs: object) -> object:
        if not _in_use.get():
            return _call_layer(layer, args, kwargs)
        for tensor in _tensors((*args, *kwargs.values())):
            if tensor.ndim > 1 and tensor.shape[0] == 1:  # packed
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return self._compiled(layer, args, kwargs)


_of_model: WeakKeyDictionary[nn.Module, CompiledLayers] = WeakKeyDictionary()
_num_moves: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def compiled_layers(model: PreTrainedModel, compile: bool | None, steps: float) -> CompiledLayers | None:  # noqa: A002 (the name of the setting)
    """Return the compiled layers for a call of up to `steps` decode steps, or None if it runs uncompiled.

    `compile` is the setting: None compiles on a GPU if the steps are likely to pay for it. Models whose weights are
    offloaded, or on several devices, are never compiled.
    """
    if compile is False or len(devices := weight_devices(model)) > 1 or torch.device("meta") in devices:
        return None
    layers = _of_model.get(model)
    if layers is None:
        layers = _of_model[model] = CompiledLayers(model)
        if layers.failed and compile:
            _logger.warning("decode steps run without compiled layers: %s has no list of them", type(model).__name__)
    if compile is None and (execution_device(model).type != "cuda" or not layers.pays_off(steps)):
        layers.num_steps += 0 if math.isinf(steps) else int(steps)
        return None
    if layers.failed:
        return None
    layers.fuse(model)
    return layers


def num_moves(model: nn.Module) -> int:
    """Return how often weights of a model have moved in memory because projections were fused or separated."""
    return _num_moves.get(model, 0)


def forget(model: nn.Module) -> None:
    """Undo the fusion of a model's projections, and forget its compiled layers."""
    if (layers := _of_model.pop(model, None)) is not None:
        layers.separate(model)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model: the list of as many modules as its config has layers; empty if none."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder: nn.Module = model.get_decoder() or model  # without layers of an image encoder
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return next((list(layers) for layers in lists if all(_has_attention(layer) for layer in layers)), [])


def _has_attention(layer: nn.Module) -> bool:
    return any(hasattr(module, "layer_idx") for module in layer.modules())


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _call_layer(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return layer._call_impl(*args, **kwargs)

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
from functools import cached_property
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from hf_parallel.cache.placement import execution_device, weight_devices
from hf_parallel.models.decode.fused import MERGE, FusedLinear, fuse
from hf_parallel.models.intercept.compiler import one_graph_for_all_layers
from hf_parallel.models.intercept.modules import InstalledCall, install_call, remove_call

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

_COMPILER_ERRORS = TorchDynamoException, FailOnRecompileLimitHit

_in_use: ContextVar[bool] = ContextVar("hf_parallel_compiled_layers", default=False)
_logger = logging.getLogger(__name__)


class _CompiledCall(InstalledCall):
    """Compiled call of a layer, installed only while decode steps run."""


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
        function = FunctionType(_call_layer.__code__.replace(), _call_layer.__globals__)
        options: Any = {"post_grad_custom_pre_pass": MERGE} if COMPILER == "inductor" else None
        return torch.compile(function, fullgraph=True, backend=COMPILER, options=options)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Let calls of the layers in this thread run compiled; other threads run them uncompiled."""
        token = _in_use.set(True)
        try:
            for layer in self.layers:
                install_call(layer, _CompiledCall(self._call, layer))
            with ExitStack() as stack, one_graph_for_all_layers(MAX_GRAPHS):
                for group in self._intact():
                    stack.enter_context(group.installed())
                yield
        finally:
            for layer in self.layers:
                remove_call(layer, _CompiledCall)
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
    if compile is False:
        return None
    devices = weight_devices(model)
    if len(devices) > 1 or torch.device("meta") in devices:
        return None
    layers = _of_model.get(model)
    if layers is None:
        layers = _of_model[model] = CompiledLayers(model)
        if layers.failed and compile:
            _logger.warning("decode steps run without compiled layers: %s has no list of them", type(model).__name__)
    if compile is None and (execution_device(model).type != "cuda" or not layers.pays_off(steps)):
        if not math.isinf(steps):
            layers.num_steps += int(steps)
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
    layers = _of_model.pop(model, None)
    if layers is not None:
        layers.separate(model)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model: the list of as many modules as its config has layers; empty if none."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder: nn.Module = model.get_decoder() or model  # without layers of an image encoder
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and all(map(_has_attention, module)):
            return list(module)
    return []


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

"""Recording: what one decode step of a model computes, as operations on addresses.

A step is watched where it is computed: the calls of the C kernels, the operations of PyTorch between them, and what
layers store and read. Modules and their names play no part. What is not an operation of a program (`OPERATIONS`) is
recorded as unknown; a program cannot be made of a step whose logits depend on it.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_parallel.cache import BlockCache
from hf_parallel.kernels import AttentionParams, AttentionPlan, native
from hf_parallel.kernels.program import ROLES
from hf_parallel.models.decode.cuda_graph import SYNCHRONIZING

UNKNOWN = "unknown"
_DIMS = 4  # of copies, sums and products
aten = torch.ops.aten
_SUMS = {aten.add.Tensor: "add", aten.add_.Tensor: "add", aten.sub.Tensor: "subtract", aten.sub_.Tensor: "subtract"}
_PRODUCTS = {aten.mul.Tensor: "multiply", aten.mul_.Tensor: "multiply", aten.div.Tensor: "divide"}
_COMBINED = _SUMS | _PRODUCTS
_ALLOCATIONS = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


class Place(NamedTuple):
    """A named tensor and an offset from its start, in bytes."""

    of: Any
    offset: int


@dataclass(eq=False)
class Call:
    """An operation with its operands: integers, and addresses, which `StepRecording.located` gives names."""

    operation: str
    operands: list[Any]
    what: str = ""  # what an unknown operation is

    def addresses(self, role: str) -> list[Any]:
        """Return the operands that are read (`r`) or written (`w`)."""
        roles = ROLES.get(self.operation)
        if roles is None:  # unknown: what it writes, then what it reads
            return self.operands[0] if role == "w" else self.operands[1]
        return [operand for operand, letter in zip(self.operands, roles, strict=True) if letter == role]


class LayerCall(NamedTuple):
    """How a layer reads its keys: arguments of the kernel that are the same in each step."""

    dims: tuple[int, int, int, int]  # heads, KV heads, sizes of stored keys and values
    params: AttentionParams


@dataclass(eq=False)
class RotaryCall:
    """A call of the module that computes cosines and sines, whose results are inputs of the program."""

    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[torch.Tensor] = field(default_factory=list)


class StepRecording(TorchDispatchMode):
    """Records the passes that a model computes over `cache` within `recorded`."""

    def __init__(self, model: nn.Module, cache: BlockCache) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.rotary: list[RotaryCall] = []
        self.templates: list[Any] = []  # arguments of the attention kernel, as C structs, by call
        self.layer_calls: list[LayerCall] = []  # by call of the attention kernel
        self.reads_numbers = ""  # operation whose result Python reads, which it may depend on
        self._cache = cache
        self._kept = [*model.parameters(), *model.buffers()]  # tensors whose addresses have a meaning
        self._paused = 0
        self._thread = threading.get_ident()  # others may run the model meanwhile
        self._running: LayerCall | None = None

    # Recording operations

    def kernel(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Record a call of a kernel."""
        if name == "attend":
            self._attend(*arguments)
        elif name in ROLES:
            operands = []
            for argument, role in zip(arguments, ROLES[name], strict=False):  # the last one is the number of threads
                operands.append(_float_bits(argument) if role == "f" else argument or 0)
            self.calls.append(Call(name, operands))
        else:
            addresses = [argument for argument in arguments if isinstance(argument, int)]
            self.calls.append(Call(UNKNOWN, [addresses, addresses], name))

    def _attend(self, layer: Any, plan: Any, threads: int) -> None:
        del plan, threads
        template = layer._obj
        assert self._running is not None, "attention is computed by a backend"
        number = len(self.templates)
        self.templates.append(template)
        self.layer_calls.append(self._running)
        results = template.out, template.best, template.total
        storage = template.storage
        query = template.query, template.query_token, template.query_head
        operands = [("template", number), *query, *results, storage.keys, storage.values, template.tokens]
        self.calls.append(Call("attend", [*operands, ("plan", number)]))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        outputs = _tensors(result)
        self._kept += outputs
        if func.overloadpacket.__name__ in SYNCHRONIZING:
            self.reads_numbers = str(func)
        if func in _ALLOCATIONS or _is_view(func):
            return result
        with self.paused():
            call = self._known(func, args, kwargs or {}, result)
        if call is None:
            inputs = _tensors((args, kwargs))
            self._kept += inputs
            addresses = [[x.data_ptr() for x in tensors] for tensors in (outputs, inputs)]
            self.calls.append(Call(UNKNOWN, addresses, str(func)))
        else:
            self.calls += call
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operations of PyTorch."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _known(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Call] | None:
        """Return an operation of PyTorch as calls of a program; None: it is not known."""
        if func in _COMBINED and not kwargs:
            return self._combined(_COMBINED[func], args[0], args[1], result)
        if func is aten.neg.default:
            return self._combined("multiply", args[0], -1.0, result)
        if func is aten.clone.default or func is aten._to_copy.default:
            return self._combined("copy", args[0], args[0], result)
        if func is aten.copy_.default:
            return self._combined("copy", args[1], args[1], args[0])
        if func is aten.cat.default:
            dim = args[1] if len(args) > 1 else 0
            return self._joined(args[0], result.split([part.shape[dim] for part in args[0]], dim))
        if func is aten.stack.default:
            return self._joined(args[0], result.unbind(args[1] if len(args) > 1 else 0))
        if func is aten.embedding.default:
            return self._rows(args[0], args[1], result)
        if func is aten.index_select.default and args[1] == 0:
            return self._rows(args[0], args[2], result)
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0] is not None:
            return self._rows(args[0], args[1][0], result)
        return None

    def _combined(self, operation: str, a: Any, b: Any, out: torch.Tensor) -> list[Call] | None:
        """Return `out = a + b`, or another operation on two tensors; `b` may be a number."""
        if isinstance(b, int | float):
            b = torch.tensor(float(b))
            self._kept.append(b)
        if not all(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in (a, b, out)):
            return None
        self._kept += (a, b)
        expanded = [x.expand(out.shape) for x in (a, b, out)]
        dims = _merged_dims(out.shape, [x.stride() for x in expanded])
        if dims is None:
            return None
        addresses = [x.data_ptr() for x in expanded]
        return [Call(operation, [*addresses, *(number for dim in zip(*dims, strict=True) for number in dim)])]

    def _joined(self, parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> list[Call] | None:
        """Return the copies of tensors to their places in another one."""
        calls: list[Call] = []
        for part, place in zip(parts, places, strict=True):
            copied = self._combined("copy", part, part, place)
            if copied is None:
                return None
            calls += copied
        return calls

    def _rows(self, table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> list[Call] | None:
        if table.dim() != 2 or not table.is_contiguous() or not out.is_contiguous():
            return None
        if indices.dtype != torch.int64 or not indices.is_contiguous():
            return None
        self._kept += (table, indices)
        row_bytes = table.shape[1] * table.element_size()
        sizes = indices.numel(), row_bytes, len(table)
        return [Call("take_rows", [table.data_ptr(), indices.data_ptr(), out.data_ptr(), *sizes])]

    # Recording passes

    @contextmanager
    def recorded(self, rotary_modules: Sequence[nn.Module]) -> Iterator[None]:
        """Record what a model computes in this context."""
        layers = self._cache.pool.arena.layers
        backends = {number: layer.backend for number, layer in layers.items()}
        hooks = []
        for module in rotary_modules:
            hooks.append(module.register_forward_pre_hook(self._begin_rotary, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._end_rotary))
        try:
            for number, layer in layers.items():
                layer.backend = _RecordedBackend(self, number, backends[number])
            with native.calls_reported(self.kernel), self:
                yield
        finally:
            for number, layer in layers.items():
                layer.backend = backends[number]
            for hook in hooks:
                hook.remove()

    def _begin_rotary(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        self._paused += 1
        self.rotary.append(RotaryCall(module, (args, kwargs)))

    def _end_rotary(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._paused -= 1
        results = _tensors(result)
        self._kept += results
        self.rotary[-1].results = results

    def appended(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Record that a layer stores new keys and values, `[kv_heads, T, head_dim]`."""
        self._kept += (keys, values)
        layer = self._cache.pool.arena.layers[layer_idx]
        for new, storage in ((keys, layer.keys), (values, layer.values)):
            sizes = [new.stride(0), new.stride(1), new.shape[0], new.shape[2]]
            if new.stride(2) == 1 and new.dtype == torch.float32:
                self.calls.append(Call("append", [new.data_ptr(), *sizes, storage.data_ptr(), ("writes",)]))
            else:
                self.calls.append(Call(UNKNOWN, [[storage.data_ptr()], [new.data_ptr()]], "append"))

    @contextmanager
    def attending(self, layer_call: LayerCall) -> Iterator[None]:
        """Attention of a layer is computed in this context."""
        self._running = layer_call
        try:
            yield
        finally:
            self._running = None

    # Reading the recording

    def located(self, names: Sequence[tuple[Any, torch.Tensor]]) -> tuple[list[Call], dict[Any, torch.UntypedStorage]]:
        """Return the calls with places instead of addresses, and the storages of what has no other name.

        `names` are names of tensors that the step does not make. Others are called `("buffer", number)`, in the order
        in which the calls name them.
        """
        storages: dict[int, tuple[torch.UntypedStorage, Any]] = {}
        for name, tensor in [*((None, tensor) for tensor in self._kept), *names]:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = (storage, name)
        starts = sorted(storages)
        buffers: dict[Any, torch.UntypedStorage] = {}
        numbers: dict[int, Any] = {}

        def place(address: Any) -> Any:
            if not isinstance(address, int):
                return Place(address, 0)
            if address == 0:
                return None
            start = starts[max(bisect_right(starts, address) - 1, 0)]
            storage, name = storages[start]
            if not start <= address < start + storage.nbytes():
                raise LookupError(f"no tensor of the step is at {address:#x}")
            if name is None:
                name = numbers.setdefault(start, ("buffer", len(numbers)))
                buffers[name] = storage
            return Place(name, address - start)

        calls = []
        for call in self.calls:
            roles = ROLES.get(call.operation)
            if roles is None:
                operands: list[Any] = [[_placed(place, address) for address in group] for group in call.operands]
            else:
                operands = []
                for operand, role in zip(call.operands, roles, strict=True):
                    operands.append(place(operand) if role in "rw" else operand)
            calls.append(Call(call.operation, operands, call.what))
        return calls, buffers


class _RecordedBackend:
    """Backend of a layer's storage in the recorded pass."""

    def __init__(self, recording: StepRecording, layer_idx: int, backend: Any) -> None:
        self._recording = recording
        self._layer_idx = layer_idx
        self._backend = backend

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        params: AttentionParams,
        quantized: Any = None,
    ) -> torch.Tensor:
        dims = query.shape[1], params.num_kv_heads, keys.shape[1], values.shape[1]
        with self._recording.attending(LayerCall(dims, params)):
            return self._backend.attend(query, keys, values, plan, params, quantized)  # type: ignore[no-any-return]

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        self._recording.appended(self._layer_idx, new_keys, new_values)
        with self._recording.paused():
            self._backend.append(keys, values, new_keys, new_values, plan)


def _float_bits(number: float) -> int:
    """Return the bits of a float64 as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _placed(place: Callable[[Any], Any], address: Any) -> Any:
    """Return the place of an address; None if it is in no tensor, as a size among the arguments of a kernel."""
    try:
        return place(address)
    except LookupError:
        return None


def _merged_dims(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Return `_DIMS` dimensions with the same elements in the same order: (size, stride of each tensor) of each.

    Neighbors that are one run in all tensors are merged. None: there are more.
    """
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(before == step * size for before, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    if len(merged) > _DIMS:
        return None
    nothing = (1, *[0] * len(strides))
    return [nothing] * (_DIMS - len(merged)) + merged


def _is_view(func: Any) -> bool:
    """Whether an operation returns tensors of its inputs' storage, and writes nothing."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or the result of a function."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

"""A stand-in for an accelerator on a machine without one: memory of the CPU that may not be mixed with the rest.

Tensors on `DEVICE` say so, and the errors of a real device are raised: for an operation on tensors of both devices, and
for a conversion to NumPy. A tensor that is created without a device is on the host, whatever it is used for. What
kernels of an accelerator need is not covered, nor are other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakIdKeyDictionary

DEVICE = torch.device("privateuseone", 0)
"""A device for which PyTorch has no code of its own."""
CPU = torch.device("cpu")
BETWEEN_DEVICES = ("copy_", "to", "cpu", "type", "tolist", "item", "__set__", "set_", "__deepcopy__")
BETWEEN_DEVICES += ("_has_compatible_shallow_copy_type",)
"""Operations that accept or move tensors of both devices."""
TO_NUMPY = ("numpy", "__array__", "__dlpack__")
INDEXING = ("__getitem__", "__setitem__", "index_put_")


class PretendedDevice(TorchFunctionMode):
    """Follows the device of each tensor within its context."""

    _here = WeakIdKeyDictionary()
    """Tensors on the device; shared, as caches of the package outlive a context."""

    def hold(self, model: nn.Module) -> Any:
        """Move a model to the device, in place."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._here[tensor] = True
        return model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note the device of its results."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and func.__self__ is torch.Tensor.device:
            return DEVICE if args[0] in self._here else func(*args)
        if name == "__get__" and func.__self__ is torch.Tensor.is_cpu:
            return args[0] not in self._here
        if func is torch.device:
            return func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        place = self._place(func, name, given, args, kwargs)
        args = tuple(CPU if _is_here(item) else item for item in args)
        out = func(*args, **{key: CPU if _is_here(item) else item for key, item in kwargs.items()})
        if name == "__iter__":
            return iter([self._put(item, place) for item in out])
        if place is not None and any(out is tensor and place != (tensor in self._here) for tensor in given):
            out = out.clone()  # PyTorch sees no other device and copies nothing
        if name == "__set__":
            self._put(args[0], args[1] in self._here if isinstance(args[1], torch.Tensor) else place)
        for tensor in _tensors(out):
            self._put(tensor, place if name not in ("copy_", "set_") else None)
        return out

    def _place(self, func: Any, name: str, given: list[torch.Tensor], args: Any, kwargs: Any) -> bool | None:
        """Return whether the results are on the device; None: where they are. Raise an error if it is not defined."""
        here = [tensor in self._here for tensor in given]
        if name in TO_NUMPY and any(here):
            raise TypeError("can't convert a tensor of the device to numpy. Use Tensor.cpu() first")
        if name == "cpu":
            return False
        asked = kwargs.get("device")
        if name == "to":
            others = [kwargs.get("other"), *args[1:]]
            asked = next((x for x in [asked, *others] if isinstance(x, (torch.device, str, torch.Tensor))), None)
        if isinstance(asked, torch.Tensor):
            return asked in self._here
        if asked is not None:
            return _is_here(asked)
        if name in BETWEEN_DEVICES or func in _device_constructors():
            return here[0] if here else False
        if name in INDEXING:
            if not here[0] and any(_indices_on_device(args[1], self._here)):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            return here[0]
        mixed = {place for tensor, place in zip(given, here, strict=True) if tensor.dim() or place}
        if len(mixed) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found two, in {name}")
        return any(here)

    def _put(self, item: Any, here: bool | None) -> Any:
        if isinstance(item, torch.Tensor) and here is not None:
            if here:
                self._here[item] = True
            else:
                self._here.pop(item, None)
        return item


def _is_here(item: Any) -> bool:
    """Return whether an argument names the device."""
    return isinstance(item, (torch.device, str)) and str(item).startswith(DEVICE.type)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (tuple, list, dict)):
        for part in item.values() if isinstance(item, dict) else item:
            yield from _tensors(part)


def _indices_on_device(index: Any, here: Any) -> Iterator[bool]:
    return (tensor in here for tensor in _tensors(index) if tensor.dim())


def raises(run: Callable[[], object]) -> bool:
    """Return whether a call raises the error of a device."""
    try:
        run()
    except (RuntimeError, TypeError) as error:
        return "device" in str(error)
    return False

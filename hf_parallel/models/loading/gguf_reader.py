"""A GGUF file whose structure is checked: its metadata and its tensors.

Needs the package gguf: imported where a file is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from hf_parallel.models.loading.gguf_rope import TENSORS, is_scaling

_MOST_ELEMENTS = 1 << 22  # of an array of metadata; vocabularies have fewer tokens and merges
_IGNORED = ("pooling_type", "tensor_data_layout", "vocab_size", "rope.scaling.finetuned")
"""Keys that change no logits of a causal language model. `vocab_size` is the number of rows of the embedding."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
}
"""Keys with the values with which they change nothing."""
_LIST = [gguf.GGUFValueType.ARRAY]
"""Types of a field whose last part is the list of all its values. Transformers takes such a part unchanged."""
_LOCK = threading.RLock()
"""Held while names of the package gguf are replaced."""


class _Reader(gguf.GGUFReader):
    """A reader that raises `ValueError` where a damaged file points beyond its end: the base class reads less.

    Its arrays are plain views of the mapped file: NumPy takes several times as long to slice an `np.memmap`.
    """

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        end = int(offset) + int(count) * kind.itemsize
        if end > len(self.data):
            raise ValueError(f"{count} values at byte {offset} are beyond its end")
        values = np.asarray(self.data)[int(offset) : end].view(kind)
        return values.view(kind.newbyteorder(override_order or self.byte_order))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Read an array as one part, a list. The base class makes several arrays for each element."""
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        if length > _MOST_ELEMENTS:
            raise ValueError(f"an array has {length} elements, more than {_MOST_ELEMENTS}")
        if length < 2:  # Transformers reads an array of one element as that element
            return super()._get_field_parts(orig_offs, raw_type)
        start = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            strings, end = self._get_strings(start, length)
            return end - orig_offs, [strings], [0], _LIST
        numbers = self._get(start, self.gguf_scalar_to_np[kind], length)
        return numbers.nbytes + 12, [numbers.tolist()], [0], _LIST

    def _get_strings(self, start: int, length: int) -> tuple[list[str], int]:
        """Return the strings of an array, and the offset of the first byte after them."""
        content = memoryview(self.data)  # type: ignore[arg-type] # on Python 3.10, arrays declare no buffer
        order: Any = "little" if self.endianess == gguf.GGUFEndian.LITTLE else "big"
        strings = []
        end = start
        for _ in range(length):
            begin = end + 8
            end = begin + int.from_bytes(content[end:begin], order)
            if end > len(content):
                raise ValueError(f"an array of {length} strings ends beyond its end")
            strings.append(str(content[begin:end], "utf-8"))
        return strings, end


@dataclass
class GGUF:
    """Metadata and tensors of a file."""

    file: Path
    architecture: str
    general: dict[str, Any]  # keys without an architecture
    metadata: dict[str, Any]  # keys of the architecture, without its name
    tensors: dict[str, gguf.ReaderTensor]
    reader: gguf.GGUFReader

    @property
    def rope_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The tensors by which frequencies are divided, by name."""
        return {
            name: gguf.dequantize(one.data, one.tensor_type) for name, one in self.tensors.items() if name in TENSORS
        }

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let Transformers read the file through `reader`, in this thread; its own reader takes seconds per use.

        Transformers imports `GGUFReader` and `get_tensor_name_map` from gguf in each call, so both are replaced in that
        package. The second one returns the same table for each module of a model, and would compute it each time.
        """

        def open_reader(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> gguf.GGUFReader:
            is_this_file = os.path.samefile(path, self.file)
            return self.reader if is_this_file else stock_reader(path, *arguments, **options)

        with _LOCK:
            stock_reader = gguf.GGUFReader
            stock_map = gguf.get_tensor_name_map
            gguf.GGUFReader = _in_this_thread(open_reader, stock_reader)  # type: ignore[misc] # a class
            gguf.get_tensor_name_map = _in_this_thread(cache(stock_map), stock_map)
            try:
                yield
            finally:
                gguf.GGUFReader = stock_reader  # type: ignore[misc]
                gguf.get_tensor_name_map = stock_map

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer of the metadata. Raises `ValueError` if it is missing or something else."""
        value = self.metadata.get(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.architecture}.{key} must be a positive integer, got {value!r}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, as in PyTorch. Raises `ValueError` if there is none of this name."""
        if name not in self.tensors:
            raise ValueError(f"it has no tensor {name}")
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def check_keys(self, known: Callable[[str], bool]) -> None:
        """Raise `ValueError` for a key of the architecture that may change results and is not `known`."""
        for key, value in self.metadata.items():
            if key in _IGNORED or is_scaling(key) or known(key):
                continue
            if key not in _NEUTRAL or value not in _NEUTRAL[key]:
                shown = f"{value!r}"[:80]
                raise ValueError(f"{self.architecture}.{key}={shown} is not supported: it may change results")

    def check_tensors(self, known: Callable[[str], bool]) -> None:
        """Raise `ValueError` for a tensor that is not `known`."""
        for name in self.tensors:
            if name not in TENSORS and not known(name):
                raise ValueError(f"the tensor {name} is not supported: it may change results")


def _in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Any:
    """Return a function that calls `function` in the current thread, and `elsewhere` in others."""
    thread = threading.get_ident()

    def call(*arguments: Any, **options: Any) -> Any:
        chosen = function if threading.get_ident() == thread else elsewhere
        return chosen(*arguments, **options)

    return call


def read(file: Path) -> GGUF:
    """Read a file's metadata, and where its tensors are. Raises `ValueError` if it is damaged, or holds no model."""
    try:
        with np.errstate(all="ignore"):
            reader = _Reader(file)
        fields = {name: _value(field) for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it is damaged, or no GGUF file: {error}") from error
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ValueError(f"general.architecture must be a name, got {architecture!r}")
    kind = fields.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"general.type must be 'model', got {kind!r}")
    num_parts = fields.get("split.count", 1)
    if num_parts not in (0, 1):
        raise ValueError(f"it is one of {num_parts} parts (split.count): merge them with llama-gguf-split")
    prefix = f"{architecture}."
    metadata: dict[str, Any] = {}
    general: dict[str, Any] = {}
    for key, value in fields.items():
        if key.startswith(prefix):
            metadata[key.removeprefix(prefix)] = value
        else:
            general[key] = value
    contents = GGUF(file, architecture, general, metadata, tensors, reader)
    _check_sizes(contents)
    return contents


def _value(field: gguf.ReaderField) -> Any:
    return field.parts[-1] if field.types is _LIST else field.contents()


def _check_sizes(contents: GGUF) -> None:
    """Raise `ValueError` if sizes cannot be those of the tensors: a damaged one would need any amount of memory."""
    if not contents.tensors:
        raise ValueError("it has no tensors")
    architecture = contents.architecture
    num_layers = 0
    for name in contents.tensors:
        first, *parts = name.split(".")
        if first == "blk" and parts and parts[0].isdigit():
            num_layers = max(num_layers, int(parts[0]) + 1)
    if num_layers and contents.integer("block_count") != num_layers:
        block_count = contents.metadata["block_count"]
        raise ValueError(f"{architecture}.block_count is {block_count}, but it has {num_layers} layers")
    largest = max(max(contents.shape(name), default=0) for name in contents.tensors)
    for key, value in contents.metadata.items():
        is_size = key.endswith(("_length", "head_count", "head_count_kv", "dimension_count", "_size"))
        if not is_size or key == "context_length":
            continue
        for size in value if isinstance(value, list) else [value]:
            if type(size) is not int or not 0 <= size <= largest:
                raise ValueError(f"{architecture}.{key} must be at most {largest}, got {size!r}")

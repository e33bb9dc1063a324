"""A GGUF file whose structure is checked: its metadata and its tensors.

Needs the package gguf: imported where a file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


class _Reader(gguf.GGUFReader):
    """A reader that raises `ValueError` where a damaged file points beyond its end: the base class reads less."""

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"{count} values at byte {offset} are beyond its end")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Read an array of numbers at once, and skip one of strings; the base class takes seconds for a vocabulary."""
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        if length > _MOST_ELEMENTS:
            raise ValueError(f"an array has {length} elements, more than {_MOST_ELEMENTS}")
        start = end = orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, kind]
        if kind == gguf.GGUFValueType.STRING:
            content = memoryview(self.data)  # type: ignore[arg-type] # on Python 3.10, arrays declare no buffer
            order: Any = "little" if self.endianess == gguf.GGUFEndian.LITTLE else "big"
            for _ in range(length):
                if end > len(content):
                    raise ValueError(f"an array of {length} strings ends beyond its end")
                end += 8 + int.from_bytes(content[end : end + 8], order)
            return end - orig_offs, [], [], types
        values = self._get(start, self.gguf_scalar_to_np[kind], length)
        return values.nbytes + 12, [values], [0], types


@dataclass
class GGUF:
    """Metadata and tensors of a file."""

    file: Path
    architecture: str
    general: dict[str, Any]  # keys without an architecture
    metadata: dict[str, Any]  # keys of the architecture, without its name
    tensors: dict[str, gguf.ReaderTensor]

    @property
    def rope_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The tensors by which frequencies are divided, by name."""
        return {
            name: gguf.dequantize(one.data, one.tensor_type) for name, one in self.tensors.items() if name in TENSORS
        }

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


def read(file: Path) -> GGUF:
    """Read a file's metadata, and where its tensors are. Raises `ValueError` if it is damaged, or holds no model."""
    try:
        with np.errstate(all="ignore"):
            reader = _Reader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
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
    contents = GGUF(file, architecture, general, metadata, tensors)
    _check_sizes(contents)
    return contents


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

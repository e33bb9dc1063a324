"""Layers whose weights stay packed in memory: blocks of 32 weights of a GGUF file, or half precision.

A C kernel converts each weight to float32 where it is used. Activations stay in float32, so results equal those of a
float32 model with the converted weights, to the last bit.
With `int8`, linear layers round activations to 8 bits, a scale per token and block of 32, for products in integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_parallel.kernels import native
from hf_parallel.models.cpu.linear import PACKINGS, is_computable, product
from hf_parallel.models.loading.gguf_file import Blocks, load_empty, read_blocks
from hf_parallel.progress import progress_bar

if TYPE_CHECKING:
    from hf_parallel.models.loading.gguf_reader import GGUF

PACKED = ("packed", "packed_int8")
"""Values of `weights`: activations of linear layers stay in float32, or are rounded to 8 bits."""
_BLOCKS = "packed.safetensors"


class _Packed(nn.Module):
    """Weights `[out_features, in_features]` in the buffer `packed`, uint8 `[out_features, bytes]`.

    `packing` is one of `native.PACKINGS`. The `state_dict` has the unpacked `weight`: a saved model is a plain one.
    """

    def __init__(self, packing: str, packed: torch.Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        bytes_per_block, weights_per_block = native.PACKINGS[packing]
        self.packing = packing
        self.out_features = len(packed)
        self.in_features = packed.shape[1] // bytes_per_block * weights_per_block
        self.register_buffer("packed", packed)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weights in float32, a copy."""
        return native.unpack(self.get_buffer("packed"), self.packing)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}packed"]
        destination[f"{prefix}weight"] = self.weight


class PackedLinear(_Packed):
    """`nn.Linear` with packed weights, computed in float32. Results have the dtype of the input.

    With `int8`, activations are rounded to 8 bits (`native.linear`), except in calls that record gradients outside of a
    `kernel_pass`.
    """

    int8 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (its name in `nn.Linear.forward`)
        """Return `x W^T + b`."""
        bias = self._parameters["bias"]
        if is_computable(input, self.in_features):
            return product(input, self.get_buffer("packed"), bias, self.packing, int8=self.int8)
        return F.linear(input.float(), self.weight, bias).to(input.dtype)


class PackedEmbedding(_Packed):
    """`nn.Embedding` with packed weights, which returns float32."""

    def __init__(self, packing: str, packed: torch.Tensor, bias: None = None) -> None:
        super().__init__(packing, packed, bias)
        self.num_embeddings = self.out_features
        self.embedding_dim = self.in_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Return the rows of the weights for token ids."""
        rows = self.get_buffer("packed")[input.flatten()]
        return native.unpack(rows, self.packing).view(*input.shape, self.in_features)


def check_packed(weights: str | None, dtype: torch.dtype | None, device: torch.device | str | int | None) -> bool:
    """Return whether weights are packed. Raises `ValueError` for other values of `weights`, dtypes and devices."""
    if weights is None:
        return False
    if weights not in PACKED:
        raise ValueError(f"weights must be 'packed', 'packed_int8', a quantization config or None, got {weights!r}")
    is_float32 = dtype in (None, torch.float32)
    is_cpu = device is None or str(device).partition(":")[0] == "cpu"  # not torch.device: it may be "auto"
    if not is_float32 or not is_cpu:
        raise ValueError(f"packed weights are computed in float32 on a CPU, got dtype={dtype} and device={device}")
    return True


def pack_half(model: PreTrainedModel, int8: bool = False) -> None:
    """Keep weights of linear layers and embeddings in half precision, others in float32. `ValueError`: it has none."""
    if int8:
        raise ValueError(
            f"weights='packed_int8' needs blocks of a GGUF file, {type(model).__name__} was saved in "
            f"{model.dtype}: use weights='packed'"
        )
    modules: list[Any] = [module for module in model.modules() if _is_plain(module)]
    half = {module.weight for module in modules if module.weight.dtype in (torch.bfloat16, torch.float16)}
    if not half:
        raise ValueError(f"packed weights are in bfloat16 or float16, {type(model).__name__} has none ({model.dtype})")
    packed = {}
    for weight in half:
        packed[weight] = (PACKINGS[weight.dtype], weight.detach().contiguous().view(torch.uint8))
    _pack(model, packed)
    model.float()


def pack_blocks(model: PreTrainedModel, blocks: Blocks, int8: bool = False) -> None:
    """Replace weights, given by the names of parameters, by blocks. `int8`: see `PackedLinear`."""
    _pack(model, {model.get_parameter(name): block for name, block in blocks.items()})
    for parameter in model.parameters():  # of norms: the file of all float32 weights need not stay mapped
        parameter.data = parameter.data.clone()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.int8 = int8 and module.packing in native.INTEGERS


def load_gguf(contents: GGUF, int8: bool = False) -> PreTrainedModel:
    """Load a model whose weights stay in the blocks of its GGUF file. `ValueError`: see `read_blocks`."""
    model, blocks, weights = load_empty(contents)
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    pack_blocks(model, blocks, int8)
    return model


def save_blocks(model: PreTrainedModel, contents: GGUF, folder: Path) -> None:
    """Save the blocks of a model's GGUF file by the names of its layers."""
    blocks, _ = read_blocks(contents, model)
    tensors: dict[str, torch.Tensor] = {}
    for name, (packing, data) in blocks.items():
        tensors[f"{name.removesuffix('.weight')}.{packing}"] = data
    save_file(tensors, folder / _BLOCKS)


def load_blocks(folder: Path) -> Blocks:
    """Return what `save_blocks` saved."""
    blocks: Blocks = {}
    for key, data in load_file(folder / _BLOCKS).items():
        name, _, packing = key.rpartition(".")
        blocks[f"{name}.weight"] = (packing, data)
    return blocks


def _pack(model: PreTrainedModel, blocks: Mapping[Any, tuple[str, torch.Tensor]]) -> None:
    """Replace the modules with these weights; tied weights stay tied."""
    for name, module in progress_bar(list(model.named_modules()), what="Packing weights", unit="modules"):
        if _is_plain(module) and module.weight in blocks:
            packing, packed = blocks[module.weight]
            if isinstance(module, nn.Linear):
                model.set_submodule(name, PackedLinear(packing, packed, module.bias))
            else:
                model.set_submodule(name, PackedEmbedding(packing, packed))


def _is_plain(module: Any) -> bool:
    is_plain = type(module) is nn.Linear or (type(module) is nn.Embedding and module.max_norm is None)
    return is_plain and type(module.weight) is nn.Parameter

"""`hf_parallel.generate`: a call of a mode whose settings and output have types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_parallel.generation.config import OutputT, ParallelConfig
from hf_parallel.generation.mixin import enable

_FIXED = ("generation_mode", "parallel_config", "return_dict_in_generate")


def generate(model: nn.Module, config: ParallelConfig[OutputT], inputs: Any, **kwargs: Any) -> OutputT:
    """Generate with a mode, and return its output object.

    Equals `model.generate(..., parallel_config=config, return_dict_in_generate=True)`, where type checkers and editors
    see neither the settings nor the fields of the output.

    Parameters
    ----------
    model : PreTrainedModel
        Is enabled if it is not yet; see `enable`.
    config : ParallelConfig
        The mode and its settings, such as `HogwildConfig(num_workers=2)`.
    inputs : int64 tensor [rows, length] or mapping
        Token ids; or `input_ids` with `attention_mask`, as a tokenizer and `build_prompt` return them.
    **kwargs
        Further arguments of `model.generate`.

    Returns
    -------
    ParallelOutput
        That of the mode, such as a `HogwildOutput`.

    Raises
    ------
    TypeError
        If `config` is no `ParallelConfig`, or `inputs` are text.
    ValueError
        As `model.generate`, and for arguments that are given by `config`.

    Examples
    --------
    >>> config = hf_parallel.SharedPrefixConfig(seed=0)
    >>> inputs = tokenizer("Parallel generation is", return_tensors="pt")
    >>> out = hf_parallel.generate(model, config, inputs, num_return_sequences=4, do_sample=True, max_new_tokens=8)
    >>> out.sequences.shape[0]
    4
    """
    if not isinstance(config, ParallelConfig):
        raise TypeError(f"config must be a ParallelConfig, such as HogwildConfig(num_workers=2), got {config!r}")
    if isinstance(inputs, str | list | tuple):
        raise TypeError(
            f"inputs must be a tensor of token ids or a mapping, got {type(inputs).__name__}: use the tokenizer with "
            "return_tensors='pt', or hf_parallel.build_prompt"
        )
    for name in _FIXED:
        if name in kwargs:
            raise ValueError(f"{name}={kwargs[name]!r} cannot be given: config names the mode, and returns its output")
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    output: OutputT = enable(model).generate(  # type: ignore[operator]
        **arguments, **kwargs, parallel_config=config, return_dict_in_generate=True
    )
    return output

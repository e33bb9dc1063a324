"""RoPE scaling of a GGUF file as `rope_parameters` of Transformers.

llama.cpp reads keys `rope.scaling.*`, and tensors by which it divides each frequency: `rope_freqs.weight`, in which its
converter writes the scaling of Llama 3.1, and `rope_factors_long.weight` and `rope_factors_short.weight` of longrope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
FREQUENCIES = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
TENSORS = (FREQUENCIES, LONG, SHORT)
_SCALING = "rope.scaling."
_OLD_FACTOR = "rope.scale_linear"
_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Settings of YaRN that Transformers has no name for, and the values with which they change nothing."""


def is_scaling(key: str) -> bool:
    """Return whether a key of metadata, without the architecture, sets the scaling."""
    return key.startswith(_SCALING) or key == _OLD_FACTOR


def scaled_rope(
    metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], theta: float, dim: int
) -> dict[str, Any]:
    """Return the `rope_parameters` of a file.

    Parameters
    ----------
    metadata : dict
        By key, without the architecture.
    tensors : dict
        The arrays of `TENSORS` that the file has, `[dim / 2]` each.
    theta, dim : float, int
        Base of the frequencies, and number of rotated dimensions.

    Raises
    ------
    ValueError
        That names the key or tensor if Transformers has no such scaling.
    """
    scaling = {key.removeprefix(_SCALING): value for key, value in metadata.items() if key.startswith(_SCALING)}
    kind = scaling.pop("type", "linear")
    factor = _positive("factor", scaling.pop("factor", None) or metadata.get(_OLD_FACTOR) or 1.0)
    original = scaling.pop("original_context_length", 0) or metadata.get("context_length", 0)
    attention = _positive("attn_factor", scaling.pop("attn_factor", 1.0))
    scaling.pop("finetuned", None)  # what the model was trained for
    betas = {f"beta_{end}": scaling.pop(f"yarn_beta_{end}", beta) for end, beta in (("fast", 32.0), ("slow", 1.0))}
    for name, value in scaling.items():
        if _NEUTRAL.get(name) != value:
            raise ValueError(f"{_SCALING}{name}={value!r} is not supported")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ValueError(f"{_SCALING}type={kind!r} is not supported")
    for name, values in tensors.items():
        if values.shape != (dim // 2,) or not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"{name} must hold {dim // 2} positive numbers")

    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "longrope" or LONG in tensors or SHORT in tensors:
        _check_only(tensors, LONG, SHORT)
        if factor != 1.0:
            raise ValueError(f"{_SCALING}factor={factor} with {LONG} is not supported")
        factors = {"long_factor": tensors[LONG].tolist(), "short_factor": tensors[SHORT].tolist()}
        sizes = {"original_max_position_embeddings": original, "attention_factor": attention}
        return parameters | {"rope_type": "longrope"} | factors | sizes
    if kind == "yarn" and factor != 1.0:
        _check_only(tensors)
        attention *= 0.1 * math.log(factor) + 1.0
        sizes = {"factor": factor, "original_max_position_embeddings": original, "attention_factor": attention}
        return parameters | {"rope_type": "yarn"} | sizes | betas
    if attention != 1.0:
        raise ValueError(f"{_SCALING}attn_factor={attention} with {_SCALING}type={kind!r} is not supported")
    if kind == "linear" and factor != 1.0:
        _check_only(tensors)
        return parameters | {"rope_type": "linear", "factor": factor}
    if FREQUENCIES in tensors:
        return parameters | _from_factors(tensors[FREQUENCIES].astype(np.float64), theta, dim)
    return parameters


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, float | int) or not 0 < value < math.inf:
        raise ValueError(f"{_SCALING}{name} must be a positive number, got {value!r}")
    return float(value)


def _check_only(tensors: Mapping[str, object], *names: str) -> None:
    """Raise `ValueError` unless a file has these tensors of `TENSORS`, and no others."""
    if wrong := sorted({*names} ^ tensors.keys()):
        raise ValueError(f"{wrong[0]} is {'missing' if wrong[0] in names else 'not supported with this scaling'}")


def _from_factors(factors: Floats, theta: float, dim: int) -> dict[str, Any]:
    """Return the scaling that divides frequencies by these factors: none, linear, or that of Llama 3.1.

    Of the latter, frequencies between two wavelengths `w` are scaled by `(1 - s) / factor + s`, where `s` is
    `(old / w - low) / (high - low)`. As only ratios matter, `low` is 1.
    """
    largest = float(factors.max())
    if np.allclose(factors, largest, rtol=1e-6, atol=0):
        factor = _rounded(largest)
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    waves = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    shares = (1 / factors - 1 / largest) / (1 - 1 / largest)
    is_between = (shares > 1e-5) & (shares < 1 - 1e-5)
    high = 4.0
    if is_between.sum() > 1:
        slope, offset = np.polyfit(1 / waves[is_between], shares[is_between], 1)
        high = 1 - 1 / min(float(offset), -1e-6)
        old = float(slope) * (high - 1)
    elif is_between.any():
        old = float((waves * (1 + shares * (high - 1)))[is_between][0])
    else:
        old = high * float(waves[shares > 0.5].max(initial=1.0))
    for values in (_rounded(largest), _rounded(high), _rounded(old)), (largest, high, old):
        factor, high, old = values
        expected = np.clip((old / waves - 1) / (high - 1), 0, 1) if high > 1 else shares + 1
        if np.allclose((1 - expected) / factor + expected, 1 / factors, rtol=1e-5, atol=0):
            sizes = {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": old}
            return {"rope_type": "llama3", "factor": factor, **sizes}
    raise ValueError(f"{FREQUENCIES} holds factors that no RoPE scaling of Transformers has")


def _rounded(value: float) -> float:
    """Return the nearest whole number if it is closer than the error of a fit to factors in float32."""
    is_whole = math.isfinite(value) and math.isclose(value, round(value), rel_tol=1e-4)
    return round(value) if is_whole else value

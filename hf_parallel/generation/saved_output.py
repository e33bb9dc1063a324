"""An output of a mode as a JSON file, which is read by the types of the fields of its class."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_parallel.files import read_json, write_atomically
from hf_parallel.generation.config import make_config
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import Arguments
from hf_parallel.transcript.page import render
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.sections import is_plain, transcript_dict

FORMAT, VERSION = "hf_parallel output", 1
"""Values of `format` and `version` in a file."""
_SEPARATE = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)} - {"sequences"} | {"record"}
"""Fields that are not saved, or saved differently."""
_RUN = [field.name for field in dataclasses.fields(Record) if field.name not in ("config", "log_probs", "trace")]
"""Fields of a record that transcripts need."""

OutputT = TypeVar("OutputT")


def write(output: Any, path: str | Path) -> None:
    """Write an output; see `ParallelOutput.save`."""
    record: Record | None = output.record
    if record is None:
        raise ValueError("this output has no record: only outputs of calls with a `generation_mode` can be saved")
    run = {name: getattr(record, name) for name in _RUN}
    run["settings"] = {name: value for name, value in record.settings.items() if is_plain(value)}
    content = {
        **{"format": FORMAT, "version": VERSION, "class": type(output).__name__},
        "fields": {name: _pack(getattr(output, name), name) for name in _hints(type(output))},
        "run": _pack({"mode": record.mode, **run}, "run"),
    }
    write_atomically(path, json.dumps(content, allow_nan=False) + "\n")


def read(cls: type[OutputT], path: str | Path) -> OutputT:
    """Read an output of a class, or of a subclass of it; see `ParallelOutput.load`."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved output: it must be a JSON object whose 'format' is {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}, but only version {VERSION} can be read")
    name, classes = content.get("class"), {one.__name__: one for one in _classes(cls)}
    if not isinstance(name, str) or name not in classes:
        raise ValueError(f"{path} holds a {name!r}, which is none of {', '.join(sorted(classes))}")
    try:
        fields = _unpack_fields(_hints(classes[name]), content.get("fields"), "fields")
        output = classes[name](**fields, record=_unpack_record(content.get("run")))
        _check(output)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return output  # type: ignore[no-any-return]


def _unpack_record(content: object) -> Record:
    hints = get_type_hints(Record)
    values = _unpack_fields({"mode": str, **{name: hints[name] for name in _RUN}}, content, "run")
    mode = values.pop("mode")
    if mode not in MODES:
        raise ValueError(f"its mode {mode!r} is not defined here: import the package that defines it")
    known = MODES[mode]
    kept = {n: v for n, v in values["settings"].items() if n in known.fields() and n not in known.not_remote()}
    record = Record(make_config(mode, kept), **values)  # settings that name code or patterns stay in `settings`
    rows = len(record.events) + len(record.prompts)
    _expect(all(0 <= event.row <= rows for event in record.events), "events have rows out of range")
    most = record.config.max_rows_per_prompt
    _expect(most <= len(record.events) + len(record.lengths), "settings have more rows than the run")
    return record


def _classes(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _classes(subclass)


def _hints(cls: type) -> Arguments:
    """Return the types of the saved fields of a class."""
    hints = get_type_hints(cls) | {"sequences": torch.Tensor}
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name not in _SEPARATE}


def _check(output: Any) -> None:
    """Raise an error if the parts of an output do not fit together, so that its methods would raise one."""
    record = output.record
    _expect(output.sequences.dtype == torch.int64 and output.sequences.dim() == 2, "sequences must be int64 [rows, n]")
    rows, length = output.sequences.shape
    _expect(len(record.lengths) == rows and all(0 <= n <= length for n in record.lengths), "lengths do not fit")
    _expect(bool(record.prompts) and 0 <= record.begin <= length, "prompts or begin do not fit")
    _expect(all(len(prompt) and prompt.min() >= 0 for prompt in record.prompts), "prompts hold no token ids")
    _expect(bool((output.sequences >= 0).all()), "sequences hold no token ids")
    _expect(len(record.returned) in (0, rows), "returned does not fit")
    for row in (*range(rows), *record.returned):
        _expect(0 <= record.place(row)[0] < len(record.prompts), "there are more rows than prompts")
    output.to_records()
    render(output.to_dict() if record.events else transcript_dict(record, output.stats, []))


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _pack(value: object, where: str) -> Any:
    """Return a value as JSON: tensors as objects, floats that JSON lacks as text."""
    if isinstance(value, torch.Tensor):
        values = _pack(value.tolist(), where)
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "values": values}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _pack(getattr(value, field.name), where) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and all(isinstance(name, str | int) for name in value):
        return {str(name): _pack(item, where) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple | set):
        return [_pack(item, where) for item in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | None):
        return value
    raise ValueError(f"{where} cannot be saved as JSON: it holds a {type(value).__name__}")


def _unpack(hint: Any, value: Any, where: str) -> Any:
    """Return what `_pack` has packed for a type; raise `ValueError` if the value is not of the type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Any, object):
        return value
    if kind in (Union, types.UnionType):
        return _unpack_union(inner, value, where)
    if isinstance(kind, type) and issubclass(kind, torch.Tensor):
        return _unpack_tensor(value, where)
    if kind is np.ndarray:
        return np.array(_unpack(list[int], value, where), np.int64)
    if dataclasses.is_dataclass(kind):
        hints, names = get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]
        return kind(**_unpack_fields({name: hints[name] for name in names}, value, where))  # type: ignore[operator]
    if issubclass(kind, tuple) and inner[-1:] != (...,):
        items = tuple(get_type_hints(kind).values()) or inner  # of a named tuple
        _expect(isinstance(value, list) and len(value) == len(items), f"{where} must be a list of {len(items)}")
        parts = [_unpack(one, item, where) for one, item in zip(items, value, strict=True)]
        return tuple(parts) if kind is tuple else kind(*parts)
    if kind in (list, tuple, set, Sequence) and isinstance(value, list):
        parts = [_unpack(inner[0], item, where) for item in value]
        return parts if kind is Sequence else kind(parts)
    if kind is dict and isinstance(value, dict):
        return {inner[0](name): _unpack(inner[1], item, where) for name, item in value.items()}
    if kind is float and value in ("nan", "inf", "-inf"):
        return float(value)
    if kind is float and type(value) is int:
        return value
    _expect(kind in (str, int, bool, float, type(None)) and type(value) is kind, f"{where} must be of type {hint}")
    return value


def _unpack_fields(hints: Mapping[str, object], value: object, where: str) -> Arguments:
    """Return the values of an object that has exactly these fields."""
    given = _unpack(dict[str, object], value, where)
    _expect(given.keys() == hints.keys(), f"{where} must have the fields {sorted(hints)}")
    return {name: _unpack(hint, given[name], f"{where}.{name}") for name, hint in hints.items()}


def _unpack_union(hints: tuple[object, ...], value: object, where: str) -> Any:
    errors = []
    for hint in hints:
        try:
            return _unpack(hint, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _unpack_tensor(value: object, where: str) -> torch.Tensor:
    given = _unpack_fields({"dtype": str, "shape": list[int], "values": object}, value, where)
    dtype = getattr(torch, given["dtype"], None)
    _expect(isinstance(dtype, torch.dtype), f"{where} has the dtype {given['dtype']!r}")
    shape, values = given["shape"], np.array(given["values"], np.int64 if "int" in given["dtype"] else np.float64)
    _expect(list(values.shape) == shape or values.size == 0, f"{where} must have the shape {shape}")
    return torch.as_tensor(values).to(dtype).reshape(shape)

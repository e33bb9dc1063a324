"""An output of a mode as a JSON file, which is read by the types of the fields of its class."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_parallel.files import read_json, write_atomically
from hf_parallel.generation.config import make_config
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import Arguments
from hf_parallel.transcript.record import Event, Record
from hf_parallel.transcript.sections import check_run, is_plain, transcript_dict

FORMAT, VERSION = "hf_parallel output", 1
"""Values of `format` and `version` in a file."""
_SEPARATE = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)} - {"sequences"} | {"record"}
"""Fields that are not saved, or saved differently."""

OutputT = TypeVar("OutputT")


@dataclass
class _Run:
    """Saved part of a `Record`: all that transcripts need."""

    mode: str
    settings: dict[str, Any]
    prompts: list[list[int]]
    has_gaps: bool
    begin: int
    lengths: list[int]
    passes: int
    events: list[tuple[int, int, str, str]]
    truncated: list[int]
    errors: dict[str, str]
    end_reasons: dict[str, str]
    returned: list[int]
    origins: dict[str, str]

    @classmethod
    def of(cls, record: Record) -> _Run:
        return cls(
            record.mode,
            {name: value for name, value in record.settings.items() if is_plain(value)},
            [prompt.tolist() for prompt in record.prompts],
            record.has_gaps,
            record.begin,
            record.lengths,
            record.passes,
            [(*event,) for event in record.events],
            sorted(record.truncated),
            {str(row): text for row, text in record.errors.items()},
            {str(row): text for row, text in record.end_reasons.items()},
            record.returned,
            {str(row): letters for row, letters in record.origins.items()},
        )

    def record(self) -> Record:
        if self.mode not in MODES:
            raise ValueError(f"its mode {self.mode!r} is not defined here: import the package that defines it")
        known = MODES[self.mode]
        kept = {n: v for n, v in self.settings.items() if n in known.fields() and n not in known.not_remote()}
        config = make_config(self.mode, kept)  # settings that name code or patterns stay in `settings`
        rows = [event[1] for event in self.events]
        _expect(all(0 <= row <= len(rows) + len(self.prompts) for row in rows), "events have rows out of range")
        _expect(config.max_rows_per_prompt <= len(rows) + len(self.lengths), "settings have more rows than the run")
        return Record(
            config,
            self.settings,
            prompts=[np.array(prompt, np.int64) for prompt in self.prompts],
            has_gaps=self.has_gaps,
            begin=self.begin,
            lengths=self.lengths,
            passes=self.passes,
            events=[Event(*event) for event in self.events],
            truncated=set(self.truncated),
            errors={int(row): text for row, text in self.errors.items()},
            end_reasons={int(row): text for row, text in self.end_reasons.items()},
            returned=self.returned,
            origins={int(row): letters for row, letters in self.origins.items()},
        )


def write(output: Any, path: str | Path) -> None:
    """Write an output; see `ParallelOutput.save`."""
    if output.record is None:
        raise ValueError("this output has no record: only outputs of calls with a `generation_mode` can be saved")
    fields = {name: getattr(output, name) for name in _hints(type(output))}
    content = {
        **{"format": FORMAT, "version": VERSION, "class": type(output).__name__},
        "fields": {name: _pack(value, name) for name, value in fields.items()},
        "run": _pack(_Run.of(output.record), "run"),
    }
    write_atomically(path, json.dumps(content, allow_nan=False) + "\n")


def read(cls: type[OutputT], path: str | Path) -> OutputT:
    """Read an output of a class, or of a subclass of it; see `ParallelOutput.load`."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved output: it must be a JSON object whose 'format' is {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}, but only version {VERSION} can be read")
    name = content.get("class")
    found = [one for one in _classes(cls) if one.__name__ == name]
    if not found:
        known = sorted({one.__name__ for one in _classes(cls)})
        raise ValueError(f"{path} holds a {name!r}, which is none of {', '.join(known)}")
    try:
        hints = _hints(found[0])
        fields = _unpack(dict[str, Any], content.get("fields"), "fields")
        values = {name: _unpack(hints[name], value, name) for name, value in fields.items()}
        _expect(fields.keys() == hints.keys(), f"fields must be {sorted(hints)}")
        record: Record = _unpack(_Run, content.get("run"), "run").record()
        output: Any = found[0](**values, record=record)
        _check(output)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return output


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
    check_run(output.to_dict() if record.events else transcript_dict(record, output.stats, []))


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
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _pack(item, where) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, where) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | None):
        return value
    raise ValueError(f"{where} cannot be saved as JSON: it holds a {type(value).__name__}")


def _unpack(hint: Any, value: Any, where: str) -> Any:
    """Return what `_pack` has packed for a type; raise `ValueError` if the value is not of the type."""
    kind = get_origin(hint) or hint
    inner = get_args(hint)
    if kind is Any:
        return value
    if kind in (Union, types.UnionType):
        return _unpack_union(inner, value, where)
    if isinstance(kind, type) and issubclass(kind, torch.Tensor):
        return _unpack_tensor(value, where)
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        hints, required = get_type_hints(make), {field.name for field in dataclasses.fields(make)}
        given = _unpack(dict[str, Any], value, where)
        _expect(given.keys() == required, f"{where} must have the fields {sorted(required)}")
        return make(**{name: _unpack(hints[name], item, f"{where}.{name}") for name, item in given.items()})
    if kind is tuple and inner[-1:] != (...,):
        _expect(isinstance(value, list) and len(value) == len(inner), f"{where} must be a list of {len(inner)}")
        return tuple(_unpack(one, item, where) for one, item in zip(inner, value, strict=True))
    if kind in (list, tuple) and isinstance(value, list):
        return kind(_unpack(inner[0], item, where) for item in value)
    if kind is dict and isinstance(value, dict):
        return {name: _unpack(inner[1], item, where) for name, item in value.items()}
    if kind is float and value in ("nan", "inf", "-inf"):
        return float(value)
    if kind is float and type(value) is int:
        return value
    _expect(kind in (str, int, bool, float, type(None)) and type(value) is kind, f"{where} must be of type {hint}")
    return value


def _unpack_union(hints: tuple[object, ...], value: object, where: str) -> Any:
    errors = []
    for hint in hints:
        try:
            return _unpack(hint, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _unpack_tensor(value: object, where: str) -> torch.Tensor:
    given = _unpack(dict[str, Any], value, where)
    _expect(given.keys() == {"dtype", "shape", "values"}, f"{where} must be a tensor")
    dtype = getattr(torch, str(given["dtype"]), None)
    _expect(isinstance(dtype, torch.dtype), f"{where} has the dtype {given['dtype']!r}")
    shape, values = given["shape"], np.array(given["values"], np.int64 if "int" in given["dtype"] else np.float64)
    _expect(list(values.shape) == shape or values.size == 0, f"{where} must have the shape {shape}")
    return torch.as_tensor(values).to(dtype).reshape(shape)

"""Every loader of the package reads files completely and safely: damaged and forged ones raise typed errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from workers import small_model

from hf_parallel import LogitsCache, enable
from hf_parallel.agents.trace import RunTrace
from hf_parallel.cache.logits_trie import digest_of
from hf_parallel.evaluation.results import KEY, MEASURED, format_table, read_results, table

pytestmark = pytest.mark.usefixtures("one_thread")

JUNK = [None, True, -1, 0, 7, 10**20, 10**400, 1e308, float("nan"), float("inf"), "", "x", [], ["a"], [[1]]]
JUNK += [{}, {"a": [1]}, {"": None}]


@dataclass
class Loader:
    """A way to read files: how a file is written, its values changed, and read."""

    write: Callable[[Path], None]
    load: Callable[[Path], Any]
    values: Callable[[Path], Any] = lambda path: json.loads(path.read_text())
    forge: Callable[[Path, Any], None] = lambda path, values: path.write_text(json.dumps(values)) and None


def _write_logits(path: Path) -> None:
    enable(model := small_model())
    ids = torch.tensor([[5, 6, 7]])
    cache = LogitsCache(top_k=4)
    wanted = {"generation_mode": "resample", "max_new_tokens": 3, "logits_cache": cache}
    model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)
    cache.save(path)


def _use_logits(path: Path) -> None:
    enable(model := small_model())
    ids = torch.tensor([[5, 6, 7]])
    wanted = {"generation_mode": "resample", "max_new_tokens": 4, "logits_cache": LogitsCache.load(path)}
    model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)
    wanted["logits_cache"].save(path)


def _logits_values(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).tolist() for name in file.keys()} | {"metadata": file.metadata()}  # noqa: SIM118


def _forge_logits(path: Path, values: Any) -> None:
    """Write logits with a right digest."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for name, value in values.items():
        try:
            if name == "metadata":
                metadata = {key: one if isinstance(one, str) else json.dumps(one) for key, one in dict(value).items()}
            else:
                tensors[name] = torch.tensor(value, dtype=tensors[name].dtype if name in tensors else None)
        except (OverflowError, TypeError, ValueError, RuntimeError):  # no tensor can hold it
            tensors.pop(name, None)
    metadata.pop("digest", None)
    save_file(tensors, path, metadata | {"digest": digest_of(metadata, tensors)})


def _write_trace(path: Path) -> None:
    trace = RunTrace()
    trace.add("a#0", "gen", "0", begin=0.0, tokens=3, prompt_tokens=9, reused=4, text="x", settings={"seed": 1})
    trace.add("a#0", "state", "0.1", parent="0", value=0.5, status="committed")
    trace.add("a#0", "scores", scores={"a": 0.5})
    trace.save(path)


def _write_results(path: Path) -> None:
    result = dict.fromkeys(KEY, 0) | dict.fromkeys(MEASURED, 0.5) | {"text": "x", "settings": {"num_workers": 2}}
    result |= {"task": "t", "mode": "m", "problem": "p"}
    lines = [result, {**result, "index": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _load_results(path: Path) -> None:
    format_table(table(read_results(path.parent)))


def _lines(path: Path) -> Any:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _forge_lines(path: Path, values: Any) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


LOADERS = {
    "logits": Loader(_write_logits, _use_logits, _logits_values, _forge_logits),
    "run trace": Loader(_write_trace, RunTrace.load),
    "results": Loader(_write_results, _load_results, _lines, _forge_lines),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a valid file for each loader."""
    paths = {}
    for name, loader in LOADERS.items():
        paths[name] = tmp_path_factory.mktemp("loader") / "results.rank0.jsonl"
        loader.write(paths[name])
    return paths


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values, of whole objects and lists as well."""
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _places(item, (*place, name))


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_forged_files_raise_value_errors(name: str, files: dict[str, Path], data: st.DataObject) -> None:
    loader, path = LOADERS[name], files[name]
    whole = path.read_bytes()
    try:
        values = loader.values(path)
        *parents, last = data.draw(st.sampled_from(list(_places(values))))
        holder = values
        for parent in parents:
            holder = holder[parent]
        holder[last] = data.draw(st.sampled_from(JUNK))
        loader.forge(path, values)
        with suppress(ValueError):  # any other error fails the test
            loader.load(path)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "not UTF-8", "deeply nested", "huge", "truncated"])
def test_files_that_cannot_be_read_raise(
    name: str, kind: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.rank0.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "not UTF-8":
        path.write_bytes(b'{"a": "\xff"}\n')
    elif kind == "deeply nested":
        path.write_text("[" * 100_000 + "\n")
    elif kind == "truncated":
        path.write_bytes(files[name].read_bytes()[:5] + b"\n")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 42)  # takes no disk space
    with pytest.raises(ValueError, match="results.rank0.jsonl"):
        LOADERS[name].load(path)

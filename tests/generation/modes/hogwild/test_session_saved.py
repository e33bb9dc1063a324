"""Saved sessions continue as if they had not been interrupted; other files raise."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import dense
import pytest
import tiny
import torch
from talks import begin, change_at_random, logits_during, state
from transformers import GenerationConfig
from workers import TOKENIZER, small_model

import hf_parallel
from hf_parallel import HogwildSession


def load(path: Path, model: Any = None, **helpers: Any) -> HogwildSession:
    return HogwildSession.load(path, model or small_model(), helpers.pop("tokenizer", TOKENIZER), **helpers)


@pytest.mark.parametrize(
    ("layout", "num_workers", "move"),
    [
        *(("combined", 3, move) for move in ("rotate", "reencode")),
        *(("interleaved", 2, move) for move in ("rotate", "reencode")),
        ("contiguous", 2, "rotate"),
    ],
)
def test_a_loaded_session_continues_with_the_same_logits(
    tmp_path: Any, layout: str, num_workers: int, move: str
) -> None:
    model = hf_parallel.enable(dense.in_float64(tiny.build("starcoder2"), num_layers=2))
    end = -1 if move == "rotate" else -2  # a step that is computed again is held twice until it moves
    session = begin(model, layout=layout, num_workers=num_workers, step_move=move, max_new_tokens=500)
    for part in range(2):
        change_at_random(session, random.Random(f"{layout}{num_workers}{part}"), changes=5)
        session.save(tmp_path / "session.json")
        other = HogwildSession.load(tmp_path / "session.json", model, TOKENIZER)
        assert state(other)[:end] == state(session)[:end]
        continued = [
            logits_during(model, lambda one=one: change_at_random(one, random.Random("on"), changes=2))
            for one in (session, other)
        ]
        for mine, its in zip(*continued, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-9)
        assert state(other)[:end] == state(session)[:end]
        session = other


@pytest.mark.parametrize("passes", [0, 9])
def test_a_loaded_session_continues_with_the_same_tokens(tmp_path: Path, passes: int) -> None:
    session, whole = begin(temperature=1.0), begin(temperature=1.0)
    session.run(passes)
    session.save(tmp_path / "session.json")
    other = load(tmp_path / "session.json")
    assert state(other)[:-1] == state(session)[:-1]
    other.run(15)
    whole.run(passes + 15)
    assert state(other)[:-1] == state(whole)[:-1]
    assert torch.equal(other.finish().sequences, whole.finish().sequences)


def test_settings_of_generate_and_of_the_mode_are_restored(tmp_path: Path) -> None:
    settings = {"top_k": 9, "repetition_penalty": 1.2, "eos_token_id": [ord("q")], "worker_names": ("Ann", "Ben")}
    config = GenerationConfig(do_sample=True, max_new_tokens=30, **{k: v for k, v in settings.items() if "_n" not in k})
    session = begin(seed=[3, 4], generation_config=config, max_new_tokens=30, **settings)
    session.run(4)
    session.save(tmp_path / "session.json")
    other = load(tmp_path / "session.json")
    assert list(other.config.worker_names) == ["Ann", "Ben"]
    other.save(tmp_path / "again.json")
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("session.json", "again.json"))
    assert second == first
    assert first["generation"].items() >= {"do_sample": True, "top_k": 9, "max_new_tokens": 30}.items()
    other.run()
    session.run()
    assert state(other)[:-1] == state(session)[:-1]


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, session = tmp_path / "session.json", begin()
    session.run(4)
    session.save(path)
    before = path.read_bytes()
    session.run(1)

    def write_half(file: Path, text: str, *given: Any, **settings: Any) -> None:
        file.write_bytes(text.encode()[:50])
        raise OSError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_half)
        with pytest.raises(OSError, match="no space left on device"):
            session.save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
    session.save(path)
    assert state(load(path))[:-1] == state(session)[:-1]


# Invalid files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    session = begin()
    change_at_random(session, random.Random(2), changes=8)
    path = tmp_path_factory.mktemp("saved") / "session.json"
    session.save(path)
    return path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("prompt", lambda value: value[1:]),
        ("journal", lambda value: value[:-1]),
        ("tokens", lambda value: value[:-1]),
        ("settings", lambda value: value | {"seed": 9}),
        ("digest", lambda value: "0" * 64),
    ],
)
def test_a_changed_file_raises(saved: Path, tmp_path: Path, name: str, change: Any) -> None:
    content = json.loads(saved.read_text())
    content[name] = change(content[name])
    (tmp_path / "changed.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="changed.json is damaged"):
        load(tmp_path / "changed.json")


def test_another_model_raises(saved: Path) -> None:
    other = hf_parallel.enable(copy.deepcopy(tiny.build("llama", seed=1)))
    with pytest.raises(ValueError, match="was saved with another model, or with other weights"):
        load(saved, other)
    with pytest.raises(TypeError, match=r"model must be a transformers.PreTrainedModel, got str"):
        load(saved, "llama")

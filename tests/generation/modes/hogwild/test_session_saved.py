"""Saved sessions continue as if they had not been interrupted; other files raise."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense
import numpy as np
import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from talks import PROMPT, TALK, begin, change_at_random, logits_during, state
from transformers import GenerationConfig, LogitsProcessor
from workers import TOKENIZER, Listener, small_model

import hf_parallel
from hf_parallel import HogwildSession
from hf_parallel.generation.modes.hogwild.journal import write_journal


def load(path: Path, model: Any = None, **helpers: Any) -> HogwildSession:
    return HogwildSession.load(path, model or small_model(), helpers.pop("tokenizer", TOKENIZER), **helpers)


@pytest.mark.parametrize(("layout", "num_workers"), [("combined", 3), ("interleaved", 2), ("contiguous", 2)])
def test_a_loaded_session_continues_with_the_same_logits(tmp_path: Any, layout: str, num_workers: int) -> None:
    model = hf_parallel.enable(dense.in_float64(tiny.build("starcoder2"), num_layers=2))
    session = begin(model, layout=layout, num_workers=num_workers, max_new_tokens=500)
    for part in range(2):
        change_at_random(session, random.Random(f"{layout}{num_workers}{part}"), changes=5)
        session.save(tmp_path / "session.json")
        other = HogwildSession.load(tmp_path / "session.json", model, TOKENIZER)
        assert state(other)[:-1] == state(session)[:-1]
        continued = [
            logits_during(model, lambda one=one: change_at_random(one, random.Random("on"), changes=2))
            for one in (session, other)
        ]
        for mine, its in zip(*continued, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-9)
        assert state(other)[:-1] == state(session)[:-1]
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


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    ours = {"seed": np.int64(3), "temperature": np.float64(0.5), "num_workers": np.int64(2)}
    for name, settings in (("numpy", ours), ("plain", {name: value.item() for name, value in ours.items()})):
        with begin(**settings) as session:
            session.run(5)
            session.save(tmp_path / name)
    assert json.loads((tmp_path / "numpy").read_text()) == json.loads((tmp_path / "plain").read_text())


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


def test_padding_of_a_prompt_is_ignored(tmp_path: Path) -> None:
    ids, mask = tiny.left_pad([PROMPT[0, :5], PROMPT[0]])
    padded = {"input_ids": ids[:1], "attention_mask": mask[:1], "position_ids": (mask.cumsum(-1) - 1)[:1]}
    settings = {**TALK, "max_new_tokens": 20}
    session = HogwildSession(small_model(), TOKENIZER, padded, **settings)
    plain = HogwildSession(small_model(), TOKENIZER, PROMPT[:, :5], **settings)
    session.run(4)
    session.save(tmp_path / "session.json")
    other = load(tmp_path / "session.json")
    plain.run(4)
    for one in (session, other, plain):
        one.run()
    assert state(other)[:-1] == state(session)[:-1] == state(plain)[:-1]


@pytest.mark.parametrize(("passes", "chunk", "forward_passes"), [(60, None, 1), (60, 80, 4)])
def test_many_passes_are_restored_in_one_forward_pass(
    tmp_path: Path, passes: int, chunk: int | None, forward_passes: int
) -> None:
    session = begin(
        num_workers=1, max_new_tokens=500, prefill_chunk_size=chunk, redundancy_prompt="", stop_on_answer="never"
    )
    session.run(passes)
    session.save(tmp_path / "session.json")
    other = load(tmp_path / "session.json")
    assert (session.passes, other.stats.forward_passes) == (passes, 1 + forward_passes)  # the prompt first
    for one in (session, other):
        one.run(20)
    assert state(other)[:-1] == state(session)[:-1]


def test_a_streamer_receives_all_earlier_text(tmp_path: Path) -> None:
    first, second = Listener(), Listener()
    session = begin(streamer=first)
    change_at_random(session, random.Random(1), changes=6)
    session.save(tmp_path / "session.json")
    other = load(tmp_path / "session.json", streamer=second)
    for one in (session, other):
        one.run(5)
    assert second.written == first.written


def test_processors_are_passed_to_load(tmp_path: Path) -> None:
    class Bans(LogitsProcessor):
        keeps_rows = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, ord("x")] = -100.0
            return scores

    session = begin(logits_processor=[Bans()])
    session.run(3)
    session.save(tmp_path / "session.json")
    with pytest.raises(ValueError, match=r"other processors or criteria: .*'Bans'.*, this session has"):
        load(tmp_path / "session.json")
    other = load(tmp_path / "session.json", logits_processor=[Bans()])
    for one in (session, other):
        one.run(8)
    assert state(other)[:-1] == state(session)[:-1]


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


def forge(saved: Path, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write a changed copy of a file with the digest of its new content."""
    state = json.loads(saved.read_text())
    head = {name: state.pop(name) for name in ("format", "version", "digest")}
    change(state)
    write_journal(path, state)
    assert json.loads(path.read_text())["digest"] != head["digest"]
    return path


def event(state: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the first event of a journal with a key."""
    return next(event for event in state["journal"] if kind in event)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["prompt"].append(10**6), "input_ids .* 1000000, outside the vocabulary"),
        (lambda s: s["settings"].update(num_workers="x"), "num_workers must be an int"),
        (lambda s: s["generation"].update(streamer=5), "streamer"),
        (lambda s: s.update(tokens=[]), "its texts have other tokens"),
        (lambda s: s["journal"].append({"magic": 1}), "is damaged"),
        (lambda s: s["journal"].append({"pass": [[9, 5, 0]]}), r"rows \[9\] were active"),
        (lambda s: event(s, "tell").update(tell=99), "is damaged"),
    ],
)
def test_forged_files_raise_errors_that_name_the_field(saved: Path, tmp_path: Path, change: Any, said: str) -> None:
    path = forge(saved, tmp_path / "forged.json", change)
    with pytest.raises(ValueError, match=rf"(?s)forged\.json .*{said}"):
        load(path)


def test_another_model_raises(saved: Path) -> None:
    other = hf_parallel.enable(copy.deepcopy(tiny.build("llama", seed=1)))
    with pytest.raises(ValueError, match="was saved with another model, or with other weights"):
        load(saved, other)
    with pytest.raises(TypeError, match=r"model must be a transformers.PreTrainedModel, got str"):
        load(saved, "llama")


class Other(AsciiTokenizer):
    """Adds a token to texts that contain `odd`."""

    def __init__(self, odd: str) -> None:
        self.odd = odd

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> dict[str, list[int]]:
        encoded = super().__call__(text, add_special_tokens, **kwargs)["input_ids"]
        return {"input_ids": encoded + [32] if self.odd in text else encoded}


@pytest.mark.parametrize("odd", ["[DONE]", "Alice 1", "a"])
def test_another_tokenizer_raises(saved: Path, odd: str) -> None:
    with pytest.raises(ValueError, match="was saved with another tokenizer"):
        load(saved, tokenizer=Other(odd))


def test_errors_of_save_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a session with output_scores cannot be saved"):
        begin(output_scores=True).save(tmp_path / "session.json")
    with pytest.raises(ValueError, match="eos_token_id cannot be saved: it must be plain data"):
        begin(eos_token_id=torch.tensor([5])).save(tmp_path / "session.json")
    assert not list(tmp_path.iterdir())

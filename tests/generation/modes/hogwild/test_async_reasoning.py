"""The mode async_reasoning: exact logits, who writes when, and texts that arrive meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dense
import pytest
import test_hogwild
import tiny
import torch
from dense import DenseOracle
from talks import SHORT
from workers import TOKENIZER, Recording, Scripted, check_against, encode, small_model

import hf_parallel
from hf_parallel import AsyncReasoningConfig, HogwildConfig, HogwildSession
from hf_parallel.engine import Engine
from hf_parallel.models.probing.capabilities import probe_capabilities

EVERY_SETTING: dict[str, Any] = test_hogwild.EVERY_SETTING
SMALL_CALL: dict[str, Any] = {"collaboration_prompt": "{names} talk.", "control_interval": 3}
MODE: dict[str, Any] = {"generation_mode": "async_reasoning"}
TEXTS: dict[str, Any] = {
    **SHORT,
    "own_headers": ["[T]", "[W]"],
    "step_prefix": "{name}: ",
    "control_prompt": "Ok?",
    "control_interval": 1000,
}
"""Short texts, so that tests can spell out everything that a row sees."""


@contextmanager
def answering(model: Any, *answers: bool, recording: Recording | None = None) -> Iterator[list[str]]:
    """Let a model answer the control prompt; after the given `answers` it says no. Yields what each answer has seen."""
    left, asked = list(answers), []

    def answer(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if TOKENIZER.decode(kwargs["input_ids"][0].tolist()).endswith("Ok?"):
            asked.append(recording.passes[-1].seen[-1] if recording else "Ok?")
            output.logits[..., ord("y")] = 1000.0 if left and left.pop(0) else -1000.0
        return output

    hook = model.register_forward_hook(answer, with_kwargs=True)
    yield asked
    hook.remove()


def talk(thoughts: str, answer: Any, **settings: Any) -> HogwildSession:
    """Return a session over the prompt `P` whose thinker and writer write scripts."""
    given = {**MODE, "do_sample": False, "max_new_tokens": 99, **TEXTS, **settings}
    return HogwildSession(
        small_model(), TOKENIZER, torch.tensor([encode("P")]), logits_processor=[ByRow([thoughts, answer])], **given
    )


class ByRow(Scripted):
    """Writes each row's script by what the row has written already, so that rows may pause."""

    keeps_rows = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, script in enumerate(self.scripts):
            name = f"{('Thinker', 'Writer')[row]}: "
            text = TOKENIZER.decode(input_ids[row].tolist()).split(name)[-1]
            token = script[len(text)] if len(text) < len(script) else ord("x")
            scores[row] = torch.nn.functional.one_hot(torch.tensor(token), scores.shape[1]).to(scores) * 100
        return scores


# Exactness


@pytest.mark.parametrize("layout", ["combined", "contiguous"])
def test_logits_equal_the_dense_oracle_with_pauses_and_injected_texts(layout: str) -> None:
    """Of the thinker, the writer and the control prompt, in float64 under a sliding window."""
    model = hf_parallel.enable(dense.in_float64(tiny.build("starcoder2"), num_layers=2))
    oracle, recording = DenseOracle(model, probe_capabilities(model).rotary), Recording(model)
    prompt = tiny.make_prompts([17])[0][None]
    settings = {**MODE, **TEXTS, "layout": layout, "control_interval": 2, "do_sample": True, "seed": 0}
    with answering(model, True, False, True) as asked:
        session = HogwildSession(model, TOKENIZER, prompt, max_new_tokens=40, suppress_tokens=[tiny.EOS], **settings)
        for text in ("No, wait.", "Go on."):
            session.run(7)
            session.inject("Thinker", text)
            session.inject("Writer" if layout == "contiguous" else "common", text)
        session.run(5)
    assert len(asked) == 9
    assert check_against(oracle, recording.passes) < 1e-9


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_float32_logits_of_a_batch_equal_the_dense_oracle(name: str) -> None:
    model = tiny.build(name)
    oracle, recording = DenseOracle(model, probe_capabilities(model).rotary), Recording(hf_parallel.enable(model))
    ids, mask = tiny.left_pad(tiny.make_prompts([17, 9]))
    settings = {**MODE, **TEXTS, "control_interval": 3, "tokenizer": TOKENIZER, "suppress_tokens": [tiny.EOS]}
    try:
        with answering(model, True, True):
            model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **settings)
    finally:
        hf_parallel.disable(model)
    assert check_against(oracle, recording.passes) < 1e-3


# Who writes when


def passes_of(session: HogwildSession, passes: int) -> str:
    """Run passes; return T for each in which only the thinker writes, W for only the writer, B for both."""
    letters = {("Thinker",): "T", ("Writer",): "W", ("Thinker", "Writer"): "B", (): ""}
    return "".join(letters[tuple(session.step())] for _ in range(passes))


def test_the_writer_pauses_after_a_paragraph_until_the_thoughts_suffice() -> None:
    recording = Recording()
    with answering(small_model(), False, True, True, recording=recording) as asked:
        session = talk("ab\n\nc\n\ndefgh\n\n", ["U\n\nV", tiny.EOS])
        assert passes_of(session, 8) == "TTTTTTTB"
        assert [segment.seen for segment in recording.passes[-1].segments][-2:] == [
            "P[DONE][OTHERS]Writer: [T]Thinker: ab\n\nc\n\n",
            "P[DONE][OTHERS]Thinker: ab\n\nc\n\n[W]Writer: ",
        ]
        assert passes_of(session, 20) == "BBTTTTBB"
    assert recording.passes[-1].seen == [
        "P[DONE][OTHERS]Writer: U\n\nV[T]Thinker: ab\n\nc\n\ndefgh\n\nx",
        "P[DONE][OTHERS]Thinker: ab\n\nc\n\ndefgh\n\nx[W]Writer: U\n\nV",
    ]
    assert asked == [
        "P[DONE][OTHERS][T]Thinker: ab\nOk?",
        "P[DONE][OTHERS][T]Thinker: ab\n\nc\nOk?",
        "P[DONE][OTHERS]Writer: U\n[T]Thinker: ab\n\nc\n\ndefgh\nOk?",
    ]
    assert session.texts == {"Thinker": "Thinker: ab\n\nc\n\ndefgh\n\nxx", "Writer": "Writer: U\n\nV"}
    assert session.stats.decoded_tokens == 16 + 5


def test_the_control_prompt_is_asked_at_each_interval_of_the_thoughts() -> None:
    with answering(small_model(), False, True, False) as asked:
        assert passes_of(talk("abcdefghi", "U", control_interval=3), 10) == "TTTTTTBBBT"
    assert len(asked) == 3


@pytest.mark.parametrize("end", [["ab", tiny.EOS], "ab</think>"])
def test_the_writer_goes_on_alone_when_the_thoughts_have_ended(end: Any) -> None:
    with answering(small_model()) as asked:
        session = talk(end, ["U\n\nV", tiny.EOS])
        session.run()
    assert not asked
    assert session.texts["Writer"] == "Writer: U\n\nV"
    assert session.stats.decoded_tokens == len(encode(end)) + 5
    assert passes_of(talk("ab", ["U", tiny.EOS], max_new_tokens=3), 9) == "TTTWW"


def test_a_call_of_the_mode_equals_a_session_and_a_request_for_each_of_its_prompts() -> None:
    prompts, settings = (
        [torch.tensor(encode(text)) for text in ("P", "Question")],
        {**MODE, **TEXTS, "tokenizer": TOKENIZER},
    )
    settings |= {"max_new_tokens": 15, "control_interval": 4, "do_sample": False, "min_new_tokens": 9}
    ids, mask = tiny.left_pad(prompts)
    out = small_model().generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
    sessions = [HogwildSession(small_model(), prompt=prompt[None], **settings) for prompt in prompts]
    for session in sessions:
        session.run()
    with Engine(small_model()) as engine:
        handles = [engine.submit(prompt[None], return_dict_in_generate=True, **settings) for prompt in prompts]
        assert [text for handle in handles for text in handle.result(600).texts] == out.texts
    assert [text for session in sessions for text in session.texts.values()] == out.texts
    assert out.names == [["Thinker", "Writer"]] * 2


# Sessions


def test_texts_that_arrive_while_it_decodes_are_seen_by_both() -> None:
    recording = Recording()
    with answering(small_model(), True):
        session = talk("ab\n\ncd", "UV")
        session.run(6)
        session.inject("common", "It rains.")
        session.inject("Thinker", "Hm.")
        session.run(1)
        assert recording.passes[-1].seen[1:] == [
            "P[DONE]It rains.\n\n[OTHERS]Writer: UV[T]Thinker: ab\n\ncd\nHm.",
            "P[DONE]It rains.\n\n[OTHERS]Thinker: ab\n\ncd\nHm.[W]Writer: UV",
        ]
    assert [step.text for step in session.history] == ["It rains.\n\n"]


# Malformed input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1, "worker_names": None, "own_headers": None}, "two workers .* num_workers=1"),
        ({"layout": "interleaved"}, "layout='interleaved'"),
        ({"own_headers": ["one"]}, r"own_headers must be 2 texts, got \['one'\]"),
        ({"control_prompt": 3}, "control_prompt must be a string, got 3"),
        ({"step_move": "reencode"}, "step_move must be 'rotate' where .* got 'reencode' with .*control_prompt='.*Wait"),
        ({"control_interval": 0}, "control_interval must be an int of at least 1, got 0"),
        ({"logits_cache": hf_parallel.LogitsCache()}, "logits_cache must be None with a control_prompt"),
    ],
)
def test_settings_that_leave_nobody_in_control_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncReasoningConfig(**settings)
    assert not HogwildConfig().control_prompt

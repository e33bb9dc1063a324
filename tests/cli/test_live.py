"""The live view shows the names and texts of the rows of every mode, as many as fit."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import tiny
import torch
from consoles import a_pipe, a_terminal, printed
from rich.text import Text
from stories import tell
from talks import SHORT, scripted
from workers import TOKENIZER, small_model

import hf_parallel
from hf_parallel import HogwildConfig, ParallelStreamer, PDOSConfig, SelfConsistencyConfig, SharedPrefixConfig
from hf_parallel.cli.interruptible import InterruptibleCall
from hf_parallel.cli.live import ABOVE, LiveView
from hf_parallel.generation import MODES
from hf_parallel.generation.presets import SAMPLING

pytestmark = pytest.mark.usefixtures("one_thread")

STORY = "Now. ####A:......\n####B:......\n####%%%%"
PROMPT = tiny.make_prompts([9], seed=4)[0][None]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class WithSpecials:
    """Tokenizer that names its special tokens."""

    all_special_ids = (tiny.PAD, tiny.BOS, tiny.EOS)
    decode = staticmethod(TOKENIZER.decode)


def drawn(view: LiveView, height: int | None = None) -> list[str]:
    """Return the lines of the picture, without colours."""
    lines = view.console.render_lines(view.picture(height), pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def texts(view: LiveView) -> dict[str, str]:
    return {row.name: "".join(step.text for step in row.steps) for row in view.rows.values()}


def write(view: LiveView, steps: list[str], end_step: bool = True) -> None:
    """Write a step of every worker, word by word."""
    words = [text.split() for text in steps]
    for row in range(len(steps)):
        view.write_row(row, "", "begin")
    for i in range(max(len(row) for row in words)):
        view.put(torch.zeros(len(steps), dtype=torch.long))
        for row, mine in enumerate(words):
            if i < len(mine):
                view.write_row(row, f" {mine[i]}", "token")
            if end_step and i == len(mine) - 1:
                view.write_row(row, "", "step")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_a_view(mode: str) -> None:
    view = LiveView(MODES[mode](), a_terminal())
    assert isinstance(view, ParallelStreamer)
    assert drawn(view, 16)[-1] == "reading the task ..."


def test_branches_are_columns_next_to_the_answer() -> None:
    view = LiveView(PDOSConfig(), a_terminal())
    with view, view.watching(small_model()):
        out = tell([STORY + "So.", tiny.EOS], branches=["one####", "two####"], streamer=view)
    assert texts(view) == {"Answer": STORY + "So.", "Branch 1": "####A:one####", "Branch 2": "####B:two####"}
    assert view.passes == out.stats.forward_passes
    assert view.kv_tokens * out.past_key_values.pool.arena.bytes_per_token == out.stats.kv_bytes
    joined = view.rows[0].steps[0].ended
    assert joined is not None
    assert [row.steps[0].ended for row in view.rows.values()] == [joined] * 3
    picture = "\n".join(drawn(view))
    assert all(f"{name}, done" in picture for name in ("Answer", "Branch 1", "Branch 2"))
    assert f"\u2713{joined}" in picture


def test_answers_and_conclusions_have_separate_columns() -> None:
    config = SelfConsistencyConfig(num_answers=2, vote="final", conclusion_tokens=4, answer_pattern="")
    view = LiveView(config, a_terminal())
    given: dict[str, Any] = {"parallel_config": config, "tokenizer": TOKENIZER, "do_sample": True, "max_new_tokens": 6}
    with view:
        out = small_model().generate(PROMPT, **given, streamer=view, return_dict_in_generate=True)
    shown = texts(view)
    assert "Conclusion" in shown
    assert [len(shown[name]) for name in ("Answer 1", "Answer 2")] == [len(text) for text in out.texts[0]]


@pytest.mark.parametrize("mode", ["shared_prefix", "resample"])
def test_tokens_of_modes_that_stream_no_text_are_decoded(mode: str) -> None:
    view = LiveView(MODES[mode](), a_terminal(), WithSpecials())
    given = {"do_sample": True, "max_new_tokens": 8, "eos_token_id": ord("e"), "pad_token_id": tiny.PAD}
    given |= {"logits_cache": hf_parallel.LogitsCache()} if mode == "resample" else {}
    with view:
        out = small_model().generate(PROMPT, generation_mode=mode, num_return_sequences=3, streamer=view, **given)
    expected = [TOKENIZER.decode([t for t in row.tolist() if t != tiny.PAD]) for row in out[:, PROMPT.shape[1] :]]
    assert list(texts(view)) == ["Answer 1", "Answer 2", "Answer 3"]
    assert [re.sub(r"[^\n -~]", " ", text) for text in expected] == list(texts(view).values())
    assert view.passes == out.shape[1] - PROMPT.shape[1]


def test_a_session_shows_injected_text_and_new_workers() -> None:
    view = LiveView(HogwildConfig(**SHORT), a_terminal(100))
    with view:
        session = scripted("One", "Uno", streamer=view)
        session.run(3)
        session.inject("Alice", " Why? ")
        session.inject("common", "It rains.")
        session.add_worker("Carol")
        session.run(2)
    assert texts(view) == {"Alice": "One\nWhy? xx", "Bob": "Unoxx", "common": "It rains.\n\n", "Carol": "xx"}
    assert view.rows[-1].steps[0].ended == 3


@pytest.mark.slow
def test_the_view_shows_the_text_and_cache_size_of_hogwild(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    config = HogwildConfig(seed=3)  # the model's preset adds the texts
    view = LiveView(config, a_terminal())
    given = {**SAMPLING, "parallel_config": config, "tokenizer": tokenizer, "max_new_tokens": 24}
    prompt = hf_parallel.hogwild_prompt("Plan a picnic.", tokenizer, config)
    hf_parallel.enable(model)
    try:
        with view, view.watching(model):
            output = model.generate(**prompt, **given, streamer=view, return_dict_in_generate=True)
    finally:
        hf_parallel.disable(model)
    moved = {(step.worker, step.step): step.forward_pass for step in output.history[0]}
    steps = {(row, i + 1): step.ended for row, of in view.rows.items() for i, step in enumerate(of.steps)}
    assert steps == moved
    assert any(moved.values())
    assert view.tokens == output.stats.decoded_tokens
    assert view.kv_tokens * output.past_key_values.pool.arena.bytes_per_token == output.stats.kv_bytes


@pytest.mark.parametrize(("width", "height"), [(40, 12), (60, 20), (80, 24), (250, 50)])
def test_a_frame_shows_as_many_rows_as_fit_unfinished_ones_first(width: int, height: int) -> None:
    view = LiveView(PDOSConfig(), a_terminal(width, height))
    view.write_row(0, "the skeleton", "token")
    for branch in range(1, 11):
        view.write_row(branch, f"title {branch} ", "begin")
        view.write_row(branch, "\u77ed\u3044 text " + "continues " * 30 * (branch == 4), "token")
    for branch in (1, 2, 3):
        view.write_row(branch, "", "end")
    lines = drawn(view, height - ABOVE)
    assert len(lines) == max(height - ABOVE, 6)
    assert max(Text(line).cell_len for line in lines) <= width
    fit = min(width // 24, 11)
    assert (f"{11 - fit} more row" in lines[-1]) == (fit < 11)
    shown = [number for number in range(1, 11) if f"Branch {number}," in lines[1]]
    assert shown == ([4, 5, 6, 7, 8, 9, 10][: fit - 1] if fit < 8 else [*range(11 - fit + 1, 11)])


@pytest.mark.parametrize("console", [a_terminal, a_pipe])
def test_the_last_picture_has_all_text_and_marks_the_pass_of_each_step(console: Any) -> None:
    with LiveView(HogwildConfig(), console()) as view:
        write(view, ["one two three.", "one two three four five."])
        for number in range(30):
            write(view, [f"a{number} moves.", f"b{number} moves."])
        write(view, ["unfinished", "unfinished"], end_step=False)
    text = printed(view.console)
    final = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text[text.rindex("Alice") :])
    assert all(f"{who}{number} moves." in final for who in "ab" for number in range(30))
    assert re.search("[\u2713+]3 +one two three.", final)
    assert re.search("[\u2713+]5 +one two three four five.", final)
    assert ("\x1b" in text) == (console is a_terminal)


@pytest.mark.parametrize(("error", "interrupted"), [(KeyboardInterrupt, False), (None, True), (None, False)])
def test_an_interrupted_view_restores_the_cursor_and_marks_unfinished_rows(
    error: type[BaseException] | None, interrupted: bool
) -> None:
    console = a_terminal()
    with suppress(KeyboardInterrupt), LiveView(HogwildConfig(), console) as view:
        for row, text in enumerate(("Ann.", "two\nlines")):
            view.write_row(row, text, "token")
        view.write_row(0, "", "step")
        view.write_row(0, "", "end")
        view.interrupted = interrupted
        if error is not None:
            raise error
    shown = printed(console)
    assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR) == 1
    final = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", shown[shown.index(SHOW_CURSOR) :])
    assert "Alice, done" in final
    assert ("Bob, interrupted" in final) == (interrupted or error is not None)


def test_terminal_commands_in_generated_text_are_not_printed() -> None:
    for console in (a_terminal(), a_pipe()):
        with LiveView(HogwildConfig(), console) as view:
            write(view, ["clear \x1b[2J\x07 the", "screen \x9b2J"])
        assert not re.search("\x1b\\[2J|\x07|\x9b", printed(console))


def test_a_row_that_begins_another_text_is_not_done() -> None:
    """The row of the outline also generates the conclusion."""
    view = LiveView(MODES["skeleton_of_thought"](), a_terminal())
    for event in ("begin", "token", "end", "begin", "token"):
        view.write_row(0, "a" if event != "end" else "", event)
    assert (view.rows[0].name, view.rows[0].done, len(view.rows[0].steps)) == ("Outline", False, 2)


def test_answers_of_a_live_view_say_which_are_truncated() -> None:
    config = SharedPrefixConfig()
    arguments = {"input_ids": PROMPT, "max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    call = InterruptibleCall(small_model(), TOKENIZER, config, arguments)
    call.run(LiveView(config, a_pipe(), TOKENIZER))
    assert [record["truncated"] for record in call.records(["P"])] == [True]

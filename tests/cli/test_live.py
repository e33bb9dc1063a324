"""The live view shows the names and texts of the rows of every mode, as many as fit."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import tiny
import torch
from consoles import a_pipe, a_terminal, printed
from rich.console import Console
from rich.text import Text
from stories import tell
from talks import SHORT, scripted
from workers import TOKENIZER, small_model

import hf_parallel
from hf_parallel import HogwildConfig, ParallelStreamer, PDOSConfig, SelfConsistencyConfig, SharedPrefixConfig
from hf_parallel.cli.interruptible import InterruptibleCall
from hf_parallel.cli.live import ABOVE, LiveColumns, LiveLines, LiveTails, LiveView, live_view
from hf_parallel.generation import MODES

pytestmark = pytest.mark.usefixtures("one_thread")

STORY = "Now. ####A:......\n####B:......\n####%%%%"
PROMPT = tiny.make_prompts([9], seed=4)[0][None]


def drawn(view: LiveView, height: int | None = None) -> list[str]:
    """Return the lines of the picture, without colours."""
    assert isinstance(view, LiveColumns)
    lines = view.console.render_lines(view.picture(height), pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def texts(view: LiveView) -> dict[str, str]:
    return {row.name: "".join(step.text for step in row.steps) for row in view.rows.values()}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_a_view(mode: str) -> None:
    view = live_view(MODES[mode](), a_terminal())
    assert isinstance(view, LiveColumns)
    assert isinstance(view, ParallelStreamer)
    assert type(live_view(MODES[mode](), a_pipe())) is LiveLines
    assert drawn(view, 16)[-1] == "reading the task ..."


def test_branches_are_columns_next_to_the_answer() -> None:
    view = live_view(PDOSConfig(), a_terminal())
    with view, view.watching(small_model()):
        out = tell([STORY + "So.", tiny.EOS], branches=["one####", "two####"], streamer=view)
    assert texts(view) == {"Answer": STORY + "So.", "Branch 1": "####A:one####", "Branch 2": "####B:two####"}
    assert view.passes == out.stats.forward_passes
    joined = view.rows[0].steps[0].ended
    assert joined is not None
    assert [row.steps[0].ended for row in view.rows.values()] == [joined] * 3
    picture = "\n".join(drawn(view))
    assert all(f"{name}, done" in picture for name in ("Answer", "Branch 1", "Branch 2"))
    assert f"\u2713{joined}" in picture


def test_a_branch_is_printed_once_without_a_terminal() -> None:
    console = a_pipe()
    with live_view(PDOSConfig(), console) as view:
        tell([STORY + "So.", tiny.EOS], branches=["one####", "two####"], streamer=view)
    shown = printed(console)
    assert re.search(r"^Branch 1 \| ####A:one####  \(end\)$", shown, re.MULTILINE)
    assert shown.count("A:one") == shown.count("B:two") == 1
    assert re.search(r"^Answer +\| So\.  \(end\)$", shown, re.MULTILINE)


def test_answers_and_conclusions_have_separate_columns() -> None:
    config = SelfConsistencyConfig(num_answers=2, vote="final", conclusion_tokens=4, answer_pattern="")
    view = live_view(config, a_terminal())
    with view:
        out = small_model().generate(
            PROMPT,
            generation_mode="self_consistency",
            parallel_config=config,
            tokenizer=TOKENIZER,
            do_sample=True,
            max_new_tokens=6,
            streamer=view,
            return_dict_in_generate=True,
        )
    shown = {name: text for name, text in texts(view).items() if name != "Conclusion"}
    assert list(shown) == ["Answer 1", "Answer 2"]
    assert "Conclusion" in texts(view)
    assert [len(text) for text in shown.values()] == [len(text) for text in out.texts[0]]


@pytest.mark.parametrize("mode", ["shared_prefix", "resample"])
def test_tokens_of_modes_that_stream_no_text_are_decoded(mode: str) -> None:
    view = live_view(MODES[mode](), a_terminal(), TOKENIZER_WITH_SPECIALS)
    with view:
        out = small_model().generate(
            PROMPT,
            generation_mode=mode,
            num_return_sequences=3,
            do_sample=True,
            max_new_tokens=8,
            streamer=view,
            logits_processor=None,
            eos_token_id=ord("e"),
            pad_token_id=tiny.PAD,
            **({"logits_cache": hf_parallel.LogitsCache()} if mode == "resample" else {}),
        )
    expected = [TOKENIZER.decode([t for t in row.tolist() if t != tiny.PAD]) for row in out[:, PROMPT.shape[1] :]]
    assert list(texts(view)) == ["Answer 1", "Answer 2", "Answer 3"]
    assert [re.sub(r"[^\n -~]", " ", text) for text in expected] == list(texts(view).values())
    assert view.passes == out.shape[1] - PROMPT.shape[1]


class _WithSpecials:
    all_special_ids = (tiny.PAD, tiny.BOS, tiny.EOS)
    decode = staticmethod(TOKENIZER.decode)


TOKENIZER_WITH_SPECIALS = _WithSpecials()


def test_completions_are_printed_when_they_end_without_a_terminal() -> None:
    console = a_pipe()
    with live_view(SharedPrefixConfig(), console, TOKENIZER_WITH_SPECIALS) as view:
        for value in (torch.ones(2, 3), torch.tensor([ord("a"), ord("c")]), torch.tensor([ord("b"), tiny.EOS])):
            view.put(value)
        view.end()
    assert printed(console).splitlines() == ["Answer 2 | c  (end)", "Answer 1 | ab  (end)"]


def test_tokens_are_counted_without_a_tokenizer() -> None:
    view = live_view(SharedPrefixConfig(), a_terminal())
    view.put(torch.zeros(2, 5))
    view.put(torch.zeros(2))
    assert (view.passes, view.tokens, view.rows) == (1, 2, {})


def test_a_session_shows_injected_text_and_new_workers() -> None:
    view = live_view(HogwildConfig(**SHORT), a_terminal(100))
    with view:
        session = scripted("One", "Uno", streamer=view)
        session.run(3)
        session.inject("Alice", " Why? ")
        session.inject("common", "It rains.")
        session.add_worker("Carol")
        session.run(2)
    assert texts(view) == {"Alice": "One\nWhy? xx", "Bob": "Unoxx", "common": "It rains.\n\n", "Carol": "xx"}
    assert view.rows[-1].steps[0].ended == 3


def write_branches(view: LiveView, count: int) -> None:
    for branch in range(1, count + 1):
        view.write_row(branch, f"title {branch} ", "begin")
    for branch in range(1, count + 1):
        view.write_row(branch, f"text of {branch}", "token")


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (250, 50)])
def test_a_frame_shows_as_many_rows_as_fit_unfinished_ones_first(width: int, height: int) -> None:
    view = live_view(PDOSConfig(), a_terminal(width, height))
    view.write_row(0, "the skeleton", "token")
    write_branches(view, 10)
    for branch in (1, 2, 3):
        view.write_row(branch, "", "end")
    lines = drawn(view, height - ABOVE)
    assert len(lines) == height - ABOVE
    assert max(Text(line).cell_len for line in lines) <= width
    fit = min(width // 24, 11)
    shown = [name for name in view.rows if f"title {name} " in "\n".join(lines)]
    assert shown == ([4, 5, 6, 7, 8, 9, 10][: fit - 1] if fit < 8 else [*range(11 - fit + 1, 11)])
    assert (f"{11 - fit} more row" in lines[-1]) == (fit < 11)


def test_the_final_picture_has_all_rows() -> None:
    console = a_terminal(80)
    with live_view(PDOSConfig(), console) as view:
        write_branches(view, 10)
    shown = printed(console)
    final = shown[shown.rindex("Branch 1,") :] if "Branch 1," in shown else shown
    assert all(f"text of {branch}" in final for branch in range(1, 11))
    assert max(Text(re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", line)).cell_len for line in final.splitlines()) <= 80


def test_views_of_many_rows_show_the_first_of_those_that_are_active() -> None:
    for console in (a_terminal(600, 40), a_terminal(40, 40)):
        view = live_view(SharedPrefixConfig(), console, TOKENIZER)
        view.put(torch.zeros(64, 3))
        for _ in range(2):
            view.put(torch.full((64,), 97))
        for row in range(5):
            view.write_row(row, "", "end")
        view.passes = 2
        lines = ["".join(piece.text for piece in line) for line in console.render_lines(view.frame(), pad=False)]
        assert len(lines) < 40
        shown = re.findall(r"Answer (\d+)(?: |,)", "\n".join(lines))
        assert shown == [str(row) for row in range(6, 18)]
        hidden = 64 - 12 - 5 * isinstance(view, LiveTails)
        assert view._summary_line(hidden).plain.endswith(f", and {hidden} more rows")
        assert lines[-1].startswith(view._summary_line(hidden).plain[:39])
        with view:
            pass
    assert printed(console).count("Answer 64") <= 1


def half_written(console: Console, error: type[BaseException] | None, interrupted: bool) -> str:
    """Return the output of a call that ends while Bob has an unfinished step; Alice is done."""
    with suppress(KeyboardInterrupt), live_view(HogwildConfig(), console) as view:
        for row, text in enumerate(("Ann.", "two\nlines")):
            view.write_row(row, text, "token")
        view.write_row(0, "", "step")
        view.write_row(0, "", "end")
        view.interrupted = interrupted
        if error is not None:
            raise error
    return printed(console)


@pytest.mark.parametrize(("error", "interrupted"), [(KeyboardInterrupt, False), (None, True)])
def test_an_interrupted_view_shows_unfinished_steps(error: type[BaseException] | None, interrupted: bool) -> None:
    assert half_written(a_pipe(), error, interrupted).splitlines()[1:] == [
        "Bob   | two",
        "Bob   | lines  (interrupted)",
    ]
    picture = half_written(a_terminal(), error, interrupted)
    final = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", picture[picture.rindex("Alice") :])
    assert "Alice, done" in final
    assert "Bob, interrupted" in final


def test_a_view_without_an_interrupt_marks_none() -> None:
    for console in (a_pipe(), a_terminal()):
        assert "interrupted" not in half_written(console, None, interrupted=False)


def test_a_narrow_terminal_shows_the_ends_of_unfinished_rows() -> None:
    view = live_view(HogwildConfig(), a_terminal(40, 5))
    view.write_row(0, "one two\n" * 20, "token")
    view.write_row(1, "\u77ed\u3044" * 20 + "e", "token")
    assert isinstance(view, LiveTails)
    lines = [Text("".join(piece.text for piece in line)) for line in view.console.render_lines(view.frame(), pad=False)]
    assert re.fullmatch(r"Alice \| .* one two one two", lines[0].plain)
    assert re.fullmatch("Bob   \\| [\u77ed\u3044]{15}e", lines[1].plain)
    assert [line.cell_len for line in lines[:2]] == [40, 39]
    for row in range(2, 9):
        view.write_row(row, "more", "token")
    assert len(view.console.render_lines(view.frame(), pad=False)) == 4
    view.write_row(0, "", "step")
    view.write_row(1, "", "end")
    lines = ["".join(piece.text for piece in line) for line in view.console.render_lines(view.frame(), pad=False)]
    assert [line.split("|")[0].strip() for line in lines[:2]] == ["Alice", "Carol"]
    assert "one" not in lines[0]


def test_the_final_output_in_a_narrow_terminal_is_lines_and_the_summary() -> None:
    console = a_terminal(40)
    picture = half_written(console, KeyboardInterrupt, interrupted=False)
    final = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", picture[picture.rindex("Bob   | two") :])
    assert [line.strip() for line in final.splitlines() if line.strip()] == [
        "Bob   | two",
        "Bob   | lines  (interrupted)",
        "reading the task ...",
    ]
    assert picture.rindex("\x1b[?25h") > picture.rindex("\x1b[?25l")


def test_branches_need_space_for_two_columns() -> None:
    assert isinstance(live_view(PDOSConfig(), a_terminal(47)), LiveLines)
    assert isinstance(live_view(PDOSConfig(), a_terminal(48)), LiveColumns)
    assert isinstance(live_view(PDOSConfig(), a_terminal(80, 8)), LiveLines)


def test_a_row_that_begins_another_text_is_not_done() -> None:
    """The row of the outline also generates the conclusion."""
    view = live_view(MODES["skeleton_of_thought"](), a_terminal())
    for event in ("begin", "token", "end", "begin", "token"):
        view.write_row(0, "a" if event != "end" else "", event)
    assert (view.rows[0].name, view.rows[0].done, len(view.rows[0].steps)) == ("Outline", False, 2)


def test_answers_of_a_live_view_say_which_are_truncated() -> None:
    """The record of the call has this, whatever the streamer is."""
    config = SharedPrefixConfig()
    arguments = {"input_ids": PROMPT, "max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    call = InterruptibleCall(small_model(), TOKENIZER, config, arguments)
    call.run(LiveView(config, a_pipe(), TOKENIZER))
    assert [record["truncated"] for record in call.records(["P"])] == [True]

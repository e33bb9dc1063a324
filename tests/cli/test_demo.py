"""`hf-parallel demo`: its output, the size of the live view, and interrupts."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from consoles import a_pipe, a_terminal, printed
from rich.text import Text

import hf_parallel
from hf_parallel import HogwildConfig, ParallelStreamer, hogwild_prompt
from hf_parallel.cli import demo
from hf_parallel.cli.live import ABOVE, LiveColumns, LiveLines, LiveView, live_view, make_console
from hf_parallel.cli.main import main
from hf_parallel.cli.measure import StepClock, dense_bytes, long_prompt
from hf_parallel.generation.presets import SAMPLING

pytestmark = pytest.mark.usefixtures("one_thread")

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def drawn(view: LiveColumns, height: int | None = None) -> list[str]:
    """Return the lines of the picture, without colours."""
    lines = view.console.render_lines(view.picture(height), pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def write(view: LiveView, texts: list[str], end_step: bool = True) -> None:
    """Write a step of every worker, word by word."""
    for row, worker in view.rows.items():
        view.write_row(row, view.config.step_prefix.format(name=worker.name, step=len(worker.steps) + 1), "begin")
    words = [text.split() for text in texts]
    for i in range(max(len(row) for row in words)):
        view.put(torch.zeros(len(texts), dtype=torch.long))
        for row, mine in enumerate(words):
            if i < len(mine):
                view.write_row(row, f" {mine[i]}", "token")
            if end_step and i == len(mine) - 1:
                view.write_row(row, "", "step")


@pytest.fixture(scope="module")
def quick_demo(one_thread: None, embedded: tuple[Any, Any]) -> str:
    """Output of `hf-parallel demo --quick` without a terminal."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("FORCE_COLOR", "1")
        assert main(["demo", "--quick", "--max-new-tokens", "22"]) == 0
    return out.getvalue()


def test_demo_shows_a_finished_step_of_each_worker(quick_demo: str) -> None:
    assert re.search(r"^Alice \| .*\w.* \(step 1, pass \d+\)$", quick_demo, re.MULTILINE)
    assert re.search(r"^Bob   \| .*\w.* \(step 1, pass \d+\)$", quick_demo, re.MULTILINE)
    assert "22 passes, 44 tokens" in quick_demo


def test_demo_gets_the_tokens_of_generate(quick_demo: str) -> None:
    assert "same tokens: yes" in quick_demo


def test_demo_writes_no_terminal_commands_into_a_pipe(quick_demo: str) -> None:
    assert "\x1b" not in quick_demo


def test_demo_times_both_ways_in_turns_and_shows_different_sampled_completions(quick_demo: str) -> None:
    lines = [line.strip() for line in quick_demo.splitlines()]
    ways = [line.removesuffix(" ...") for line in lines if line.endswith(" ...")]
    assert ways == ["shared_prefix", "generate", "shared_prefix"]
    sampled = [line for line in lines[lines.index("Sampled, 4 of 4 completions:") :] if line.startswith("- ")]
    assert len(sampled) == 4
    assert len(set(sampled)) > 1


def test_a_demo_with_other_tokens_says_so(monkeypatch: pytest.MonkeyPatch, embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    outputs = iter([torch.full((2, 12), token) for token in (20, 20, 21)])

    def measure(*arguments: Any) -> demo.Measured:
        return demo.Measured(next(outputs), prefill=1.0, step=1.0, total=2.0, kv_bytes=8)

    monkeypatch.setattr(demo, "measure", measure)
    console = a_pipe()
    hf_parallel.enable(model)
    try:
        demo.show_shared_prefix(console, model, tokenizer, demo.Sizes(prompt=10, rows=2, new_tokens=2))
    finally:
        hf_parallel.disable(model)
    assert "same tokens: NO" in printed(console)


def test_every_view_is_a_parallel_streamer() -> None:
    assert isinstance(LiveLines(HogwildConfig(), a_pipe()), ParallelStreamer)
    assert isinstance(LiveColumns(HogwildConfig(), a_terminal()), ParallelStreamer)


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (100, 50)])
def test_the_picture_fits_the_terminal(width: int, height: int) -> None:
    view = LiveColumns(HogwildConfig(), a_terminal(width, height))
    for number in range(12):
        write(view, [f"step {number} of Alice " + "continues " * 15, f"step {number} of Bob, 短い " + "x" * 90])
    write(view, ["Alice's last", "Bob's last"], end_step=False)
    lines = drawn(view, height - ABOVE)
    assert len(lines) <= height - ABOVE
    assert max(Text(line).cell_len for line in lines) <= width
    assert any("Alice's last" in line and "Bob's last" in line for line in lines)


def test_the_height_of_the_picture_does_not_depend_on_the_text() -> None:
    view = LiveColumns(HogwildConfig(), a_terminal())
    heights = [len(drawn(view, 15))]
    for _ in range(8):
        write(view, ["one two three " * 9, "four"])
        heights.append(len(drawn(view, 15)))
    assert set(heights) == {15}


def test_the_final_picture_has_all_text() -> None:
    console = a_terminal()
    with LiveColumns(HogwildConfig(), console) as view:
        for number in range(30):
            write(view, [f"a{number} moves.", f"b{number} moves."])
    text = printed(console)
    final = text[text.rindex("Alice") :]
    assert all(f"{who}{number} moves." in final for who in "ab" for number in range(30))


def test_steps_are_marked_with_the_pass_at_which_they_moved() -> None:
    view = LiveColumns(HogwildConfig(), a_terminal())
    write(view, ["one two three.", "one two three four five."])
    write(view, ["unfinished", "unfinished"], end_step=False)
    picture = "\n".join(drawn(view))
    assert "\u27133   one two three." in picture
    assert "\u27135   one two three four five." in picture
    assert "Alice, step 2" in picture
    assert "Bob, step 2" in picture


def test_an_interrupt_restores_the_cursor() -> None:
    console = a_terminal()
    with suppress(KeyboardInterrupt), LiveColumns(HogwildConfig(), console) as view:
        write(view, ["I was", "interrupted"], end_step=False)
        raise KeyboardInterrupt
    text = printed(console)
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert "interrupted" in text[text.index(SHOW_CURSOR) :]


def test_terminal_commands_in_generated_text_are_not_printed() -> None:
    for console, kind in ((a_terminal(), LiveColumns), (a_pipe(), LiveLines)):
        with kind(HogwildConfig(), console) as view:
            write(view, ["clear \x1b[2J\x07 the", "screen \x9b2J"])
        assert not re.search("\x1b\\[2J|\x07|\x9b", printed(console))


def test_lines_name_the_worker_on_every_line() -> None:
    console = a_pipe()
    view = LiveLines(HogwildConfig(), console)
    view.write_row(1, "**Bob [1]:** ", "begin")
    view.write_row(1, "first\nsecond.\n\n", "token")
    view.write_row(1, "", "step")
    assert printed(console).splitlines()[0] == "Bob   | first"
    assert printed(console).splitlines()[1].startswith("Bob   | second.")


@pytest.mark.parametrize(
    ("terminal", "environment", "columns"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
    ids=["terminal", "pipe", "no-color", "dumb"],
)
def test_columns_need_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], columns: bool
) -> None:
    stdout = io.StringIO()
    stdout.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stdout)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | environment).items():
        monkeypatch.setenv(name, value)
    assert isinstance(live_view(HogwildConfig(), make_console()), LiveColumns if columns else LiveLines)


def test_columns_need_space() -> None:
    assert isinstance(live_view(HogwildConfig(num_workers=8), a_terminal(100, 40)), LiveLines)
    assert isinstance(live_view(HogwildConfig(), a_terminal(80, 6)), LiveLines)


def test_the_view_shows_the_text_and_cache_size_of_hogwild(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    config = HogwildConfig(seed=3)  # the model's preset adds the texts
    view = LiveColumns(config, a_terminal())
    hf_parallel.enable(model)
    try:
        with view, view.watching(model):
            output = model.generate(
                **hogwild_prompt("Plan a picnic.", tokenizer, config),
                generation_mode="hogwild",
                parallel_config=config,
                tokenizer=tokenizer,
                max_new_tokens=24,
                streamer=view,
                return_dict_in_generate=True,
                **SAMPLING,
            )
    finally:
        hf_parallel.disable(model)
    moved = {(step.worker, step.step): step.forward_pass for step in output.history[0]}
    shown = {(row, i + 1): step for row, worker in view.rows.items() for i, step in enumerate(worker.steps)}
    assert {place: step.ended for place, step in shown.items()} == moved
    assert any(moved.values())
    for row, worker in view.rows.items():
        assert "".join(f"{worker.name}:{step.text}" for step in worker.steps) == output.texts[row]
    assert view.tokens == output.stats.decoded_tokens
    assert view.kv_tokens * output.past_key_values.pool.arena.bytes_per_token == output.stats.kv_bytes


def test_the_first_interrupt_skips_the_workers_and_the_second_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], embedded: tuple[Any, Any]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "load", lambda *arguments: embedded)
    monkeypatch.setattr(demo, "show_workers", interrupted)
    monkeypatch.setattr(demo, "show_shared_prefix", interrupted)
    assert demo.main([]) == 130
    shown = capsys.readouterr().out
    assert shown.index("on to the second part") < shown.index("Stopped.")


def test_an_error_names_a_model_that_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere cannot be used"):
        demo.load(str(tmp_path / "nowhere"), a_pipe())


def test_a_task_is_shown_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], embedded: tuple[Any, Any]
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Any:
        raise demo.UnsupportedModelError("no call")

    task = "Sort [3, 1] in [red]code[/red] :smile:"
    monkeypatch.setattr(demo, "load", lambda *arguments: embedded)
    monkeypatch.setattr(embedded[0], "generate", fail)
    monkeypatch.setattr(demo, "show_shared_prefix", lambda *arguments: None)
    assert demo.main(["--task", task]) == 0
    assert task in capsys.readouterr().out


def test_long_prompt_has_the_given_length(embedded: tuple[Any, Any]) -> None:
    for length in (4, 96, 1024, 2048):
        assert long_prompt(embedded[1], length).shape == (1, length)


def test_the_clock_records_the_prompt_and_every_token(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    counts: list[int] = []
    clock = StepClock(counts.append)
    output = model.generate(
        long_prompt(tokenizer, 8),
        streamer=clock,
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert counts == [1, 2, 3]
    assert len(clock.step_seconds) == 2
    assert clock.seconds == pytest.approx(clock.prefill_seconds + sum(clock.step_seconds))
    per_token = model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert dense_bytes(output.past_key_values) == (8 + 2) * per_token

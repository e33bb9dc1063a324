"""`make demo`: what it prints, that the picture of the workers fits its terminal, and that it stops politely."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from consoles import a_pipe, a_terminal, printed
from rich.text import Text

import hf_parallel
from hf_parallel import HogwildConfig, ParallelStreamer, hogwild_prompt
from hf_parallel.cli import demo
from hf_parallel.cli.live import ABOVE, LiveColumns, LiveLines, LiveView, live_view
from hf_parallel.cli.measure import StepClock, dense_bytes, long_prompt

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def drawn(view: LiveColumns, height: int | None = None) -> list[str]:
    """The lines of the picture, without colours."""
    lines = view.console.render_lines(view.picture(height), pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def write(view: LiveView, texts: list[str], end_step: bool = True) -> None:
    """Let every worker write a step, word by word."""
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
def quick_demo() -> subprocess.CompletedProcess[str]:
    """`python -m hf_parallel.cli.demo --quick` as it runs where there is no terminal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "hf_parallel.cli.demo", "--quick", "--max-new-tokens", "22"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_demo_runs_to_its_end(quick_demo: subprocess.CompletedProcess[str]) -> None:
    assert quick_demo.returncode == 0, quick_demo.stderr
    assert "Traceback" not in quick_demo.stderr


def test_demo_shows_a_finished_step_of_each_worker(quick_demo: subprocess.CompletedProcess[str]) -> None:
    assert re.search(r"^Alice \| .*\w.* \(step 1, pass \d+\)$", quick_demo.stdout, re.MULTILINE)
    assert re.search(r"^Bob   \| .*\w.* \(step 1, pass \d+\)$", quick_demo.stdout, re.MULTILINE)
    assert "22 passes, 44 tokens" in quick_demo.stdout


def test_demo_gets_the_tokens_of_generate(quick_demo: subprocess.CompletedProcess[str]) -> None:
    assert "same tokens: yes" in quick_demo.stdout


def test_demo_writes_no_terminal_commands_into_a_pipe(quick_demo: subprocess.CompletedProcess[str]) -> None:
    assert "\x1b" not in quick_demo.stdout


def test_a_demo_with_other_tokens_says_so(monkeypatch: pytest.MonkeyPatch, embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    answers = iter([torch.full((2, 12), token) for token in (20, 21)])

    def measure(*arguments: Any) -> demo.Measured:
        return demo.Measured(next(answers), prefill=1.0, step=1.0, total=2.0, kv_bytes=8)

    monkeypatch.setattr(demo, "measure", measure)
    console = a_pipe()
    demo.show_shared_prefix(console, model, tokenizer, demo.Sizes(prompt=10, rows=2, new_tokens=2))
    assert "same tokens: NO" in printed(console)


def test_every_view_is_a_parallel_streamer() -> None:
    assert isinstance(LiveLines(HogwildConfig(), a_pipe()), ParallelStreamer)
    assert isinstance(LiveColumns(HogwildConfig(), a_terminal()), ParallelStreamer)


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (100, 50)])
def test_picture_keeps_inside_the_terminal(width: int, height: int) -> None:
    view = LiveColumns(HogwildConfig(), a_terminal(width, height))
    for number in range(12):
        write(view, [f"step {number} of Alice " + "goes on " * 15, f"step {number} of Bob, 短い " + "x" * 90])
    write(view, ["Alice's last", "Bob's last"], end_step=False)
    lines = drawn(view, height - ABOVE)
    assert len(lines) <= height - ABOVE
    assert max(Text(line).cell_len for line in lines) <= width
    assert any("Alice's last" in line and "Bob's last" in line for line in lines)


def test_picture_has_the_same_height_however_much_is_written() -> None:
    view = LiveColumns(HogwildConfig(), a_terminal())
    heights = [len(drawn(view, 15))]
    for _ in range(8):
        write(view, ["one two three " * 9, "four"])
        heights.append(len(drawn(view, 15)))
    assert set(heights) == {15}


def test_final_picture_holds_all_that_was_written() -> None:
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


def test_terminal_is_left_clean_by_an_interrupt() -> None:
    console = a_terminal()
    with suppress(KeyboardInterrupt), LiveColumns(HogwildConfig(), console) as view:
        write(view, ["I was", "interrupted"], end_step=False)
        raise KeyboardInterrupt
    text = printed(console)
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert "interrupted" in text[text.index(SHOW_CURSOR) :]


def test_terminal_commands_of_the_model_are_not_passed_on() -> None:
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
    assert isinstance(live_view(HogwildConfig(), demo.make_console()), LiveColumns if columns else LiveLines)


def test_columns_need_room() -> None:
    assert isinstance(live_view(HogwildConfig(num_workers=8), a_terminal(100, 40)), LiveLines)
    assert isinstance(live_view(HogwildConfig(), a_terminal(80, 6)), LiveLines)


def test_view_shows_what_hogwild_wrote_and_holds(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    config = HogwildConfig(seed=3, **demo.EMBEDDED_PRESET.settings)
    view = LiveColumns(config, a_terminal())
    hf_parallel.enable(model)
    try:
        with view, view.watching(model):
            output = model.generate(
                **hogwild_prompt("Task: Plan a picnic.", tokenizer, config),
                generation_mode="hogwild",
                parallel_config=config,
                tokenizer=tokenizer,
                max_new_tokens=24,
                streamer=view,
                return_dict_in_generate=True,
                **demo.SAMPLING,
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
    assert view.kv_tokens * output.past_key_values.arena.bytes_per_token == output.stats.kv_bytes


def test_interrupting_the_workers_goes_on_and_interrupting_again_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "load", lambda *arguments: (None, None))
    monkeypatch.setattr(demo.transformers.logging, "set_verbosity_error", lambda: None)
    monkeypatch.setattr(demo, "show_workers", interrupted)
    monkeypatch.setattr(demo, "show_shared_prefix", interrupted)
    assert demo.main([]) == 130
    said = capsys.readouterr().out
    assert said.index("on to the second part") < said.index("Stopped.")


def test_a_model_that_does_not_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere cannot be used"):
        demo.load(str(tmp_path / "nowhere"), a_pipe())


def test_a_task_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    monkeypatch.setattr(demo.transformers.logging, "set_verbosity_error", lambda: None)
    monkeypatch.setattr(demo, "load", lambda *arguments: (None, None))
    monkeypatch.setattr(demo, "show_workers", lambda console, *rest: (shown.append(rest[3]), console.print(rest[3])))
    monkeypatch.setattr(demo, "show_shared_prefix", lambda *arguments: None)
    assert demo.main(["--task", "Sort [3, 1] in [red]code[/red] :smile:"]) == 0
    assert shown[0] in capsys.readouterr().out


def test_missing_rich_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hf_parallel.cli.demo")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match="needs rich"):
        importlib.import_module("hf_parallel.cli.demo")


def test_long_prompt_has_the_length_asked_for(embedded: tuple[Any, Any]) -> None:
    for length in (4, 96, 1024, 2048):
        assert long_prompt(embedded[1], length).shape == (1, length)


def test_clock_sees_the_prompt_and_every_token(embedded: tuple[Any, Any]) -> None:
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

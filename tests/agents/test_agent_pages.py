"""The page of a run of agents: lanes, boxes, marks and arrows are in their places, and text is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import browsers
import pytest
from agent_traces import HOSTILE, gen, repair_trace, ticking

from hf_parallel.agents.drawing.page import render
from hf_parallel.agents.trace import Event, RunTrace
from hf_parallel.cli import main as cli

REPAIR, GATHER = "bug_repair#0", "bug_repair#0/context_gather#0"
VOID = {"meta", "input"}
"""Elements without an end tag."""


class Page(HTMLParser):
    """Elements of a page, which must all be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(text)
        self.close()
        assert not self._inside, f"not closed: {self._inside}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"{tag} has an attribute twice: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._inside[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._inside[-1:] != ["style"]:
            self.text += data

    def titles(self, *classes: str) -> list[str]:
        """Return the tooltips of the elements that have all of the classes."""
        return [attrs["title"] for attrs in self.elements(*classes)]

    def elements(self, *classes: str) -> list[dict[str, str]]:
        """Return the attributes of the elements with a tooltip that have all of the classes."""
        return [attrs for _, attrs in self.tags if {*classes} <= {*attrs.get("class", "").split()} and "title" in attrs]


def number(attributes: dict[str, str], name: str) -> float:
    """Return a number of an element's style, in percent or pixels."""
    style = dict(entry.split(":", 1) for entry in attributes["style"].split(";"))
    return float(style[name].rstrip("px%"))


def test_boxes_of_a_lane_do_not_overlap() -> None:
    trace = RunTrace(clock=ticking())
    for branch in range(8):
        gen(trace, "a#0", f"0.{branch}", begin=0.5)
    gen(trace, "a#0", "0.0.0", begin=8.5)
    boxes = Page(render(trace)).elements("box", "gen")
    spans = [(number(box, "top"), number(box, "left"), number(box, "left") + number(box, "width")) for box in boxes]
    assert len({top for top, *_ in spans}) == 8, "the last one follows in the first free row"
    for index, (top, left, right) in enumerate(spans):
        assert all(top != other or end <= left or begin >= right for other, begin, end in spans[:index])


def test_all_text_of_a_trace_is_escaped() -> None:
    def run(bad: str) -> RunTrace:
        trace = RunTrace(clock=ticking())
        trace.add(bad, "spawn", child=f"{bad}x", name=bad)
        numbers = {"begin": 0, "tokens": 1, "prompt_tokens": 0, "reused": 0}
        trace.add(bad, "gen", bad, **numbers, text=bad, settings={bad: [bad]})
        trace.add(bad, "tool", bad, begin=0, name=bad, result=bad, error=None)
        trace.add(bad, "state", bad, parent=bad, value=float("nan"), status="dropped")
        trace.add(bad, "kv", bytes=1)
        trace.add(bad, "scores", scores={bad: 1.0})
        trace.add(f"{bad}x", "error", error=bad)
        return trace

    plain, hostile = Page(render(run("a"))), Page(render(run(HOSTILE.replace("/", ""))))
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in hostile.tags]
    assert len(hostile.scripts) == 1


def test_a_page_allows_only_its_own_script() -> None:
    text = render(repair_trace())
    page = Page(text)
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "http" not in text.replace("http-equiv", "")


def test_an_event_without_an_entry_of_its_kind_raises() -> None:
    with pytest.raises(ValueError, match=r"event 0 .*'tokens' is missing"):
        render(RunTrace([Event(1.0, "a#0", "gen", "0", {"begin": 0.0})]))


@pytest.mark.parametrize("trace", [RunTrace(), RunTrace([Event(0.0, "a#0", "end", "", {"value": ""})])])
def test_a_run_without_duration_has_a_page(trace: RunTrace) -> None:
    assert len(Page(render(trace)).elements("name")) == len(trace.events)


def test_view_renders_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trace = repair_trace()
    trace.save(path)
    assert cli.main(["view", str(path)]) == 0
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == render(trace)
    data = json.loads(path.read_text())
    del data["events"][0]["data"]["child"]
    path.write_text(json.dumps(data))
    assert cli.main(["view", str(path)]) == 2
    assert "'child' is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_click_shows_the_text_and_the_slider_zooms(tmp_path: Path) -> None:
    measure = """{
        const chart = document.querySelector(".chart"), slider = document.querySelector("[type=range]");
        const says = document.querySelector(".says"), shown = [says.hidden], before = chart.offsetWidth;
        document.querySelector(".lane .gen").click();
        shown.push(says.hidden, says.textContent.includes("3 tokens"));
        document.querySelector(".lane").click();
        shown.push(says.hidden);
        slider.value = 2;
        slider.dispatchEvent(new Event("input"));
        shown.push(chart.offsetWidth > 3 * before, slider.offsetWidth > 0);
        const arrow = document.querySelector(".plot > .yield");
        shown.push(arrow.offsetHeight > 0);
        document.querySelector("[value=yield]").click();
        shown.push(arrow.offsetHeight > 0);
        document.title = shown.join(" ");}"""
    path = tmp_path / "page.html"
    path.write_text(browsers.with_scripts(render(repair_trace()), "", measure), encoding="utf-8")
    dom = browsers.launch(tmp_path / "profile", path)
    assert browsers.title(dom) == "true false true true true true true false"

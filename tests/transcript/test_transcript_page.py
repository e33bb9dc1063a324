"""The page of a transcript: text is escaped, cards are in their places, and a browser shows the state at a pass."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import browsers
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import TOKENIZER, write

from hf_parallel.transcript.page import render

EOS = tiny.EOS
ALICE, BOB = "Ann.\n\nTwo.", "Bo is slow.\n\nx"
"""Alice finishes a step at pass 6, Bob at pass 13; their last steps stay unfinished."""

pytestmark = pytest.mark.usefixtures("one_thread")


class Page(HTMLParser):
    """Elements of a page, and the text of its cards."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._inside[-1:] != ["style"]:
            self.text += data


HOSTILE = '</span></script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;b'


def test_generated_text_is_escaped() -> None:
    plain, hostile = Page(write("a", "b").to_html(TOKENIZER)), Page(write(HOSTILE, "b").to_html(TOKENIZER))
    kinds = [[tag for tag, _ in page.tags if tag != "span"] for page in (plain, hostile)]
    assert kinds[0] == kinds[1]
    assert HOSTILE in hostile.text
    assert len(hostile.scripts) == 1


def test_names_titles_and_prompts_are_escaped() -> None:
    bad = '"><img src=x>'
    run = write("a", "b", prompts=["<i>&amp;"], worker_names=[bad, "b"]).to_dict(TOKENIZER)
    run |= {"model": "</title><img src=x>", "mode": "<img>"}
    run["style"] |= {"spanning": bad, "unit": bad, "x><img src=x": "y"}
    page = Page(render(run))
    assert "img" not in {tag for tag, _ in page.tags}
    assert "<i>&amp;" in page.text


def test_a_page_is_self_contained_and_allows_no_other_script() -> None:
    text = write(ALICE, BOB).to_html()
    page = Page(text)
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    assert "url(" not in text
    assert "import" not in page.scripts[0]
    assert "http" not in re.sub(r"http-equiv", "", text)
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


# Transcripts read from a file


@functools.cache
def saved() -> str:
    return json.dumps(write(ALICE, BOB).to_dict())


JUNK = [..., None, True, -1, 0, 99, 10**400, 10**5000, "x", [], [[1, 2, "m"]], [[99, "a", "m"]], {}, {"a": [1]}]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*place, name)
        yield from places(item, (*place, name))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_transcript_renders_or_raises(data: st.DataObject) -> None:
    """`...` removes a value. What decides about the layout always raises."""
    run = json.loads(saved())
    *parents, last = place = data.draw(st.sampled_from(list(places(run))))
    holder, junk = run, data.draw(st.sampled_from(JUNK))
    for parent in parents:
        holder = holder[parent]
    if junk is ...:
        del holder[last]
    else:
        holder[last] = junk
    needed = place[-1] in ("format", "version", "sections", "begin", "pieces") and junk in (..., "x")
    with pytest.raises(ValueError, match="transcript") if needed else suppress(ValueError):
        render(run)


def test_other_json_raises() -> None:
    for run in (None, [], "text", 3, {}):
        with pytest.raises(ValueError, match="not a transcript"):
            render(run)


# In a browser


class View(NamedTuple):
    """A page that a browser opens."""

    page: str
    state: str = ""
    width: int = 1280


COLLECT = """
    const pages = [...document.querySelectorAll("iframe")].map(frame => frame.contentDocument.documentElement);
    document.body.textContent = JSON.stringify(pages.map(page => page.outerHTML));"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Open a file in a browser and return its DOM after its script has run."""
    return functools.partial(browsers.launch, tmp_path_factory.mktemp("profile"))


@pytest.fixture
def browse(launch: Callable[..., str], tmp_path: Path) -> Callable[..., list[str]]:
    """Open pages as frames of one document, as a browser takes long to start, and return the DOM of each."""

    def open_views(*views: View) -> list[str]:
        frames = []
        for number, view in enumerate(views):
            path = tmp_path / f"{number}.html"
            path.write_text(view.page, encoding="utf-8")
            frames.append(f'<iframe src="{path.as_uri()}{view.state}" width="{view.width}" height="900"></iframe>')
        document = tmp_path / "frames.html"
        document.write_text(f"<body>{''.join(frames)}<script>onload = () => {{{COLLECT}}};</script></body>")
        found = re.search(r"<body>(.*)</body>", launch(document), re.DOTALL)
        assert found is not None
        return json.loads(html.unescape(found[1]))

    return open_views


def classes(dom: str) -> list[set[str]]:
    """Return the classes of the cards."""
    return [set((attrs["class"] or "").split()) for tag, attrs in Page(dom).tags if tag == "article"]


def test_the_slider_shows_the_state_at_a_pass(browse: Callable[..., list[str]]) -> None:
    (dom,) = browse(View(write(ALICE, BOB).to_html(), "#pass=8"))
    assert classes(dom) == [{"card"}, {"card", "writing"}, {"card", "writing"}, {"card", "later"}]
    later = {
        attrs["data-p"] for tag, attrs in Page(dom).tags if "later" in (attrs.get("class") or "") and tag == "span"
    }
    assert later == {str(at) for at in range(9, len(BOB) + 1)}
    assert "After pass 8: Alice and Bob are writing. In the history: Alice 1." in Page(dom).text


def test_the_page_shows_which_cards_a_row_could_see_at_a_pass(browse: Callable[..., list[str]]) -> None:
    expected = {
        "combined": ([False] * 4, "1 finished step of others and what Alice has written so far"),
        "interleaved": ([False, False, True, False], "1 finished step of others"),
    }
    doms = browse(*(View(write(ALICE, BOB, layout=layout).to_html(), "#pass=8&as=1") for layout in expected))
    for dom, (unseen, message) in zip(doms, expected.values(), strict=True):
        assert ["unseen" in card for card in classes(dom)] == unseen
        assert "After pass 8, Bob can see the prompt, its own text" in Page(dom).text
        assert message in Page(dom).text

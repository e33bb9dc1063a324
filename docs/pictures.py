"""Draws the pictures of README and the pages as SVG: `python docs/pictures.py`.

Views and rotation offsets are read from the caches. `workers` animates a recorded run of the demo model: `hf-parallel
generate "Plan a picnic in the park." --mode hogwild --seed 5 --max-new-tokens 42 -o docs/recorded_run.json`.
`images/transcript-hogwild.png` is a screenshot of its page (`hf-parallel view`), `#pass=30&as=0` at 1280 x 640 pixels.
`images/page-*.png` are screenshots of the server's page with the demo model, 1280 pixels wide.
With `--check` the script changes nothing and returns 1 if a picture is out of date.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hf_parallel import HogwildCache, SharedPrefixCache, TreeBranchCache
from hf_parallel.cache import Block, BlockCache, Segment
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS, Workspace
from hf_parallel.kernels import RotarySpec

FOLDER = Path(__file__).parent / "pictures"
RECORDED_RUN = Path(__file__).parent / "recorded_run.json"
WIDTH = 540
ROTARY = {0: RotarySpec(inv_freq=(1.0,))}
COLORS = {
    "page": ("#ffffff", "#14171b"),
    "ink": ("#1f2933", "#e6e8ea"),
    "faint": ("#5f6b77", "#9aa4ae"),
    "prompt": ("#c9d6e2", "#3d4f61"),
    "header": ("#e9edf1", "#2b323a"),
    "history": ("#a9d6b8", "#275c3a"),
    "first": ("#f6c177", "#74490c"),
    "second": ("#8fb8ea", "#244f86"),
    "third": ("#d9a5d0", "#6b3561"),
    "fourth": ("#a5d8d8", "#1f5b5b"),
    "replayed": ("#d5e8b4", "#475f1c"),
    "new": ("#ffffff", "#1d2227"),
}
"""Colors of page, text and blocks by kind, in light and dark mode; the same in all pictures."""

BRANCHES = (("Rome", "first", 12), ("Oslo", "second", 15), ("Lima", "third", 8))
"""Title, color and length of each branch of an answer."""

Named = dict[Block, tuple[str, str]]
"""Label and color of each block."""


class Drawing:
    """SVG that grows downwards; `y` is the top of the next element."""

    def __init__(self, title: str, width: int = WIDTH) -> None:
        self.title, self.width, self.y = title, width, 14.0
        self.parts: list[str] = []
        self.seconds = 0.0

    def animate(self, seconds: float) -> None:
        """Repeat the picture every `seconds`; elements with `since` appear at that forward pass."""
        self.seconds = seconds

    def _appear(self, since: int) -> str:
        """Animation of an element that appears at a forward pass. Viewers without animation show the last state."""
        if not since:
            return ""
        times = f"0;{since * PASS_SECONDS / self.seconds:.4f}"
        return (
            f'<animate attributeName="opacity" values="0;1" keyTimes="{times}" calcMode="discrete" '
            f'dur="{self.seconds:.2f}s" repeatCount="indefinite"/>'
        )

    def rect(self, x: float, y: float, w: float, h: float, color: str, dashed: bool = False, since: int = 0) -> None:
        """Add a box with round corners."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="4" class="{color} box" '
            f'stroke-width="1"{dash}>{self._appear(since)}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 13,
        anchor: str = "start",
        faint: bool = False,
        mono: bool = False,
        since: int = 0,
    ) -> None:
        """Add a line of text with its baseline at `y`."""
        color = "faint" if faint else "ink"
        font = ' font-family="ui-monospace, Menlo, Consolas, monospace" xml:space="preserve"' if mono else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" class="{color}"{font}>'
            f"{escape(text)}{self._appear(since)}</text>"
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, arrow: bool = False) -> None:
        """Add a line, optionally with an arrow head."""
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="line" stroke-width="1.3"{head}/>'
        )

    def heading(self, text: str) -> None:
        """Add a heading."""
        self.y += 20
        self.text(14, self.y, text, size=15)
        self.y += 12

    def note(self, text: str) -> None:
        """Add a caption in a faint color."""
        self.y += 14
        self.text(14, self.y, text, faint=True)
        self.y += 8

    def view(self, who: str, blocks: Iterable[Block], names: Named, scale: float, below: Sequence[str] = ()) -> None:
        """Add a row as the line of its blocks, optionally with a word below each."""
        self.text(14, self.y + 20, who)
        x = 92.0
        for number, block in enumerate(blocks):
            name, color = names[block]
            width = scale * block.length
            self.rect(x, self.y, width - 3, 30, color)
            self.text(x + (width - 3) / 2, self.y + 20, name, anchor="middle")
            if below:
                self.text(x + (width - 3) / 2, self.y + 45, below[number], anchor="middle", faint=True)
            x += width
        self.y += 56 if below else 36

    def svg(self) -> str:
        """Return the picture."""
        height = self.y + 14
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:.0f}" width="{self.width}" '
                f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path d="M0 0 L8 4 L0 8 z" class="faint"/></marker></defs>',
                f"<style>{_colors(0)} @media (prefers-color-scheme: dark) {{ {_colors(1)} }}</style>",
                f'<rect width="{self.width}" height="{height:.0f}" rx="8" class="page"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _colors(mode: int) -> str:
    """Return the rules of light (0) or dark (1) mode. A dark page needs its own, as it shows pictures unchanged."""
    rules = [f".{name} {{ fill: {colors[mode]} }}" for name, colors in COLORS.items()]
    return " ".join([*rules, f".box {{ stroke: {COLORS['ink'][mode]} }} .line {{ stroke: {COLORS['faint'][mode]} }}"])


def fill(block: Block, length: int) -> Block:
    """Set the length of a block in tokens."""
    block.length = length
    return block


def workspace(cache: HogwildCache, layout: str, headers: bool) -> tuple[Workspace, Named]:
    """Return a prompt with two workers that have unfinished steps, and the labels of its blocks."""
    prompt = fill(cache.pool.new_block(), 60)
    space = cache.new_workspace(layout, [prompt], 2, (8, 8, 8, 8), base=prompt.length)
    names = {prompt: ("prompt", "prompt"), fill(space.history, 80): ("history", "history")}
    for header in space.headers[:3]:
        names[fill(header, 14 if headers else 0)] = ("", "header")
    alice, bob = space.workers
    names |= {fill(alice, 50): ("Alice", "first"), fill(bob, 70): ("Bob", "second")}
    return space, names


def views() -> Drawing:
    """Rows of four modes as lines of blocks."""
    drawing = Drawing("Views of the rows in each mode")
    drawing.heading("shared_prefix: four completions of three prompts")
    _shared_prefix(drawing)
    drawing.heading("hogwild: two workers")
    space, names = workspace(HogwildCache(ROTARY), "combined", headers=False)
    for number, who in enumerate(("Alice", "Bob")):
        drawing.view(who, seen(space.view(number)), names, 1.6)
    drawing.heading("pdos: three branches of one answer")
    _branches(drawing)
    drawing.heading("resample: a new sample that replays cached logits")
    _resample(drawing)
    drawing.note("Within a mode, blocks of the same color and name are the same memory.")
    return drawing


def seen(view: Iterable[Block]) -> list[Block]:
    """Return the blocks of a view that hold tokens."""
    return [block for block in view if block.length]


def _shared_prefix(drawing: Drawing) -> None:
    cache = SharedPrefixCache()
    rules, north, south = [7] * 90, [8] * 60, [9] * 80
    prompts = [rules + north, rules + north, rules + south, rules + south + [10] * 40]
    leaves = [cache.insert(np.array(prompt)) for prompt in prompts]
    for node in cache.nodes_to_prefill():
        assert node.block is not None
        fill(node.block, len(node.tokens))
    blocks = [leaf.view for leaf in leaves]
    own = [fill(block, length) for block, length in zip(cache.pool.new_blocks(4), (60, 80, 60, 40), strict=True)]
    names = {
        blocks[0][0]: ("rules", "prompt"),
        blocks[0][1]: ("north", "history"),
        blocks[2][1]: ("south", "third"),
        blocks[3][2]: ("more", "fourth"),
    } | {block: (f"text {number}", "first") for number, block in enumerate(own)}
    for number, (view, block) in enumerate(zip(blocks, own, strict=True)):
        drawing.view(f"row {number}", [*view, block], names, 1.6)


def _branches(drawing: Drawing) -> None:
    cache = TreeBranchCache(ROTARY)
    prompt, trunk = cache.pool.new_blocks(2)
    trunk.base, names = 80, {fill(prompt, 80): ("prompt", "prompt"), fill(trunk, 60): ("trunk", "history")}
    views = cache.branch([prompt, trunk], len(BRANCHES), 80 + 60, expected_length=64)
    for (title, color, length), view in zip(BRANCHES, views, strict=True):
        names[fill(view[-1], 6 * length)] = (title, color)
        drawing.view(title, view, names, 1.6)


def _resample(drawing: Drawing) -> None:
    cache = BlockCache()
    prompt, known, own = (
        fill(block, length) for block, length in zip(cache.pool.new_blocks(3), (80, 110, 60), strict=True)
    )
    names = {prompt: ("prompt", "prompt"), known: ("replayed, prefilled once", "replayed"), own: ("new", "first")}
    drawing.view("sample 2", [prompt, known, own], names, 1.6)


def layouts() -> Drawing:
    """Alice's view in each layout."""
    drawing = Drawing("View of the first of two workers in each layout")
    for layout in LAYOUTS[::-1]:
        drawing.heading(f'layout="{layout}"')
        space, names = workspace(HogwildCache(ROTARY), layout, headers=True)
        drawing.view("Alice sees", seen(space.view(0)), names, 1.45)
    drawing.note("Unnamed blocks are headers, which introduce the block after them.")
    return drawing


def hogwild() -> Drawing:
    """Steps of two workers over forward passes, and the shared history."""
    steps = [
        ("A1", 0, 0, 9),
        ("B1", 1, 0, 15),
        ("A2", 0, 9, 24),
        ("B2", 1, 15, 28),
        ("A3", 0, 24, 32),
        ("B3", 1, 28, 32),
    ]
    drawing = Drawing("Steps of two workers over forward passes; finished steps move to the history")
    drawing.heading("Two workers, 32 forward passes")
    left, scale, top = 92, 13.2, drawing.y
    for lane, who in enumerate(("Alice", "Bob")):
        drawing.text(14, top + 21 + 44 * lane, who)
    ended = sorted((step for step in steps if step[3] < 32), key=lambda step: step[3])
    for name, worker, begin, end in steps:
        color, y = ("first", "second")[worker], top + 44 * worker
        drawing.rect(left + scale * begin, y, scale * (end - begin) - 3, 30, color, dashed=end == 32)
        drawing.text(left + scale * (begin + end) / 2 - 2, y + 20, name, anchor="middle")
    floor = top + 92
    for count in (0, 10, 20, 30):
        drawing.text(left + scale * count, floor + 4, f"pass {count}", size=12, anchor="middle", faint=True)
    drawing.y = floor + 6
    drawing.heading("The shared history")
    for count, (_, _, _, moment) in enumerate(ended, start=1):
        drawing.text(14, drawing.y + 20, f"pass {moment}")
        x: float = left
        for name, worker, begin, end in ended[:count]:
            width = scale * (end - begin) * 0.6
            drawing.rect(x, drawing.y, width - 3, 30, ("first", "second")[worker])
            drawing.text(x + width / 2 - 2, drawing.y + 20, name, anchor="middle")
            x += width
        drawing.y += 36
    drawing.note("Dashed: unfinished steps, which both workers see token by token.")
    return drawing


def pdos() -> Drawing:
    """Trunk and branches over forward passes, and the joined answer."""
    drawing = Drawing("The skeleton, three branches side by side, and the joined answer")
    drawing.heading("Forward passes")
    left, scale, top = 92, 14.0, drawing.y
    drawing.text(14, top + 21, "trunk")
    boxes = ((0, 6, "skeleton", "history"), (21, 31, "continuation", "prompt"))
    for begin, end, name, color in boxes:
        drawing.rect(left + scale * begin, top, scale * (end - begin) - 3, 30, color)
        drawing.text(left + scale * (begin + end) / 2 - 2, top + 20, name, anchor="middle")
    for lane, (name, color, length) in enumerate(BRANCHES, start=1):
        y = top + 36 * lane
        drawing.text(14, y + 21, f"branch {lane}")
        drawing.rect(left + scale * 6, y, scale * length - 3, 30, color)
        drawing.text(left + scale * (6 + length / 2) - 2, y + 20, name, anchor="middle")
        drawing.line(left + scale * (6 + length), y + 15, left + scale * 22, y + 15)
    drawing.line(left + scale * 22, top + 36 * 3 + 15, left + scale * 22, top + 33, arrow=True)
    drawing.text(left + scale * 22 + 8, top + 36 * 2 + 10, "join")
    drawing.y = top + 36 * 4
    drawing.heading("The joined answer is as long as a sequential one")
    x: float = 14
    for name, color, length in (("start", "history", 6), *BRANCHES, ("continuation", "prompt", 10)):
        width = 10 * length
        drawing.rect(x, drawing.y, width - 3, 30, color)
        drawing.text(x + width / 2 - 2, drawing.y + 20, name, size=12, anchor="middle")
        x += width
    drawing.y += 32
    return drawing


def rotate() -> Drawing:
    """One set of blocks at its positions in two views, with the rotations of a pass's plan."""
    cache = HogwildCache(ROTARY)
    space, names = workspace(cache, "combined", headers=False)
    drawing = Drawing("The same blocks at different positions; queries are rotated by the difference")
    drawing.heading("Each stored once; seen at two positions")
    forward = cache.prepare([Segment(space.view(number), 1) for number in range(2)])
    plan = forward.plan
    deltas: dict[tuple[int, int], int] = {}
    seen_blocks = dict.fromkeys(block for segment in forward.segments for block in segment.view)
    blocks = sorted(seen(seen_blocks), key=lambda block: (block.base, block.age))  # as in the plan
    for number in range(plan.num_blocks):
        for pair in range(*plan.block_pairs[number : number + 2]):
            deltas[int(plan.pair_query[pair]), number] = int(plan.pair_delta[pair])
    for row, who in enumerate(("Alice", "Bob")):
        view = seen(space.view(row))
        below = [f"rotate by {deltas[row, blocks.index(block)]}" for block in view]
        drawing.view(f"{who} sees", view, names, 1.6, below)
    cache.rollback()
    drawing.note("In positions: the distance of the row's next token from the start of the")
    drawing.note("block, minus the position to which the model has rotated its query already.")
    return drawing


def merge() -> Drawing:
    """Partial results and their weights in a small example."""
    drawing = Drawing("Partial results of three blocks are merged by their weights")
    drawing.heading("One query, three blocks")
    sums = {"history": 2.0, "Bob": 1.2, "Alice": 0.3}
    total = math.log(sum(math.exp(value) for value in sums.values()))
    top = drawing.y
    for lane, (name, value) in enumerate(sums.items()):
        y, weight = top + 46 * lane, math.exp(value - total)
        drawing.rect(14, y, 90, 32, {"history": "history", "Bob": "second", "Alice": "first"}[name])
        drawing.text(59, y + 21, name, anchor="middle")
        drawing.line(106, y + 16, 146, y + 16, arrow=True)
        drawing.rect(150, y, 140, 32, "new")
        drawing.text(220, y + 21, f"result, weight {weight:.2f}", anchor="middle")
        drawing.line(292, y + 16, 366, top + 62, arrow=True)
    drawing.rect(370, top + 40, 156, 44, "replayed")
    drawing.text(448, top + 59, "their weighted sum:", size=12, anchor="middle")
    drawing.text(448, top + 75, "attention over all keys", size=12, anchor="middle")
    drawing.y = top + 130
    drawing.note("Weights are the softmax of the log-sum-exps.")
    return drawing


CHARACTER, LINE, COLUMN = 7.8, 19, 44
"""Width and height of a character in pixels, and characters of a worker's column in `workers`."""
PASS_SECONDS, PAUSE_SECONDS = 0.28, 5.0


def workers() -> Drawing:
    """Two workers over forward passes, animated: each token appears at the pass that sampled it."""
    run = json.loads(RECORDED_RUN.read_text())
    (section,) = run["sections"]
    drawing = Drawing("Two workers write at the same time and read each other's unfinished text", width=760)
    drawing.animate(run["passes"] * PASS_SECONDS + PAUSE_SECONDS)
    drawing.heading("Task: " + section["prompt"].split("Task: ")[-1].split("<|")[0].strip())
    top, bottom = drawing.y + 8, 0.0
    for lane, name in enumerate(section["columns"]):
        x, y = 14 + lane * 372.0, top
        drawing.text(x + 8, y + 14, name, size=15)
        y += 26
        for card in section["cards"]:
            if card["column"] == lane:
                y = _card(drawing, card, x, y, ("first", "second")[lane])
        bottom = max(bottom, y)
    drawing.y = bottom
    drawing.note(f"A recorded run of {run['model']}: one row per worker, one KV cache, {run['passes']} forward passes.")
    drawing.note("Colored: finished steps, moved to the shared history. Dashed: a step that the other reads already.")
    return drawing


def _card(drawing: Drawing, card: dict[str, Any], x: float, y: float, color: str) -> float:
    """Draw one step of a worker; return the top of the next one."""
    pieces = [(number, text.replace("\n", " ")) for number, text, _ in card["pieces"]]
    lines = textwrap.wrap("".join(text for _, text in pieces).strip(), COLUMN)
    width, height = COLUMN * CHARACTER + 16, LINE * len(lines) + 12
    drawing.rect(x, y, width, height, "new", dashed=True, since=card["begin"])
    if card["ended"] == "step":
        drawing.rect(x, y, width, height, color, since=card["end"])
    line = column = 0
    for number, text in pieces:
        text = text.strip() if column == 0 else text.rstrip()
        if column + len(text) > len(lines[line]) and line + 1 < len(lines):
            line, column, text = line + 1, 0, text.strip()
        if text:
            left, base = x + 8 + CHARACTER * column, y + 20 + LINE * line
            drawing.text(left, base, text, mono=True, since=number)
        column += len(text)
    return y + height + 8


PICTURES: tuple[Callable[[], Drawing], ...] = (workers, views, layouts, hogwild, pdos, rotate, merge)


def main() -> int:
    """Draw all pictures, or list those that are out of date; return the exit status."""
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for draw in PICTURES:
        path, svg = FOLDER / f"{draw.__name__}.svg", draw().svg()
        if not path.is_file() or path.read_text() != svg:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(svg)
    print(*stale or ["all pictures are up to date"], sep="\n")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

"""Layered drawings of directed graphs as SVG text.

Layers follow the longest paths, the order within a layer and the positions follow the neighbours (Sugiyama et al.,
1981). Links against the order of the boxes, such as those of loops, are curves at the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from markupsafe import escape

from hf_parallel.transcript.page import printable

INK, SOFT, LINE, ACCENT = "#1d2126", "#5c6570", "#aab0b6", "#2457c5"
"""Colors of text, notes, links and forkable states, as on pages."""
STYLES = {
    "plain": f'fill="#ffffff" stroke="{SOFT}"',
    "end": f'fill="#eceae4" stroke="{SOFT}"',
    "fork": f'fill="#e3ebfb" stroke="{ACCENT}" stroke-width="1.5"',
    "chosen": 'fill="#e2f3e6" stroke="#2c7a3f" stroke-width="1.5"',
    "words": 'fill="none"',
    "dropped": f'fill="#f4f3ef" stroke="{LINE}" stroke-dasharray="4 3"',
}
"""Attributes of boxes; those of `fork` have a second outline, and those of `end` round sides."""
_CHAR, _LEADING, _PAD = 7.3, 16.0, 8.0  # pixels: width of a character, height of a line, margin in a box
_GAP, _RISE, _LANE = 22.0, 38.0, 18.0  # pixels between boxes, layers, and curves at the right
_VIA = 14.0  # pixels: width of a link that passes a layer
_SWEEPS = 12


@dataclass(frozen=True)
class Box:
    """A node: its name in links, its lines of text, and a key of `STYLES`; the note is its tooltip."""

    name: str
    lines: tuple[str, ...]
    style: str = "plain"
    note: str = ""

    @property
    def width(self) -> float:
        """Width in pixels."""
        return max(map(len, self.lines)) * _CHAR + 2 * _PAD

    @property
    def height(self) -> float:
        """Height in pixels."""
        return len(self.lines) * _LEADING + _PAD


@dataclass(frozen=True)
class Link:
    """An arrow between two boxes. A faint one is dashed; one without tip ends at words about it."""

    begin: str
    end: str
    label: str = ""
    faint: bool = False
    tip: bool = True


class Drawing(NamedTuple):
    """Elements of an SVG document, and their size in pixels."""

    width: float
    height: float
    elements: str


def draw(boxes: Sequence[Box], links: Sequence[Link]) -> Drawing:
    """Return a drawing of a graph; links to an earlier box, or to the same one, are curves at the right."""
    index = {box.name: number for number, box in enumerate(boxes)}
    back = [link for link in links if index[link.end] <= index[link.begin]]
    forward = [link for link in links if index[link.end] > index[link.begin]]
    plan = _Plan(boxes, [(index[link.begin], index[link.end]) for link in forward])
    parts = [_forward(link, plan, path) for link, path in zip(forward, plan.paths, strict=True)]
    width, lanes = plan.width, list[tuple[float, float, float]]()  # lanes: top, bottom and x of curves
    for link in sorted(back, key=lambda link: index[link.begin] - index[link.end]):
        begin, end = index[link.begin], index[link.end]
        top, bottom = sorted((plan.y[end], plan.y[begin]))  # an earlier box may be in a lower layer
        lane = _LANE + (plan.right(top, bottom, lanes) if begin != end else plan.x[begin] + plan.widths[begin] / 2)
        lanes.append((top, bottom, lane))
        parts.append(_back(link, plan, begin, end, lane))
        width = max(width, lane + _PAD + len(link.label) * _CHAR)
    parts += [_box(box, plan.x[number], plan.y[number]) for number, box in enumerate(boxes)]
    return Drawing(width, plan.height, "\n".join(parts))


def document(drawings: Sequence[tuple[str, Drawing]], title: str) -> str:
    """Return an SVG document of drawings below each other, each with a heading (empty: none)."""
    parts, y, margin = [], 12.0, 16.0
    width = max([240.0, *(max(drawing.width, len(heading) * 1.2 * _CHAR) for heading, drawing in drawings)])
    for heading, drawing in drawings:
        if heading:
            parts.append(_text(heading, 0, y + _LEADING, f'fill="{INK}" font-weight="600" font-size="14"'))
            y += 2 * _LEADING
        parts.append(f'<g transform="translate(0 {y:.1f})">\n{drawing.elements}\n</g>')
        y += drawing.height + 24
    size = f"{width + 2 * margin:.0f}", f"{y:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
            f' viewBox="0 0 {size[0]} {size[1]}" role="img" font-family="ui-monospace, DejaVu Sans Mono, monospace"'
            ' font-size="12">',
            f"<title>{_escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#fbfaf7"/>',
            f'<g transform="translate({margin:.0f} 0)">',
            *parts,
            "</g>\n</svg>",
        ]
    )


def note(text: str) -> Drawing:
    """Return a line of text as a drawing."""
    return Drawing(len(text) * _CHAR, _LEADING, _text(text, 0, _LEADING / 2, f'fill="{SOFT}"'))


def shorten(text: str, length: int) -> str:
    """Return a text on one line with at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}\u2026"


def _escape(text: str) -> str:
    return str(escape(printable(text)))


def _text(text: str, x: float, y: float, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_escape(text)}</text>'


def _box(box: Box, x: float, y: float) -> str:
    left, top, radius = x - box.width / 2, y - box.height / 2, box.height / 2 if box.style == "end" else 5
    size = f'width="{box.width:.1f}" height="{box.height:.1f}" rx="{radius:.1f}"'
    parts = [f"<g><title>{_escape(box.note)}</title>" if box.note else "<g>"]
    if box.style == "fork":  # several completions: a second box below the first
        parts.append(f'<rect x="{left + 4:.1f}" y="{top + 4:.1f}" {size} {STYLES["fork"]}/>')
    parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} {STYLES[box.style]}/>')
    middle = f'text-anchor="middle" dominant-baseline="central" fill="{SOFT if box.style == "dropped" else INK}"'
    for number, line in enumerate(box.lines):
        parts.append(_text(line, x, top + _PAD / 2 + _LEADING * (number + 0.5), middle))
    return "".join([*parts, "</g>"])


def _path(link: Link, path: str, x: float, y: float) -> str:
    dashes = f'stroke="{LINE}" stroke-dasharray="4 3"' if link.faint else f'stroke="{SOFT}"'
    tip = ' marker-end="url(#tip)"' if link.tip else ""
    line = f'<path d="{path}" fill="none" {dashes}{tip}/>'
    halo = f'fill="{INK}" stroke="#fbfaf7" stroke-width="4" paint-order="stroke" dominant-baseline="central"'
    return line + (_text(link.label, x, y, halo) if link.label else "")


def _forward(link: Link, plan: _Plan, points: Sequence[int]) -> str:
    """Return a link to a later box as a curve through the layers between."""
    first, last = points[0], points[-1]
    places = [(plan.x[first], plan.y[first] + plan.heights[first] / 2)]
    places += [(plan.x[point], plan.y[point]) for point in points[1:-1]]
    places.append((plan.x[last], plan.y[last] - plan.heights[last] / 2))
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for (x, y), (next_x, next_y) in zip(places, places[1:], strict=False):
        middle = (y + next_y) / 2
        path += f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
    (x, y), (next_x, next_y) = places[:2]
    return _path(link, path, (x + next_x) / 2 + 5, (y + next_y) / 2)


def _back(link: Link, plan: _Plan, begin: int, end: int, lane: float) -> str:
    """Return a link to an earlier box, or to the same one, as a curve at the right."""
    right = [plan.x[box] + plan.widths[box] / 2 for box in (begin, end)]
    y, end_y = plan.y[begin] + 4, plan.y[end] - 4
    control = (8 * lane - sum(right)) / 6  # the middle of the curve is at `lane`
    path = f"M{right[0]:.1f} {y:.1f}C{control:.1f} {y:.1f} {control:.1f} {end_y:.1f} {right[1]:.1f} {end_y:.1f}"
    return _path(link, path, lane + 4, (y + end_y) / 2)


class _Plan:
    """Positions of boxes and of the points where links pass a layer: `x` and `y` of their centers in pixels."""

    def __init__(self, boxes: Sequence[Box], links: Sequence[tuple[int, int]]) -> None:
        self.widths = [box.width for box in boxes]
        self.heights = [box.height for box in boxes]
        self._layers = _layers(len(boxes), links)
        self.paths = [self._path(begin, end) for begin, end in links]
        above: list[list[int]] = [[] for _ in self.widths]
        below: list[list[int]] = [[] for _ in self.widths]
        for path in self.paths:
            for point, following in zip(path, path[1:], strict=False):
                below[point].append(following)
                above[following].append(point)
        rows: list[list[int]] = [[] for _ in range(1 + max(self._layers, default=-1))]
        for point, layer in enumerate(self._layers):
            rows[layer].append(point)
        _sort_rows(rows, above, below)
        self._place(rows, above, below)

    def _path(self, begin: int, end: int) -> list[int]:
        """Return the points of a link, with a new one for each layer that it passes."""
        between = range(self._layers[begin] + 1, self._layers[end])
        path = [begin, *range(len(self.widths), len(self.widths) + len(between)), end]
        self.widths += [_VIA] * len(between)
        self.heights += [0.0] * len(between)
        self._layers += between
        return path

    def _place(self, rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
        self.x = [0.0] * len(self.widths)
        for sweep in range(_SWEEPS):
            for row in rows if sweep % 2 == 0 else reversed(rows):
                wanted = []
                for point in row:
                    neighbors = above[point] + below[point]
                    wanted.append(fmean(self.x[other] for other in neighbors) if neighbors else self.x[point])
                for point, x in zip(row, _spread(wanted, [self.widths[point] for point in row]), strict=True):
                    self.x[point] = x
        left = min((x - width / 2 for x, width in zip(self.x, self.widths, strict=True)), default=0.0)
        self.x = [x - left for x in self.x]
        self.width = 4 + max((x + width / 2 for x, width in zip(self.x, self.widths, strict=True)), default=0.0)
        self.y, top = [0.0] * len(self.widths), 1.0
        for row in rows:
            height = max((self.heights[point] for point in row), default=0.0)
            for point in row:
                self.y[point] = top + height / 2
            top += height + _RISE
        self.height = max(top - _RISE + 6, 0.0)

    def right(self, top: float, bottom: float, lanes: Sequence[tuple[float, float, float]]) -> float:
        """Return the right end of everything between two heights, with the curves there."""
        ends = [x + width / 2 for x, y, width in zip(self.x, self.y, self.widths, strict=True) if top <= y <= bottom]
        return max([*ends, *(x for begin, end, x in lanes if begin <= bottom and end >= top)])


def _layers(count: int, links: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each box: the longest path to it. A box that no link enters follows the one before it."""
    layers = [0] * count
    entered: dict[int, list[int]] = {}
    for begin, end in links:
        entered.setdefault(end, []).append(begin)
    linked = {box for link in links for box in link}
    for box in range(1, count):
        if box in entered:
            layers[box] = 1 + max(layers[begin] for begin in entered[box])
        elif box not in linked:
            layers[box] = 1 + layers[box - 1]
    return layers


def _sort_rows(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each layer by the mean position of the neighbors, from above and from below in turns."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row, fixed in zip(rows[1:], rows, strict=False) if down else zip(rows[-2::-1], rows[:0:-1], strict=False):
            place = {point: number for number, point in enumerate(fixed)}
            own = {point: number for number, point in enumerate(row)}
            neighbors = above if down else below
            means = {
                point: fmean(place[other] for other in neighbors[point]) if neighbors[point] else own[point]
                for point in row
            }
            row.sort(key=means.__getitem__)


def _spread(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return positions in the given order, without overlaps, with the least squared distance to the wanted ones.

    Positions less the space of those before them must not decrease: isotonic regression, by pooling neighbors.
    """
    offsets = [0.0]
    for width, following in zip(widths, widths[1:], strict=False):
        offsets.append(offsets[-1] + (width + following) / 2 + _GAP)
    pools: list[tuple[float, int]] = []  # sum and number of the members
    for target, offset in zip(wanted, offsets, strict=True):
        pool = (target - offset, 1)
        while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
            total, number = pools.pop()
            pool = (total + pool[0], number + pool[1])
        pools.append(pool)
    means = [total / number for total, number in pools for _ in range(number)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]

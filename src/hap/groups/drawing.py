"""A drawing of what a trace found, as SVG: one row for each layer, one rail for each group.

A filled dot on a rail is a layer that computes the group's units, a ring one that reads them; several dots on one rail
are layers that must lose the same units. Squares are axes that stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hap.groups.types import Frozen, Group

COLOURS = ("#1668dc", "#d97706", "#0f8a6d", "#8b5cf6", "#d6336c", "#0891b2")
ROW, LANE, LETTER, MARGIN = 22, 16, 7.0, 20
STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1b2330 }
.faint { fill: #667085 } .title { font-weight: bold } .stripe { fill: #f5f6f8 } .paper { fill: #ffffff }
.rail { fill: none; stroke-width: 2 } .ring { stroke-width: 2; fill: #ffffff } .frozen { fill: #98a2b3 }
"""


@dataclass(frozen=True)
class Rail:
    """A group with its place in the drawing: rows of the layers that compute and read it, and a lane."""

    group: Group
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    lane: int
    colour: str

    @property
    def top(self) -> int:
        return min(self.makes + self.reads)

    @property
    def bottom(self) -> int:
        return max(self.makes + self.reads)


@dataclass(frozen=True)
class Traced:
    """What is drawn: groups by name, the shapes of parameters, what is frozen, and the weights of layers, in order."""

    groups: Mapping[str, Group]
    coupling: str
    shapes: Mapping[str, tuple[int, ...]]
    frozen: Sequence[Frozen]
    weights: Sequence[str]


def to_svg(traced: Traced) -> str:
    """The drawing as the text of an SVG file."""
    weights = _layers(traced)
    rails = _rails(traced, weights)
    names = [w.removesuffix(".weight") for w in weights]
    sizes = [" x ".join(map(str, traced.shapes[w])) for w in weights]
    notes = _notes(traced, weights, rails)
    left = MARGIN + LETTER * max(map(len, [*names, "layer"])) + 2 * MARGIN
    lanes = left + LETTER * max(map(len, [*sizes, "outputs x inputs"])) + MARGIN
    right = lanes + LANE * (1 + max((r.lane for r in rails), default=0)) + MARGIN
    reasons = [f"{f.what}: {f.why}" for f in traced.frozen]
    width = right + LETTER * max(map(len, [*notes, *reasons, "group"])) + MARGIN
    rows = [
        _row(i, *line, (MARGIN, left, right), width) for i, line in enumerate(zip(names, sizes, notes, strict=True))
    ]
    body = [
        _heading(traced, (MARGIN, left, right)),
        *rows,
        *(_rail(rail, lanes) for rail in rails),
        *_squares(traced, weights, lanes),
        *_footer(reasons, len(weights)),
    ]
    height = _y(len(weights)) + ROW * (len(reasons) + 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">\n<style>{STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        + "\n".join([*body, "</svg>\n"])
    )


def _layers(traced: Traced) -> list[str]:
    """Weights in the order of their first use, then whatever else computes or reads units."""
    groups = traced.groups.values()
    others = [weight for g in groups for weight in (*(p.weight for p in g.producers), *(w for w, _ in g.consumers))]
    return list(dict.fromkeys([*traced.weights, *others]))


def _rails(traced: Traced, weights: list[str]) -> list[Rail]:
    """Every group in the leftmost lane that is free along its rows."""
    row = {weight: i for i, weight in enumerate(weights)}
    spans = []
    for group in traced.groups.values():
        makes = tuple(sorted({row[p.weight] for p in group.producers}))
        reads = tuple(sorted({row[weight] for weight, _ in group.consumers}))
        spans.append((min(makes + reads), max(makes + reads), group, makes, reads))
    spans.sort(key=lambda span: span[:2])
    ends: list[int] = []
    rails = []
    for i, (top, bottom, group, makes, reads) in enumerate(spans):
        lane = next((k for k, end in enumerate(ends) if end < top), len(ends))
        ends[lane : lane + 1] = [bottom]
        rails.append(Rail(group, makes, reads, 1 + lane, COLOURS[i % len(COLOURS)]))
    return rails


def _notes(traced: Traced, weights: list[str], rails: list[Rail]) -> list[str]:
    """What stands at the right of each row: the groups that begin there, or why the layer's outputs stay."""
    notes: list[list[str]] = [[] for _ in weights]
    for rail in rails:
        notes[rail.makes[0]].append(_describe(rail.group))
    reasons = {f.what: f.why for f in reversed(traced.frozen)}
    for i, weight in enumerate(weights):
        if _fixed(traced, weight) and not notes[i]:
            why = reasons.get(weight.removesuffix(".weight"))
            notes[i].append(f"stays: {why}" if why else "stays")
    return ["; ".join(n) for n in notes]


def _describe(group: Group) -> str:
    first = group.producers[0]
    rows = int((first.unit >= 0).sum()) // len(group)
    each = f" of {rows} rows" if rows > 1 else ""
    coupled = f", {len(group.producers)} layers coupled" if len(group.producers) > 1 else ""
    return f"{len(group)} units{each}{coupled}"


def _fixed(traced: Traced, weight: str) -> bool:
    """Whether a layer's outputs belong to no group."""
    return not any(p.weight == weight for g in traced.groups.values() for p in g.producers)


# ---- SVG ----------------------------------------------------------------------------------------------------


def _y(row: int) -> float:
    return 3.5 * ROW + row * ROW


def _heading(traced: Traced, columns: tuple[float, float, float]) -> str:
    title = f"{sum(map(len, traced.groups.values()))} units in {len(traced.groups)} groups, {traced.coupling} coupling"
    key = "dot: computes the units, ring: reads them, square: stays as it is"
    heads = "".join(
        f'<text class="faint" x="{x:.1f}" y="{2.6 * ROW:.1f}">{word}</text>'
        for x, word in zip(columns, ("layer", "weight", "group"), strict=True)
    )
    return (
        f'<text class="title" x="{MARGIN}" y="{ROW}">{escape(title)}</text>'
        f'<text class="faint" x="{MARGIN}" y="{1.7 * ROW:.1f}">{key}</text>{heads}'
    )


def _row(i: int, name: str, size: str, note: str, columns: tuple[float, float, float], width: float) -> str:
    stripe = f'<rect class="stripe" x="0" y="{_y(i) - ROW / 2:.1f}" width="{width:.0f}" height="{ROW}"/>'
    kinds = ("", "faint", "faint" if note.startswith("stays") else "")
    texts = (
        f'<text class="{kind}" x="{x:.1f}" y="{_y(i) + 4:.1f}">{escape(text)}</text>'
        for x, text, kind in zip(columns, (name, size, note), kinds, strict=True)
    )
    return stripe * (i % 2) + "".join(texts)


def _rail(rail: Rail, lanes: float) -> str:
    x = lanes + LANE * rail.lane
    dots = "".join(f'<circle cx="{x:.1f}" cy="{_y(r):.1f}" r="5" fill="{rail.colour}"/>' for r in rail.makes)
    rings = "".join(
        f'<circle class="ring" cx="{x:.1f}" cy="{_y(r):.1f}" r="4" stroke="{rail.colour}"/>'
        for r in rail.reads
        if r not in rail.makes
    )
    line = f'<path class="rail" stroke="{rail.colour}" d="M{x:.1f} {_y(rail.top):.1f}V{_y(rail.bottom):.1f}"/>'
    return f"<g><title>{escape(rail.group.name)}: {_describe(rail.group)}</title>{line}{dots}{rings}</g>"


def _squares(traced: Traced, weights: list[str], lanes: float) -> list[str]:
    return [
        f'<rect class="frozen" x="{lanes - 4:.1f}" y="{_y(i) - 4:.1f}" width="8" height="8"/>'
        for i, weight in enumerate(weights)
        if _fixed(traced, weight)
    ]


def _footer(reasons: list[str], rows: int) -> list[str]:
    head = f'<text class="faint" x="{MARGIN}" y="{_y(rows) + ROW:.1f}">left alone</text>' if reasons else ""
    lines = (
        f'<text x="{MARGIN}" y="{_y(rows) + ROW * (i + 2) - 6:.1f}">{escape(reason)}</text>'
        for i, reason in enumerate(reasons)
    )
    return [head, *lines]

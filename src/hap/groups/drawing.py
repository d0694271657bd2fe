"""A drawing of what a trace found, as SVG: one row for each layer, one rail for each group.

A filled dot on a rail is a layer that computes the group's units, a ring one that reads them; several dots on one rail
are layers that must lose the same units. Squares are axes that stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from hap.groups.types import Group

if TYPE_CHECKING:
    from hap.groups.groups import Groups

COLOURS = ("#1668dc", "#d97706", "#0f8a6d", "#8b5cf6", "#d6336c", "#0891b2")
ROW, LANE, LETTER, MARGIN = 22, 16, 7.0, 20
STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1b2330 }
.faint { fill: #667085 } .title { font-weight: bold } .stripe { fill: #f5f6f8 } .paper { fill: #ffffff }
.rail { fill: none; stroke-width: 2 } .ring { stroke-width: 2; fill: #ffffff } .frozen { fill: #98a2b3 }
"""


@dataclass(frozen=True)
class Rail:
    """A group with its place in the drawing: rows of the layers that compute its units and of others that read them,
    the first and the last of all these, and a lane."""

    group: Group
    makes: list[int]
    reads: list[int]
    top: int
    bottom: int
    lane: int
    colour: str


def to_svg(groups: Groups) -> str:
    """The drawing as the text of an SVG file."""
    weights = _layers(groups)
    rails = _rails(groups, weights)
    fixed = set(range(len(weights))).difference(*(rail.makes for rail in rails))
    names = [w.removesuffix(".weight") for w in weights]
    sizes = [" x ".join(map(str, groups.shapes[w])) for w in weights]
    notes = _notes(groups, names, rails, fixed)
    left = MARGIN + LETTER * max(map(len, [*names, "layer"])) + 2 * MARGIN
    lanes = left + LETTER * max(map(len, [*sizes, "outputs x inputs"])) + MARGIN
    right = lanes + LANE * (1 + max((r.lane for r in rails), default=0)) + MARGIN
    reasons = [f"{f.what}: {f.why}" for f in groups.frozen]
    width = right + LETTER * max(map(len, [*notes, *reasons, "group"])) + MARGIN
    rows = enumerate(zip(names, sizes, notes, strict=True))
    corners = [(lanes - 4, _y(row) - 4) for row in sorted(fixed)]
    body = [
        *_heading(groups, (MARGIN, left, right)),
        *(_row(i, texts, (MARGIN, left, right), width) for i, texts in rows),
        *(_rail(rail, lanes) for rail in rails),
        *(f'<rect class="frozen" x="{x:.1f}" y="{y:.1f}" width="8" height="8"/>' for x, y in corners),
        *([_text(MARGIN, _y(len(weights)) + ROW, "left alone", "faint")] if reasons else []),
        *(_text(MARGIN, _y(len(weights)) + ROW * i - 6, reason) for i, reason in enumerate(reasons, 2)),
    ]
    height = _y(len(weights)) + ROW * (len(reasons) + 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">\n<style>{STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        + "\n".join([*body, "</svg>\n"])
    )


def _layers(groups: Groups) -> list[str]:
    """Weights in the order of their first use, then whatever else computes or reads units."""
    used = [term.weight for term in groups.costs.weight_macs]
    others = [w for g in groups.values() for w in (*(p.weight for p in g.producers), *(w for w, _ in g.consumers))]
    return list(dict.fromkeys([*used, *others]))


def _rails(groups: Groups, weights: list[str]) -> list[Rail]:
    """Every group in the leftmost lane that is free along its rows."""
    row = {weight: i for i, weight in enumerate(weights)}
    spans = []
    for group in groups.values():
        makes, reads = {row[p.weight] for p in group.producers}, {row[weight] for weight, _ in group.consumers}
        spans.append((min(makes | reads), max(makes | reads), group, sorted(makes), sorted(reads - makes)))
    spans.sort(key=lambda span: span[:2])
    ends: list[int] = []
    rails = []
    for i, (top, bottom, group, made, read) in enumerate(spans):
        lane = next((k for k, end in enumerate(ends) if end < top), len(ends))
        ends[lane : lane + 1] = [bottom]
        rails.append(Rail(group, made, read, top, bottom, 1 + lane, COLOURS[i % len(COLOURS)]))
    return rails


def _notes(groups: Groups, names: list[str], rails: list[Rail], fixed: set[int]) -> list[str]:
    """What stands at the right of each row: the groups that begin there, or why the layer's outputs stay."""
    notes: list[list[str]] = [[] for _ in names]
    for rail in rails:
        notes[rail.makes[0]].append(_describe(rail.group))
    reasons = {f.what: f": {f.why}" for f in reversed(groups.frozen)}
    for row in fixed:
        notes[row].append(f"stays{reasons.get(names[row], '')}")
    return ["; ".join(note) for note in notes]


def _describe(group: Group) -> str:
    first = group.producers[0]
    rows = int((first.unit >= 0).sum()) // len(group)
    each = f" of {rows} rows" if rows > 1 else ""
    coupled = f", {len(group.producers)} layers coupled" if len(group.producers) > 1 else ""
    return f"{len(group)} units{each}{coupled}"


# ---- SVG ----------------------------------------------------------------------------------------------------


def _y(row: int) -> float:
    return 3.5 * ROW + row * ROW


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _heading(groups: Groups, columns: tuple[float, float, float]) -> list[str]:
    key = "dot: computes the units, ring: reads them, square: stays as it is"
    heads = zip(columns, ("layer", "weight", "group"), strict=True)
    return [
        _text(MARGIN, ROW, f"{groups.units} units in {len(groups)} groups, {groups.coupling} coupling", "title"),
        _text(MARGIN, 1.7 * ROW, key, "faint"),
        *(_text(x, 2.6 * ROW, word, "faint") for x, word in heads),
    ]


def _row(i: int, texts: tuple[str, str, str], columns: tuple[float, float, float], width: float) -> str:
    stripe = f'<rect class="stripe" x="0" y="{_y(i) - ROW / 2:.1f}" width="{width:.0f}" height="{ROW}"/>'
    kinds = ("", "faint", "faint" if texts[2].startswith("stays") else "")
    return stripe * (i % 2) + "".join(_text(x, _y(i) + 4, *of) for x, *of in zip(columns, texts, kinds, strict=True))


def _rail(rail: Rail, lanes: float) -> str:
    x, colour = lanes + LANE * rail.lane, rail.colour
    dots = (f'<circle cx="{x:.1f}" cy="{_y(r):.1f}" r="5" fill="{colour}"/>' for r in rail.makes)
    rings = (f'<circle class="ring" cx="{x:.1f}" cy="{_y(r):.1f}" r="4" stroke="{colour}"/>' for r in rail.reads)
    line = f'<path class="rail" stroke="{colour}" d="M{x:.1f} {_y(rail.top):.1f}V{_y(rail.bottom):.1f}"/>'
    return f"<g><title>{escape(rail.group.name)}: {_describe(rail.group)}</title>{line}{''.join((*dots, *rings))}</g>"

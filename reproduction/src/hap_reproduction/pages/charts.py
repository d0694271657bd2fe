"""Accuracy against what is left: the figures of the page of results."""

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from hap.report.style import MUTED, SERIES, Figure, new_figure, styled
from hap_reproduction.pages.rows import Row

STYLES = [(colour, marker) for marker in ("o", "s", "^", "D") for colour in SERIES]
"""As many methods as there are look different."""


def against_flops(rows: Sequence[Row]) -> Figure:
    """Filled: ours, a line through the means and a small dot for each seed. Hollow: the paper's."""
    with styled():
        figure, axes = new_figure(8.2, 4.2)
        axis = axes[0]
        for (colour, marker), (name, members) in zip(cycle(STYLES), _by_label(rows).items(), strict=False):
            _line(axis, members, "macs", colour, name, marker)
            points = [(r.job.paper["flops"], r.job.paper["accuracy"]) for r in members if r.job.paper]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker, mfc="none", mec=colour, ms=6.5, mew=1.2)
        _label(axis, "FLOPs left, %", "ResNet56, protocol paper (hollow: the paper's figures)")
        figure.legend(loc="outside right upper")
    return figure


def curves(rows: Sequence[Row], names: Mapping[str, str]) -> Figure:
    """A panel for each network, a line for each method."""
    models = list(dict.fromkeys(row.job.model for row in rows))
    epochs = rows[0].job.recipe.epochs
    with styled():
        figure, axes = new_figure(4.6 * len(models), 3.6, len(models))
        styles = dict(zip(_by_label(rows), cycle(STYLES), strict=False))
        for axis, model in zip(axes, models, strict=True):
            for name, members in _by_label([r for r in rows if r.job.model == model]).items():
                _line(axis, members, "params", styles[name][0], name, styles[name][1])
            _label(axis, "parameters left, %", f"{names[model]}, {epochs} epochs of fine-tuning")
        axes[0].legend(loc="lower right")
    return figure


def as_svg(figure: Figure) -> str:
    """The figure as a file of its own; the same figure gives the same text."""
    buffer = io.StringIO()
    with styled():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.label, []).append(row)
    return found


def _line(axis: Any, rows: Sequence[Row], kind: str, colour: str, name: str, marker: str) -> None:
    ordered = sorted(rows, key=lambda row: row.share(kind))
    axis.plot(
        [r.share(kind) for r in ordered],
        [r.mean for r in ordered],
        f"{marker}-",
        color=colour,
        ms=6,
        lw=1.4,
        mec="none",
        label=name,
    )
    for row in ordered:
        if len(row.records) > 1:
            axis.plot(
                [row.share(kind)] * len(row.records), row.accuracies, "o", color=colour, ms=3.5, alpha=0.5, mec="none"
            )


def _label(axis: Any, x: str, title: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel("test accuracy after the last epoch, %")
    axis.set_title(title)
    axis.tick_params(labelcolor=MUTED)

"""The charts: each takes records and gives a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from hap.report.style import (
    ACCENT,
    DENSE,
    GRID,
    IMPLANT,
    INK,
    LOST,
    MUTED,
    SERIES,
    VARIABLES,
    Figure,
    new_figure,
    styled,
    to_svg,
)
from hap.report.summary import Row
from hap.workflow.results import Result

FATES = {"kept": ACCENT, "implanted": IMPLANT, "removed": LOST}


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each method, the same in all charts."""
    pruned = [row.name for row in rows if not row.dense]
    return {row.name: DENSE for row in rows if row.dense} | {n: SERIES[i % len(SERIES)] for i, n in enumerate(pruned)}


def palette(rows: Sequence[Row]) -> dict[str, str]:
    """The name in the page's style sheet of each method's colour."""
    return {name: VARIABLES[colour] for name, colour in colours(rows).items()}


def figures(
    results: Sequence[Result], rows: Sequence[Row], others: Sequence[Mapping[str, Any]]
) -> dict[str, str | int | None]:
    """The charts of the page as SVG, and what it says of them; None for those that have no records."""
    maps = [r for r in others if r["kind"] == "hap-sensitivity" and r["criterion"].startswith("hessian")]
    telling = max(maps, key=_implanted, default=None)
    found = next((r for r in others if r["kind"] == "hap-probes"), None)
    trained = any(r.curve.get("loss") for r in results)
    return {
        "summary": to_svg(summary(rows), "summary"),
        "sensitivity": to_svg(sensitivity(telling), "sensitivity") if telling else None,
        "sensitivity_of": telling["name"] if telling else None,
        "probes": to_svg(probes(found), "probes") if found else None,
        "probe_count": found["probes"] if found else None,
        "probe_images": found["images"] if found else None,
        "curves": to_svg(curves(results, rows), "curves") if trained else None,
    }


def _implanted(record: Mapping[str, Any]) -> int:
    return sum(layer["fate"].count("implanted") for layer in record["layers"].values())


def summary(rows: Sequence[Row]) -> Figure:
    """Accuracy beside cost. With several budgets, accuracy against the parameters left."""
    budgets = {round(row.params_left, 2) for row in rows if not row.dense}
    with styled():
        figure, axes = new_figure(9.2, 1.5 + 0.42 * len(rows), 2, width_ratios=(1.15, 1))
        if len(budgets) > 1:
            _against_params(axes[0], rows)
        else:
            _dots(axes[0], rows)
        _costs(axes[1], rows)
    return figure


def _dots(axis: Any, rows: Sequence[Row]) -> None:
    """A line per method: a dot for each seed and a bar at their mean."""
    colour = colours(rows)
    for y, row in enumerate(rows):
        values = [100 * a for a in row.accuracies]
        mean = 100 * row.accuracy
        axis.plot(values, _stacked(values, y), "o", color=colour[row.name], ms=6.5, alpha=0.6, mec="none", zorder=3)
        axis.plot([mean, mean], [y - 0.24, y + 0.24], color=colour[row.name], lw=2.6, zorder=4)
        axis.annotate(f"{mean:.2f}%", (mean, y - 0.3), ha="center", va="bottom", color=INK, fontsize=9, weight="bold")
    low, high = (f(100 * a for r in rows for a in r.accuracies) for f in (min, max))
    margin = max(0.22 * (high - low), 0.15)
    axis.set_xlim(low - margin, high + margin)
    axis.set_ylim(len(rows) - 0.45, -0.75)
    axis.set_yticks(range(len(rows)), [row.name for row in rows], color=INK)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("test accuracy after the last epoch, %")
    many = max(len(row.accuracies) for row in rows) > 1
    axis.set_title("Accuracy (a dot is a seed, a bar the mean)" if many else "Accuracy")


def _stacked(values: list[float], y: float) -> list[float]:
    """Heights that lay equal values side by side instead of on top of each other."""
    return [y + 0.2 * (values[:i].count(v) - (values.count(v) - 1) / 2) for i, v in enumerate(values)]


def _against_params(axis: Any, rows: Sequence[Row]) -> None:
    colour = colours(rows)
    for row in rows:
        x, seeds = 100 * row.params_left, [100 * a for a in row.accuracies]
        axis.plot([x] * len(seeds), seeds, "o", color=colour[row.name], ms=6, alpha=0.45, mec="none")
        axis.plot([x], [100 * row.accuracy], "o", color=colour[row.name], ms=9, mec="none", label=row.name, zorder=4)
    axis.set_xlabel("parameters left, %")
    axis.set_ylabel("test accuracy, %")
    axis.set_title("Accuracy against size")
    axis.legend(loc="best")


def _costs(axis: Any, rows: Sequence[Row]) -> None:
    """Parameters, multiply-adds and latency left, in per cent of the dense network's."""
    pruned = [row for row in rows if not row.dense]
    colour = colours(rows)
    kinds = [
        ("parameters", [r.params_left for r in pruned]),
        ("FLOPs", [r.macs_left for r in pruned]),
        ("latency", [1 / r.speed for r in pruned]),
    ]
    height = 0.8 / max(len(pruned), 1)
    for i, (_, values) in enumerate(kinds):
        for j, (row, value) in enumerate(zip(pruned, values, strict=True)):
            y = i + (j - (len(pruned) - 1) / 2) * height
            axis.barh(y, 100 * value, height=0.82 * height, color=colour[row.name], lw=0)
            axis.annotate(f"{100 * value:.0f}", (100 * value + 1.5, y), va="center", color=MUTED, fontsize=8)
    axis.axvline(100, color=DENSE, lw=1.2, ls=(0, (4, 3)))
    axis.set_xlim(0, max(112, 100 * max((v for _, vs in kinds for v in vs), default=1) + 12))
    axis.set_yticks(range(len(kinds)), [name for name, _ in kinds], color=INK)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("left, % of the dense network (dashed)")
    axis.set_title("Cost")


def sensitivity(record: Mapping[str, Any], count: int = 3) -> Figure:
    """Sensitivity per channel of a few layers, with what became of each channel."""
    layers = record["layers"]
    chosen = _telling(layers, count)
    floor = _floor(layers)
    with styled():
        figure, axes = new_figure(9.2, 2.75, len(chosen), sharey=True)
        for axis, name in zip(axes, chosen, strict=True):
            scores, fate = layers[name]["scores"], layers[name]["fate"]
            for word, colour in FATES.items():
                at = [i for i, f in enumerate(fate) if f == word]
                tops = [max(scores[i], floor) for i in at]
                axis.vlines(at, floor, tops, color=colour, lw=max(1.4, min(3.6, 120 / len(scores))))
                axis.plot(at, tops, "o", color=colour, ms=4, mec="none", label=word)
            axis.set_yscale("log")
            axis.set_ylim(bottom=floor)
            axis.set_title(name)
            axis.set_xlabel("channel")
            axis.grid(axis="x", visible=False)
        axes[0].set_ylabel(f"sensitivity ({record['criterion']})")
        present = {f for name in chosen for f in layers[name]["fate"]}
        handles, names = axes[0].get_legend_handles_labels()
        shown = [(h, n) for h, n in zip(handles, names, strict=True) if n in present]
        figure.legend([h for h, _ in shown], [n for _, n in shown], loc="outside upper right", ncols=3)
    return figure


def _telling(layers: Mapping[str, Any], count: int) -> list[str]:
    """Layers spread over the depth, of those that both kept and lost channels where there are enough."""
    mixed = [name for name, layer in layers.items() if len(set(layer["fate"])) > 1]
    pool = mixed if len(mixed) >= count else list(layers)
    if len(pool) <= count:
        return pool
    return [pool[round(i * (len(pool) - 1) / (count - 1))] for i in range(count)]


def _floor(layers: Mapping[str, Any]) -> float:
    positive = [s for layer in layers.values() for s in layer["scores"] if s > 0]
    return max(min(positive), max(positive) * 1e-9) / 2 if positive else 1e-12


def probes(record: Mapping[str, Any]) -> Figure:
    """The running mean of Hutchinson's estimate for a few channels, its standard error, and the exact value."""
    channels = record["channels"]
    with styled():
        figure, axes = new_figure(9.2, 2.6, len(channels))
        for axis, channel in zip(axes, channels, strict=True):
            _probe_panel(axis, channel)
        axes[0].set_ylabel("score")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return figure


def _probe_panel(axis: Any, channel: Mapping[str, Any]) -> None:
    mean, error = channel["mean"], channel["error"]
    steps = range(2, len(mean) + 1)
    low, high = ([m + sign * e for m, e in zip(mean[1:], error[1:], strict=True)] for sign in (-1, 1))
    axis.fill_between(steps, low, high, color=ACCENT, alpha=0.18, lw=0, label="± 1 standard error")
    axis.plot(range(1, len(mean) + 1), mean, color=ACCENT, lw=1.5, label="mean of the probes so far")
    if channel["exact"] is not None:
        axis.axhline(channel["exact"], color=INK, lw=1.2, ls=(0, (4, 3)), label="exact")
    tail = slice(min(4, len(low) - 1), None)
    bounds = [*low[tail], *high[tail], *([channel["exact"]] if channel["exact"] is not None else [])]
    gap = 0.15 * (max(bounds) - min(bounds)) or 1e-12
    axis.set_ylim(min(bounds) - gap, max(bounds) + gap)
    axis.set_xlim(0, len(mean))
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=False)
    axis.yaxis.get_offset_text().set_color(MUTED)
    axis.set_title(f"{channel['layer']} [{channel['unit']}]", fontsize=9, pad=12)
    axis.set_xlabel("probes")


def curves(results: Sequence[Result], rows: Sequence[Row]) -> Figure:
    """Loss and test accuracy by epoch: the dense training, and the fine-tunings."""
    colour = colours(rows)
    dense = [r for r in results if r.pruned is None and r.curve.get("loss")]
    pruned = [r for r in results if r.pruned is not None and r.curve.get("loss")]
    sides = [(title, part) for title, part in (("dense training", dense), ("fine-tuning", pruned)) if part]
    with styled():
        figure, axes = new_figure(9.2, 2.7, 2 * max(len(sides), 1))
        for i, (title, part) in enumerate(sides):
            left, right = axes[2 * i], axes[2 * i + 1]
            _curve(left, part, "loss", 1, colour)
            left.set_title(f"Loss, {title}")
            _curve(right, part, "accuracy", 100, colour)
            right.set_title(f"Accuracy %, {title}")
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper right", ncols=6)
    return figure


def _curve(axis: Any, results: Sequence[Result], what: str, scale: float, colour: Mapping[str, str]) -> None:
    named: set[str] = set()
    for result in results:
        points = [(i, scale * v) for i, v in enumerate(result.curve[what], 1) if v is not None]
        marker = "o" if len(points) == 1 else None
        label = None if result.name in named else result.name
        named.add(result.name)
        axis.plot(*zip(*points, strict=True), color=colour[result.name], lw=1.5, alpha=0.85, label=label, marker=marker)
    axis.set_xlabel("epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelcolor=MUTED)
    axis.spines["left"].set_color(GRID)

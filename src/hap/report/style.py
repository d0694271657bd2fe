"""How charts look: one palette, drawn once and shown in light and dark by the page's colours."""

import io
import re
from functools import partial
from typing import Any

from hap.errors import optional_package

with optional_package("the report needs matplotlib and jinja2, which are missing", "report"):
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, MUTED, GRID, PAPER = "#1b2330", "#667085", "#dfe3ea", "#ffffff"
DENSE, ACCENT, IMPLANT, OTHER, LOST = "#475467", "#1668dc", "#d97706", "#0f8a6d", "#b9c0cc"
SERIES = (ACCENT, IMPLANT, OTHER, "#8b5cf6", "#d6336c", "#0891b2")
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    DENSE: "dense",
    LOST: "lost",
    **{colour: f"series-{i}" for i, colour in enumerate(SERIES)},
}
"""Colours of the charts by their names in the page's style sheet."""

SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "hap",
}


styled = partial(mpl.rc_context, SETTINGS)  # type: ignore[arg-type]
"""Inside of it charts are drawn as the settings say."""


def new_figure(width: float, height: float, panels: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure outside of pyplot, so that no window system and no global state is touched, and its panels in a row."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.06))
    return figure, figure.subplots(1, panels, squeeze=False, **options)[0]


def to_svg(figure: Figure, name: str) -> str:
    """The figure as inline SVG: colours are the page's variables, and names are unlike any other chart's."""
    buffer = io.StringIO()
    with styled():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    text = re.sub(r'width="([\d.]+)pt" height="([\d.]+)pt"', 'width="100%"', text, count=1)
    text = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "var(--font)", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text


def to_png(figure: Figure, dpi: int = 180) -> bytes:
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()

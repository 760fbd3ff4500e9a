"""The style of all figures: widths in inches, colours, lines, matplotlib's settings.

Every colour comes from `THEME`, which has a counterpart for dark pages.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...install import install
from ...recipes import METHODS as OF_PAPER
from ..plain import Data

WIDE, NARROW = 9.0, 4.4
SMALL = 8.0
"""The smallest font size, in points; at least 9 pixels high wherever a page shows the figure."""

# Name -> (on a light page, on a dark page). Figures are drawn in the light ones.
THEME = {
    "ink": ("#1c2127", "#e6e9ec"),
    "muted": ("#66707b", "#9aa4ae"),
    "grid": ("#e3e7eb", "#2c3238"),
    "accent": ("#0b62b5", "#6cb2f5"),
    # Methods: Okabe and Ito's hues, which the colour-blind can tell apart, dark enough for a white page.
    "method-1": ("#2a2f36", "#d5dade"),
    "method-2": ("#c9720a", "#f0a030"),
    "method-3": ("#3b96cc", "#73c2f2"),
    "method-4": ("#00795a", "#2cc59a"),
    "method-5": ("#b0568a", "#e091bf"),
    "method-6": ("#8a8200", "#dccf3a"),
    "method-7": ("#c33a00", "#ff7a3d"),
    "method-8": ("#1f4fd0", "#8aa8ff"),
    "method-9": ("#7a4fc0", "#b79bf5"),
    "method-10": ("#8a5a2b", "#d3a275"),
    "method-11": ("#0f8a93", "#55cbd4"),
    "method-12": ("#5d7388", "#a3b7c9"),
    # Layers, first to last: the part of viridis that is legible on such a page.
    "layer-1": ("#482475", "#287d8e"),
    "layer-2": ("#453581", "#24878e"),
    "layer-3": ("#404588", "#20928c"),
    "layer-4": ("#3a548c", "#1e9d89"),
    "layer-5": ("#33628d", "#22a785"),
    "layer-6": ("#2d708e", "#2cb17e"),
    "layer-7": ("#287c8e", "#3bbb75"),
    "layer-8": ("#23898e", "#50c46a"),
    "layer-9": ("#1f958b", "#67cc5c"),
    "layer-10": ("#1fa287", "#84d44b"),
    "layer-11": ("#28ae80", "#a0da39"),
    "layer-12": ("#3bbb75", "#bddf26"),
    # Experts, first to last: once around the hues, neighbours alternately lighter and darker.
    "expert-1": ("#2a5cda", "#81a9fd"),
    "expert-2": ("#0e81c3", "#7bc6ff"),
    "expert-3": ("#01758f", "#04bde6"),
    "expert-4": ("#138b90", "#0cd7df"),
    "expert-5": ("#047a68", "#0ec6aa"),
    "expert-6": ("#039256", "#1ae088"),
    "expert-7": ("#407a01", "#70c426"),
    "expert-8": ("#7c8100", "#c0c813"),
    "expert-9": ("#7f6604", "#cea608"),
    "expert-10": ("#a96b03", "#ffa930"),
    "expert-11": ("#a74a04", "#fe843d"),
    "expert-12": ("#d73433", "#fda298"),
    "expert-13": ("#bd135a", "#fe799d"),
    "expert-14": ("#c43998", "#fe96d6"),
    "expert-15": ("#9a31ac", "#e379f5"),
    "expert-16": ("#8f54dc", "#c9adfd"),
}
INK, MUTED, GRID, ACCENT = (THEME[name][0] for name in ("ink", "muted", "grid", "accent"))
METHODS, LAYERS, EXPERTS = (
    [light for name, (light, _) in THEME.items() if name.startswith(kind)] for kind in ("method-", "layer-", "expert-")
)

# The fixed colours of the paper's methods; other methods take the remaining ones of METHODS.
KINDS = {name: METHODS[method.colour] for name, method in OF_PAPER.items() if method.colour is not None}
ONE_LAYER: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (3, 1.5)), "alpha": 0.75}  # of many
WARMUP: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (2, 2))}  # its end
TARGET: dict[str, Any] = {"color": INK, "linewidth": 0.7, "linestyle": (0, (2, 2))}  # what is aimed at
DASHES = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.4, 1, 1.4)))  # of methods of one kind

STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": MUTED,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0.2,
    "legend.handlelength": 1.7,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "xtick.major.width": 0.6,
    "ytick.major.size": 0,
    "lines.linewidth": 1.5,
    "lines.markersize": 3,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "expert-threshold",  # the same figure is the same file
}
"""matplotlib's settings; they must be active while a figure is drawn and saved."""


@contextmanager
def style() -> Iterator[None]:
    """Make `STYLE` active in a context. Raises ValueError with the remedy if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"figures need matplotlib, which is missing; run: {install('viz')}") from None
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a page's browser has it; a PNG shows a box
        yield


def layer_colours(count: int) -> list[str]:
    """Return a colour for each layer, first to last; neighbours share one if there are too few."""
    return _evenly(LAYERS, count)


def expert_colours(count: int) -> list[str]:
    """Return a colour for each expert, first to last; neighbours share one if there are too few."""
    return _evenly(EXPERTS, count)


def _evenly(colours: Sequence[str], count: int) -> list[str]:
    return [colours[round(place)] for place in np.linspace(0, len(colours) - 1, count)]


def method_colours(kinds: Sequence[str]) -> dict[str, str]:
    """Return kind -> colour."""
    others = [kind for kind in dict.fromkeys(kinds) if kind not in KINDS]
    left = [colour for colour in METHODS if colour not in KINDS.values()]
    return KINDS | {kind: left[place % len(left)] for place, kind in enumerate(others)}


def strokes(methods: Sequence[Data]) -> list[dict[str, Any]]:
    """Return the colour, the dashes and the label of each method; methods of one kind share the colour."""
    kinds = [entry["kind"] for entry in methods]
    colours = method_colours(kinds)
    return [
        {
            "color": colours[entry["kind"]],
            "linestyle": DASHES[kinds[:place].count(entry["kind"]) % len(DASHES)],
            "label": entry["method"],
        }
        for place, entry in enumerate(methods)
    ]

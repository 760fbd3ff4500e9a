"""The style of all figures: widths in inches, colours, lines, matplotlib's settings.

Figures are drawn for a light page; on a dark page, the style sheet inverts their lightness and keeps their hues.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from ...install import install
from ...recipes import METHODS as OF_PAPER
from ..plain import Data

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any  # matplotlib is an extra, and imported only to draw

WIDE, NARROW = 9.0, 4.4
SMALL = 8.0
"""The smallest font size, in points, which is at least 9 pixels high wherever a page shows the figure."""

# Colours of pages, and of text and lines in figures: on a light page and on a dark page.
THEME = {
    "ink": ("#1c2127", "#e6e9ec"),
    "muted": ("#66707b", "#9aa4ae"),
    "grid": ("#e3e7eb", "#2c3238"),
    "accent": ("#0b62b5", "#6cb2f5"),
}
INK, MUTED, GRID, ACCENT = (light for light, _ in THEME.values())

# Hues of Okabe and Ito, which colour-blind readers can distinguish, made dark enough for a white page.
METHODS = [
    "#2a2f36", "#c9720a", "#3b96cc", "#00795a", "#b0568a", "#8a8200",
    "#c33a00", "#1f4fd0", "#7a4fc0", "#8a5a2b", "#0f8a93", "#5d7388",
]  # fmt: skip
# The fixed colours of the paper's methods; other methods use the remaining colours of METHODS.
KINDS = {name: METHODS[method.colour] for name, method in OF_PAPER.items() if method.colour is not None}
ONE_LAYER: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (3, 1.5)), "alpha": 0.75}  # of many
WARMUP: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (2, 2))}  # the end of warmup
DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (3, 1.5))}
TARGET: dict[str, Any] = {"color": INK, "linewidth": 0.7, "linestyle": (0, (2, 2))}  # a target
DASHES = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.4, 1, 1.4)))  # for methods of the same kind

STYLE: dict[Any, Any] = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "font.size": 9, "text.color": INK, "text.parse_math": False,
    "axes.labelcolor": MUTED, "axes.titlecolor": MUTED, "axes.titlesize": 9, "axes.titlelocation": "left",
    "axes.edgecolor": MUTED, "axes.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "legend.frameon": False, "legend.fontsize": 8.5, "legend.borderpad": 0, "legend.borderaxespad": 0.2,
    "legend.handlelength": 1.7, "legend.handletextpad": 0.5, "legend.columnspacing": 1.2, "legend.labelspacing": 0.25,
    "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.major.size": 3, "xtick.major.width": 0.6, "ytick.major.size": 0,
    "lines.linewidth": 1.5, "lines.markersize": 3, "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "expert-threshold",  # so that identical figures give identical files
}  # fmt: skip
"""matplotlib's settings; they must be active while a figure is drawn and saved."""
OTHER_SCRIPTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Micro Hei", "Noto Emoji", "Symbola")
"""Fonts for characters that DejaVu lacks, used where they are installed; without them a PNG shows boxes."""


@contextmanager
def style() -> Iterator[None]:
    """Make `STYLE` active in a context. Raises ValueError with the remedy if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"figures need matplotlib, which is missing; run: {install('viz')}") from None
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    families = ["sans-serif", *(name for name in OTHER_SCRIPTS if name in installed)]
    with matplotlib.rc_context(STYLE | {"font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def monospaced() -> list[str]:
    """Return the families of monospaced text while `STYLE` is active."""
    from matplotlib import rcParams

    return ["DejaVu Sans Mono", *rcParams["font.family"][1:]]


def layer_colours(count: int) -> list[str]:
    """Return a colour for each layer, first to last, from the part of viridis that is legible on white."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(tuple(colour)) for colour in colormaps["viridis"](np.linspace(0.1, 0.68, count))]


def expert_colours(count: int) -> list[str]:
    """Return a colour for each expert, first to last: once around the hues, with every other colour lighter."""
    from matplotlib.colors import hsv_to_rgb, to_hex

    hues, values = np.linspace(0.6, 1.6, count, endpoint=False) % 1, np.where(np.arange(count) % 2, 0.72, 0.55)
    return [to_hex(tuple(hsv_to_rgb((hue, 0.85, value)))) for hue, value in zip(hues, values, strict=True)]


def strokes(methods: Sequence[Data]) -> dict[str, dict[str, Any]]:
    """Return the colour, the dashes and the label of each method, keyed by its name.

    Methods of the same kind share a colour.
    """
    kinds = [entry["kind"] for entry in methods]
    others = dict.fromkeys(kind for kind in kinds if kind not in KINDS)
    colours = KINDS | dict(zip(others, cycle(c for c in METHODS if c not in KINDS.values()), strict=False))
    dashes = [DASHES[kinds[:place].count(kind) % len(DASHES)] for place, kind in enumerate(kinds)]
    return {
        entry["method"]: {"color": colours[entry["kind"]], "linestyle": dash, "label": entry["method"]}
        for entry, dash in zip(methods, dashes, strict=True)
    }

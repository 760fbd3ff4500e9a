"""Generated text for the terminal: control characters escaped, routing shown in colour."""

from __future__ import annotations

import unicodedata

from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from .engine import Step

COLOURS = ("bright_black", "blue", "cyan", "green", "yellow", "bright_red", "bright_magenta")
"""Colours for 0, 0.5, 1, … routed experts per layer, rounded; the last one covers everything above."""

LEGEND = Text.assemble(
    "routed experts per layer: ",
    *((f"{i / 2:g} ", colour) for i, colour in enumerate(COLOURS[:-1])),
    (f"{len(COLOURS) / 2 - 0.5:g}+", COLOURS[-1]),
)


def printable(text: str) -> str:
    """Return the text with every control character but newline and tab escaped, as \\x1b, so that none takes effect."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def render_routing(step: Step) -> Segment:
    """Return the step's text, coloured by its token's mean fanout over the layers; the step must be recorded.

    A segment is printed as is; a `Text` would lose tabs and control characters.
    """
    assert step.routing is not None, "only steps of generate(..., record=True) have a routing"
    fanout = sum(len(layer.experts) for layer in step.routing) / max(len(step.routing), 1)
    return Segment(step.text, Style.parse(COLOURS[min(round(2 * fanout), len(COLOURS) - 1)]))

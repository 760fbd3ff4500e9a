"""Prepares generated text for the terminal: escapes control characters, and shows the routing in colour."""

from __future__ import annotations

import unicodedata

from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from .engine import Step

COLOURS = ("bright_black", "blue", "cyan", "green", "yellow", "bright_red", "bright_magenta")
"""The colours for about 0, 0.5, 1, … routed experts per layer. The last one also covers everything above."""

LEGEND = Text.assemble(
    "routed experts per layer: ",
    *((f"{i / 2:g} ", colour) for i, colour in enumerate(COLOURS[:-1])),
    (f"{len(COLOURS) / 2 - 0.5:g}+", COLOURS[-1]),
)


def printable(text: str) -> str:
    """Return the text with control characters other than newline and tab replaced by escapes such as \\x1b."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def render_routing(step: Step) -> Segment:
    """Return the step's text, coloured by the mean fanout of its token over the layers.

    The step must have been recorded. A segment is printed unchanged, whereas a `Text` would lose tabs.
    """
    assert step.routing is not None, "only steps of generate(..., record=True) have a routing"
    fanout = sum(len(layer.experts) for layer in step.routing) / max(len(step.routing), 1)
    return Segment(step.text, Style.parse(COLOURS[min(round(2 * fanout), len(COLOURS) - 1)]))

"""What a model writes, for the terminal: without orders to it, and with the routing in colour."""

from __future__ import annotations

import unicodedata

from rich.text import Text

from .engine import Step

COLOURS = ("bright_black", "blue", "cyan", "green", "yellow", "bright_red", "bright_magenta")
"""By routed experts per layer: 0, 0.5, 1, … to the nearest; the last one for all above."""

LEGEND = Text.assemble(
    "routed experts per layer: ",
    *((f"{i / 2:g} ", colour) for i, colour in enumerate(COLOURS[:-1])),
    (f"{len(COLOURS) / 2 - 0.5:g}+", COLOURS[-1]),
)


def printable(text: str) -> str:
    """With every control character but newline and tab as its number, \\x1b: a terminal would obey it."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def render_routing(step: Step) -> Text:
    """The step's text in the colour of its token's mean fanout over the layers; the step must have been recorded."""
    assert step.routing is not None, "only steps of generate(..., record=True) have a routing"
    fanout = sum(len(layer.experts) for layer in step.routing) / max(len(step.routing), 1)
    return Text(step.text, COLOURS[min(round(2 * fanout), len(COLOURS) - 1)])

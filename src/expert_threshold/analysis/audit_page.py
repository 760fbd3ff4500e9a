"""The page of an audit: the verdict, the checks of causality, and the use of experts."""

from __future__ import annotations

from html import escape

import numpy as np

from .audit import CHANGES, Audit
from .figures.plot import colour_scale, deviations, panels
from .figures.style import WIDE, Figure
from .page import exhibit, exhibits, page, section, table, text
from .sentences import fixed

CAUSALITY = (
    "For each change there are positions that it must not affect. A position counts as changed if a logit changes by "
    "more than rounding could explain, or, in float64, if the token goes to other experts."
)
LOADS = "The load of each expert in each text, divided by the mean load of its layer. Grey cells have no tokens."
LAYERS = (
    "Entropy is the entropy of the loads, 1 if all are equal. Drift is how much the mean score of an expert changes "
    "between the halves of a text, in standard deviations. Bits are the information about the text in the expert of a "
    "token. Pairs are experts that share more tokens than independent choices would give, with the ratio."
)


def audit_page(audit: Audit) -> str:
    """Return the self-contained page. Raises ValueError with the remedy if matplotlib is missing."""
    verdict, _, rest = audit.verdict.removeprefix(f"{audit.model}: ").partition(": ")
    header = f"<header><h1>{escape(audit.model)}: {verdict}</h1>{text(rest[0].upper() + rest[1:], muted=True)}</header>"
    body = [header, section("Causality", text(CAUSALITY), _checks(audit))]
    if audit.layers:
        body.append(exhibits("Experts", [exhibit("Loads", lambda: (LOADS, draw_loads(audit)))]))
        body.append(section("Layers", text(LAYERS), _layers(audit)))
    return page(f"Audit of {audit.model}", body)


def _checks(audit: Audit) -> str:
    rows = []
    for check in audit.checks:
        first = next((name for name, positions in check.routers.items() if positions), "–")
        verdict = "leaks" if check.changed else "holds" if check.positions else "not judged"
        counts = f"{check.changed:,} of {check.positions:,}" if check.positions else "–"
        largest = f"{check.largest:.2g}" if check.positions else "–"
        rows.append((CHANGES.get(check.what, check.what), verdict, counts, largest, first, check.reason or "–"))
    head = ("change", "verdict", "positions", "largest change of a logit", "other experts from", "note")
    return table(head, rows, "Causality")


def _layers(audit: Audit) -> str:
    rows = []
    for layer in audit.layers:
        uses = fixed(layer.fanout, 2), fixed(layer.spread, 2), fixed(layer.entropy, 3)
        dead = ", ".join(map(str, layer.dead)) or "none"
        pairs = ", ".join(f"{one} and {other} ({ratio:.1f})" for one, other, _, ratio in layer.pairs[:3]) or "none"
        rows.append((layer.router, *uses, dead, fixed(layer.drift, 3), fixed(layer.information, 3), pairs))
    return table(("router", "fanout", "largest / mean", "entropy", "dead", "drift", "bits", "pairs"), rows, "Layers")


def draw_loads(audit: Audit) -> Figure:
    """Draw load / mean load, with a row for each layer and a panel for each text."""
    texts = list(audit.layers[0].load)
    experts = max(len(layer.fanout_counts) - 1 for layer in audit.layers)
    figure, every = panels(WIDE, texts, min(0.25 * len(audit.layers) + 0.5, 6), "expert", "layer")
    for axes, name in zip(every, texts, strict=True):
        ratios = np.full((len(audit.layers), experts), np.nan)
        for row, layer in zip(ratios, audit.layers, strict=True):
            row[: len(layer.load[name])] = np.array(layer.load[name]) / max(np.mean(layer.load[name]), 1e-12)
        colours = deviations(axes, ratios)
    colour_scale(every, colours, {-1: "½ mean", 0: "mean", 1: "2 × mean"})
    return figure

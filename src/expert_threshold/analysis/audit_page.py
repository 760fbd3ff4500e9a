"""The page of an audit: its verdict, causality and the use of experts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from .audit import CHANGES, Audit
from .figures.axes import colour_scale, deviations, fanout_bars, panels, single, whole_ticks
from .figures.style import WIDE, layer_colours
from .page import exhibit, exhibits, page, section, table, text
from .sentences import fixed, listed, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 12
"""The most layers with a panel of their own."""


def audit_page(audit: Audit) -> str:
    """Return the self-contained page. Raises ValueError with the remedy if matplotlib is missing."""
    texts = [*audit.layers[0].load] if audit.layers else []
    numbers = {"not causal" if audit.leaks else "causal": f"in {audit.dtype}, tolerance {audit.tolerance:.1g}"}
    if audit.layers:
        numbers[f"{max(layer.spread for layer in audit.layers):.2f}"] = "largest load / mean, worst layer"
        numbers[f"{np.mean([layer.fanout for layer in audit.layers]):.2f}"] = "experts per token"
        numbers[f"{sum(len(layer.dead) for layer in audit.layers)}"] = "dead experts"
    shown = "".join(f"<li><b>{escape(value)}</b>{escape(what)}</li>" for value, what in numbers.items())
    drawn = [
        exhibit("Load of each expert", LOAD, lambda: draw_loads(audit)),
        exhibit("Experts per token", "Share of tokens (%) by their number of experts.", lambda: draw_fanouts(audit)),
    ]
    return page(
        f"Audit of {audit.model}",
        [
            f"<header><h1>Audit of {escape(audit.model)}</h1>{text(audit.verdict, muted=True)}\n"
            f'<ul class="numbers">{shown}</ul></header>',
            section("Causality", text(CAUSALITY), _checks(audit)),
            exhibits("Experts", drawn if audit.layers else []),
            section("Layers", text(LAYERS), _layers(audit)) if audit.layers else "",
            section("Experts that fire together", text(PAIRS), _pairs(audit)) if audit.layers else "",
            section("Texts", text(TEXTS), _texts(audit, texts)) if len(texts) > 1 else "",
        ],
    )


CAUSALITY = (
    "Each change leaves positions that it may not reach. A position counts as changed if a logit moves by more than "
    " rounding can, or, in float64, if it gets other experts."
)
LOAD = "Tokens of each expert over the mean of its layer."
LAYERS = (
    "Entropy is that of the loads, 1 if all are equal. Drift is how far the mean score of an expert moves between the "
    "halves of a text, in standard deviations of its scores."
)
PAIRS = "Tokens that two experts share, and their number over that expected if experts chose tokens independently."
TEXTS = (
    "Bits about the text in the expert of a token, and in each text the expert with the largest share of its tokens "
    "relative to all texts."
)


def _checks(audit: Audit) -> str:
    rows = []
    for check in audit.checks:
        verdict = "leaks" if check.changed else "not judged" if check.reason and not check.positions else "holds"
        where = [f"{name} ({count})" for name, count in check.choices.items() if count]
        first = listed(where[:3]) if where else "–"
        numbers = (
            (f"{check.changed:,} of {check.positions:,}", f"{check.largest:.2g}") if check.positions else ("–", "–")
        )
        rows.append((CHANGES[check.what], verdict, *numbers, first, check.reason or "–"))
    return table(
        ("change", "verdict", "changed", "largest, of a logit", "other experts in (positions)", "note"),
        rows,
        "Causality",
    )


def _layers(audit: Audit) -> str:
    rows = [
        (
            layer.name,
            f"{layer.experts}",
            fixed(layer.fanout, 2),
            fixed(layer.spread, 2),
            fixed(layer.entropy, 3),
            ", ".join(map(str, layer.dead)) or "none",
            fixed(layer.drift, 3),
        )
        for layer in audit.layers
    ]
    return table(("router", "experts", "fanout", "largest / mean", "entropy", "dead", "drift"), rows, "Layers")


def _pairs(audit: Audit) -> str:
    rows = [
        (layer.name, f"{first} and {second}", f"{tokens:,}", f"{lift:.2f}")
        for layer in audit.layers
        for first, second, tokens, lift in layer.pairs
    ]
    return table(("router", "experts", "tokens", "over chance"), rows, "Pairs") if rows else text("There are none.")


def _texts(audit: Audit, texts: list[str]) -> str:
    rows = []
    for layer in audit.layers:
        load = np.array([layer.load[name] for name in texts], dtype=float)
        shares = load / load.sum(1, keepdims=True).clip(1)
        over = shares / (load.sum(0) / max(load.sum(), 1)).clip(1e-12)
        best = over.argmax(1)
        cells = (f"{expert}: {percent(shares[i, expert])}, {over[i, expert]:.1f} ×" for i, expert in enumerate(best))
        rows.append((layer.name, f"{layer.information:.3f}", *cells))
    return table(("router", "bits", *texts), rows, "Texts")


def draw_loads(audit: Audit) -> Figure:
    """Draw load / mean load, a row for each layer."""
    most = max(layer.experts for layer in audit.layers)
    ratios = np.full((len(audit.layers), most), np.nan)
    for row, layer in zip(ratios, audit.layers, strict=True):
        load = np.sum([*layer.load.values()], axis=0)
        row[: layer.experts] = load / max(load.mean(), 1e-12)
    figure, axes = single(WIDE, min(0.25 * len(ratios) + 0.5, 6), "layer", "expert")
    colours = deviations(axes, ratios)
    for axis in (axes.xaxis, axes.yaxis):
        whole_ticks(axis)
    colour_scale([axes], colours, {-1: "½ mean", 0: "mean", 1: "2 × mean"})
    return figure


def draw_fanouts(audit: Audit) -> Figure:
    """Draw the fanout of tokens, a panel for each layer, of evenly chosen ones if there are many."""
    places = np.unique(np.linspace(0, len(audit.layers) - 1, min(len(audit.layers), SHOWN)).round().astype(int))
    layers = [audit.layers[place] for place in places]
    shares = [np.array(layer.fanout_counts) / max(sum(layer.fanout_counts), 1) for layer in layers]
    most = max(map(len, shares))
    figure, every = panels(WIDE, [f"layer {place}" for place in places], 1.2)
    means = [f"mean {layer.fanout:.2f}" for layer in layers]
    fanout_bars(every, [np.pad(share, (0, most - len(share))) for share in shares], means, layer_colours(len(layers)))
    return figure

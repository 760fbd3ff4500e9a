"""Experts by domain, and the routing of single tokens of a passage (paper, Expert Specialization)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.cells import cell_len, set_cell_size

from ..material import Material, Study, over_methods
from ..measures import expert_token_ratio, mutual_information
from ..plain import Data, NotShownError, array
from ..records import Run
from ..sentences import counted, each, listed, percent
from .plot import colour_scale, heat, panels
from .style import INK, MUTED, SMALL, WIDE, Axes, Figure, monospaced, strokes

CELLS = 108
"""The maximum number of tokens of a passage shown in cells, which is two or three rows on a wide page."""
LONGEST = 9
"""The maximum number of characters of a token below its column."""
CELL, ROW, EDGE = 0.17, 0.165, 0.12  # inches: the width of a token's column, the height of a line, a margin


def specialisation(material: Material) -> Data:
    """Compute the share of each domain's tokens that each expert gets, per layer.

    bits: information of a routed token's expert about its domain, per layer, if all domains have the same size.
    """
    domains = {name: domain.known_as for name, domain in material.domains.items()}
    if len(domains) < 2:
        raise NotShownError(
            "it needs the text of two or more domains: --human-eval and --gsm8k, or --domain NAME=SOURCE"
        )

    def compute(run: Run) -> Data:
        ratios = {}
        for domain in domains:
            trace = material.trace(run, domain)
            ratios[domain] = torch.cat([expert_token_ratio(trace.assignment(layer)[None]) for layer in trace.layers])
        bits = mutual_information(torch.stack(list(ratios.values()), dim=1))
        return {"layers": run.layers, "ratios": ratios, "bits": bits}

    return {"domains": domains, **over_methods(material.each("expert specialisation", material.routed), compute)}


def draw_specialisation(data: Data) -> Figure:
    methods = data["methods"]
    most = max(array(list(entry["ratios"].values())).max() for entry in methods)
    layers = max(len(entry["layers"]) for entry in methods)
    shown = {f"{entry['method']}\n{domain}": (entry, domain) for entry in methods for domain in data["domains"]}
    colours = [stroke["color"] for stroke in strokes(methods).values() for _ in data["domains"]]
    figure, every = panels(WIDE, list(shown), max(0.13 * layers, 0.6), "expert", "layer", colours=colours)
    for axes, (entry, domain) in zip(every, shown.values(), strict=True):
        drawn = heat(axes, array(entry["ratios"][domain]), 0, most)
        every_nth = -(-layers // 6)
        axes.set_yticks(range(0, len(entry["layers"]), every_nth), entry["layers"][::every_nth])
    colour_scale(every, drawn, {0: "0 %", most: f"{100 * most:.0f} %"})
    return figure


def say_specialisation(data: Data) -> str:
    bits = each(data, lambda entry: f"{array(entry['bits']).mean():.3f}")
    most = max(array(list(entry["ratios"].values())).max() for entry in data["methods"])
    names = [f"{name} ({text})" if text else name for name, text in data["domains"].items()]
    return (
        f"The information of a routed token's expert about its domain ({listed(names)}), in bits averaged over layers, "
        f"is {bits}; the maximum is {math.log2(len(names)):.3g}. "
        f"The darkest cell is an expert that gets {percent(most)} of a domain's tokens."
    )


def draw_passage_intensity(data: Data) -> Figure:
    """Draw passages as text; the colour behind each token shows its fanout."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    advance = 0.602 * SMALL / 72  # inches: DejaVu Sans Mono is 0.602 em wide
    columns = int((WIDE - 2 * EDGE - 0.3) / advance)
    texts = [list(lay_out(passage["tokens"], columns)) for passage in data["passages"]]
    most = max(array(passage["values"]).max() for passage in data["passages"])
    (stroke,) = strokes([data]).values()
    height = 0.6 + sum(ROW * (placed[-1].line + 4) for placed in texts)
    figure = Figure((WIDE, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDE), ylim=(height, 0))
    axes.axis("off")

    def shade(value: float) -> dict[str, Any]:
        return {"color": stroke["color"], "alpha": 0.8 * value / max(most, 1), "linewidth": 0}

    steps = sorted({round(share * most) for share in (0, 0.25, 0.5, 0.75, 1)})
    title = "routed experts, all layers together"
    figure.legend([Patch(**shade(step)) for step in steps], steps, title=title, ncols=len(steps), loc="upper left")
    top = 0.6
    for passage, placed in zip(data["passages"], texts, strict=True):
        axes.text(EDGE, top + 0.5 * ROW, f"{passage['name']}, {data['method']}", color=MUTED, va="center")
        for token in placed:
            x, y = EDGE + token.column * advance, top + (1.5 + token.line) * ROW
            box = (x, y), cell_len(token.text) * advance, 0.92 * ROW
            axes.add_patch(Rectangle(*box, **shade(passage["values"][token.token])))
            if text := token.text.strip():  # position each token separately, since fonts differ in their advance
                at = x + (len(token.text) - len(token.text.lstrip())) * advance
                axes.text(at, y + 0.7 * ROW, text, fontsize=SMALL, family=monospaced(), color=INK)
        top += ROW * (placed[-1].line + 4)
    return figure


class Placed(NamedTuple):
    """A token, or the part of it on one line: its position and its visible text."""

    line: int
    column: int
    text: str
    token: int


def lay_out(tokens: Sequence[str], columns: int) -> Iterator[Placed]:
    """Lay out tokens on lines of `columns` cells; a line break is shown as ⏎, a control character as □."""
    line = column = 0
    for number, token in enumerate(tokens):
        for piece in re.split(r"(?<=\n)", token.replace("\r", "")):
            text = _visible(piece.expandtabs(4))
            width = min(cell_len(text), columns)
            if column + width > columns:
                line, column = line + 1, 0
            yield Placed(line, column, set_cell_size(text, width), number)
            column += width
            if piece.endswith("\n"):
                line, column = line + 1, 0


def say_passage_intensity(data: Data) -> str:
    parts = []
    for passage in data["passages"]:
        fanout = array(passage["values"])
        order = sorted(range(len(fanout)), key=lambda place: -fanout[place])
        words = [f"“{passage['tokens'][place].strip()}”" for place in order if passage["tokens"][place].strip()]
        top = list(dict.fromkeys(words))[:5]
        parts.append(
            f"{fanout.mean():.1f} on average in {passage['name']}, with a maximum of {fanout.max():.0f}, and highest "
            f"for {listed(top)}"
        )
    layers = counted(len(data["layers"]), "layer")
    return f"In {data['method']} the fanout of a token, summed over {layers}, is {'; '.join(parts)}."


def draw_passage_fanout(data: Data) -> Figure:
    """Draw passages with cells above the tokens that show their fanout in each layer."""
    most = max(1, *(array(passage["values"]).max() for passage in data["passages"]))

    def draw(axes: Axes, values: np.ndarray) -> None:
        heat(axes, values, 0, most)
        for layer, token in zip(*np.nonzero(values), strict=True):
            number = f"{values[layer, token]:.0f}"
            axes.text(token, layer, number, ha="center", va="center_baseline", fontsize=SMALL, color=INK)
        axes.set_yticks(range(len(data["layers"])), data["layers"], fontsize=SMALL)

    return _blocks(data, ROW * len(data["layers"]), draw, "layer")


def say_passage_fanout(data: Data) -> str:
    parts = []
    for passage in data["passages"]:
        means = array(passage["values"]).mean(1)
        text = f"{means.mean():.2f} in {passage['name']}"
        if len(means) > 1:
            low, high = (data["layers"][int(place)] for place in (means.argmin(), means.argmax()))
            text += f" ({means.min():.2f} in layer {low} to {means.max():.2f} in layer {high})"
        parts.append(text)
    return f"A token of {data['method']} has a mean fanout in a layer of {listed(parts)}."


def draw_passage_routing(data: Data) -> Figure:
    """Draw passages with cells above the tokens, filled if the token goes to the expert."""
    experts, layers = data["experts"], data["layers"]
    rows = experts * len(layers)

    def draw(axes: Axes, values: np.ndarray) -> None:
        heat(axes, values.transpose(0, 2, 1).reshape(rows, -1))
        axes.hlines(np.arange(1, len(layers)) * experts - 0.5, -0.5, values.shape[1] - 0.5, color=MUTED, linewidth=0.5)
        axes.set_yticks((np.arange(len(layers)) + 0.5) * experts - 0.5, layers, fontsize=SMALL)

    height = max(min(0.05, 3.5 / rows) * rows, 0.15 * len(layers))
    return _blocks(data, height, draw, "experts of layer" if height > 1 else "layer")


def _blocks(data: Data, height: float, draw: Callable[[Axes, np.ndarray], None], label: str) -> Figure:
    """Draw passages in rows of cells with their tokens below. height: of a row's cells, in inches."""
    columns = int((WIDE - 0.6) / CELL)
    blocks = [(passage, start) for passage in data["passages"] for start in range(0, len(passage["tokens"]), columns)]
    titles = [f"{passage['name']}, {data['method']}" if start == 0 else "" for passage, start in blocks]
    names = [[_short(token) for token in passage["tokens"][start : start + columns]] for passage, start in blocks]
    room = height + 0.072 * max(len(name) for block in names for name in block) - 0.25  # no label below
    figure, every = panels(WIDE, titles, room, "", label, columns=1, share=False)
    for axes, (passage, start), tokens in zip(every, blocks, names, strict=True):
        draw(axes, array(passage["values"])[:, start : start + columns])
        axes.spines[:].set_visible(False)
        axes.set_xlim(-0.5, columns - 0.5)
        axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=SMALL, family=monospaced())
        axes.tick_params(length=0, pad=2)
    return figure


def _short(token: str) -> str:
    text = _visible(token.replace("\r", "").replace("\t", "→"))
    text = text.strip() or text.replace(" ", "␣") or "·"
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else "□" for c in text.replace("\n", "⏎"))


def say_passage_routing(data: Data) -> str:
    parts = []
    for passage in data["passages"]:
        used = array(passage["values"]).any(axis=1)
        parts.append(f"{used.sum():.0f} of {used.size} experts get a token of {passage['name']}")
    return f"Filled cells are tokens routed to an expert of {data['method']}: {listed(parts)}."


def passages(measure: Callable[[np.ndarray], np.ndarray], most: int | None, material: Material) -> dict[str, Any]:
    """Collect passages, and apply `measure` to their assignment (layers, tokens, experts) in the run in focus.

    most: maximum number of tokens, from the start; None means all traced tokens.
    """
    run = material.focus
    found = []
    for name, (trace, tokens) in material.passages(run).items():
        # Skip BOS, which starts every document and has no text.
        shown = slice(1, None if most is None else most + 1)
        assignment = np.stack([trace.assignment(layer)[shown].numpy() for layer in trace.layers])
        found.append({"name": name, "tokens": tokens[shown], "values": measure(assignment)})
    experts = run.rule.num_experts
    return {**run.tag, "layers": run.layers, "experts": experts, "passages": found}


FIGURES = [
    Study("specialisation", "Expert specialisation", specialisation, draw_specialisation, say_specialisation),
    Study("passage_intensity", "Computation over the text",
          partial(passages, lambda assignment: assignment.sum(axis=(0, 2)), None),
          draw_passage_intensity, say_passage_intensity),
    Study("passage_fanout", "Fanout of every token, by layer",
          partial(passages, lambda assignment: assignment.sum(axis=2), CELLS), draw_passage_fanout, say_passage_fanout),
    Study("passage_routing", "Experts of every token, by layer",
          partial(passages, lambda assignment: assignment.astype(int), CELLS),
          draw_passage_routing, say_passage_routing),
]  # fmt: skip

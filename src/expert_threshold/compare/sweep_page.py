"""The page of a sweep: each method's best options and trials, and the loss over each option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from ..analysis.figures.axes import log_ticks, panels
from ..analysis.figures.learning import draw_losses
from ..analysis.figures.style import ACCENT, INK, MUTED, WIDE, Axes, Figure
from ..analysis.page import exhibit, exhibits, facts, folded, page, section, table, text
from ..analysis.sentences import counted, fixed
from ..files import replace_file

STATES = ("finished", "pruned", "diverged", "refused")
HEAD = 0.6
"""The share of the losses, from the best up, that sets the scale of a figure; failed trials would flatten it."""
ROOM = 0.02
"""The minimum range of losses, in nats per token, that a figure shows."""


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page for the contents of sweep.json. Raises ValueError with the remedy if matplotlib is missing."""
    options, studies = result["options"], result["studies"]
    figures = {
        "Loss over each option": (
            "Each dot is a finished trial, and the large dot is the best. Triangles are losses beyond the upper edge.",
            draw_options,
        ),
        "Curves": ("Validation loss during each trial. Of many trials, only the lowest are named.", draw_curves),
    }
    tokens = options["train.batch_size"] * options["train.accumulation"] * options["model.context"]
    sizes = [f"{options[f'model.{name}']:,}" for name in ("layers", "d_model", "vocab_size")]
    title = f"Sweep: {' with '.join(result['start'].values())}"
    entries = {
        "Model": "{} layers of width {}, vocabulary {}".format(*sizes),
        "Trials": f"{options['train.steps']:,} steps of {tokens:,} tokens; {counted(options['seeds'], 'seed')} each",
        "Space": options["space"],
        "Corpus": Path(options["data.source"]).name,
    }
    body = [
        f"<header><h1>{escape(title)}</h1>\n{facts(entries.items())}</header>",
        section("Best options", table(*best_options(studies), "Best options"), text("Nats per token, in validation.")),
        *(
            exhibits(name, [exhibit(title, why, partial(draw, study)) for title, (why, draw) in figures.items()])
            for name, study in studies.items()
            if study["best"] is not None
        ),
        *(trials(name, study) for name, study in studies.items()),
    ]
    replace_file(path, page(title, body).encode(errors="replace"))


def best_options(studies: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head of the table and a row for each method: trials, losses, and the best value of each option."""
    options = list(dict.fromkeys(option for study in studies.values() for option in study["options"]))
    rows = []
    for name, study in studies.items():
        states = [trial["state"] for trial in study["trials"]]
        made = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        best = study["best"] or {"loss": None, "options": {}}
        values = [show_value(best["options"].get(option, "–")) for option in options]
        rows.append([name, made, fixed(best["loss"], 4), fixed(study["present"], 4), *values])
    return ["method", "trials", "best loss", "current loss", *options], rows


def trials(name: str, study: Mapping[str, Any]) -> str:
    """Return a table of all trials, collapsed."""
    options = list(study["options"])
    rows = [
        [
            str(trial["trial"]),
            fixed(trial["loss"], 4),
            *(show_value(trial["options"].get(option, "–")) for option in options),
            f"{trial['seconds']:.1f}",
            trial["reason"] or "",
        ]
        for trial in study["trials"]
    ]
    title = f"Trials of {name}"
    shown = table(["trial", "loss", *options, "seconds", "reason"], rows, title)
    return section(title, folded(counted(len(rows), "trial"), shown))


def show_value(value: Any) -> str:
    """Return an option's value for display, with three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw_curves(study: Mapping[str, Any]) -> Figure:
    """Draw the validation losses of each trial over its steps."""
    names = {f"trial {trial['trial']}": trial["curve"] for trial in study["trials"] if trial["curve"]}
    return draw_losses({"methods": [{"method": name, "kind": name, "points": names[name]} for name in names]}, "step")


def draw_options(study: Mapping[str, Any]) -> Figure:
    """Draw the loss over each option, with a dot for each trial."""
    options = study["options"]
    trials, best = _finished(study), study["best"]
    losses = [trial["loss"] for trial in trials]
    figure, every = panels(WIDE, list(options), 1.5, share=False, colours=[INK] * len(options))
    for axes, (name, entry) in zip(every, options.items(), strict=True):
        if entry["scale"] is None:
            places = _choices(axes, entry["space"])
        else:
            places, scale = {}, entry["scale"]
            if scale["log"]:
                axes.set_xscale("log")
                axes.set_xlim(scale["low"] / 1.1, scale["high"] * 1.1)
                log_ticks(axes.xaxis, 4)
        values = [trial["options"][name] for trial in trials]
        _draw_losses(axes, [places.get(value, value) for value in values], losses)
        place = places.get(best["options"][name], best["options"][name])
        axes.plot([place], [best["loss"]], marker="o", markersize=6, color=ACCENT)
        _limit(axes, losses)
    return figure


def _finished(study: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [trial for trial in study["trials"] if trial["loss"] is not None]


def _draw_losses(axes: Axes, places: Sequence[float], losses: Sequence[float]) -> None:
    """Draw a dot for each loss, or a triangle at the upper edge if the loss is beyond it."""
    top = _top(losses)
    for place, loss in zip(places, losses, strict=True):
        axes.plot([place], [min(loss, top)], marker="^" if loss > top else "o", color=MUTED, clip_on=False)


def _choices(axes: Axes, space: str) -> dict[str, int]:
    """Label the axis with the choices, numbers in ascending order, and return the position of each choice."""
    texts = space.split("|")
    with suppress(ValueError):
        texts = sorted(texts, key=float)
    axes.set_xticks(range(len(texts)), texts)
    axes.set_xlim(-0.5, len(texts) - 0.5)
    return {text: place for place, text in enumerate(texts)}


def _top(losses: Sequence[float]) -> float:
    """Return the upper edge: twice as far above the best loss as the best HEAD of the losses reach."""
    best = min(losses)
    return best + max(2 * (sorted(losses)[min(int(HEAD * len(losses)), len(losses) - 1)] - best), ROOM)


def _limit(axes: Axes, losses: Sequence[float]) -> None:
    """Set the limits of the y axis to show losses from the best to `_top`."""
    bottom, top = min(losses), _top(losses)
    axes.set_ylim(bottom - 0.08 * (top - bottom), top)

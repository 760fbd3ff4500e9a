"""The page of a sweep, with the best options and trials of each method, and the loss over each option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from ..analysis.figures.learning import draw_losses
from ..analysis.figures.plot import log_ticks, panels
from ..analysis.figures.style import ACCENT, INK, MUTED, WIDE, Figure
from ..analysis.page import Exhibit, exhibit, exhibits, facts, folded, page, section, table, text
from ..analysis.sentences import counted, fixed
from ..files import replace_file

BEST = "Best options"
HEAD = ("method", "trials", "best loss", "current loss", "option", "best")
STATES = ("finished", "pruned", "diverged", "refused")
MOST = 0.6
"""The share of the losses, from the best up, that sets a figure's scale, so that failed trials do not flatten it."""
ROOM = 0.02
"""The minimum range of losses, in nats per token, that a figure shows."""


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page for the contents of sweep.json. Raises ValueError with the remedy if matplotlib is missing."""
    options, studies = result["options"], result["studies"]
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
        section(BEST, table(HEAD, best_rows(studies), BEST), text("Nats per token, in validation.")),
        *(exhibits(name, figures(study)) for name, study in studies.items() if study["best"] is not None),
        *(trials(name, study) for name, study in studies.items()),
    ]
    replace_file(path, page(title, body).encode(errors="replace"))


def figures(study: Mapping[str, Any]) -> Iterator[Exhibit]:
    dots = "Each dot is a finished trial, and the large dot is the best. Triangles are losses beyond the upper edge."
    yield exhibit("Loss over each option", lambda: (dots, draw_options(study)))
    lines = "Validation loss during each trial. Of many trials, only the lowest are named."
    yield exhibit("Curves", lambda: (lines, draw_curves(study)))


def best_rows(studies: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells below `HEAD`, with a row for each option of each method."""
    rows = []
    for name, study in studies.items():
        states = [trial["state"] for trial in study["trials"]]
        made = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        best = study["best"] or {"loss": None, "options": {}}
        for option in study["options"]:
            value = show_value(best["options"].get(option, "–"))
            rows.append([name, made, fixed(best["loss"], 4), fixed(study["present"], 4), option, value])
    return rows


def trials(name: str, study: Mapping[str, Any]) -> str:
    """Return a collapsed table of all trials."""
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
    """Draw the loss over each option, with a dot for each trial or, beyond the upper edge, a triangle at the edge."""
    options, best = study["options"], study["best"]
    trials = [trial for trial in study["trials"] if trial["loss"] is not None]
    losses = sorted(trial["loss"] for trial in trials)
    low = losses[0]
    top = low + max(2 * (losses[min(int(MOST * len(losses)), len(losses) - 1)] - low), ROOM)
    figure, every = panels(WIDE, list(options), 1.5, share=False, colours=[INK] * len(options))
    for axes, (name, entry) in zip(every, options.items(), strict=True):
        places: dict[Any, float] = {}
        if entry["scale"] is None:
            texts = entry["space"].split("|")
            with suppress(ValueError):
                texts = sorted(texts, key=float)  # numbers in ascending order
            places = {text: place for place, text in enumerate(texts)}
            axes.set_xticks(range(len(texts)), texts)
            axes.set_xlim(-0.5, len(texts) - 0.5)
        elif entry["scale"]["log"]:
            axes.set_xscale("log")
            axes.set_xlim(entry["scale"]["low"] / 1.1, entry["scale"]["high"] * 1.1)
            log_ticks(axes.xaxis, 4)
        for trial in trials:
            place, loss = places.get(trial["options"][name], trial["options"][name]), trial["loss"]
            axes.plot([place], [min(loss, top)], marker="^" if loss > top else "o", color=MUTED, clip_on=False)
        place = places.get(best["options"][name], best["options"][name])
        axes.plot([place], [best["loss"]], marker="o", markersize=6, color=ACCENT)
        axes.set_ylim(low - 0.08 * (top - low), top)
    return figure

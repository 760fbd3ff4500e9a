"""The page of a sweep: the best options of each method, its trials, and the loss over each option."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from ..analysis.page import Exhibit, LeftOut, exhibit, exhibits, facts, folded, page, section, table, text
from ..analysis.sentences import counted, fixed
from ..files import replace_file
from .sweep_figures import draw_curves, draw_options, draw_trials

STATES = ("finished", "pruned", "diverged", "refused")


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page of the content of sweep.json. Raises ValueError with the remedy if matplotlib is missing."""
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
        section("Best options", table(*best_options(studies), "Best options"), text("Nats per token of validation.")),
        *(exhibits(name, figures(study)) for name, study in studies.items() if study["best"] is not None),
        *(trials(name, study) for name, study in studies.items()),
    ]
    replace_file(path, page(title, body).encode(errors="replace"))


def best_options(studies: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and a row for each method: trials, losses, and the best value and range of each option."""
    options = list(dict.fromkeys(option for study in studies.values() for option in study["options"]))
    rows = []
    for name, study in studies.items():
        states = [trial["state"] for trial in study["trials"]]
        made = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        best = study["best"]
        losses = (None if best is None else best["loss"], study["present"])
        rows.append(
            [
                name,
                made,
                *(fixed(loss, 4) for loss in losses),
                *(_of_option(study["options"].get(option)) for option in options),
            ]
        )
    return ["method", "trials", "best loss", "loss at present", *options], rows


def _of_option(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["best"] is None:
        return "–"
    return show_value(entry["best"])


def figures(study: Mapping[str, Any]) -> list[Exhibit | LeftOut]:
    """Return the figures of a study with a finished trial."""
    return [
        exhibit(
            "Loss over each option",
            "Each dot is a finished trial, the larger one the best; a triangle is one with a higher loss.",
            partial(draw_options, study),
        ),
        exhibit(
            "Trials",
            "Each finished trial, and the best so far.",
            partial(draw_trials, study),
        ),
        exhibit(
            "Curves",
            "Validation during each trial; the best in colour, those stopped early dashed.",
            partial(draw_curves, study),
        ),
    ]


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
    """Return an option's value for people: three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)

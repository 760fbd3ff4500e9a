"""`et analyze`: draws every figure of the paper from run folders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from ..analysis.atlas import write_atlas
from ..analysis.figures import FIGURES
from ..analysis.material import DOMAINS, STREAMS, Domain, Material, Study
from ..analysis.methods import find_runs, select_runs
from ..files import expand
from ..option import Bounds
from ..train.device import keep_freed_memory
from ..train.log import Display
from .options import COMPUTE, Option, parse_all, parse_names, picked_device

# Options of every command that traces runs.
TRACING = [
    Option("tokens", Annotated[int, Bounds(least=2)], 32768, "Number of tokens to trace each run on."),
    Option("data", str | None, None, "Text on whose held-out part all runs are traced. Defaults to each run's text."),
    *COMPUTE,
]
OPTIONS = [
    Option("run", str, None, "Folders of runs or comparisons to analyse.", positional=True, required=True, many=True),
    Option("out", str, "RUN/analysis", "Folder for the figures, their data and report.html.", derived=True),
    Option("figures", str, "all", "Figures to draw, separated by commas."),
    Option("human_eval", str | None, None, "Folder or .jsonl file of HumanEval, which is used as the code domain."),
    Option("gsm8k", str | None, None, "Folder or .jsonl file of GSM8K, which is used as the math domain."),
    Option("domain", str, None, "Held-out text of another domain, given as NAME=SOURCE. May be repeated.", many=True),
    *TRACING,
]
DESCRIPTION = (
    "Draw every figure of the paper from run folders. Each figure is saved as PNG, SVG and data, and report.html shows "
    "all of them.\n\nRuns that differ only in their seed count as one method. An unfinished run is left out if its "
    "method has finished runs, and a figure is left out if it needs runs that are missing. The report lists what is "
    "left out and why.\n\n"
    "Figures: " + ", ".join(study.name for study in FIGURES) + "."
)


def run(arguments: Sequence[str]) -> None:
    """Analyse the runs and print the path of the report."""
    options = parse_all("et analyze", DESCRIPTION, OPTIONS, arguments)
    studies = chosen_studies(options["figures"])
    out = Path(options["out"] or Path(options["run"][0]) / "analysis")
    with Display(Console(stderr=True), name="et analyze") as display:
        report = write_atlas(open_material(options, out, display), out, studies, display.say)
    print(f"report: {report}")


def open_material(options: Mapping[str, Any], out: Path, display: Display) -> Material:
    """Open the runs named in `options`. Traces are cached in `out`. Raises ValueError if a run cannot be traced."""
    domains = named_domains(options)
    selection = select_runs(find_runs(options["run"]))
    for path, reason in selection.left_out.items():
        display.say(f"run left out: {path}: {reason}")
    for path, how_far in selection.unfinished.items():
        display.say(f"{path}: {how_far}; shown up to there")
    device, dtype = picked_device(options)
    keep_freed_memory()
    traces, text, tokens = out / "traces", options["data"], options["tokens"]
    material = Material(selection, traces, text, tokens, domains, device, dtype, display.task)
    material.read_domains()
    return material


def named_domains(options: Mapping[str, Any]) -> dict[str, Domain]:
    """Return the domains, keyed by name. Raises ValueError if a file is missing or a name is invalid or repeated."""
    domains: dict[str, Domain] = {}
    for flag, name in (("--human-eval", "code"), ("--gsm8k", "math")):
        source = options.get(flag[2:].replace("-", "_"))
        if source is not None:
            domains[name] = Domain(source, DOMAINS[name])
            if not expand(source).exists():
                raise ValueError(f"{flag} {source} does not exist; pass the folder or the .jsonl file of the data set")
    for text in options.get("domain") or ():
        name, equals, source = text.partition("=")
        if not (equals and source and re.fullmatch(r"[\w-]+", name)):
            raise ValueError(f"--domain {text}: expected NAME=SOURCE, such as novels=DATA/novels")
        if name in (*domains, *DOMAINS.values(), *STREAMS):
            raise ValueError(f"--domain {text}: the name {name} is already taken; choose another name")
        domains[name] = Domain(source)
    return domains


def chosen_studies(text: str) -> list[Study]:
    """Return the studies named by --figures. Raises ValueError if a name is unknown."""
    if text == "all":
        return FIGURES
    known = {study.name: study for study in FIGURES}
    names = parse_names("--figures", text, known)
    return [study for study in FIGURES if study.name in names]

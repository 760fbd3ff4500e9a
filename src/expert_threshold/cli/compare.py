"""`et compare`: trains several methods with the same budget, data order and seeds, and compares their losses."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis.sentences import listed
from ..compare.experiment import opened
from ..compare.judgement import MARGIN, Findings, chosen_baseline
from ..compare.page import write_page
from ..compare.running import COMPARISON, JOINED, Comparison, budget, join
from ..config import DEFAULT_PRESET, RunConfig
from ..data.sources import absolute
from ..install import et
from ..option import Count, Positive
from ..recipes import METHODS, REFERENCE, Method, methods
from ..routing import option_names
from ..train.checks import require_trainable
from ..train.device import keep_freed_memory
from ..train.log import say
from .options import Option, flag_of, parse_names, take_own
from .run_options import Given, parse_run, read_config_file, resolve_run, start_of
from .tables import console_for_tables, table


def leaves_open(method: Method, path: str) -> bool:
    """Return False for an option of rules that the method's rule lacks or that the method sets itself."""
    section, _, option = path.partition(".")
    return section != "rule" or (option in option_names(method.rule) and option not in method.options)


PAPER, ALL = "paper", "all"
OPTIONS = [
    Option(
        "rules",
        str,
        PAPER,
        "Methods to compare, given as A,B. The name paper selects the paper's methods, and all adds every other rule "
        "and variant. An option of a rule applies to the methods that do not set it themselves.",
    ),
    Option("seeds", Count, 1, "Number of runs for each method, with seeds 0, 1, and so on."),
    Option(
        "baseline",
        str,
        REFERENCE,
        "Method that the others are compared with. If the default is not among --rules, the first method is used.",
        derived=True,
    ),
    Option("margin", Positive, MARGIN, "Largest difference in nats per token at which methods count as equivalent."),
    Option(
        "tuned",
        str,
        None,
        "Folder of a sweep whose best options are used. May be repeated. A method that was not tuned uses the best "
        "options of another method with the same rule.",
        many=True,
    ),
    Option(
        "join",
        str,
        None,
        "Folder of a comparison to join with others. May be repeated. Nothing is trained; tables are written to --out.",
        many=True,
    ),
    Option("out", str, "runs/compare-PRESET", "Folder to create, or existing comparison to continue.", derived=True),
]
DECIDED = {"recipe", "rule.name", "train.seed"}
"""Options that the methods and seeds determine, which therefore have no flag."""


def run(arguments: Sequence[str]) -> None:
    """Train the unfinished runs and print the tables."""
    about = "Train several methods with the same budget, data order and seeds, and compare their losses."
    description = "\n\n".join([about, *(f"{name}: {method.summary}." for name, method in methods().items())])
    given = parse_run("et compare", description, OPTIONS, arguments, without=DECIDED)
    if "join" in given:
        _join(given)
        return
    own = take_own(given, OPTIONS)
    chosen = chosen_methods(own["rules"])
    baseline = chosen_baseline(own["baseline"], chosen)
    tuned = best_options(own["tuned"], chosen) if own["tuned"] else {}
    configs = configure(given, chosen, tuned)
    require_shared_budget(configs)
    keep_freed_memory()
    console = console_for_tables()
    out = own["out"] or f"runs/compare-{given.get('preset', DEFAULT_PRESET)}"
    with opened(out, "comparison", COMPARISON) as folder:
        start, seeds = " with ".join(start_of(given).values()), own["seeds"]
        comparison = Comparison(folder, configs, seeds, start, baseline, own["margin"])
        comparison.require_continued()
        count = f"{len(configs)} × {seeds} = {len(configs) * seeds} runs"
        say(console, f"{comparison.headline()}\nmethods × seeds: {count} in {folder}")
        for name, path in tuned.items():
            say(console, f"options of {name}: {path}")
        try:
            comparison.train(console)
        except KeyboardInterrupt:
            say(console, f"to continue the comparison: {et()} {shlex.join(['compare', *arguments])}")
            raise
        conclude(console, comparison.findings(), folder, COMPARISON)
        say(console, f"next: {et()} analyze {shlex.quote(str(folder))}")


def _join(given: dict[str, Any]) -> None:
    """Join several comparisons, and write and print their tables."""
    own = take_own(given, [option for option in OPTIONS if option.name in ("join", "baseline", "margin", "out")])
    if given:
        flags = ", ".join(str(value) if name == "preset" else flag_of(name) for name, value in given.items())
        raise ValueError(f"--join can only be combined with --baseline, --margin and --out; leave out {flags}")
    findings = join(own["join"], own["baseline"], own["margin"])
    with opened(own["out"] or "runs/compare-joined", "joined comparison", JOINED) as folder:
        conclude(console_for_tables(), findings, folder, JOINED)


def conclude(console: Console, findings: Findings, folder: Path, file: str) -> None:
    """Write and print the tables, write the page, and print where the files are."""
    findings.write(folder, file)
    for head, lines, note in findings.tables(lambda text: f"[bold]{text}[/bold]"):
        console.print(table(head, lines))
        if note:
            console.print(note, markup=False, highlight=False)
    try:
        figures = write_page(findings, folder)
        say(console, f"results in {folder}: compare.html, .md and .csv, {file}; {listed(figures)}, .png and .svg")
    except ValueError as missing:
        say(console, f"results in {folder}, but without figures: {missing}")


def chosen_methods(text: str, flag: str = "--rules") -> list[str]:
    """Return the methods named by the flag, in the order of `methods`. Raises ValueError if a name is unknown."""
    known = methods()
    names = list({PAPER: METHODS, ALL: known}.get(text, ())) or parse_names(flag, text, known)
    return [method for method in known if method in names]


def best_options(folders: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Return the path of the file with the best options for each method, keyed by method.

    Raises ValueError if a method has no such file, if two sweeps tuned the same method, or if a file cannot be read.
    """
    known = methods()
    found: dict[str, Path] = {}
    for folder in folders:
        files = {path.parent.name: path for path in Path(folder).glob("*/best.json")}
        if not files:
            raise ValueError(
                f"--tuned {folder} contains no METHOD/best.json; pass the folder of a sweep that has finished trials"
            )
        if twice := sorted(files.keys() & found.keys()):
            raise ValueError(
                f"--tuned {folder}: {found[twice[0]].parent.parent} also tuned {listed(twice)}; pass only one of them"
            )
        found |= files
    chosen = {}
    for name in names:
        kin = [name, *(other for other in known if known[other].rule == known[name].rule)]
        path = next((found[other] for other in kin if other in found), None)
        if path is None:
            none = f"no best options were found for {name}; tune it, or leave it out of --rules"
            raise ValueError(f"--tuned {' '.join(folders)}: {none}")
        read_config_file(str(path), "--tuned")
        chosen[name] = path
    return chosen


def configure(given: Given, names: Sequence[str], files: Mapping[str, Path] | None = None) -> dict[str, RunConfig]:
    """Return the configuration of each method's run with seed 0. Raises ValueError if it cannot be trained or compared.

    files: a file of options for each method. Flags override these options.
    """
    if files and "config" in given:
        raise ValueError(f"--config {given['config']}: --tuned already sets each method's file; leave one of them out")
    known = methods()
    for path in given:
        if not any(leaves_open(known[name], path) for name in names):
            raise ValueError(f"{flag_of(path)} {given[path]}: cannot be set for {', '.join(names)}; leave it out")
    configs = {}
    for name in names:
        method = known[name]
        own = {path: value for path, value in given.items() if leaves_open(method, path)}
        if files:
            own["config"] = str(files[name])
        fixed = {f"rule.{option}": value for option, value in method.options.items()}
        config = resolve_run(own | {"rule.name": method.rule, "train.seed": 0} | fixed)
        require_trainable(config.model, config.train)
        configs[name] = replace(config, data=replace(config.data, source=absolute(config.data.source)))
    if config.train.eval_every is None:
        raise ValueError("--eval-every none: methods are compared by their validation loss; omit this option")
    return configs


def require_shared_budget(configs: Mapping[str, RunConfig]) -> None:
    """Raise ValueError if --tuned gives methods different budgets."""
    names = list(configs)
    shared = [vars(each.data) | budget(vars(each.train), each.model.to_dict()["model"]) for each in configs.values()]
    for name, mine in zip(names, shared, strict=True):
        for option, value in mine.items():
            if value != shared[0][option]:
                raise ValueError(
                    f"--tuned: {name} has {option}={value!r} but {names[0]} has {shared[0][option]!r}; all "
                    "methods must use the same text, batch and trunk; tune them alike, or set the option here"
                )

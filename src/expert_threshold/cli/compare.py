"""`et compare`: trains several methods with the same budget, data order and seeds, and compares their losses."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..analysis.comparison import HEADERS, NOTES, Row, cells, summarise
from ..compare import COMPARISON, Comparison
from ..config import DEFAULT_PRESET, RunConfig
from ..data.sources import absolute
from ..experiment import opened, read_record
from ..install import et
from ..option import Count
from ..recipes import METHODS, Method, methods
from ..routing import option_names
from ..train.checks import require_trainable
from ..train.device import keep_freed_memory
from .options import Option, parse_names
from .run_options import RULE, Given, parse_run, resolve_run, rules_having, start_of


def leaves_open(method: Method, option: str) -> bool:
    """Return True if this option of the method's rule can be chosen."""
    return option in option_names(method.rule) and option not in method.options


def _description() -> str:
    return "Train several methods with the same budget, data order and seeds, and compare their losses.\n\n" + (
        "\n\n".join(f"{name}: {method.summary}." for name, method in methods().items())
    )


PAPER, ALL = "paper", "all"
OPTIONS = [
    Option(
        "rules",
        str,
        PAPER,
        "The methods to compare, as A,B; paper is the paper's methods, all adds every other rule and variant. A rule's "
        "option applies to the methods that do not fix it.",
    ),
    Option("seeds", Count, 1, "Number of runs of each method, with seeds 0, 1, and so on."),
    Option("out", str, "runs/compare-PRESET", "The folder to make, or that of the comparison to continue."),
]


def decided() -> set[str]:
    """Return the options of a run that the methods and the seeds decide."""
    every = methods().values()
    return {"recipe", "rule", "seed"} | {
        RULE + option for option in rules_having() if not any(leaves_open(method, option) for method in every)
    }


def run(arguments: Sequence[str]) -> None:
    """Train the runs that are not finished, and print the table."""
    given = parse_run("et compare", _description(), OPTIONS, arguments, without=decided())
    chosen = chosen_methods(given.pop("rules", PAPER))
    seeds = given.pop("seeds", 1)
    out = given.pop("out", f"runs/compare-{given.get('preset', DEFAULT_PRESET)}")
    configs = configure(given, chosen)
    keep_freed_memory()
    console = Console() if Console().is_terminal else Console(width=120)
    with opened(out, COMPARISON) as folder:
        record = read_record(folder, COMPARISON, start_of(given), configs)
        comparison = Comparison(folder, configs, seeds, record)
        console.print(introduction(comparison), markup=False, highlight=False, soft_wrap=True)
        comparison.read_corpus()
        comparison.write()
        try:
            comparison.train(console)
        except KeyboardInterrupt:
            again = f"{et()} {shlex.join(['compare', *arguments])}"
            console.print(f"to continue the comparison: {again}", markup=False, highlight=False, soft_wrap=True)
            raise
        console.print(table(summarise(comparison.results())))
        console.print(NOTES, markup=False, highlight=False)
        console.print(conclude(comparison), markup=False, highlight=False, soft_wrap=True)


def chosen_methods(text: str, flag: str = "--rules") -> list[str]:
    """Return the methods that the flag names, in the order of `methods`. Raises ValueError as `parse_names` does."""
    known = methods()
    names = list({PAPER: METHODS, ALL: known}.get(text, ())) or parse_names(flag, text, known)
    return [method for method in known if method in names]


def configure(given: Given, names: Sequence[str]) -> dict[str, RunConfig]:
    """Return the run of each method with seed 0. Raises ValueError for options that cannot be trained or compared."""
    known = methods()
    of_rules = [key for key in given if key.startswith(RULE)]
    for key in of_rules:
        option = key.removeprefix(RULE)
        if not any(leaves_open(known[name], option) for name in names):
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"{flag} {given[key]}: not an option of {', '.join(names)}; leave it out")
    configs = {}
    for name in names:
        method = known[name]
        closed = [key for key in of_rules if not leaves_open(method, key.removeprefix(RULE))]
        own = {key: value for key, value in given.items() if key not in closed}
        fixed = {RULE + option: value for option, value in method.options.items()}
        config = resolve_run(own | {"rule": method.rule, "seed": 0} | fixed)
        require_trainable(config.model, config.train)
        configs[name] = replace(config, data=replace(config.data, source=absolute(config.data.source)))
    if config.train.eval_every is None:
        raise ValueError("--eval-every none: methods are compared by their validation loss; leave it out")
    return configs


def introduction(comparison: Comparison) -> str:
    """Return lines about the work ahead."""
    methods, seeds = len(comparison.configs), comparison.seeds
    return (
        f"{comparison.headline()}\nmethods × seeds: {methods} × {seeds} = {methods * seeds} runs in {comparison.folder}"
    )


def table(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal. In a narrow one the methods' names wrap; numbers never do."""
    lines = cells(rows, lambda text: f"[bold]{text}[/bold]")
    table = Table(HEADERS[0], box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.columns[0].overflow = "fold"
    for header, texts in zip(HEADERS[1:], list(zip(*lines, strict=True))[1:], strict=True):
        words = map(len, header.split())
        width = max(min(len(header), 8), *words, *(Text.from_markup(text).cell_len for text in texts))
        table.add_column(header, justify="right", width=width)
    for line in lines:
        table.add_row(*line)
    return table


def conclude(comparison: Comparison) -> str:
    """Draw the figure, and return lines that say where the results are."""
    folder = comparison.folder
    try:
        comparison.draw()
    except ValueError as missing:
        return f"results in {folder}, but no figure: {missing}"
    return (
        f"results in {folder}: compare.md, .csv and .json, loss_by_method.png and .svg\n"
        f"next: {et()} analyze {shlex.quote(str(folder))}"
    )

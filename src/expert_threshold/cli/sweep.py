"""`et sweep`: searches learning rates and other options for the lowest validation loss, separately for each method."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from rich.console import Console

from ..analysis.sentences import counted
from ..compare.experiment import opened
from ..compare.running import OF_EXPERTS
from ..compare.sweep import SWEEP, Dimension, Sweep, Tunable, require_optuna
from ..compare.sweep_page import HEAD, best_rows, write_page
from ..config import DEFAULT_PRESET, KINDS, RunConfig, by_path, kinds, kinds_of_all_rules, nested
from ..install import et
from ..option import Bounds, Count, Minutes, alternatives, convert, did_you_mean
from ..plan import costs
from ..recipes import methods as all_methods
from ..routing import DENSE
from ..train.device import keep_freed_memory
from ..train.log import clock, say
from .compare import DECIDED, chosen_methods, configure, leaves_open
from .options import SHORT, Option, flag_of, take_own
from .run_options import Given, parse_run, read_config_file, resolve_run, start_of
from .tables import console_for_tables, table

FACTOR = 8
"""By default, each learning rate is searched from its current value divided by this to its value multiplied by this."""
RATES = ("optim.matrix_lr", "optim.embed_lr", "optim.head_lr", "optim.router_lr")
SHARE, LEAST_STEPS, VALIDATIONS = 10, 100, 4
"""By default, a trial runs a tenth of the preset's steps, but at least 100, and is validated four times."""

NOT_SEARCHED = {
    "rule.name": "each method is tuned separately; choose the methods with --methods",
    "model.vocab_size": "the loss per token depends on the vocabulary",
    "model.context": "the validation loss depends on the context length",
    "model.dispatch": "it selects how experts are computed and does not change the model",
    "train.batch_size": "all trials use the same number of tokens; run a sweep for each --batch-size",
}
SHARED = "all trials share the text and the training loop; set it with its flag"
DESCRIPTION = (
    "Search for the learning rates and other options that give each method the lowest validation loss with optuna.\n\n"
    "The first trial uses the current options, the next seven cover the space evenly (Sobol), and later trials are "
    "drawn near good ones (TPE). After 40 % of its steps, a trial is stopped once its best loss is above the median of "
    "the other trials. Run the command again to continue an interrupted sweep, or with more --trials to extend it."
)
OPTIONS = [
    Option(
        "methods",
        str,
        "expert_threshold",
        "Methods to tune separately, given as A,B. The names paper and all have the same meaning as in et compare.",
    ),
    Option(
        "space",
        str,
        "learning rates within a factor of 8 of their current values",
        "Option to search, such as optim.matrix-lr=LOW..HIGH or rule.gate=A|B|C. Append :log to a range for a "
        "logarithmic scale. May be repeated. An option of a rule is searched only for methods that have it.",
        many=True,
        derived=True,
    ),
    Option(
        "trials",
        Annotated[int, Bounds(least=1, most=100_000)],
        24,
        "Number of trials for each method, including existing trials.",
    ),
    Option("minutes", Minutes | None, None, "Time limit in minutes. No trial is started that would exceed it."),
    Option("seeds", Count, 1, "Number of runs per trial, with seeds 1000, 1001, and so on; comparisons start at 0."),
    Option("out", str, "runs/sweep-PRESET", "Folder to create, or existing sweep to continue.", derived=True),
]


def run(arguments: Sequence[str]) -> None:
    """Run the remaining trials and print the best trial of each method."""
    given = parse_run("et sweep", DESCRIPTION, OPTIONS, arguments, without=DECIDED)
    own = take_own(given, OPTIONS)
    require_optuna()
    names = chosen_methods(own["methods"], "--methods")
    given |= short_runs(given)
    configs = configure(given, names)
    space = read_space(own["space"] or default_space(configs[names[0]]), given, names)
    methods = {name: tunable(given, name, configs[name], space) for name in names}
    keep_freed_memory()
    console = console_for_tables()
    searched = " ".join(f"{path}={values}" for path, values in space.items())
    out = own["out"] or f"runs/sweep-{given.get('preset', DEFAULT_PRESET)}"
    with opened(out, "sweep", SWEEP) as folder:
        sweep = Sweep(folder, methods, start_of(given), searched, own["trials"], own["seeds"], own["minutes"])
        sweep.begin(console)
        introduce(console, sweep)
        try:
            sweep.run(console)
        except KeyboardInterrupt:
            say(console, f"to continue the sweep: {et()} {shlex.join(['sweep', *arguments])}")
            raise
        console.print(table(HEAD, best_rows(sweep.result()["studies"])))
        say(console, conclude(sweep, given))


def short_runs(given: Given) -> dict[str, int]:
    """Return the steps of a trial and the validation interval, each unless a flag or the --config file sets it."""
    said = {*given, *(read_config_file(given["config"]) if "config" in given else ())}
    steps = resolve_run(given).train.steps
    added: dict[str, int] = {}
    if not said & {"train.steps", "tokens"}:
        added["train.steps"] = steps = min(steps, max(LEAST_STEPS, steps // SHARE))
    if "train.eval_every" not in said:
        added["train.eval_every"] = max(1, steps // VALIDATIONS)
    return added


def default_space(config: RunConfig) -> list[str]:
    """Return --space entries that search each learning rate over a range around its current value."""
    return [
        f"{name}={value / FACTOR:.3g}..{value * FACTOR:.3g}:log"
        for name in RATES
        for value in present_values(config, name)[-1:]
        if value is not None
    ]


def present_values(config: RunConfig, path: str) -> list[Any]:
    """Return a list of the option's current value. An unset learning rate is followed by the rate that replaces it."""
    options = by_path(config.to_dict())
    if path not in options:
        return []
    rate = [config.optim.matrix_lr] if path in ("optim.router_lr", "optim.expert_lr") and options[path] is None else []
    return [options[path], *rate]


def read_space(texts: Sequence[str], given: Given, names: Sequence[str]) -> dict[str, str]:
    """Return the values in --space entries, keyed by path. Raises ValueError if an option cannot be searched."""
    paths = {short: path for path, short in SHORT.items()}
    known = {path for path in kinds_of_all_rules() if path.startswith(("model.", "optim.", "rule."))}
    space: dict[str, str] = {}
    for text in texts:
        typed, _, values = (part.strip() for part in text.partition("="))
        path = typed.replace("-", "_")
        path = paths.get(path, path)
        if not values:
            raise ValueError(f"--space {text}: write NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A|B|C")
        if reason := NOT_SEARCHED.get(path, SHARED if path in KINDS and path not in known else None):
            raise ValueError(f"--space {text}: {path} cannot be searched, since {reason}")
        if path not in known:
            remedy = did_you_mean(path, known - NOT_SEARCHED.keys(), "see et sweep --help-all")
            raise ValueError(f"--space {text}: unknown option {path}; {remedy}")
        if path in space:
            raise ValueError(f"--space {text}: {path} is given twice; give it only once")
        if path in given:
            raise ValueError(f"{flag_of(path)} {given[path]}: --space searches {path}; leave one of them out")
        if not any(leaves_open(all_methods()[name], path) for name in names):
            raise ValueError(f"--space {text}: {path} cannot be set for {', '.join(names)}; leave it out")
        space[path] = values
    return space


def read_values(text: str, kind: Any) -> Dimension:
    """Parse the values to search for one option. Raises ValueError if there are fewer than two."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if ".." not in text:
        choices = text.split("|")
        parsed = [convert(kind, choice) for choice in choices]
        if len(parsed) < 2 or any(value in parsed[:place] for place, value in enumerate(parsed)):
            raise ValueError("there is nothing to search; give two or more distinct values, as in A|B")
        return Dimension(text, CategoricalDistribution(choices), dict(zip(choices, parsed, strict=True)))
    bounds, _, scale = text.partition(":")
    low, high = (convert(kind, bound) for bound in bounds.split("..", 1))
    plain = {plain for plain, _ in alternatives(kind)}
    if not (isinstance(low, int | float) and isinstance(high, int | float)) or bool in plain:
        raise ValueError("a range needs two numbers; write other values as A|B|C")
    if scale not in ("", "log"):
        raise ValueError(f"unknown scale {scale!r}; append :log, or nothing for a linear scale")
    if not low < high:
        raise ValueError(f"there is nothing to search, since {low:g} is not below {high:g}")
    if scale == "log" and low <= 0:
        raise ValueError("a logarithmic range must start above 0")
    if float in plain:
        return Dimension(text, FloatDistribution(low, high, log=scale == "log"))
    return Dimension(text, IntDistribution(int(low), int(high), log=scale == "log"))


def tunable(given: Given, name: str, config: RunConfig, space: Mapping[str, str]) -> Tunable:
    """Return a method with the dimensions that affect it. Raises ValueError if there are none.

    Also raises ValueError if the method rejects a choice or an end of a range while its other options are unchanged.
    """
    method = all_methods()[name]
    given = {path: value for path, value in given.items() if leaves_open(method, path)}

    def configured(values: Mapping[str, Any]) -> RunConfig:
        return configure({**given, **values}, [name])[name]

    own: dict[str, Dimension] = {}
    present: dict[str, Any] = {}
    for path, text in space.items():
        if not leaves_open(method, path) or (method.rule == DENSE and path in OF_EXPERTS):
            continue
        try:
            own[path] = entry = read_values(text, kinds(method.rule)[path])
            for end in entry.ends:
                configured({path: end})
        except ValueError as error:
            raise ValueError(f"--space {path}={text}: {error}") from None
        draws = (entry.drawn(value) for value in present_values(config, path))
        if (draw := next((draw for draw in draws if draw is not None), None)) is not None:
            present[path] = draw
    if not own:
        raise ValueError(f"--space searches no option of method {name}; add one, or leave {name} out")
    return Tunable(config, own, present, configured, partial(recommended, given, name))


def recommended(given: Given, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return these values, the given options and the method's fixed options, as a file for `et train --config`.

    Options that follow from the preset are omitted, as are all training options other than the batch size.
    """
    tuned = by_path(configure({**given, **values}, [name])[name].to_dict())
    file = read_config_file(given["config"]) if "config" in given else ()
    own = (f"rule.{option}" for option in all_methods()[name].options)
    # Keep chosen options even if they equal the preset's values, which may be different for a longer run.
    chosen = {*given, *file, *values, *own, "rule.name"}
    kept = ("train.batch_size", "train.accumulation")
    return nested(
        {
            path: value
            for path, value in tuned.items()
            if path in chosen and (path in kept or not path.startswith("train."))
        }
    )


def introduce(console: Console, sweep: Sweep) -> None:
    """Print what the sweep will do and how long it may take."""
    first = next(iter(sweep.methods.values())).config
    cost, left = costs(first), len(sweep.left())
    for name, method in sweep.methods.items():
        say(console, f"{name}: {', '.join(f'{option} {entry.text}' for option, entry in method.space.items())}")
    runs = "" if sweep.seeds == 1 else f" × {sweep.seeds} seeds"
    text = (
        f"{sweep.folder}: {sweep.trials} trials × {counted(len(sweep.methods), 'method')}{runs}, each of "
        f"{cost['steps']:,} steps of {cost['tokens_per_step']:,} tokens; {left} left"
    )
    if left:
        seconds = sweep.estimate()
        text += f", up to {clock(seconds * left)} at {clock(seconds)} a trial, less if trials are pruned"
        if sweep.minutes is not None:
            text += f"; no trial is started that would exceed {sweep.minutes:g} minutes"
    say(console, text)


def conclude(sweep: Sweep, given: Given) -> str:
    """Write the results and the page, even if the sweep was already finished, and return lines that name the files."""
    folder = sweep.folder
    sweep.write()
    best = next((name for name in sweep.methods if (folder / name / "best.json").is_file()), None)
    try:
        write_page(folder / "sweep.html", sweep.result())
        where = f"results in {folder}: sweep.html and .json, METHOD/best.json"
    except ValueError as missing:
        where = f"results in {folder}, but without a page: {missing}"
    if best is None:
        return f"{where}\nno trial has finished; try smaller learning rates"
    preset, steps = given.get("preset", DEFAULT_PRESET), sweep.methods[best].config.train.steps
    longer = f" --steps {steps}" if steps > resolve_run({"preset": preset}).train.steps else ""
    path = shlex.quote(str(folder / best / "best.json"))
    return f"{where}\nnext: {et()} train {preset} --config {path}{longer}"

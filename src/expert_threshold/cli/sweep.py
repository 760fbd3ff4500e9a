"""`et sweep`: searches learning rates and other options for the least validation loss, each method by itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..analysis.sentences import counted, fixed
from ..compare.experiment import opened
from ..compare.sweep import SWEEP, Choice, Range, Space, Sweep, Tunable, require_optuna
from ..compare.sweep_page import show_value
from ..config import DEFAULT_PRESET, RunConfig
from ..install import et
from ..option import Bounds, Count, Minutes, alternatives, bare, describe, did_you_mean, kinds_of
from ..plan import costs
from ..recipes import methods as all_methods
from ..routing import DENSE, RULES, Rule, rule_to_dict
from ..train.device import keep_freed_memory
from ..train.log import clock, say
from .compare import chosen_methods, configure, console_for_tables, decided, leaves_open
from .options import Option, parse_value
from .run_options import RULE, Given, parse_run, read_config_file, resolve_run, run_groups, start_of

FACTOR = 8
"""The default space: the present learning rates divided and multiplied by this."""
RATES = ("matrix_lr", "embed_lr", "head_lr", "router_lr")
SHARE, LEAST_STEPS, VALIDATIONS = 10, 100, 4
"""By default a trial has a tenth of the preset's steps, at least 100, and four validations."""
OF_EXPERTS = (
    "router_lr",
    "expert_lr",
    "router_optimizer",
    "z_loss",
    "gate_norm",
    "d_expert",
    "shared_experts",
    "dense_layers",
)
"""Options without effect on a dense model; its space leaves them out."""
NOT_SEARCHED = {
    "rule": "compare methods with --methods",
    "vocab_size": "the loss of a token depends on the vocabulary",
    "context": "validation depends on it",
    "dispatch": "it does not change what is learned",
    "batch_size": "trials have equally many tokens; sweep once for each --batch-size",
}
TRIALS = 24
DESCRIPTION = (
    "Search learning rates and other options for the least validation loss, each method by itself, with optuna.\n\n"
    "The first trial has the present options, the next seven cover the space evenly (Sobol), later ones are near good "
    "trials (TPE). From 0.4 of its steps on, a trial is stopped where its best loss so far is above the median of the "
    "others at that step. The same command continues a sweep that was stopped, and makes more trials if --trials is "
    "larger."
)
OPTIONS = [
    Option(
        "methods", str, "expert_threshold", "The methods, as A,B, each tuned by itself; paper and all as in compare."
    ),
    Option(
        "space",
        str,
        "learning rates over a factor of 64 around their values",
        "An option to search: NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A|B|C; give --space once for each option. A "
        "rule's option is searched for the methods that have it.",
        many=True,
    ),
    Option(
        "trials",
        Annotated[int, Bounds(least=1, most=100_000)],
        TRIALS,
        "Trials of each method, including those already made.",
    ),
    Option("minutes", Minutes | None, None, "Begin no trial that would end after this time; none is no limit."),
    Option("seeds", Count, 1, "Runs of each trial, with seeds 1000, 1001, and so on; comparisons count from 0."),
    Option("out", str, "runs/sweep-PRESET", "The folder to make, or that of the sweep to continue."),
]


def run(arguments: Sequence[str]) -> None:
    """Make the trials that are left, and print the best of each method."""
    given = parse_run("et sweep", DESCRIPTION, OPTIONS, arguments, without=decided())
    require_optuna()
    names = chosen_methods(given.pop("methods", "expert_threshold"), "--methods")
    texts = given.pop("space", None)
    trials, seeds, minutes = given.pop("trials", TRIALS), given.pop("seeds", 1), given.pop("minutes", None)
    out = given.pop("out", f"runs/sweep-{given.get('preset', DEFAULT_PRESET)}")
    given |= short_runs(given)
    configs = configure(given, names)
    first = next(iter(configs.values()))
    space = read_space(default_space(first) if texts is None else texts, given, names)
    methods = {name: tunable(given, name, configs[name], space) for name in names}
    keep_freed_memory()
    console = console_for_tables()
    searched = " ".join(f"{name}={entry.text}" for name, entry in space.items())
    with opened(out, SWEEP) as folder:
        sweep = Sweep(folder, methods, start_of(given), searched, trials=trials, seeds=seeds, minutes=minutes)
        sweep.begin(console)
        introduce(console, sweep)
        try:
            sweep.run(console)
        except KeyboardInterrupt:
            say(console, f"to continue the sweep: {et()} {shlex.join(['sweep', *arguments])}")
            raise
        console.print(table(sweep.result()))
        say(console, conclude(sweep, given))


def short_runs(given: Given) -> dict[str, int]:
    """Return the steps of a trial and between validations, unless flags or a file give them."""
    file = read_config_file(given["config"]).get("train", {}) if "config" in given else {}
    said = {*given, *file}
    steps = resolve_run(given).train.steps
    added: dict[str, int] = {}
    if not said & {"steps", "tokens"}:
        added["steps"] = steps = min(steps, max(LEAST_STEPS, steps // SHARE))
    if "eval_every" not in said:
        added["eval_every"] = max(1, steps // VALIDATIONS)
    return added


def default_space(config: RunConfig) -> list[str]:
    """Return the learning rates, each over a range around its present value."""
    return [
        f"{name}={value / FACTOR:.3g}..{value * FACTOR:.3g}:log"
        for name in RATES
        for value in present_values(config, name)[-1:]
        if value is not None
    ]


def present_values(config: RunConfig, name: str) -> list[Any]:
    """Return the value of an option in a run, followed by the number that a rate of `none` stands for."""
    for record in (config.optim, config.model, config.model.rule):
        if record is not None and name in vars(record):
            value = vars(record)[name]
            return [value, config.optim.matrix_lr] if name in ("router_lr", "expert_lr") and value is None else [value]
    return []


def read_space(texts: Sequence[str], given: Given, names: Sequence[str]) -> dict[str, Range | Choice]:
    """Return the space that the texts describe. Raises ValueError for one that cannot be searched."""
    groups = run_groups(resolve_run({}))
    known = {option.name: option for group in ("optim", "rule", "model") for option in groups[group]}
    space: dict[str, Range | Choice] = {}
    for text in texts:
        typed, _, values = text.partition("=")
        name = typed.strip().replace("-", "_")
        if not values.strip():
            raise ValueError(f"--space {text}: write NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A|B|C")
        if name in NOT_SEARCHED:
            raise ValueError(f"--space {text}: {name} cannot be searched, since {NOT_SEARCHED[name]}")
        if name not in known:
            remedy = did_you_mean(name, known.keys() - NOT_SEARCHED, "see et sweep --help")
            raise ValueError(f"--space {text}: option {name} is unknown; {remedy}")
        if name in space:
            raise ValueError(f"--space {text}: {name} is searched twice; give it once")
        key = known[name].key or name
        if key in given:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {given[key]}: --space searches {name}; leave one of them out")
        if key.startswith(RULE) and not any(leaves_open(all_methods()[method], name) for method in names):
            raise ValueError(f"--space {text}: {name} is no open option of {', '.join(names)}; leave it out")
        space[name] = read_entry(text, values.strip(), known[name])
    return space


def read_entry(text: str, values: str, option: Option) -> Range | Choice:
    """Return the values of one option. Raises ValueError, which quotes the whole text, for none or a single one."""
    if ".." not in values:
        choices = values.split("|")
        parsed = [_parsed(text, option, choice) for choice in choices]
        if len(parsed) < 2 or any(value in parsed[:place] for place, value in enumerate(parsed)):
            raise ValueError(f"--space {text}: nothing to search; give two or more different values, as in A|B")
        return Choice(values, dict(zip(choices, parsed, strict=True)))
    bounds, _, scale = values.partition(":")
    low, high = (_parsed(text, option, bound) for bound in bounds.split("..", 1))
    kinds = {bare(alternative)[0] for alternative in alternatives(option.kind)}
    if not (isinstance(low, int | float) and isinstance(high, int | float)) or bool in kinds:
        raise ValueError(f"--space {text}: a range has two numbers; write other values as A|B|C")
    if scale not in ("", "log"):
        raise ValueError(f"--space {text}: scale {scale!r} is unknown; write :log, or nothing for an even one")
    if not low < high:
        raise ValueError(f"--space {text}: nothing to search, since {low:g} is not below {high:g}")
    if scale == "log" and low <= 0:
        raise ValueError(f"--space {text}: a logarithmic range must begin above 0")
    return Range(values, low, high, scale == "log", whole=float not in kinds)


def _parsed(text: str, option: Option, value: str) -> Any:
    try:
        return parse_value(option.kind, value)
    except ValueError:
        raise ValueError(f"--space {text}: expected {describe(option.kind)}, not {value}") from None


def tunable(given: Given, name: str, config: RunConfig, space: Space) -> Tunable:
    """Return a method with the part of the space that has an effect on it. Raises ValueError if there is none.

    Also raises ValueError for an end of a range or a choice that the method refuses, other options as at present.
    """
    method, rule = all_methods()[name], config.model.rule
    given = {
        key: value for key, value in given.items() if not key.startswith(RULE) or leaves_open(method, key[len(RULE) :])
    }
    keys: dict[str, str] = {}
    for option in space:
        if rule is not None and option in vars(rule):
            if leaves_open(method, option):
                keys[option] = RULE + option
        elif option in vars(config.optim) | vars(config.model) and not (rule is None and option in OF_EXPERTS):
            keys[option] = option
    own = {option: _in_whole_numbers(space[option], rule, option) for option in keys}
    if not own:
        raise ValueError(f"--space has no option of method {name}; add one, or leave {name} out")

    def configured(values: Mapping[str, Any]) -> RunConfig:
        return configure({**given, **{keys[option]: value for option, value in values.items()}}, [name])[name]

    for option, entry in own.items():
        for end in entry.ends:
            try:
                configured({option: end})
            except ValueError as error:
                raise ValueError(f"--space {option}={entry.text}: {error}") from None
    drawn = {
        option: [draw for value in present_values(config, option) if (draw := entry.drawn(value)) is not None]
        for option, entry in own.items()
    }
    present = {option: draws[0] for option, draws in drawn.items() if draws}
    return Tunable(config, own, present, configured, partial(recommended, given, name, keys, config.train.steps))


def _in_whole_numbers(entry: Range | Choice, rule: Rule | None, option: str) -> Range | Choice:
    """Return the entry of the space, in whole numbers if this rule's option takes no others, though another's may."""
    kind = None if rule is None else kinds_of(type(rule)).get(option)
    is_whole = kind is not None and float not in {bare(each)[0] for each in alternatives(kind)}
    return replace(entry, whole=True) if isinstance(entry, Range) and is_whole else entry


def recommended(
    given: Given, name: str, keys: Mapping[str, str], steps: int, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return these values, the options given, and what else differs from the preset's run, for `et train --config`.

    steps: of a trial. The run's length is left out, and so is what a rule scales to it, so that both fit the run that
    uses them.
    """
    method = all_methods()[name]
    start = {option: given[option] for option in ("preset",) if option in given} | {"rule": method.rule}
    length = {"steps", "tokens", "eval_every"}
    kept = {option: value for option, value in given.items() if option not in length}
    kept |= {keys[option]: value for option, value in values.items()}
    # Both runs have the preset's length, or the trial's if that is longer, in which the trial's warmups fit.
    longest = {"steps": max(steps, resolve_run(start).train.steps)}
    plain, tuned = resolve_run(start | longest), configure(kept | longest, [name])[name]
    sections = {
        "model": (_model(plain), _model(tuned)),
        "data": (asdict(plain.data), asdict(tuned.data)),
        "optim": (asdict(plain.optim), asdict(tuned.optim)),
        "train": tuple(
            {"batch_size": config.train.batch_size, "accumulation": config.train.accumulation}
            for config in (plain, tuned)
        ),
    }
    # What was chosen stays although it equals the preset's value, since at another length the preset may differ.
    chosen = {*given, *keys.values()}
    file = read_config_file(given["config"]) if "config" in given else {}
    found: dict[str, Any] = {}
    for section, (before, after) in sections.items():
        fixed_here = chosen | file.get(section, {}).keys()
        changed = {name: value for name, value in after.items() if name in fixed_here or value != before[name]}
        if changed:
            found[section] = changed
    rule, usual = rule_to_dict(tuned.model.rule), rule_to_dict(plain.model.rule)
    typed = {key.removeprefix(RULE) for key in chosen if key.startswith(RULE)}
    typed |= file.get("model", {}).get("rule", {}).keys()
    by_length = set() if method.rule == DENSE else RULES[method.rule].scaled(tuned.train.steps, {}).keys()
    scaled = by_length - typed - method.options.keys()
    own = {
        option: value
        for option, value in rule.items()
        if option in typed or (value != usual[option] and option not in scaled)
    }
    found.setdefault("model", {})["rule"] = {"name": rule["name"]} | dict(method.options) | own
    return found


def _model(config: RunConfig) -> dict[str, Any]:
    return {option: value for option, value in config.model.to_dict().items() if option != "rule"}


def introduce(console: Console, sweep: Sweep) -> None:
    """Print what the sweep will do, and how long it may take."""
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
        text += f", at most {clock(seconds * left)} at {clock(seconds)} a trial, less what is pruned"
        if sweep.minutes is not None:
            text += f"; begins none that would end after {sweep.minutes:g} minutes"
    say(console, text)


def table(result: Mapping[str, Any]) -> Table:
    """Return the best options of each method."""
    shown = Table("method", "trials", "loss", "present", "option", "best", box=box.SIMPLE_HEAD)
    for column in shown.columns[1:4]:
        column.justify = "right"
    for name, study in result["studies"].items():
        best = study["best"]
        opening = [name, str(len(study["trials"])), fixed(best and best["loss"], 4), fixed(study["present"], 4)]
        for place, (option, entry) in enumerate(study["options"].items()):
            value = "–" if entry["best"] is None else show_value(entry["best"])
            shown.add_row(*(opening if place == 0 else [""] * 4), option, value)
    return shown


def conclude(sweep: Sweep, given: Given) -> str:
    """Write the results, those of a finished sweep again, and the page, and return lines that say where they are."""
    folder = sweep.folder
    sweep.write()
    best = next((name for name in sweep.methods if (folder / name / "best.json").is_file()), None)
    try:
        sweep.write_page()
        where = f"results in {folder}: sweep.html and .json, METHOD/best.json"
    except ValueError as missing:
        where = f"results in {folder}, but no page: {missing}"
    if best is None:
        return f"{where}\nno trial has finished; search smaller learning rates"
    preset, steps = given.get("preset", DEFAULT_PRESET), sweep.methods[best].config.train.steps
    longer = f" --steps {steps}" if steps > resolve_run({"preset": preset}).train.steps else ""
    path = shlex.quote(str(folder / best / "best.json"))
    return f"{where}\nnext: {et()} train {preset} --config {path}{longer}"

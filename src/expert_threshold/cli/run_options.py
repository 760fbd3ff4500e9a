"""The options that define a run, shared by every command that plans or trains one."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from ..config import DEFAULT_PRESET, RECORDS, RUNS, RunConfig, by_path, kinds_of_all_rules, require_warmups_fit, resolve
from ..option import Count
from ..recipes import RECIPES
from ..routing import DENSE, RULES
from ..runs import RunFolder
from .options import EVERYDAY, Option, Parser, field_options, parse

Given = Mapping[str, Any]

PRESET = Option("preset", str, DEFAULT_PRESET, f"Preset to start from: {', '.join(RUNS)}.", positional=True)
RECIPE = Option("recipe", str, None, "Recipe to use; see et recipes.")
TOKENS = Option("tokens", Count | None, None, "Token budget instead of --steps.")
CONFIG = Option("config", str, None, "JSON or TOML file with options. A run's config.json is one.")
HELP = (
    "Options are named by their path, such as --optim.matrix-lr, including in files and errors. Common options also "
    "have a short flag. --help-all lists all options. If an option is set in several places, the order of precedence "
    "is: flag, file, resumed or initial run, recipe, preset."
)


def run_options(config: RunConfig) -> list[Option]:
    """Return the options of a run, with defaults from `config`. Options of the chosen rule come first."""
    sections = config.to_dict()
    rule = sections.pop("rule")
    name = rule.pop("name")
    options = [Option("rule.name", Literal[(DENSE, *RULES)], name, "Routing rule: how scores become an assignment.")]
    records = {"rule": RULES[name]} if rule else {}
    for section, record in (records | RECORDS).items():
        options += field_options(record, {"rule": rule, **sections}[section], f"{section}.")
    return options


def resolve_run(given: Given) -> RunConfig:
    """Return the run of the given options. The order of precedence is flags, file, initial model, recipe, preset.

    Options that a rule scales to the length of a run are set for the new run. Raises ValueError for invalid options.
    """
    initial, file = {}, read_config_file(given["config"]) if "config" in given else {}
    if "init_from" in given:
        source = RunFolder.open(given["init_from"])
        with source.named():
            initial = by_path({section: source.section(section) for section in ("model", "rule")})
            initial["train.steps"] = int(source.config.get("train", {}).get("steps", 0))  # unknown if it was imported
    if given.get("tokens") is not None:
        file.pop("train.steps", None)  # a flag takes precedence over the file
    flags = {path: value for path, value in given.items() if "." in path}
    recipe, tokens = given.get("recipe"), given.get("tokens")
    config = resolve(preset_of(given), file, flags, recipe=recipe, tokens=tokens, initial=initial)
    require_warmups_fit(config)
    return config


def preset_of(given: Given) -> str:
    """Return the given preset or, if there is none, the recipe's preset."""
    recipe = given.get("recipe")
    return cast(str, given.get("preset", RECIPES[recipe].preset if recipe in RECIPES else DEFAULT_PRESET))


def start_of(given: Given) -> dict[str, str]:
    """Return the preset, recipe and file that options are based on. With a file, the default preset is omitted."""
    typed = {name: given[name] for name in ("preset", "recipe", "config") if given.get(name) is not None}
    return typed if "config" in typed else {"preset": preset_of(given)} | typed


def read_config_file(path: str, flag: str = "--config") -> dict[str, Any]:
    """Return the options in the file at `path`, keyed by their paths. Raises ValueError if the file is invalid."""
    loads = tomllib.loads if Path(path).suffix == ".toml" else partial(json.loads, object_pairs_hook=_without_repeats)
    try:
        value = loads(Path(path).read_text("utf-8-sig"))  # some Windows editors write a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", error)
        raise ValueError(f"{flag} {path} is not a JSON or TOML file such as the config.json of a run ({why})") from None
    try:
        return by_path(value)
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a key is repeated, since Python would use only its last value."""
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{repeated[0]!r} is repeated")
    return dict(pairs)


def with_paths(message: str) -> str:
    """Return an error message with a run's options, such as `heads=3`, replaced by their paths: `model.heads=3`."""
    paths = {path.partition(".")[2]: path for path in kinds_of_all_rules()}
    return re.sub(r"(?<![\w./-])\w+(?==)", lambda name: paths.get(name[0], name[0]), message)


def parse_run(
    prog: str, description: str, own: Sequence[Option], arguments: Sequence[str], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the given options of a command that has its `own` options in addition to those of a run.

    without: names of options that the command does not have. --help shows common options and those of the rule, and
    --help-all shows all. Defaults come from the preset, the rule and the file named on the command line.
    """

    def offered(options: Sequence[Option]) -> list[Option]:
        return [option for option in (PRESET, RECIPE, CONFIG, TOKENS, *own, *options) if option.name not in without]

    asks = {argument for argument in arguments if argument in ("-h", "--help", "--help-all")}
    every = {"rule.name": Literal[(DENSE, *RULES)], **kinds_of_all_rules()}
    accepted = offered([Option(path, kind, None, "") for path, kind in every.items()])
    given = parse(prog, "", accepted, [argument for argument in arguments if argument not in asks])
    if asks:
        shown = offered(run_options(resolve_run(given)))
        if "--help-all" not in asks:
            kept = [
                option for option in shown if option.name in EVERYDAY or option.name.partition(".")[0] not in RECORDS
            ]
            shown = [option._replace(help=option.help.partition(". ")[0].rstrip(".") + ".") for option in kept]
        Parser(prog, f"{description}\n\n{HELP}", shown).print_help()
        raise SystemExit(0)
    return given

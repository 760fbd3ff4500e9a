"""The options that decide a run, which every command that plans or trains one has in common."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_type_hints

from ..config import (
    DEFAULT_PRESET,
    RUNS,
    SECTIONS,
    RunConfig,
    require_warmups_fit,
    resolve,
    scaled_rule,
)
from ..recipes import RECIPES
from ..routing import DENSE, RULES, option_names, rule_to_dict
from ..runs import RunFolder
from .options import HELP_FLAGS, Command, Option, field_comments, parse

Given = Mapping[str, Any]

PRESET = Option(
    "preset", Literal[tuple(RUNS)], DEFAULT_PRESET, "The run to start from; options change it.", positional=True
)
RECIPE = Option(
    "recipe",
    Literal[tuple(RECIPES)] | None,
    None,
    "A run of the paper's tables, see et recipes; with a PRESET, the same scaled to that.",
)
TOKENS = Option("tokens", int | None, None, "Train on so many tokens, in whole batches, instead of --steps.")
CONFIG = Option("config", str, None, "A JSON file of options: a run's config.json or a part of it. Flags go first.")

# Flags that are called otherwise than the field they set.
FLAGS = {"source": "data"}


def _names(record: type) -> list[str]:
    """The record's fields that a flag of their own sets: all but the rule."""
    return [f.name for f in fields(record) if f.name != "rule"]


def run_groups(config: RunConfig) -> dict[str, Sequence[Option]]:
    """The options of a run under their titles, with the defaults that `config` has."""
    record = config.to_dict()
    rule = record["model"].pop("rule")
    return {
        "rule": [_rule_option(rule["name"]), *_rule_options(config, rule)],
        **{section: _section_options(kind, record[section]) for section, kind in SECTIONS.items()},
    }


def _section_options(record: type, defaults: Given) -> list[Option]:
    """An option for each of the record's fields in `defaults`."""
    kinds, comments = get_type_hints(record), field_comments(record)
    return [Option(FLAGS.get(name, name), kinds[name], default, comments[name]) for name, default in defaults.items()]


def _rule_option(default: str) -> Option:
    return Option("rule", Literal[(DENSE, *RULES)], default, "How scores become an assignment.")


def rule_flags() -> list[str]:
    """Return the names of all rules' options, each once, but for those that other flags have already."""
    others = {"rule", "preset", "recipe", "tokens", "config"} | {
        FLAGS.get(name, name) for record in SECTIONS.values() for name in _names(record)
    }
    return list(dict.fromkeys(name for rule in RULES for name in option_names(rule) if name not in others))


def _rule_options(config: RunConfig, chosen: Given) -> list[Option]:
    """Every rule's options, with the chosen rule's default where that has the option."""
    flags = rule_flags()
    for name in option_names(chosen["name"]):
        if name not in flags:
            raise ValueError(f"rule {chosen['name']}: its option {name!r} is another flag's name; rename the field")
    found: dict[str, Option] = {}
    for rule in dict.fromkeys([chosen["name"], *RULES]):
        defaults = chosen if rule == chosen["name"] else rule_to_dict(scaled_rule(rule, config.train.steps))
        for name in option_names(rule):
            having = [other for other in RULES if name in option_names(other)]
            scope = "" if len(having) == len(RULES) else f" ({', '.join(having)})"
            kinds = [get_type_hints(RULES[other])[name] for other in dict.fromkeys([rule, *having])]
            # Rules may call different things alike; a whole number is a number to all of them.
            kind = kinds[0] if set(kinds) <= {int, float} else Union[tuple(kinds)]  # noqa: UP007  made of a list
            comment = field_comments(RULES[rule]).get(name, "An option of the rule.")
            found.setdefault(name, Option(name, kind, defaults[name], comment + scope))
    return [option for name, option in found.items() if name in flags]


def resolve_run(given: Given) -> RunConfig:
    """The run that the given options mean: flags over a file over the model of --init-from over the preset.

    A recipe comes between that and the preset, but its rule before that model's. What a rule scales to the length of a
    run is that of the new run, unless it continues the warmup. Raises ValueError.
    """
    file: dict[str, Any] = {}
    continues = given.get("continue_warmup", False)
    if continues and "init_from" not in given:
        raise ValueError("--continue-warmup goes on with the warmup of another run; name that with --init-from")
    if "init_from" in given:
        file["model"] = RunFolder.open(given["init_from"]).section("model")
        if given.get("recipe") is not None:
            file["model"].pop("rule", None)
    of_other_run = file.get("model", {}).get("rule")
    if "config" in given:
        for section, options in read_config_file(given["config"]).items():
            file[section] = file.get(section, {}) | options if isinstance(options, dict) else options
    config = resolve(
        preset_of(given),
        given.get("rule"),
        rule_options={name: given[name] for name in rule_flags() if name in given},
        changes={
            section: {name: given[flag] for name in _names(record) if (flag := FLAGS.get(name, name)) in given}
            for section, record in SECTIONS.items()
        },
        file=file,
        recipe=given.get("recipe"),
        tokens=given.get("tokens"),
        rescale=not continues and of_other_run is not None and file["model"]["rule"] is of_other_run,
    )
    if not continues:  # the warmup may be behind it
        require_warmups_fit(config)
    return config


def preset_of(given: Given) -> str:
    """The preset that is named, or the recipe's."""
    recipe = given.get("recipe")
    default = DEFAULT_PRESET if recipe is None else RECIPES[recipe].preset
    preset: str = given.get("preset", default)
    return preset


def start_of(given: Given) -> dict[str, str]:
    """What the options of a run start from: a preset, a recipe, a file; a file alone is told without the default."""
    typed = {name: given[name] for name in ("preset", "recipe", "config") if given.get(name) is not None}
    return typed if "config" in typed else {"preset": preset_of(given)} | typed


def read_config_file(path: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError where it is none."""
    remedy = "name a JSON file such as the config.json of a run"
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: no such file; {remedy}")
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config {path}: not JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"--config {path}: not an object of sections; {remedy}")
    return value


def parse_run(
    prog: str, description: str, own: Sequence[Option], arguments: Sequence[str], without: Collection[str] = ()
) -> dict[str, Any]:
    """The given options of a command that has options of its own beside those of a run, but for those in `without`.

    --help shows the defaults of the preset, the rule and the file that the command line names.
    """

    def command(config: RunConfig) -> Command:
        groups = {"run": [PRESET, RECIPE, TOKENS, *own, CONFIG]} | run_groups(config)
        left = {title: [o for o in options if o.name not in without] for title, options in groups.items()}
        return Command(prog, description, left)

    asks = [argument for argument in arguments if argument in HELP_FLAGS]
    given = parse(command(resolve()), [argument for argument in arguments if argument not in asks])
    if asks:
        parse(command(resolve_run(given)), asks)
    return given

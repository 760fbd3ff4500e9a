"""The options that define a run, shared by every command that plans or trains one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, cast, get_type_hints

from ..config import (
    DEFAULT_PRESET,
    RUNS,
    SECTIONS,
    RunConfig,
    check_changes,
    require_warmups_fit,
    resolve,
    scaled_rule,
)
from ..option import Count
from ..recipes import RECIPES
from ..routing import DENSE, RULES, option_names, rule_to_dict
from ..runs import RunFolder
from .options import HELP_FLAGS, Command, Option, field_options, parse

Given = Mapping[str, Any]

PRESET = Option(
    "preset", Literal[tuple(RUNS)], DEFAULT_PRESET, "The run to start from; options change it.", positional=True
)
RECIPE = Option(
    "recipe",
    Literal[tuple(RECIPES)] | None,
    None,
    "A run of the paper's tables or with other projects' settings, see et recipes; a PRESET scales it.",
)
TOKENS = Option("tokens", Count | None, None, "Tokens to train on, in whole batches, instead of --steps.")
CONFIG = Option("config", str, None, "A JSON file of options: a run's config.json or a part of it. Flags override it.")

# Flags whose name differs from the field they set.
FLAGS = {"source": "data"}
RULE = "rule."
"""Prefix of the key of a rule's option, since another rule or the run may have an option of the same name."""


def run_groups(config: RunConfig) -> dict[str, Sequence[Option]]:
    """Return the options of a run under their titles, with defaults from `config`."""
    record = config.to_dict()
    rule = record["model"].pop("rule")
    chosen = Option("rule", Literal[(DENSE, *RULES)], rule["name"], "How scores become an assignment.")
    return {
        "rule": [chosen, *_rule_options(config, rule)],
        **{
            section: [o._replace(name=FLAGS.get(o.name, o.name)) for o in field_options(kind, record[section])]
            for section, kind in SECTIONS.items()
        },
    }


def rules_having() -> dict[str, list[str]]:
    """Return the names of all rules' options, each with the rules that have it."""
    having: defaultdict[str, list[str]] = defaultdict(list)
    for rule in RULES:
        for name in option_names(rule):
            having[name].append(rule)
    return having


def _rule_options(config: RunConfig, chosen: Given) -> list[Option]:
    """Return every rule's options, those of the chosen rule first, with its defaults."""
    having = rules_having()
    helps = {
        rule: {field.name: field.metadata.get("help") for field in fields(cast("Any", RULES[rule]))} for rule in RULES
    }
    hints = {rule: get_type_hints(RULES[rule]) for rule in RULES}
    options = []
    for name in dict.fromkeys([*option_names(chosen["name"]), *having]):
        rules = sorted(having[name], key=lambda rule: rule != chosen["name"])
        defaults = chosen if name in chosen else rule_to_dict(scaled_rule(rules[0], config.train.steps))
        kinds = dict.fromkeys(hints[rule][name] for rule in rules)
        # Rules may use one name with different types; an int is also a float.
        kind = float if kinds.keys() == {int, float} else Union[tuple(kinds)]  # noqa: UP007  made of a list
        text = _joined({rule: helps[rule][name] or "An option of the rule." for rule in rules})
        options.append(Option(name, kind, defaults[name], text, key=RULE + name))
    return options


def _joined(helps: Mapping[str, str]) -> str:
    """Return the help of an option by the rules that have it: once if all agree, else each with its rules."""
    rules: defaultdict[str, list[str]] = defaultdict(list)
    for rule, text in helps.items():
        rules[text].append(rule)
    if len(rules) > 1:
        return " ".join(f"{', '.join(having)}: {text}" for text, having in rules.items())
    return next(iter(rules)) + ("" if len(helps) == len(RULES) else f" ({', '.join(helps)})")


def resolve_run(given: Given) -> RunConfig:
    """Return the run of the given options: flags override a file, the model of --init-from, and the preset, in turn.

    A recipe overrides only the preset, but its rule also overrides that model's. Options that a rule scales to the
    length of a run follow the new run, unless it continues the warmup. Raises ValueError.
    """
    file: dict[str, Any] = {}
    continues = given.get("continue_warmup", False)
    if continues and "init_from" not in given:
        raise ValueError("--continue-warmup continues the warmup of another run; name that run with --init-from")
    if "init_from" in given:
        source = RunFolder.open(given["init_from"])
        file["model"] = source.section("model")
        with source.named():
            check_changes(file)
        if given.get("recipe") is not None:
            file["model"].pop("rule", None)
    of_other_run = file.get("model", {}).get("rule")
    if "config" in given:
        for section, options in read_config_file(given["config"]).items():
            file[section] = file.get(section, {}) | options if isinstance(options, dict) else options
    config = resolve(
        preset_of(given),
        given.get("rule"),
        rule_options={key.removeprefix(RULE): value for key, value in given.items() if key.startswith(RULE)},
        changes={
            section: {
                field.name: given[flag]
                for field in fields(record)
                if (flag := FLAGS.get(field.name, field.name)) in given and flag != "rule"
            }
            for section, record in SECTIONS.items()
        },
        file=file,
        recipe=given.get("recipe"),
        tokens=given.get("tokens"),
        rescale=not continues and of_other_run is not None and file["model"]["rule"] is of_other_run,
    )
    if not continues:  # else its warmup may be over
        require_warmups_fit(config)
    return config


def preset_of(given: Given) -> str:
    """Return the preset named, or the recipe's."""
    recipe = given.get("recipe")
    default = DEFAULT_PRESET if recipe is None else RECIPES[recipe].preset
    preset: str = given.get("preset", default)
    return preset


def start_of(given: Given) -> dict[str, str]:
    """Return what the options start from: preset, recipe, file; with a file alone, the default preset is omitted."""
    typed = {name: given[name] for name in ("preset", "recipe", "config") if given.get(name) is not None}
    return typed if "config" in typed else {"preset": preset_of(given)} | typed


def read_config_file(path: str, flag: str = "--config") -> dict[str, Any]:
    """Return the JSON object in the file that `flag` names. Raises ValueError for none, or an invalid option in it."""
    remedy = "name a JSON file such as the config.json of a run"
    if not Path(path).is_file():
        raise ValueError(f"{flag} {path}: no such file; {remedy}")
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {path}: not JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} {path}: not an object of sections; {remedy}")
    try:
        check_changes(value)
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}") from None
    return value


def parse_run(
    prog: str, description: str, own: Sequence[Option], arguments: Sequence[str], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the given options of a command that has options of its own beside those of a run.

    without: keys of run options that the command lacks. A rule's option whose name is taken becomes --rule-NAME.
    --help shows the defaults of the preset, the rule and the file named on the command line.
    """

    def command(config: RunConfig) -> Command:
        groups = {"run": [PRESET, RECIPE, TOKENS, *own, CONFIG]} | run_groups(config)
        taken = {"help"} | {o.name for options in groups.values() for o in options if not o.key}
        left = {
            title: [
                o._replace(name=f"rule_{o.name}") if o.key and o.name in taken else o
                for o in options
                if (o.key or o.name) not in without
            ]
            for title, options in groups.items()
        }
        return Command(prog, description, left)

    asks = [argument for argument in arguments if argument in HELP_FLAGS]
    given = parse(command(resolve()), [argument for argument in arguments if argument not in asks])
    if asks:
        parse(command(resolve_run(given)), asks)
    return given

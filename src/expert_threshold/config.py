"""Configurations of whole runs: presets of the model, data, optimizer and training, which options change.

Every option has a path: `optim.matrix_lr` is a key in config.json and corresponds to the flag --optim.matrix-lr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .data import DataConfig
from .data.public import FINEWEB_EDU
from .model import PRESETS, GPTConfig
from .optim import OptimConfig
from .option import convert, did_you_mean, kinds_of
from .recipes import CHECKPOINT_EVERY, EVAL_EVERY, EVAL_TOKENS, PAPER, PAPER_TOKENS, RECIPES
from .routing import DENSE, PAPER_STEPS, RULES, Rule, option_names, require_option, rule_from_dict
from .train import RunConfig as RunConfig
from .train import TrainConfig

Options = Mapping[str, Any]

# The paper's warmups for a run of PAPER_STEPS (Table "Training hyperparameters"). d20 has the same warmups.
PAPER_ADAMW_WARMUP_STEPS, PAPER_MOMENTUM_WARMUP_STEPS = 250, 300


@dataclass(frozen=True)
class Preset:
    """The options that turn a preset of `model.PRESETS` into a run. All other options are scaled or have defaults.

    optim: learning rates for recipes at this size, unless the recipe sets them. recipe: the default recipe; None trains
    the paper's model with the paper's optimizers.
    """

    train: Options
    optim: Options = field(default_factory=dict)
    recipe: str | None = None


PAPER_EVERY: Options = {"eval_every": EVAL_EVERY, "checkpoint_every": CHECKPOINT_EVERY}
# All but the smallest train on 54 tokens per active parameter, like d12.
RUNS: dict[str, Preset] = {
    "tiny": Preset(train={"steps": 100, "batch_size": 16, "eval_every": 50}),
    # Under four minutes on two cores with bfloat16 products; docs/log/model.md lists the sizes that were tried.
    "quickstart": Preset(
        train={"steps": 1200, "batch_size": 8, "eval_every": 300, "sample_every": 600},
        optim={"matrix_lr": 0.012, "embed_lr": 0.08},
        recipe="tuned",
    ),
    "d4": Preset(train={"steps": 6_000, "batch_size": 128, **PAPER_EVERY}),
    "d6": Preset(train={"steps": 10_000, "batch_size": 128, **PAPER_EVERY}),
    "d8": Preset(train={"steps": 10_000, "batch_size": 256, **PAPER_EVERY}),
    "d12": Preset(train={"steps": 19_073, "batch_size": 256, **PAPER_EVERY}),
    "d20": Preset(train={"steps": 21_362, "batch_size": 128, "accumulation": 2, **PAPER_EVERY}),
}
DEFAULT_PRESET = "quickstart"
DEFAULT_RULE = "expert_threshold"
# Options that are kept when the rule changes, because they are the sizes of the layer.
KEPT_OF_RULE = ("num_experts", "experts_per_token")

SECTIONS = ("model", "rule", "data", "optim", "train")
RECORDS: dict[str, type] = {"model": GPTConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}
KINDS = {
    f"{section}.{field.name}": kinds_of(record)[field.name]
    for section, record in RECORDS.items()
    for field in fields(record)
    if field.metadata
}
"""The type of every option, keyed by path, except for the options of the rule, which depend on the rule."""
FACTS = (
    "format", "version", "corpus", "machine", "versions", "compiled", "kernels", "init_from",
    "time", "command",
)  # fmt: skip
"""The other entries of config.json, which are facts about that run and have no effect on other runs."""


def by_path(record: Options) -> dict[str, Any]:
    """Return the options in the sections of a whole or partial configuration, keyed by path.

    Raises ValueError for unknown sections and options and for values of the wrong type. Any value may be given as text,
    as on a command line, since TOML has no null.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"options must be a JSON object with one section per group of options, not {record!r}")
    found: dict[str, Any] = {}
    for section, options in record.items():
        if section in FACTS:
            continue
        if section not in SECTIONS:
            raise ValueError(f"unknown section {section!r}; use {', '.join(SECTIONS)}")
        if not isinstance(options, Mapping):
            raise ValueError(f"section {section!r} must be a JSON object of options, not {options!r}")
        found |= {f"{section}.{name}": value for name, value in options.items()}
    name = found.get("rule.name")
    return typed(found, name if name in (DENSE, *RULES) else None)  # any other name may still be replaced by --rule


def nested(options: Options) -> dict[str, dict[str, Any]]:
    """Convert options keyed by path to sections of options keyed by name."""
    return {section: found for section in SECTIONS if (found := in_section(options, section))}


def in_section(options: Options, section: str) -> dict[str, Any]:
    """Return the options of a section, keyed by name."""
    return {path.partition(".")[2]: value for path, value in options.items() if path.startswith(f"{section}.")}


def kinds(rule: str = DENSE) -> dict[str, Any]:
    """Return the types of a run's options for this rule, keyed by path. Raises ValueError for an unknown rule."""
    own = {f"rule.{name}": kinds_of(RULES[rule])[name] for name in option_names(rule)}
    return {**KINDS, "rule.name": str, **own}


def kinds_of_all_rules() -> dict[str, Any]:
    """Return the types of a run's options for any rule. Those of rules are text or bool, as they depend on the rule."""
    found: dict[str, set[Any]] = {}
    for rule in RULES:
        for name in option_names(rule):
            found.setdefault(f"rule.{name}", set()).add(kinds_of(RULES[rule])[name])
    return {path: bool if types == {bool} else str for path, types in found.items()} | KINDS


def typed(options: Options, rule: str | None = None) -> dict[str, Any]:
    """Convert text in options keyed by path to their types. Raises ValueError for an unknown or invalid option.

    rule: the rule that the options belong to; None does not convert options of the rule.
    """
    known, found = kinds(DENSE if rule is None else rule), dict(options)
    for path, value in options.items():
        if path in known:
            try:
                found[path] = convert(known[path], value)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        elif not path.startswith("rule."):
            raise ValueError(f"unknown option {path}; {did_you_mean(path, KINDS, 'see et train --help-all')}")
        elif rule is not None:
            require_option(rule, path.removeprefix("rule."))
    return found


def merged(*layers: Options) -> dict[str, Any]:
    """Return the options of a section after all layers, in which later layers override earlier ones.

    If a layer names another rule than the layers before it, only the numbers of experts are kept from those layers.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        if "name" in layer and layer["name"] != found.get("name"):
            found = {name: found[name] for name in KEPT_OF_RULE if name in found and layer["name"] != DENSE}
        found |= layer
    return found


def run_config(record: Options) -> RunConfig:
    """Read a config.json or the result of `to_dict`. Raises ValueError for missing sections and unknown options."""
    for section in SECTIONS:
        if section not in record:
            raise ValueError(f"configuration has no section {section!r}; name the config.json of a run")
    found = nested(by_path(record))
    parts = {name: RECORDS[name](**found.get(name, {})) for name in ("data", "optim", "train")}
    return RunConfig(GPTConfig.from_dict(found), **parts)


def scaled_rule(name: str, steps: int, /, **options: Any) -> Rule | None:
    """Return the rule for a run of `steps`, or None if it is dense. Defaults depend on the length of the run.

    Raises ValueError naming an option that the rule does not have.
    """
    given = in_section(typed({f"rule.{option}": value for option, value in options.items()}, name), "rule")
    return rule_from_dict({"name": name, **_scaled(name, steps, given), **given})


def _scaled(name: str | None, steps: int, options: Options) -> Options:
    """Return the options that the rule scales to the length of the run."""
    return {} if name in (None, DENSE) else RULES[name].scaled(steps, options)


def scaled_optim(steps: int, **options: Any) -> OptimConfig:
    """Return the paper's optimizers for a run of `steps`. By default, warmups take at most a tenth of the run."""
    scaled = {
        "adamw_warmup_steps": min(PAPER_ADAMW_WARMUP_STEPS, steps // 10),
        "momentum_warmup_steps": min(PAPER_MOMENTUM_WARMUP_STEPS, steps // 10),
    }
    return OptimConfig(**(scaled | options))


def scaled_model(base: Options, changes: Options) -> dict[str, Any]:
    """Return the sizes after `changes`. Other widths keep their ratio to d_model, and heads keep their width.

    The result has at least one head. Raises ValueError if the resulting number of heads does not divide d_model.
    """
    d_model = changes.get("d_model", base["d_model"])
    widths = {name: max(1, base[name] * d_model // base["d_model"]) for name in ("d_expert", "d_feed_forward", "heads")}
    width, left = divmod(d_model, widths["heads"])
    if "heads" not in changes and (left or width % 2):
        raise ValueError(
            f"d_model={d_model} cannot be divided into heads with an even width close to the preset's width of "
            f"{base['d_model'] // base['heads']}; use a multiple of that width, or also set heads"
        )
    kv_heads = max(1, changes.get("heads", widths["heads"]) * base["kv_heads"] // base["heads"])
    return {**base, **widths, "kv_heads": kv_heads, **changes}


def scheduled(base: Options, given: Options, context: int, tokens: int | None, of_paper: bool) -> TrainConfig:
    """Return the training options for a budget of tokens or a number of steps. Raises ValueError below one batch.

    Other intervals are in proportion to the paper's intervals or, with a budget, to the intervals of `base`.
    """
    options, of = {**base, **given}, base["steps"]
    every: Options = {name: value for name, value in base.items() if name.endswith("_every")}
    per_step = options["batch_size"] * options.get("accumulation", 1) * context
    if tokens is not None:
        if "steps" in given:
            raise ValueError(f"tokens={tokens} and steps={given['steps']} both set the length of the run; use only one")
        if tokens < per_step:
            raise ValueError(f"tokens={tokens} is less than one batch of {per_step} tokens; use at least that many")
        options["steps"] = tokens // per_step
    steps = options["steps"]
    if of_paper:
        every, of = PAPER_EVERY, PAPER_STEPS
        options["eval_tokens"] = max(round(EVAL_TOKENS * steps * per_step / PAPER_TOKENS), per_step)
    if of_paper or tokens is not None:  # longer runs keep the intervals
        options |= {name: max(1, min(value, round(value * steps / of))) for name, value in every.items()}
    return TrainConfig(**{**options, **given})


def require_warmups_fit(config: RunConfig) -> None:
    """Raise ValueError if a warmup is longer than the run."""
    for section, part in (("rule", config.model.rule), ("optim", config.optim)):
        for name, steps in vars(part).items() if part is not None else ():
            if name.endswith("warmup_steps") and steps > config.train.steps:
                raise ValueError(
                    f"{section}.{name}={steps} is longer than the run of {config.train.steps} steps; use fewer steps, "
                    "or train longer"
                )


def resolve(
    preset: str = DEFAULT_PRESET,
    *layers: Options,
    recipe: str | None = None,
    tokens: int | None = None,
    initial: Options | None = None,
) -> RunConfig:
    """Return the run of a preset after changes by a recipe, by `initial`, and by layers of options, in this order.

    Options are keyed by path. initial: options of another run's model and rule, and its train.steps. What the rule
    scales to the length of a run is scaled to this run, given the options that the other run did not get that way.
    tokens: the budget, in place of steps; with a budget or a recipe, intervals are in proportion to the run. Raises
    ValueError for unknown names and for values that cannot be trained.
    """
    if preset not in RUNS:
        raise ValueError(f"unknown preset {preset!r}; {did_you_mean(preset, RUNS)}")
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; {did_you_mean(recipe, RECIPES)}")
    base, made_by = RUNS[preset], RECIPES.get(recipe or RUNS[preset].recipe or "", PAPER)
    other = dict(initial or {})
    chosen = [other, *map(typed, layers)]

    def section(name: str, lowest: Options) -> dict[str, Any]:
        return merged(lowest, *(in_section(layer, name) for layer in chosen))

    batch = made_by.options_of_batch(base.train["batch_size"], base.train.get("accumulation", 1))
    model = scaled_model(PRESETS[preset], section("model", made_by.model))
    train = scheduled(base.train, section("train", batch), model["context"], tokens, of_paper=recipe is not None)
    default = _scaled(other.get("rule.name"), other.pop("train.steps", 0), {})
    deliberate = dict(item for item in in_section(other, "rule").items() if item not in default.items())
    now = merged(deliberate, *(in_section(layer, "rule") for layer in chosen[1:]))
    other |= {f"rule.{name}": value for name, value in _scaled(other.get("rule.name"), train.steps, now).items()}
    rule = section("rule", made_by.options_of_rule(train.batch_size, model["context"], train.steps))
    return RunConfig(
        model=GPTConfig(**model, rule=scaled_rule(rule.pop("name"), train.steps, **rule)),
        data=DataConfig(**section("data", {"source": FINEWEB_EDU} if preset == made_by.preset else {})),
        optim=scaled_optim(train.steps, **section("optim", {**base.optim, **made_by.options_of_optim(train.steps)})),
        train=train,
    )

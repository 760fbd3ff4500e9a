"""Whole runs: presets of model, data, optimizer and training together, changed by files and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .data import DataConfig
from .data.public import FINEWEB_EDU
from .model import PRESETS, GPTConfig
from .optim import OptimConfig
from .option import did_you_mean, require_valid
from .recipes import RECIPES, in_proportion, intervals
from .routing import DENSE, RULES, Rule, option_names, require_options, rule_from_dict
from .train import TrainConfig

Options = Mapping[str, Any]

# The paper's warmups, for PAPER_STEPS (Table "Training hyperparameters"); d20 keeps them.
PAPER_ADAMW_WARMUP_STEPS, PAPER_MOMENTUM_WARMUP_STEPS = 250, 300


@dataclass(frozen=True)
class Preset:
    """The options that turn a preset of `model.PRESETS` into a run; all others are scaled or defaults.

    optim: the rates at which a recipe is run at this size, where it has none of its own. recipe: the one to run unless
    another is named; None trains the paper's model with the paper's optimizers.
    """

    train: Options
    optim: Options = field(default_factory=dict)
    recipe: str | None = None


# All but the smallest train on 54 tokens per active parameter, like d12.
RUNS: dict[str, Preset] = {
    "tiny": Preset(train={"steps": 100, "batch_size": 16, "eval_every": 50}),
    # Under four minutes on two cores with bfloat16 products; docs/log/model.md has the sizes that were tried.
    "quickstart": Preset(
        train={"steps": 1200, "batch_size": 8, "eval_every": 300, "sample_every": 600},
        optim={"matrix_lr": 0.012, "embed_lr": 0.08},
        recipe="tuned",
    ),
    "d4": Preset(train={"steps": 6_000, "batch_size": 128, "eval_every": 250, "checkpoint_every": 1000}),
    "d6": Preset(train={"steps": 10_000, "batch_size": 128, "eval_every": 250, "checkpoint_every": 1000}),
    "d8": Preset(train={"steps": 10_000, "batch_size": 256, "eval_every": 250, "checkpoint_every": 1000}),
    "d12": Preset(train={"steps": 19_073, "batch_size": 256, "eval_every": 250, "checkpoint_every": 1000}),
    "d20": Preset(
        train={"steps": 21_362, "batch_size": 128, "accumulation": 2, "eval_every": 250, "checkpoint_every": 1000}
    ),
}
DEFAULT_PRESET = "quickstart"
DEFAULT_RULE = "expert_threshold"
# Options that carry over when the rule is changed: the sizes of the layer.
SHARED_RULE_OPTIONS = ("num_experts", "experts_per_token")


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run; its fields are the sections of config.json."""

    model: GPTConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a JSON object of four sections."""
        return {
            "model": self.model.to_dict(),
            "data": asdict(self.data),
            "optim": asdict(self.optim),
            "train": asdict(self.train),
        }

    @classmethod
    def from_dict(cls, record: Options) -> RunConfig:
        """Read `to_dict`'s record or a whole config.json. Raises ValueError for a missing section or unknown option."""
        for section in SECTIONS:
            if section not in record:
                raise ValueError(f"configuration has no section {section!r}; name the config.json of a run")
        check_changes(record)
        return cls(
            model=GPTConfig.from_dict(record["model"]),
            data=DataConfig(**record["data"]),
            optim=OptimConfig(**record["optim"]),
            train=TrainConfig(**record["train"]),
        )


SECTIONS: dict[str, type] = {"model": GPTConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


# The other entries of config.json: facts of that run, which have no effect on another.
FACTS = (
    "format",
    "version",
    "corpus",
    "machine",
    "versions",
    "compiled",
    "kernels",
    "init_from",
    "continue_warmup",
    "time",
    "command",
)


def check_changes(changes: Options) -> None:
    """Raise ValueError for an unknown section or option, or a value of the wrong type."""
    for section, options in changes.items():
        if section in FACTS:
            continue
        if section not in SECTIONS:
            raise ValueError(f"section {section!r} is unknown; use {', '.join(SECTIONS)}")
        if not isinstance(options, Mapping):
            raise ValueError(f"section {section!r} must be an object of options, not {options!r}")
        require_valid(SECTIONS[section], options)
        rule = options.get("rule", {"name": DENSE})
        if not (isinstance(rule, Mapping) and isinstance(rule.get("name"), str)):
            raise ValueError(f'rule={rule!r} must be an object such as {{"name": "expert_threshold"}}')
        if rule["name"] in (DENSE, *RULES):  # one that is not in the table may yet be replaced by --rule
            require_options(rule)


def scaled_rule(name: str, steps: int, /, **options: Any) -> Rule | None:
    """Return the rule for a run of `steps`, with its defaults for that length unless `options` override; None if dense.

    Raises ValueError naming an option that the rule lacks.
    """
    require_options({"name": name, **options})
    scaled = {} if name == DENSE else RULES[name].scaled(steps, options)
    return rule_from_dict({"name": name, **scaled, **options})


def scaled_optim(steps: int, **options: Any) -> OptimConfig:
    """Return the paper's optimizers for a run of `steps`; by default warmups are at most a tenth of the run."""
    scaled = {
        "adamw_warmup_steps": min(PAPER_ADAMW_WARMUP_STEPS, steps // 10),
        "momentum_warmup_steps": min(PAPER_MOMENTUM_WARMUP_STEPS, steps // 10),
    }
    return OptimConfig(**(scaled | options))


def scaled_model(base: Options, changes: Options) -> dict[str, Any]:
    """Return the sizes after `changes`: widths not given keep their proportion to d_model, and heads their width.

    There is at least one head. Raises ValueError naming d_model if the resulting number of heads does not divide it.
    """
    d_model = changes.get("d_model", base["d_model"])
    sizes = dict(base)
    if isinstance(d_model, int) and d_model > 0:
        sizes |= {
            name: max(1, base[name] * d_model // base["d_model"]) for name in ("d_expert", "d_feed_forward", "heads")
        }
        width, left = divmod(d_model, sizes["heads"])
        if "heads" not in changes and (left or width % 2):
            raise ValueError(
                f"d_model={d_model} cannot be divided into heads of an even width near the preset's, "
                f"{base['d_model'] // base['heads']}; give a multiple of that, or the number of heads, too"
            )
    sizes["kv_heads"] = max(1, changes.get("heads", sizes["heads"]) * base["kv_heads"] // base["heads"])
    return {**sizes, **changes}


def scheduled(base: Options, given: Options, context: int, tokens: int | None, of_paper: bool) -> TrainConfig:
    """Return the training options for a budget of tokens, or for steps. Raises ValueError for less than one batch.

    Intervals not given are in proportion to the paper's, or, with a budget, to those of `base`.
    """
    options = {**base, **given}
    per_step = options["batch_size"] * options.get("accumulation", 1) * context
    if tokens is not None:
        if "steps" in given:
            raise ValueError(f"tokens={tokens} and steps={given['steps']} both say how long to train; give one of them")
        if tokens < per_step:
            raise ValueError(f"tokens={tokens} is below one batch of {per_step} tokens; give at least that many")
        options["steps"] = tokens // max(per_step, 1)
    if of_paper:
        options |= intervals(options["steps"], per_step)
    elif tokens is not None:
        every = {name: value for name, value in base.items() if name.endswith("_every")}
        options |= in_proportion(every, options["steps"], base["steps"])
    return TrainConfig(**{**options, **given})


def require_warmups_fit(config: RunConfig) -> None:
    """Raise ValueError for a warmup longer than the run."""
    for part in (config.model.rule, config.optim):
        for name, steps in vars(part).items() if part is not None else ():
            if name.endswith("warmup_steps") and steps > config.train.steps:
                raise ValueError(
                    f"{name}={steps} is beyond the run of {config.train.steps} steps; give fewer, or train longer"
                )


def resolve(
    preset: str = DEFAULT_PRESET,
    rule: str | None = None,
    *,
    rule_options: Options | None = None,
    changes: Options | None = None,
    file: Options | None = None,
    recipe: str | None = None,
    tokens: int | None = None,
    rescale: bool = False,
) -> RunConfig:
    """Return the run of a preset, changed by a recipe, then by a file, then by the other arguments.

    file: sections of a config.json. changes: the same, without a rule. rule: its name; of a recipe's or a file's other
    rule only the numbers of experts and of experts per token stay. rule_options: the options of the rule. tokens: the
    budget, in place of steps; with it or with a recipe, intervals are in proportion to the run. rescale: the file
    belongs to another run, so options that its rule scales to the length of a run are computed anew.
    Raises ValueError for unknown names and for values that cannot train.
    """
    if preset not in RUNS:
        raise ValueError(f"preset {preset!r} is unknown; {did_you_mean(preset, RUNS)}")
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is unknown; {did_you_mean(recipe, RECIPES)}")
    base = RUNS[preset]
    chosen = recipe or base.recipe
    made_by = None if chosen is None else RECIPES[chosen]
    check_changes(file or {})
    layers = [file or {}, changes or {}]
    if made_by is not None:
        batch = made_by.options_of_batch(base.train["batch_size"], base.train.get("accumulation", 1))
        data = {"source": FINEWEB_EDU} if preset == made_by.preset else {}
        layers.insert(0, {"model": made_by.model, "train": batch, "data": data})
    given = {
        section: {name: value for layer in layers for name, value in layer.get(section, {}).items()}
        for section in SECTIONS
    }
    below = dict(given["model"].pop("rule", {}))
    sizes = scaled_model(PRESETS[preset], given["model"])
    train = scheduled(base.train, given["train"], sizes["context"], tokens, of_paper=recipe is not None)
    if made_by is not None:
        below = below or dict(made_by.options_of_rule(train.batch_size, sizes["context"], train.steps))
        given["optim"] = {**made_by.options_of_optim(train.steps), **given["optim"]}
    name_below = below.pop("name", None)
    name = rule or name_below or DEFAULT_RULE
    if name != name_below:
        below = {k: v for k, v in below.items() if k in SHARED_RULE_OPTIONS and k in option_names(name)}
    elif rescale and name != DENSE:
        below |= RULES[name].scaled(train.steps, below)
    return RunConfig(
        model=GPTConfig(**sizes, rule=scaled_rule(name, train.steps, **(below | dict(rule_options or {})))),
        data=DataConfig(**given["data"]),
        optim=scaled_optim(train.steps, **(dict(base.optim) | given["optim"])),
        train=train,
    )

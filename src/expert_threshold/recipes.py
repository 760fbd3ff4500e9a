"""Records of runs: the paper's tables and ablations with their reported results, and settings of other projects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .model import TRUNKS
from .optim import NANOCHAT, RELEASE, TUNED, OptimConfig
from .routing import PAPER_STEPS, RULES, scaled_decay

Options = Mapping[str, Any]

PAPER_TOKENS = PAPER_STEPS * 524_288
EVAL_EVERY, CHECKPOINT_EVERY = 250, 1000
EVAL_TOKENS = 10_485_760
"""Number of tokens per validation in a run of PAPER_TOKENS, as in the release. The paper does not state it."""


class Method(NamedTuple):
    """A rule and the options that define the method. Its other options are set as in any run.

    colour: the index of its colour in the palette of figures; None picks an unused colour.
    """

    rule: str
    options: Options
    summary: str
    colour: int | None = None


METHODS: dict[str, Method] = {
    "dense": Method("dense", {}, "no routed experts, same FLOPs per token", 0),
    "token_choice": Method("token_choice", {"balance": "none"}, "each token goes to its best experts", 1),
    "token_choice_aux": Method("token_choice", {"balance": "aux"}, "token choice, balanced by an auxiliary loss", 5),
    "token_choice_loss_free": Method("token_choice", {"balance": "loss_free"}, "token choice, balanced by biases", 6),
    "expert_choice_sequence": Method(
        "expert_choice", {"pool": "sequence"}, "each expert takes its best tokens in every sequence", 2
    ),
    "expert_choice_batch": Method("expert_choice", {"pool": "batch"}, "expert choice over every micro-batch", 7),
    "expert_threshold": Method("expert_threshold", {}, "a token goes where its score exceeds the cutoff", 3),
    "expert_threshold_no_warmup": Method("expert_threshold", {"warmup_steps": 0}, "the same without warmup", 4),
}
"""The paper's methods, keyed by the rule's name and the variant. Recipes add the pool of expert choice, in tokens of
d12, or the change in an ablation. Figures use the rule's label."""
UNBOUNDED: Options = {"capacity_slack": None}
LAST_BATCH: Options = {"estimator": "mean", "decay": 0.0}
SOFTMAX: Options = {"gate": "softmax", "null_scores": 16}
VARIANTS: dict[str, Method] = {
    # Variants of expert threshold differ in the estimator of the cutoff and in whether loads are bounded.
    "expert_threshold_last_batch": Method(
        "expert_threshold", LAST_BATCH, "expert threshold with the last batch's cutoff"
    ),
    "expert_threshold_mean": Method("expert_threshold", {"estimator": "mean"}, "expert threshold with a running mean"),
    "expert_threshold_trend": Method("expert_threshold", {"estimator": "trend"}, "expert threshold with a trend"),
    "expert_threshold_last_batch_unbounded": Method(
        "expert_threshold", {**LAST_BATCH, **UNBOUNDED}, "expert threshold with the last batch's cutoff, without bounds"
    ),
    "expert_threshold_mean_unbounded": Method(
        "expert_threshold", {"estimator": "mean", **UNBOUNDED}, "expert threshold with a running mean, without bounds"
    ),
    "expert_threshold_trend_unbounded": Method(
        "expert_threshold", {"estimator": "trend", **UNBOUNDED}, "expert threshold with a trend, without bounds"
    ),
    # Softmax gates, where the paper uses sigmoids.
    "expert_threshold_softmax": Method("expert_threshold", SOFTMAX, "expert threshold with softmax gates"),
    "expert_choice_batch_softmax": Method(
        "expert_choice", {"pool": "batch", **SOFTMAX}, "expert choice over a batch with softmax gates"
    ),
    "quantile_balancing_softmax": Method(
        "quantile_balancing", {"gate": "softmax"}, "quantile balancing with softmax gates"
    ),
    # Gates and balancing of published models. Normalised gates need --experts-per-token 2 or more.
    "token_choice_mixtral": Method(
        "token_choice", {"balance": "aux", "gate": "softmax_chosen"}, "token choice with Mixtral's gates"
    ),
    "token_choice_olmoe": Method("token_choice", {"balance": "aux", "gate": "softmax"}, "token choice as in OLMoE"),
    "token_choice_qwen3_moe": Method(
        "token_choice", {"balance": "global_aux", "gate": "softmax_chosen"}, "token choice with Qwen3-MoE's gates"
    ),
    "token_choice_deepseek_v3": Method(
        "token_choice",
        {"balance": "loss_free", "gate": "sigmoid_normalised", "over": "gates"},
        "token choice with DeepSeek-V3's gates and biases",
    ),
    "quantile_balancing_gates": Method(
        "quantile_balancing", {"over": "gates"}, "quantile balancing on the scores' sigmoids"
    ),
    "quantile_balancing_histogram": Method(
        "quantile_balancing", {"estimator": "histogram"}, "quantile balancing with a histogram"
    ),
    "null_slots_copy": Method("null_slots", {"null": "copy"}, "null slots that return the token itself"),
    "top_p_steered": Method("top_p", {"p": "steered"}, "top-p with p steered by the mean fanout"),
}
"""Further named methods. docs/routing.md lists the sizes and strengths that published models use."""
REFERENCE = "token_choice"
"""The method whose loss is the baseline in comparisons that include it."""


def methods() -> dict[str, Method]:
    """Return the named methods that can be compared: the paper's methods, other rules with defaults, and variants."""
    covered = {method.rule for method in METHODS.values()}
    others = {name: Method(name, {}, cls.summary().rstrip(".")) for name, cls in RULES.items() if name not in covered}
    return METHODS | others | VARIANTS


def method_named(rule: Options) -> str | None:
    """Return the most specific of the paper's methods that matches a rule `{"name": …, option: value, …}`, or None."""
    fitting = [
        name
        for name, method in METHODS.items()
        if method.rule == rule["name"] and all(rule.get(option) == value for option, value in method.options.items())
    ]
    return max(fitting, key=lambda name: len(METHODS[name].options), default=None)


class Reported(NamedTuple):
    """Results reported in the paper, or None where there are none."""

    where: str
    cross_entropy: float | None = None  # on validation text, nats per token
    core: float | None = None
    train_cross_entropy: float | None = None  # at the end of training (section "Batch Size Scaling")


@dataclass(frozen=True)
class Recipe:
    """A run from the paper, or a run with the settings of another project. Other options come from its preset.

    rule: the name of the rule and the options that differ from their defaults; a decay is meant for PAPER_STEPS. pool:
    the number of sequences whose tokens compete for an expert or over which load is measured; None means a whole
    micro-batch on all ranks. rates: learning rates by number of steps, with power laws in between.
    """

    summary: str
    rule: Options
    reported: Reported
    preset: str = "d12"
    pool: int | None = None
    model: Options = field(default_factory=dict)
    optim: Options = field(default_factory=dict)
    rates: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def options_of_batch(self, batch_size: int, accumulation: int) -> Options:
        """Return options that divide a step of `batch_size * accumulation` sequences into micro-batches.

        An auxiliary loss sees one micro-batch, so the pool sets its size.
        """
        whole = batch_size * accumulation
        if self.rule.get("balance") != "aux" or self.pool is None or whole % min(self.pool, whole):
            return {}
        return {"batch_size": min(self.pool, whole), "accumulation": whole // min(self.pool, whole)}

    def options_of_optim(self, steps: int) -> dict[str, Any]:
        """Return the options of the optimizer for a run of `steps`.

        Learning-rate warmups last at most a tenth of the run. In a short run, momentum may rise until the end: in 300
        steps, a momentum warmup of 30 steps instead of 300 cost 0.04 nats.
        """
        longest = {"adamw_warmup_steps": steps // 10, "muon_warmup_steps": steps // 10, "momentum_warmup_steps": steps}
        scaled = {name: min(value, longest[name]) if name in longest else value for name, value in self.optim.items()}
        logs = {name: np.log(list(found.items())).T for name, found in self.rates.items()}
        rates = {name: np.exp(np.interp(np.log(steps), *found)) for name, found in logs.items()}
        return scaled | {name: float(f"{rate:.2g}") for name, rate in rates.items()}

    def options_of_rule(self, batch_size: int, context: int, steps: int) -> Options:
        """Return the rule for a run of `steps` with micro-batches of `batch_size` sequences of `context` tokens."""
        options = dict(self.rule)
        if options["name"] == "expert_choice":
            options["pool"] = "global"
            if self.pool is not None and (self.pool == 1 or self.pool < batch_size):
                options["pool"] = "sequence" if self.pool == 1 else self.pool * context
        if "decay" in options:
            options["decay"] = scaled_decay(options["decay"], steps)
        return options


PAPER = Recipe("the paper's model and optimizers", {"name": "expert_threshold"}, Reported(""), preset="")
"""The recipe of runs that name none."""


def _changes(config: OptimConfig) -> Options:
    """Return the options that differ from the paper's settings."""
    paper = asdict(OptimConfig())
    return {name: value for name, value in asdict(config).items() if value != paper[name]}


def _rule(method: str, **options: Any) -> Options:
    """Return the rule of a method with the options that a recipe changes."""
    return {"name": METHODS[method].rule, **METHODS[method].options, **options}


DENSE, TC, TC_AUX, TC_LOSS_FREE = map(_rule, ("dense", "token_choice", "token_choice_aux", "token_choice_loss_free"))
EC: Options = {"name": "expert_choice"}  # with the recipe's pool
# The paper's estimator, in runs of any length.
ET, ET_NO_WARMUP = (_rule(name, estimator="mean") for name in ("expert_threshold", "expert_threshold_no_warmup"))
# "we select 2 experts out of 16 routed experts" (Appendix "Ablations", Shared Expert).
TWO: Options = {"experts_per_token": 2}
NO_SHARED: Options = {"shared_experts": 0}

# The learning rate of matrices is included, since a preset may set another.
_NANOCHAT, _TUNED = ({**_changes(config), "matrix_lr": config.matrix_lr} for config in (NANOCHAT, TUNED))

RECIPES: dict[str, Recipe] = {
    "dense": Recipe("no routed experts", DENSE, Reported("Table 1", 3.002, 15.743)),
    "token_choice": Recipe("token choice, not balanced", TC, Reported("Table 1", 2.893, 17.983)),
    "token_choice_aux": Recipe("token choice, auxiliary loss", TC_AUX, Reported("Table 1", 2.892, 15.894), pool=32),
    "token_choice_loss_free": Recipe(
        "token choice, balanced by biases", TC_LOSS_FREE, Reported("Table 1", 2.898, 18.031)
    ),
    "expert_choice_2k": Recipe("expert choice over a sequence", EC, Reported("Table 1", 2.910, 17.91, 2.874), pool=1),
    "expert_choice_8k": Recipe("expert choice over 4 sequences", EC, Reported("Table 1", 2.845, 18.83, 2.844), pool=4),
    "expert_choice_64k": Recipe(
        "expert choice over 32 sequences", EC, Reported("Table 1", 2.841, 18.754, 2.836), pool=32
    ),
    "expert_choice_512k": Recipe("expert choice over the batch", EC, Reported("Table 1", 2.843, 19.94, 2.840)),
    "expert_threshold": Recipe("expert threshold", ET, Reported("Table 1", 2.844, 19.876)),
    "expert_threshold_no_warmup": Recipe(
        "expert threshold without warmup", ET_NO_WARMUP, Reported("Shared Expert", 2.844, 16.867)
    ),
    "expert_choice_512k_no_shared": Recipe(
        "expert choice over the batch, no shared expert",
        {**EC, **TWO},
        Reported("Shared Expert", 2.862, 16.307),
        model=NO_SHARED,
    ),
    "expert_threshold_no_warmup_no_shared": Recipe(
        "expert threshold without warmup, no shared expert",
        {**ET_NO_WARMUP, **TWO},
        Reported("Shared Expert", 2.862, 18.515),
        model=NO_SHARED,
    ),
    "expert_threshold_fanout_norm": Recipe(
        "expert threshold with the routed sum divided by the fanout",
        ET,
        Reported("Normalization: CE + 0.04"),
        model={"gate_norm": "fanout"},
    ),
    "expert_threshold_no_capacity": Recipe(
        "expert threshold without bounds on the load", {**ET, "capacity_slack": None}, Reported("Capacity Constraints")
    ),
    "d20_dense": Recipe("no routed experts", DENSE, Reported("Table 2", 2.751, 20.43), "d20"),
    "d20_token_choice_aux": Recipe(
        "token choice, auxiliary loss", TC_AUX, Reported("Table 2", 2.687, 22.31), "d20", pool=16
    ),
    "d20_expert_choice_256k": Recipe("expert choice over half a batch", EC, Reported("Table 2", 2.621, 24.98), "d20"),
    "d20_expert_threshold": Recipe("expert threshold", ET, Reported("Table 2", 2.620, 25.14), "d20"),
    "release": Recipe(
        "expert threshold with the defaults of the authors' code",
        {**ET, "decay": 0.99, "capacity_slack": None},
        Reported("the authors' release"),
        optim=_changes(RELEASE),
    ),
    "better_rates": Recipe(
        "expert threshold with the paper's optimizers at nanochat's learning rates",
        _rule("expert_threshold"),
        Reported("nanochat 92d63d4"),
        optim={
            "embed_lr": NANOCHAT.embed_lr,
            "head_lr": NANOCHAT.head_lr,
            "matrix_lr": NANOCHAT.matrix_lr,
            "scale_muon": False,
            "betas": (0.8, 0.95),
            "adamw_warmup_steps": 0,
        },
    ),
    "nanochat": Recipe(
        "expert threshold with nanochat's optimizer and initialisation",
        _rule("expert_threshold"),
        Reported("nanochat 92d63d4"),
        model={"initialization": "nanochat"},
        optim=_NANOCHAT,
    ),
    "nanochat_trunk": Recipe(
        "the same with nanochat's trunk: value embeddings, scalars, smear, backout, sharper attention, windows",
        _rule("expert_threshold"),
        Reported("nanochat 92d63d4"),
        model={"initialization": "nanochat", **TRUNKS["nanochat"]},
        optim=_NANOCHAT,
    ),
    "tuned": Recipe(
        "the same without windows, with key offset, slower skip scalars, four iterations, experts updated in turns, "
        "and a swept learning rate for matrices",
        _rule("expert_threshold"),
        Reported("docs/sweep.md"),
        model={"initialization": "nanochat", **TRUNKS["tuned"]},
        optim=_TUNED,
        rates={"matrix_lr": {250: 0.06, 1000: 0.02, 4000: 0.01}},  # at 4,096 tokens per step
    ),
}

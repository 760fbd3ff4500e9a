"""What `et analyze` looks at: for each figure the numbers it is drawn from, and a sentence on what is seen in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .. import figures
from ..material import Material
from ..plain import Data
from . import activation, consistency, cutoffs, leakage, learning, load, overview, specialisation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Study(NamedTuple):
    """compute raises NotShownError where the figure has no meaning; draw takes the data and a width in inches."""

    name: str  # of its files
    section: str
    title: str
    compute: Callable[[Material], Data]
    draw: Callable[..., Figure]
    say: Callable[[Data], str]
    wide: bool = True
    rows: Callable[[Data], tuple[list[str], list[list[str]]]] | None = None  # head and rows of a table below it


LEARNING, CUTOFFS, COMPUTATION, EXPERTS = "Learning", "Cutoffs", "Dynamic computation", "Specialisation"
CONSISTENCY, LOAD, LEAKAGE = "Routing consistency", "Load", "Leakage"
STUDIES = [
    Study("loss_by_method", LEARNING, "Validation loss by method", learning.loss_by_method, figures.loss_by_method,
          learning.say_loss_by_method),
    Study("token_multiple", LEARNING, "Token multiple at equal loss", learning.token_multiple, figures.token_multiple,
          learning.say_token_multiple),
    Study("batch_size_scaling", LEARNING, "Batch size scaling", learning.batch_size_scaling,
          figures.batch_size_scaling, learning.say_batch_size_scaling, wide=False),
    Study("train_against_validation", LEARNING, "Training and validation loss", learning.train_against_validation,
          figures.train_against_validation, learning.say_train_against_validation),
    Study("shared_expert", LEARNING, "Shared expert on and off", learning.shared_expert, figures.shared_expert,
          learning.say_shared_expert, wide=False),
    Study("fanout_norm", LEARNING, "With and without fanout norm", learning.fanout_norm, figures.fanout_norm,
          learning.say_fanout_norm, wide=False),
    Study("rules_overview", CUTOFFS, "Overview of rules", overview.rules_overview, figures.rules_overview,
          overview.say_rules_overview),
    Study("cutoff_stability", CUTOFFS, "Cutoffs, loads and capacity bounds", cutoffs.cutoff_stability,
          figures.cutoff_stability, cutoffs.say_cutoff_stability),
    Study("cutoff_law", CUTOFFS, "Spread of cutoffs by pool size", cutoffs.cutoff_law, figures.cutoff_law,
          cutoffs.say_cutoff_law),
    Study("warmup", CUTOFFS, "Warmup dynamics", cutoffs.warmup, figures.warmup, cutoffs.say_warmup),
    Study("capacity", CUTOFFS, "Capacity behaviour", cutoffs.capacity, figures.capacity, cutoffs.say_capacity),
    Study("cutoffs_and_biases", CUTOFFS, "Cutoffs against biases", cutoffs.cutoffs_and_biases,
          figures.cutoffs_and_biases, cutoffs.say_cutoffs_and_biases),
    Study("score_histograms", CUTOFFS, "Score histograms", cutoffs.score_histograms, figures.score_histograms,
          cutoffs.say_score_histograms),
    Study("fanout_by_position", COMPUTATION, "Fanout by position", activation.fanout_by_position,
          figures.fanout_by_position, activation.say_fanout_by_position),
    Study("fanout_by_loss", COMPUTATION, "Fanout by loss", activation.fanout_by_loss, figures.fanout_by_loss,
          activation.say_fanout_by_loss),
    Study("loss_by_fanout", COMPUTATION, "Loss by fanout", activation.loss_by_fanout, figures.loss_by_fanout,
          activation.say_loss_by_fanout),
    Study("fanout_distribution", COMPUTATION, "Distribution of fanout", activation.fanout_distribution,
          figures.fanout_distribution, activation.say_fanout_distribution),
    Study("specialisation", EXPERTS, "Expert specialisation", specialisation.specialisation, figures.specialisation,
          specialisation.say_specialisation),
    Study("specialisation_summary", EXPERTS, "Information of experts about the domain",
          specialisation.specialisation_summary, figures.specialisation_summary,
          specialisation.say_specialisation_summary, wide=False),
    Study("passage_intensity", EXPERTS, "Computation over the text", specialisation.passage_intensity,
          figures.passage_intensity, specialisation.say_passage_intensity),
    Study("passage_fanout", EXPERTS, "Fanout of every token, by layer", specialisation.passage_fanout,
          figures.passage_fanout, specialisation.say_passage_fanout),
    Study("passage_routing", EXPERTS, "Experts of every token, by layer", specialisation.passage_routing,
          figures.passage_routing, specialisation.say_passage_routing),
    Study("routing_consistency", CONSISTENCY, "Weighted Jaccard between checkpoints", consistency.routing_consistency,
          figures.routing_consistency, consistency.say_routing_consistency),
    Study("routing_divergence", CONSISTENCY, "Joint divergence between checkpoints", consistency.routing_consistency,
          figures.routing_divergence, consistency.say_routing_divergence),
    Study("load_balance", LOAD, "Load balance", load.load_balance, figures.load_balance, load.say_load_balance,
          wide=False),
    Study("objective", LOAD, "Routing objective", load.objective, figures.objective,
          load.say_objective, wide=False),
    Study("load_at_scale", LOAD, "Load at scale", load.load_at_scale, figures.load_at_scale, load.say_load_at_scale,
          rows=load.rows_load_at_scale),
    Study("leakage_bounds", LEAKAGE, "Bounds on leakage", leakage.leakage_bounds,
          figures.leakage_bounds, leakage.say_leakage_bounds),
    Study("leakage_probe", LEAKAGE, "Leakage in training", leakage.leakage_probe,
          figures.leakage_probe, leakage.say_leakage_probe),
]  # fmt: skip

"""Routing rules: pure functions of a score matrix."""

from .expert_choice import ExpertChoice
from .expert_threshold import ExpertThreshold
from .observation import Observation, Routing, all_finite, scores_not_finite, summed_over_ranks
from .pools import CutoffState, Pool, begin_run, bounds, cutoff, dial
from .rule import RULES, Rule, chooses_on_rank, most_pairs, rule_from_dict, rule_name, rule_to_dict
from .selection import Cut, kth_largest, take
from .token_choice import BiasState, TokenChoice

__all__ = [
    "RULES",
    "BiasState",
    "Cut",
    "CutoffState",
    "ExpertChoice",
    "ExpertThreshold",
    "Observation",
    "Pool",
    "Routing",
    "Rule",
    "TokenChoice",
    "all_finite",
    "begin_run",
    "bounds",
    "chooses_on_rank",
    "cutoff",
    "dial",
    "kth_largest",
    "most_pairs",
    "rule_from_dict",
    "rule_name",
    "rule_to_dict",
    "scores_not_finite",
    "summed_over_ranks",
    "take",
]

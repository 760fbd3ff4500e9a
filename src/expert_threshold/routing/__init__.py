"""Routing rules: pure functions of a score matrix."""

from ..option import option
from .by_cutoff import PAPER_STEPS, ByCutoff, scaled_decay
from .expert_choice import ExpertChoice
from .expert_threshold import ExpertThreshold
from .null_slots import NullSlots, NullSlotState
from .observation import Observation, Routing, all_finite, observe, scores_not_finite, summed_over_ranks
from .options import check_experts
from .pools import CutoffState, Pool, bounds, cutoff, dial
from .quantile_balancing import PriceState, QuantileBalancing
from .registry import DENSE, RULES, option_names, register_rule, rule_from_dict, rule_name, rule_to_dict
from .relu import ReLU, ReLUState
from .rule import Rule, Scope, Window
from .selection import Cut, kth_largest, take
from .seq_top_k import SeqTopK
from .token_choice import BiasState, TokenChoice
from .top_p import TopP, TopPState

__all__ = [
    "DENSE",
    "PAPER_STEPS",
    "RULES",
    "BiasState",
    "ByCutoff",
    "Cut",
    "CutoffState",
    "ExpertChoice",
    "ExpertThreshold",
    "NullSlotState",
    "NullSlots",
    "Observation",
    "Pool",
    "PriceState",
    "QuantileBalancing",
    "ReLU",
    "ReLUState",
    "Routing",
    "Rule",
    "Scope",
    "SeqTopK",
    "TokenChoice",
    "TopP",
    "TopPState",
    "Window",
    "all_finite",
    "bounds",
    "check_experts",
    "cutoff",
    "dial",
    "kth_largest",
    "observe",
    "option",
    "option_names",
    "register_rule",
    "rule_from_dict",
    "rule_name",
    "rule_to_dict",
    "scaled_decay",
    "scores_not_finite",
    "summed_over_ranks",
    "take",
]

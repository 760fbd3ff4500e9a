"""Routing rules: pure functions of a score matrix."""

from ..option import Bounds, Count, Decay, NotNegative, Positive, Share, Whole, option
from .by_cutoff import PAPER_STEPS, ByCutoff, scaled_decay
from .expert_choice import ExpertChoice
from .expert_threshold import ExpertThreshold
from .null_slots import NullSlots, NullSlotState
from .observation import Observation, Routing, all_finite, observe, scores_not_finite, summed_over_ranks
from .pools import CutoffState, Pool, bounds, cutoff, dial
from .quantile_balancing import PriceState, QuantileBalancing
from .registry import (
    DENSE,
    RULES,
    option_names,
    register_rule,
    require_options,
    rule_from_dict,
    rule_name,
    rule_to_dict,
)
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
    "Bounds",
    "ByCutoff",
    "Count",
    "Cut",
    "CutoffState",
    "Decay",
    "ExpertChoice",
    "ExpertThreshold",
    "NotNegative",
    "NullSlotState",
    "NullSlots",
    "Observation",
    "Pool",
    "Positive",
    "PriceState",
    "QuantileBalancing",
    "ReLU",
    "ReLUState",
    "Routing",
    "Rule",
    "Scope",
    "SeqTopK",
    "Share",
    "TokenChoice",
    "TopP",
    "TopPState",
    "Whole",
    "Window",
    "all_finite",
    "bounds",
    "cutoff",
    "dial",
    "kth_largest",
    "observe",
    "option",
    "option_names",
    "register_rule",
    "require_options",
    "rule_from_dict",
    "rule_name",
    "rule_to_dict",
    "scaled_decay",
    "scores_not_finite",
    "summed_over_ranks",
    "take",
]

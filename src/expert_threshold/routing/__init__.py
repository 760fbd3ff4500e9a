"""Routing rules: pure functions of a score matrix.

Dimension names used in docstrings:

    batch, time    sequences in a micro-batch, and tokens in a sequence; tokens = batch · time
    experts        routed experts; E in formulas, with index i
    num_scores     width of the scores: experts first, then null slots or null scores, if the rule has any
    pools          groups of tokens that compete with each other: (pools, tokens per pool, experts)
    k, ks          tokens per expert in a pool, or experts per token; cuts are (ks, pools, experts)
    levels         quantiles in a sketch of an expert's scores
"""

from ..option import Bounds, Count, Decay, NonNegative, NonNegativeInt, Positive, Share, option
from .cutoffs import PAPER_STEPS, ByCutoff, CutoffState, Pool, bounds, cutoff, dial, scaled_decay
from .expert_choice import ExpertChoice
from .expert_threshold import ExpertThreshold
from .null_slots import NullSlots, NullSlotState
from .observation import Observation, Routing, all_finite, observe, scores_not_finite, summed_over_ranks
from .quantile_balancing import PriceState, QuantileBalancing
from .registry import DENSE, RULES, option_names, register_rule, require_option, rule_from_dict, rule_name, rule_to_dict
from .relu import ReLU, ReLUState
from .rule import Rule, Scope, Window
from .selection import Cut, kth_largest, take
from .seq_top_k import SeqTopK
from .token_choice import BiasState, TokenChoice
from .top_p import TopP, TopPState

__all__ = [
    "DENSE", "PAPER_STEPS", "RULES", "BiasState", "Bounds", "ByCutoff", "Count", "Cut", "CutoffState", "Decay",
    "ExpertChoice", "ExpertThreshold", "NonNegative", "NonNegativeInt", "NullSlotState", "NullSlots", "Observation",
    "Pool", "Positive", "PriceState", "QuantileBalancing", "ReLU", "ReLUState", "Routing", "Rule", "Scope",
    "SeqTopK", "Share", "TokenChoice", "TopP", "TopPState", "Window", "all_finite", "bounds", "cutoff", "dial",
    "kth_largest", "observe", "option", "option_names", "register_rule", "require_option", "rule_from_dict",
    "rule_name", "rule_to_dict", "scaled_decay", "scores_not_finite", "summed_over_ranks", "take",
]  # fmt: skip

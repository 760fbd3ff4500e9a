"""Measures of routing: pure functions of assignments, loads and scores.

An assignment is a boolean tensor (layers, tokens, experts) of routed experts; the shared expert is not part of it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..routing import kth_largest, take


def consistency(a: Tensor, b: Tensor) -> dict[str, float]:
    """Return six measures of how alike two assignments of the same tokens are (paper, Routing Consistency Sweep).

    weighted_jaccard: |E_A ∩ E_B| / |E_A ∪ E_B| over the edges E of all layers and tokens; 1 if there are no edges.
    weighted_dice: 2 |E_A ∩ E_B| / (|E_A| + |E_B|); 1 if there are no edges.
    The other measures compare the sets A_t and B_t of a token's experts, averaged over layers and tokens:
    jaccard, dice: the same ratios for A_t and B_t; 1 if both sets are empty.
    joint_jsd: the Jensen-Shannon divergence of uniform choices from A_t and from B_t, in bits: 1 if the sets
    are disjoint or exactly one is empty, and 0 if both are empty.
    total_variation: ½ Σ_i |P_t(i) − Q_t(i)| for the same choices; 0 if both sets are empty, 1 if one is.
    """
    assert a.shape == b.shape, f"assignments of the same tokens, not {a.shape} and {b.shape}"
    assert a.dtype == b.dtype == torch.bool
    assert a.numel(), "no token"
    common, first, second = (z.sum(-1).double() for z in (a & b, a, b))
    edges, of_a, of_b = common.sum(), first.sum(), second.sum()
    p, q = 1 / first.clamp(min=1), 1 / second.clamp(min=1)  # the mass of one expert
    apart = (1 - common * p) + (1 - common * q)  # experts of one set only: log2(p / m) = 1
    shared = common * (p * (2 * p / (p + q)).log2() + q * (2 * q / (p + q)).log2())
    return {
        "weighted_jaccard": _ratio(edges, of_a + of_b - edges).item(),
        "weighted_dice": _ratio(2 * edges, of_a + of_b).item(),
        "jaccard": _ratio(common, first + second - common).mean().item(),
        "dice": _ratio(2 * common, first + second).mean().item(),
        "joint_jsd": torch.where(first + second > 0, (apart + shared) / 2, 0).mean().item(),
        "total_variation": (1 - _ratio(common, torch.maximum(first, second))).mean().item(),
    }


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 1)


def expert_token_ratio(assignment: Tensor) -> Tensor:
    """Return each expert's share of the tokens, float64 (layers, experts) (paper, Expert Specialization)."""
    return assignment.sum(-2).double() / assignment.shape[-2]


def mutual_information(weights: Tensor) -> Tensor:
    """Return I(row; column) in bits of the joint distribution proportional to nonnegative weights (…, rows, columns).

    For expert token ratios (domains, experts), this is the information that the expert of a routed token gives about
    the token's domain if all domains have the same number of tokens. It is 0 if experts ignore domains or nothing is
    routed, and at most log2(min(domains, experts)).
    """
    weights = weights.double()
    largest = weights.amax((-2, -1), keepdim=True)
    weights = torch.where(largest > 0, weights / largest, 0)  # scaled first, because a sum of subnormals loses digits
    joint = weights / weights.sum((-2, -1), keepdim=True).clamp(min=1)
    marginals = _entropy(joint.sum(-1)) + _entropy(joint.sum(-2))
    return (marginals - _entropy(joint.flatten(-2))).clamp(min=0)  # rounding may go below 0


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1) / math.log(2)


def load_spread(load: Tensor) -> Tensor:
    """Return largest load / mean load for loads (…, experts): 1 for perfect balance, NaN if nothing is routed."""
    return load.max(-1).values / load.double().mean(-1)


def routing_objective(scores: Tensor, assignment: Tensor) -> Tensor:
    """Return Σ z·r over tokens and experts (…, tokens, experts), float64, the routing objective (paper, Eq. 3 to 5)."""
    return torch.where(assignment, scores.double(), 0).sum((-2, -1))


def best_expert_choice(scores: Tensor, k: int) -> Tensor:
    """Return the assignment that maximises Σ z·r in each pool, for float32 scores (pools, tokens, experts).

    Every expert gets k tokens of a pool (paper, Eq. 4; Eq. 5 if there is one pool). Fanouts are free, so no constraint
    links two experts, and the optimum is the k best tokens of each expert.
    """
    (cut,) = kth_largest(scores, [k])
    return take(scores, cut)


def best_token_choice(scores: Tensor, experts_per_token: int, load: int) -> Tensor:
    """Return the assignment that maximises Σ z·r for scores (tokens, experts) with bounded fanouts and equal loads.

    Every expert gets `load` tokens, and every token at most `experts_per_token` experts, or exactly that many at the
    maximum load, tokens · experts_per_token / experts (paper, Eq. 3). Solves a linear program with scipy; its vertices
    are integral since its constraints form a bipartite graph. Thousands of tokens take seconds.
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye, kron

    tokens, experts = scores.shape
    assert 0 <= load * experts <= tokens * experts_per_token, "tokens can fill the experts"
    solution = linprog(
        -scores.double().numpy().ravel(),
        A_ub=kron(eye(tokens), np.ones((1, experts))).tocsr(),  # Σ_i z[t, i]
        b_ub=np.full(tokens, experts_per_token),
        A_eq=kron(np.ones((1, tokens)), eye(experts)).tocsr(),  # Σ_t z[t, i]
        b_eq=np.full(experts, load),
        bounds=(0, 1),
        method="highs-ds",
    )
    assert solution.success, solution.message
    return torch.from_numpy(solution.x > 0.5).view(tokens, experts)

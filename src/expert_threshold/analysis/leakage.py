"""Bounds on what an expert's choice of tokens reveals about the future (paper, Future Information Leakage).

One expert takes k = ⌊N/E⌋ of a pool of N tokens, those whose score exceeds a cutoff that depends on the whole pool.
Leakage is the least advice, in bits, with which a causal decoder could make the same choice. A layer has granularity ·
expansion experts (the paper's G and E); each token goes to G of them on average.

The paper calls log2 C(N, N/E) superlinear in N, O(N log N). For a fixed E it is linear: by Stirling's formula

    log2 C(N, pN) = N·h(p) − ½ log2(2π·N·p·(1 − p)) + O(1/N),    h(p) = −p log2 p − (1 − p) log2(1 − p),

so that a token's share of it rises towards the constant h(1/E) per expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from typing import NamedTuple


class MoELayers(NamedTuple):
    """A model with `layers` MoE layers of granularity · expansion experts; each token goes to `granularity` of them."""

    expansion: int
    granularity: int
    layers: int

    @property
    def experts(self) -> int:
        """The number of experts in all layers."""
        return self.layers * self.granularity * self.expansion


def leakage(model: MoELayers, tokens: int) -> float:
    """Return bits per token with cutoffs of infinite precision, GE/N · log2 C(N, ⌊N/E⌋) per layer (paper, Eq. 7)."""
    return model.experts * log2_choices(tokens, tokens // model.expansion) / tokens


def limit(model: MoELayers) -> float:
    """Return G·E·h(1/E) bits per token and layer, which `leakage` approaches from below as the pool grows."""
    return model.experts * binary_entropy(1 / model.expansion)


def bound(model: MoELayers) -> float:
    """Return G·log2(E − 1) bits per token and layer, a lower bound of `leakage` if E divides N (paper, Eq. 7)."""
    return model.layers * model.granularity * math.log2(model.expansion - 1)


def finite_leakage(model: MoELayers, tokens: int, bits: int) -> float:
    """Return the most bits per token that cutoffs of `bits` bits can leak (paper, Finite-precision cutoff).

    A cutoff determines the choice, and the choice itself is advice too, so this never exceeds `leakage`.
    """
    return min(model.experts * bits / tokens, leakage(model, tokens))


def binary_entropy(p: float) -> float:
    """Return h(p) in bits."""
    return 0.0 if p in (0, 1) else -(p * math.log2(p) + (1 - p) * math.log1p(-p) / math.log(2))


def log2_choices(n: int, k: int) -> float:
    """Return log2 C(n, k) for 0 ≤ k ≤ n with a relative error of about 1e-14 at any size.

    Stirling's main terms are combined by hand, because differences of lgamma cancel.
    """
    if k in (0, n):
        return 0.0
    rest = n - k
    main = k * math.log(n / k) - rest * math.log1p(-k / n)  # n · h(k / n)
    nats = main + 0.5 * math.log(n / k / rest / (2 * math.pi))
    return (nats + _stirling_rest(n) - _stirling_rest(k) - _stirling_rest(rest)) / math.log(2)


def _stirling_rest(n: int) -> float:
    """Return ln n! − ln(√(2πn)·(n/e)^n)."""
    if n < 16:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / n**2) / n**2) / n**2) / n


Cutoffs = tuple[Fraction, Fraction]
"""A half-open interval of cutoffs, [first, second)."""


def encode(choice: Sequence[bool]) -> Cutoffs:
    """Return the cutoffs from which a causal decoder reads this choice, 2⁻ᴺ of [0, 1) (paper, Encoding Strategy).

    The lower end belongs to the interval because a score must exceed the cutoff. With the paper's r ≥ c, a score equal
    to the cutoff would be taken although the choice says no.
    """
    lower = Fraction(int("0" + "".join("01"[not taken] for taken in choice), 2), 2 ** len(choice))
    return lower, lower + Fraction(1, 2 ** len(choice))


def decode(cutoff: Fraction, tokens: int) -> tuple[list[bool], list[Fraction], Cutoffs]:
    """Decode the choice in a cutoff from [0, 1) token by token (paper, Algorithm 2), in exact arithmetic.

    Returns the choice, the scores, and the cutoffs that remain after the last token. Each score is the middle of the
    cutoffs that remain before its token.
    """
    lower, upper = Fraction(0), Fraction(1)
    choice, scores = [], []
    for _ in range(tokens):
        score = (lower + upper) / 2
        taken = score > cutoff
        lower, upper = (lower, score) if taken else (score, upper)
        choice.append(taken)
        scores.append(score)
    return choice, scores, (lower, upper)


def least_advice(tokens: int, k: int, levels: int) -> int:
    """Return the fewest labels that let a causal decoder choose the k largest of `tokens` distinct scores.

    Scores take `levels` values. log2 of the result is the leakage (paper, Definition of Future Information Leakage).
    The search over all sequences of scores is exhaustive. Two sequences need different labels if they agree up to a
    token that only one of them takes: groups that differ in the choice for the latest token add up, groups that differ
    in its score can share labels.
    """
    sequences = [
        (scores, [score in sorted(scores)[tokens - k :] for score in scores])
        for scores in permutations(range(levels), tokens)
    ]
    return _labels(sequences, 0)


def _labels(sequences: Sequence[tuple[tuple[int, ...], list[bool]]], token: int) -> int:
    """Return the labels needed for sequences that agree before `token`."""
    if len(sequences) == 1:
        return 1
    groups: dict[int, dict[bool, list[tuple[tuple[int, ...], list[bool]]]]] = {}
    for scores, choice in sequences:
        groups.setdefault(scores[token], {}).setdefault(choice[token], []).append((scores, choice))
    return max(sum(_labels(group, token + 1) for group in taken.values()) for taken in groups.values())

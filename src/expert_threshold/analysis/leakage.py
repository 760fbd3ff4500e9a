"""How much of the future an expert's choice of tokens can tell (paper, appendix Future Information Leakage).

One expert takes k = ⌊N/E⌋ of a pool of N tokens: those whose score exceeds the cutoff, which only the whole pool
decides. Leakage is the least advice, in bits, with which a causal decoder could make the same choice. A layer has
granularity · expansion experts (the paper's G and E), each token goes to G of them on average.

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
    """What leaks: `layers` with granularity · expansion experts each, of which a token gets `granularity`."""

    expansion: int
    granularity: int
    layers: int

    @property
    def experts(self) -> int:
        """Of all layers together."""
        return self.layers * self.granularity * self.expansion


def leakage(model: MoELayers, tokens: int) -> float:
    """Bits per token with cutoffs of infinite precision, GE/N · log2 C(N, ⌊N/E⌋) per layer (paper, Eq. 7)."""
    return model.experts * log2_choices(tokens, tokens // model.expansion) / tokens


def limit(model: MoELayers) -> float:
    """Bits per token as the pool grows without end, G·E·h(1/E) per layer: `leakage` stays below it for any N."""
    return model.experts * binary_entropy(1 / model.expansion)


def bound(model: MoELayers) -> float:
    """Bits per token that `leakage` exceeds where E divides N, G·log2(E − 1) per layer (paper, Eq. 7)."""
    return model.layers * model.granularity * math.log2(model.expansion - 1)


def finite_leakage(model: MoELayers, tokens: int, bits: int) -> float:
    """Bits per token at most with cutoffs of so many bits (paper, Finite-precision cutoff): a cutoff is advice enough.

    The advice may as well be the choice itself, so this is never more than `leakage`.
    """
    return min(model.experts * bits / tokens, leakage(model, tokens))


def binary_entropy(p: float) -> float:
    """h(p) in bits."""
    return 0.0 if p in (0, 1) else -(p * math.log2(p) + (1 - p) * math.log1p(-p) / math.log(2))


def log2_choices(n: int, k: int) -> float:
    """log2 C(n, k), 0 ≤ k ≤ n, to about 1e-14 of itself for any size: Stirling's main terms are put together by hand,
    where differences of lgamma would cancel."""
    if k in (0, n):
        return 0.0
    rest = n - k
    main = k * math.log(n / k) - rest * math.log1p(-k / n)  # n · h(k / n)
    nats = main + 0.5 * math.log(n / k / rest / (2 * math.pi))
    return (nats + _stirling_rest(n) - _stirling_rest(k) - _stirling_rest(rest)) / math.log(2)


def _stirling_rest(n: int) -> float:
    """ln n! − ln(√(2πn)·(n/e)^n)."""
    if n < 16:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / n**2) / n**2) / n**2) / n


Cutoffs = tuple[Fraction, Fraction]
"""All cutoffs from the first up to, but without, the second."""


def encode(choice: Sequence[bool]) -> Cutoffs:
    """The cutoffs that tell a causal decoder this choice, 2⁻ᴺ of [0, 1) (paper, Encoding Strategy).

    Its lower end is one of them because a score must exceed the cutoff: with the paper's r ≥ c there, the query that
    ends at the cutoff would be taken, though the choice says no.
    """
    lower = Fraction(int("0" + "".join("01"[not taken] for taken in choice), 2), 2 ** len(choice))
    return lower, lower + Fraction(1, 2 ** len(choice))


def decode(cutoff: Fraction, tokens: int) -> tuple[list[bool], list[Fraction], Cutoffs]:
    """The choice that a cutoff in [0, 1) tells, token by token (paper, Algorithm 2), in exact arithmetic.

    Returns the choice; the scores, each the middle of the cutoffs that the tokens before it have left; and what the
    last one has left.
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
    """The least number of labels with which a causal decoder can choose the k largest of any `tokens` different scores
    out of so many levels: log2 of it is the leakage (paper, Definition of Future Information Leakage).

    By exhaustive search over all sequences of scores. Two of them need different labels if they agree up to a token
    which only one of them takes: groups that differ in what the latest token gets add up, groups that differ in its
    score can share labels.
    """
    sequences = [
        (scores, [score in sorted(scores)[tokens - k :] for score in scores])
        for scores in permutations(range(levels), tokens)
    ]
    return _labels(sequences, 0)


def _labels(sequences: Sequence[tuple[tuple[int, ...], list[bool]]], token: int) -> int:
    """Labels for sequences that are alike in everything before `token`."""
    if len(sequences) == 1:
        return 1
    groups: dict[int, dict[bool, list[tuple[tuple[int, ...], list[bool]]]]] = {}
    for scores, choice in sequences:
        groups.setdefault(scores[token], {}).setdefault(choice[token], []).append((scores, choice))
    return max(sum(_labels(group, token + 1) for group in taken.values()) for taken in groups.values())

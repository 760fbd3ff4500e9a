"""The exact k-th largest score against sorting, with ties, and every rule's routing as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from expert_threshold.routing import RULES, Routing, kth_largest
from expert_threshold.routing.selection import _kth_largest_by_sorting
from expert_threshold.testing import make_scores, trained

from .setting import Case, Row, Setting

UNLIKE = 1e-3
"""The share of pairs in which the CPU's routing may differ: where rules sum or exponentiate scores, these round
differently, and a rounding may tip a comparison."""


def cases(setting: Setting) -> Iterator[Case]:
    """Yield selection, then routing."""
    yield Case("selection equals sorting", lambda: selection(setting), 10)
    yield Case("routing as on the CPU", lambda: routing(setting), 10)


def selection(setting: Setting) -> Row:
    """Compare scores and indices, for scores with no ties, with many, and all equal."""
    checked = 0
    for tokens, experts in setting.pick(((65_536, 16), (524_288, 16), (20_001, 257)), ((200, 3),)):
        scores = torch.randn(2, tokens, experts, generator=torch.Generator().manual_seed(0)).to(setting.device)
        for told, given in (
            ("distinct", scores),
            ("tied", scores.round(decimals=1)),
            ("bfloat16", scores.bfloat16().float()),
            ("equal", torch.zeros_like(scores)),
            ("columns", scores.mT.contiguous().mT),
        ):
            ks = [tokens // experts, 0, 1, tokens // 2, tokens]
            expected = zip(*_kth_largest_by_sorting(given, ks), strict=True)
            for k, cut, (score, last) in zip(ks, kth_largest(given, ks), expected, strict=True):
                where = f"{tokens} × {experts}, {told}, k={k}"
                assert torch.equal(cut.score, score), f"{where}: another score"
                assert torch.equal(cut.last, last), f"{where}: another token"
                checked += 2
    return {"checked": checked}


def routing(setting: Setting) -> Row:
    """Route the same scores on the device and on the CPU, in training and in inference, under every rule."""
    checked, most = 0, 0.0
    for name, cls in RULES.items():
        for told, rule in list(cls.cases().items())[:: setting.pick(1, 6)]:
            state = trained(rule)
            there = type(state)(*(tensor.to(setting.device) for tensor in state))
            for training in (True, False):
                scores = make_scores(rule)
                here = rule.route(scores, state, training=training)
                moved = rule.route(scores.to(setting.device), there, training=training)
                unlike = differences(here, moved)
                assert unlike <= UNLIKE, f"{name}, {told}, training={training}: {unlike:.1%} of pairs differ"
                torch.testing.assert_close(moved.gates.cpu(), here.gates, rtol=1e-4, atol=1e-5)
                checked, most = checked + 1, max(most, unlike)
    return {"checked": checked, "most_different": most}


def differences(here: Routing, there: Routing) -> float:
    return float((here.assignment != there.assignment.cpu()).float().mean())

"""Checks that a model's routing depends on each token alone."""

from __future__ import annotations

import torch

from ..model import GPT


@torch.no_grad()
def require_independent(model: GPT) -> None:
    """Raise ValueError if a token's experts depend on the scores of tokens that share its batch.

    The first half of a sequence is routed twice, beside different scores. Rules that use cutoffs or a token's own top
    scores give it the same experts both times; rules with pools do not.
    """
    for index, moe in model.moe_layers():
        router = moe.router
        rule = router.rule
        generator = torch.Generator().manual_seed(0)
        shape = (2, max(64, 4 * rule.num_experts), rule.num_scores)  # enough for a pool's k to be at least 1
        thresholds = router.thresholds()
        scores = torch.randn(shape, generator=generator)
        if thresholds is not None:
            scores[..., : rule.num_experts] += thresholds.cpu()
        scores = scores.to(router.weight.device)
        half = shape[1] // 2
        others = scores + 2
        others[0, :half] = scores[0, :half]
        routings = [rule.route(each, router.state, training=False) for each in (scores, others)]
        a, b = ((routing.assignment[0, :half], routing.gates[0, :half]) for routing in routings)
        if not (torch.equal(a[0], b[0]) and torch.equal(a[1] * a[0], b[1] * b[0])):
            raise ValueError(
                f"rule {type(rule).__name__} of layer {index} routes tokens by a pool: a text would depend on who "
                "shares its batch; serve a run whose rule looks at no other text in inference, such as expert_threshold"
            )

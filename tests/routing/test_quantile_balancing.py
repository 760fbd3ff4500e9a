"""Quantile balancing against its definition, and what it has in common with expert threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_threshold.routing import PriceState, QuantileBalancing, Rule
from expert_threshold.routing.quantile_balancing import kth_of_histogram, price
from expert_threshold.testing import make_scores


def seen(rule: Rule, scores: Tensor, state: Any) -> Any:
    return rule.route(scores, state, training=True).observation


def by_definition(rule: QuantileBalancing, scores: Tensor, beta: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the assignment and the next prices, before their mean is subtracted, computed by loops."""
    values = (scores if rule.over == "scores" else scores.sigmoid()).reshape(-1, rule.num_experts).numpy()
    k, (tokens, experts) = rule.experts_per_token, values.shape
    assignment, margins = np.zeros((tokens, experts), bool), np.zeros_like(values)
    for t in range(tokens):
        net = values[t] - beta.numpy()
        order = sorted(range(experts), key=lambda i: (-net[i], i))
        assignment[t, order[:k]] = True
        margins[t] = values[t] - net[order[k]]
    prices = [sorted(margins[:, i], reverse=True)[tokens * k // experts] for i in range(experts)]
    return assignment, np.array(prices, np.float32)


@pytest.mark.parametrize("experts_per_token", [1, 2, 5])
@pytest.mark.parametrize("over", ["scores", "gates"])
@pytest.mark.parametrize("grain", [1, 1 / 8, 2**-14], ids=["mostly ties", "some ties", "few ties"])
def test_selection_and_prices_are_those_of_the_definition(experts_per_token: int, over: Any, grain: float) -> None:
    rule = QuantileBalancing(6, experts_per_token, over=over)
    state = rule.init()
    for step in range(4):
        scores = make_scores(rule, step, batch=3, time=17, grain=grain)  # experts do not divide the tokens
        assignment, prices = by_definition(rule, scores, price(state))
        routing = rule.route(scores, state, training=True)
        assert np.array_equal(routing.assignment.flatten(0, 1).numpy(), assignment)
        assert np.array_equal(routing.observation.price_sum.numpy(), prices)
        state = rule.update(state, routing.observation)
        np.testing.assert_allclose(price(state).numpy(), prices - prices.mean(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"over": "gates"}, {"decay": 0.5}, {"estimator": "histogram"}], ids=str)
def test_updates_on_one_batch_bring_the_largest_load_to_the_mean(options: dict[str, Any]) -> None:
    rule = QuantileBalancing(6, 1 if "decay" in options else 2, **options)
    scores, state, spread = make_scores(rule, grain=2**-14, batch=8, time=120), rule.init(), []
    for _ in range(61):
        observation = seen(rule, scores, state)
        spread.append(float(observation.load_spread))
        state = rule.update(state, observation)
    assert spread[0] > 1.5
    assert spread[-1] < 1.05


def test_the_running_mean_is_debiased_and_several_micro_batches_are_averaged() -> None:
    rule, last = QuantileBalancing(6, 2, decay=0.75), QuantileBalancing(6, 2)
    first, second = (seen(last, make_scores(last, seed), last.init()) for seed in (0, 1))
    a, b = (price(last.update(last.init(), each)) for each in (first, second))
    torch.testing.assert_close(price(last.update(last.init(), first + second)), (a + b) / 2)
    state = rule.update(rule.init(), first)
    torch.testing.assert_close(price(state), a)
    torch.testing.assert_close(price(rule.update(state, second)), (0.75 * a + b) / 1.75)


def test_where_every_token_takes_all_experts_there_are_no_prices() -> None:
    rule = QuantileBalancing(6, 6)
    routing = rule.route(make_scores(rule), rule.init(), training=True)
    assert routing.assignment.all()
    assert not price(rule.update(rule.init(), routing.observation)).any()


@pytest.mark.parametrize("k", [1, 7, 100, 192])
def test_a_histogram_is_off_by_a_bin_at_most_and_so_nears_the_quantile(k: int) -> None:
    values = make_scores(QuantileBalancing(6), grain=2**-14).flatten(0, 1)
    exact = values.sort(0, descending=True).values[k - 1]
    width = values.amax(0) - values.amin(0)
    for bins in (1, 10, 100, 1000, 100_000):
        error = (kth_of_histogram(values, k, bins, None) - exact).abs()
        assert (error <= width / bins + 1e-5).all()


def test_a_histogram_of_equal_values_is_that_value() -> None:
    assert torch.equal(kth_of_histogram(torch.full((5, 3), 1.5), 2, 10, None), torch.full((3,), 1.5))


def test_inference_over_scores_is_a_biased_top_k_and_over_gates_none() -> None:
    state = PriceState(torch.arange(6.0), torch.tensor(2.0))
    bias, k = QuantileBalancing(6, 2).biased_top_k(state) or (None, 0)
    assert (bias.tolist(), k) == ([0, -0.5, -1, -1.5, -2, -2.5], 2)
    over_gates = QuantileBalancing(6, 2, over="gates")
    assert over_gates.biased_top_k(state) is None
    assert "bias" not in over_gates.describe(state)  # which readers add to scores

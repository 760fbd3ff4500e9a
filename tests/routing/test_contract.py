"""The contract of every routing rule: one table, rules × properties."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from cases import covering
from expert_threshold.routing import ExpertChoice, ExpertThreshold, NullSlots, QuantileBalancing, ReLU, SeqTopK, TopP
from expert_threshold.routing.cutoffs import ByCutoff, bounds, cutoff
from expert_threshold.routing.registry import RULES, rule_to_dict
from expert_threshold.routing.rule import Rule
from expert_threshold.routing.token_choice import TokenChoice
from expert_threshold.testing import BATCH, PROPERTIES, TIME, check_ranks, make_scores, trained

EXPERTS = 6

CASES = {f"{name.replace('_', ' ')}, {case}": rule for name, cls in RULES.items() for case, rule in cls.cases().items()}
SCORES_OF_EXPERTS = {name: rule for name, rule in CASES.items() if rule.num_scores == EXPERTS}
BY_CUTOFF = {name: rule for name, rule in SCORES_OF_EXPERTS.items() if isinstance(rule, ByCutoff)}


def each(cases: dict[str, Rule]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rule", cases.values(), ids=cases.keys())


both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


train = functools.cache(trained)


def pool_of(rule: Rule, batch: int = BATCH, time: int = TIME) -> int:
    """Return the number of tokens in a pool on one rank."""
    return {"sequence": time, "batch": batch * time, "global": batch * time}.get(rule.pool, rule.pool)


def modes(rule: Rule) -> tuple[tuple[type[Rule], str, Any], ...]:
    """Return the options that select a code path, which are all options except numbers."""
    options = rule_to_dict(rule).items()
    kind = type(rule)
    return tuple((kind, name, option) for name, option in options if isinstance(option, (str, bool)) or option is None)


# Compiling and ranks take seconds, and rules that differ in numbers alone take the same path. Of the modes of a rule
# `make test` takes as many as name every option once, and `make soak` all.
ONE_OF_EACH_MODE = {modes(rule): rule for rule in reversed(CASES.values())}
FEW = [ONE_OF_EACH_MODE[mode] for mode in covering(ONE_OF_EACH_MODE, size=1)]
EVERY_PROPERTY = [
    pytest.param(check, rule, id=f"{case}-{name}", marks=[pytest.mark.soak] if slow and rule not in FEW else [])
    for case, rule in CASES.items()
    for name, check in PROPERTIES.items()
    if not (slow := name == "compiled_equals_eager") or rule in ONE_OF_EACH_MODE.values()
]


@pytest.mark.parametrize(("check", "rule"), EVERY_PROPERTY)
def test_every_rule_has_every_property(check: Callable[[Rule], None], rule: Rule) -> None:
    check(rule)


@pytest.mark.parametrize("rules", [FEW, pytest.param([*CASES.values()], marks=pytest.mark.soak)], ids=["few", "all"])
def test_two_ranks_route_and_move_as_one(rules: list[Rule]) -> None:
    check_ranks(rules)


# Shape and dtype


@each(CASES)
def test_observations_of_training_and_of_inference_can_be_added(rule: Rule) -> None:
    training, inference = (
        {name: (value.shape, value.dtype) for name, value in routing.observation.tensors().items()}
        for routing in (rule.route(make_scores(rule), train(rule), training=mode) for mode in (True, False))
    )
    assert training == inference
    assert {dtype for _, dtype in training.values()} == {torch.int64, torch.float32}


@each(CASES)
@both_modes
def test_gates_are_no_views_of_which_fsdp2_would_warn(rule: Rule, training: bool) -> None:
    scores = make_scores(rule).requires_grad_()
    assert not rule.route(scores, train(rule), training=training).gates._is_view()


# Loads


@each(BY_CUTOFF)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_in_training_every_pool_keeps_the_promised_load(rule: Rule, steps: int, shift: float) -> None:
    state = train(rule, steps=steps)
    assignment = rule.route(make_scores(rule, grain=1) + shift, state, training=True).assignment
    tokens = pool_of(rule)
    low, high = rule.load_bounds(tokens) or (0, tokens)
    if state.step < rule.warmup:
        low = high = bounds(tokens, rule.experts_per_token, EXPERTS, 0)[0]
    load = assignment.reshape(-1, pool_of(rule), EXPERTS).sum(1)
    assert low <= load.min() <= load.max() <= high


@each(BY_CUTOFF)
def test_usage_in_inference_comes_to_the_target(rule: Rule) -> None:
    if rule.experts_per_token == EXPERTS:
        pytest.skip("no cutoff lies below the lowest of all scores")
    changes: dict[str, Any] = {"decay": 0.95, "pool": rule.pool if isinstance(rule.pool, str) else 8 * rule.pool}
    rule = replace(rule, **changes)  # type: ignore[type-var]
    state = rule.init()
    for step in range(80):
        scores = make_scores(rule, 100 + step, time=384, grain=1e-6)
        state = rule.update(state, rule.route(scores, state, training=True).observation)
    scores = make_scores(rule, 1, batch=64, time=384, grain=1e-6)
    usage = rule.route(scores, state, training=False).observation.usage
    torch.testing.assert_close(usage, torch.full((EXPERTS,), rule.experts_per_token / EXPERTS), rtol=0.06, atol=0)


def test_max_pairs_is_exact_for_token_choice_and_none_without_a_bound() -> None:
    assert TokenChoice(8, 3).max_pairs(10, training=True) == 30
    assert TokenChoice(8, 3).max_pairs(10, training=False) == 30
    assert ExpertThreshold(8).max_pairs(10, training=False) is None
    assert ExpertThreshold(8, capacity_slack=None).max_pairs(10, training=True) is None
    assert ExpertThreshold(8).max_pairs(10, training=True, ranks=2) is None  # one rank's may be all of the pool's
    assert ExpertThreshold(8, pool="batch").max_pairs(10, training=True, ranks=2) == 15
    assert ExpertThreshold(4, 3, capacity_slack=0.5).max_pairs(10, training=True) == 40  # no more than there are


# Gradients


@each(CASES)
@both_modes
def test_only_what_balances_by_a_loss_has_one_and_in_training_alone(rule: Rule, training: bool) -> None:
    scores = make_scores(rule).requires_grad_()
    loss = rule.route(scores, train(rule), training=training).loss
    if training and (isinstance(rule, ReLU) or getattr(rule, "balance", None) in ("aux", "global_aux")):
        assert loss.shape == ()
        (gradient,) = torch.autograd.grad(loss, scores)
        assert (gradient > 0).any()
        assert getattr(rule, "gate", "").startswith("softmax") or (gradient >= 0).all()  # shares have both signs
    else:
        assert loss is None


@each(CASES)
@both_modes
def test_an_observation_says_what_happened(rule: Rule, training: bool) -> None:
    scores, state = make_scores(rule), train(rule)
    of_experts = scores[..., :EXPERTS]
    routing = rule.route(scores, state, training=training)
    seen, z, gates = routing.observation, routing.assignment.flatten(0, 1), routing.gates
    torch.testing.assert_close(seen.usage, z.float().mean(0))
    torch.testing.assert_close(seen.score_std, of_experts.flatten(0, 1).std(0, correction=0))
    torch.testing.assert_close(seen.gate_std, gates.flatten(0, 1).std(0, correction=0))
    torch.testing.assert_close(seen.fanout_mean, z.sum(1).float().mean())
    torch.testing.assert_close(seen.fanout_std, z.sum(1).float().std(correction=0))
    torch.testing.assert_close(seen.load_spread, seen.load.max() / seen.load.float().mean())
    if not isinstance(rule, ByCutoff) or not training:
        if isinstance(rule, ByCutoff):
            assert seen.pools == 0
            assert torch.equal(seen.raw_load, seen.load)
            measured = rule.measure(state, seen)
            assert measured["saturation"].tolist() == measured["starvation"].tolist() == [0] * EXPERTS
        fixed = isinstance(rule, TopP) and rule.p != "steered"  # nothing is aimed at
        target = z.sum() / EXPERTS if fixed else torch.tensor(BATCH * TIME * rule.experts_per_token / EXPERTS)
        torch.testing.assert_close(seen.target, target)
        return
    above = (of_experts > cutoff(state)).flatten(0, 1)
    # Without bounds the taken tokens of a pool are a subset or a superset of those above the cutoff.
    assert torch.equal(seen.raw_load, above.sum(0))
    assert torch.equal(seen.dropped, (above & ~z).sum(0))
    assert torch.equal(seen.filled, (z & ~above).sum(0))
    assert torch.equal(seen.load, seen.raw_load - seen.dropped + seen.filled)
    pools = of_experts.reshape(-1, pool_of(rule), EXPERTS)
    k = int(pools.shape[1] * Fraction(str(rule.experts_per_token)) / EXPERTS)
    assert (seen.pools, seen.target) == (len(pools), len(pools) * k)
    torch.testing.assert_close(seen.batch_cutoff, pools.sort(1, descending=True).values[:, k - 1].mean(0))
    measured = rule.measure(state, seen)
    torch.testing.assert_close(measured["raw_usage"], above.float().mean(0))
    torch.testing.assert_close(measured["saturation"], (above & ~z).sum(0) / above.sum(0).clamp(min=1))
    torch.testing.assert_close(measured["starvation"], (z & ~above).sum(0) / (len(pools) * k))


# The edges


@each(CASES)
@both_modes
@pytest.mark.parametrize("shape", [(0, TIME), (BATCH, 0), (0, 0)])
def test_no_tokens_get_an_empty_assignment(rule: Rule, training: bool, shape: tuple[int, int]) -> None:
    scores = torch.empty(*shape, rule.num_scores, requires_grad=True)
    routing = rule.route(scores, train(rule), training=training)
    assert routing.assignment.shape == (*shape, EXPERTS)
    assert all((x == 0).all() for x in routing.observation.tensors().values())
    if routing.loss is not None:
        assert routing.loss == 0


@each({name: rule for name, rule in BY_CUTOFF.items() if rule.experts_per_token < EXPERTS})
def test_a_pool_too_small_for_one_token_per_expert_is_refused_in_training_alone(rule: Rule) -> None:
    rule = replace(rule, pool="sequence")  # type: ignore[type-var]
    state = rule.init()
    with pytest.raises(ValueError, match=r"pool of 1 tokens: k = ⌊1 · [0-9.]+ / 6⌋ = 0") as error:
        rule.route(make_scores(rule, time=1), state, training=True)
    assert "\n" not in str(error.value)
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    rule.route(make_scores(rule, time=smallest), state, training=True)
    if smallest > 1:
        with pytest.raises(ValueError, match="= 0"):
            rule.route(make_scores(rule, time=smallest - 1), state, training=True)
    assert rule.route(make_scores(rule, time=1), state, training=False).assignment.shape == (BATCH, 1, EXPERTS)


@pytest.mark.parametrize("kind", [ExpertChoice, ExpertThreshold])
def test_a_pool_that_does_not_divide_the_batch_is_refused_in_training_alone(kind: type[ExpertChoice]) -> None:
    rule = kind(EXPERTS, pool=50)
    with pytest.raises(ValueError, match="pool=50 does not divide the batch of 4 × 48 = 192 tokens; use a divisor"):
        rule.route(make_scores(rule), rule.init(), training=True)
    rule.route(make_scores(rule), rule.init(), training=False)


BY_SCORES = (ExpertThreshold, ExpertChoice, TokenChoice, QuantileBalancing)
# Each with the option that the error names first, and others that make it wrong; what a kind of option refuses beyond
# these, such as NaN, is the same for all.
NONSENSE: list[tuple[type[Rule], dict[str, list[Any]]]] = [
    *[
        (kind, {"num_experts": [0, 1.5, True, "8", None], "experts_per_token": [0, 17, float("nan"), True, "1", None]})
        for kind in RULES.values()
    ],
    (TokenChoice, {"experts_per_token": [1.5], "balance": ["auxiliary", None], "aux_strength": [-0.1, float("inf")]}),
    (TokenChoice, {"bias_rate": [-0.1, None], "gate": ["relu", 0], "gate_scale": [0, True], "over": ["logits", None]}),
    (TokenChoice, {"num_groups": [0, 3, 32, 2.5], "groups_per_token": [0, 2, 1.5]}),
    (ExpertChoice, {"pool": ["rank", 0, -4, 8.0, True], "decay": [1, -0.1, "0.9"], "debias": [1, None]}),
    (ExpertThreshold, {"pool": ["", 0, None], "decay": [1.5, None], "debias": [0, "no"]}),
    (ExpertThreshold, {"warmup_steps": [-1, 2.5, None], "capacity_slack": [-0.5, float("nan"), True, "0.5"]}),
    (QuantileBalancing, {"experts_per_token": [1.5], "over": ["logits"], "pool": ["sequence", 96]}),
    (QuantileBalancing, {"decay": [1], "estimator": ["mean"]}),
    (ReLU, {"l1_start": [0, None]}),
    (SeqTopK, {"max_per_token": [0, 17, 1.5], "gate": ["relu"], "gate_scale": [0]}),
    (TopP, {"p": [0, 1.1, None, "moved"], "p_rate": [-0.1, float("inf")]}),
    (NullSlots, {"null_slots": [0], "slots_per_token": [40], "experts_per_token": [3], "null": ["half"]}),
    (NullSlots, {"bias_rate": [-1], "gate_scale": [0]}),
]
TOGETHER: list[tuple[type[Rule], dict[str, Any]]] = [
    (NullSlots, {"experts_per_token": 1, "null_slots": 1, "slots_per_token": 4}),
    (SeqTopK, {"max_per_token": 1, "experts_per_token": 2}),  # which is token choice
    (TopP, {"experts_per_token": 0.5, "p": "steered"}),  # a token's likeliest expert is always taken
    *(
        (kind, {"gate": gate, "experts_per_token": 1})  # the gate would be constant
        for kind in (TokenChoice, QuantileBalancing)
        for gate in ("softmax_chosen", "sigmoid_normalised")
    ),
    *((kind, {"null_scores": 3}) for kind in (*BY_SCORES, SeqTopK)),  # only softmax is taken over all scores
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {name: value}) for kind, many in NONSENSE for name, values in many.items() for value in values] + TOGETHER,
    ids=lambda x: x.__name__ if isinstance(x, type) else repr(x),
)
def test_nonsense_is_refused_with_option_value_and_remedy(kind: type[Rule], options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} ")) as error:
        kind(**options)
    message = str(error.value)
    assert message.startswith(f"{name}={value!r} ")
    assert any(remedy in message for remedy in ("use ", "must "))
    assert "\n" not in message


def test_whole_numbers_and_numbers_of_numpy_are_stored_as_python_s() -> None:
    for fanout in (2.0, np.float32(2)):
        assert type(TokenChoice(EXPERTS, fanout).experts_per_token) is int  # type: ignore[arg-type]
    rule = ExpertChoice(np.int64(EXPERTS), np.int32(1), pool=np.int64(8), decay=np.float32(0.5))  # type: ignore[arg-type]
    assert rule == ExpertChoice(EXPERTS, 1, pool=8, decay=0.5)
    assert {type(rule.num_experts), type(rule.experts_per_token), type(rule.pool)} == {int}
    assert type(rule.decay) is float

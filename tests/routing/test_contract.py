"""The contract of every routing rule: one table, rules × properties."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from cases import covering
from expert_threshold.routing import (
    RULES,
    ByCutoff,
    Cut,
    ExpertChoice,
    ExpertThreshold,
    Observation,
    QuantileBalancing,
    ReLU,
    Routing,
    Rule,
    TokenChoice,
    TopP,
    cutoff,
    rule_from_dict,
    rule_name,
    rule_to_dict,
)
from expert_threshold.routing.pools import batch_sketch
from expert_threshold.routing.sketch import LEVELS
from expert_threshold.testing import PROPERTIES, check_ranks, same

BATCH, TIME, EXPERTS = 4, 48, 6

CASES: dict[str, Rule] = {
    f"{name.replace('_', ' ')}, {case}": rule for name, cls in RULES.items() for case, rule in cls.cases().items()
}
SCORES_OF_EXPERTS = {name: rule for name, rule in CASES.items() if rule.num_scores == EXPERTS}
TOKEN_CHOICE = {name: rule for name, rule in SCORES_OF_EXPERTS.items() if isinstance(rule, TokenChoice)}
BY_CUTOFF = {name: rule for name, rule in SCORES_OF_EXPERTS.items() if isinstance(rule, ByCutoff)}
EXPERT_CHOICE = {name: rule for name, rule in BY_CUTOFF.items() if isinstance(rule, ExpertChoice)}


def each(cases: dict[str, Rule]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rule", cases.values(), ids=cases.keys())


both_modes = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


def make_scores(
    seed: int = 0, batch: int = BATCH, time: int = TIME, grain: float = 1 / 8, width: int = EXPERTS
) -> Tensor:
    """Another mean and spread for every expert, and many ties: scores are multiples of `grain`."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, time, width, generator=generator)
    return (scores * torch.linspace(0.5, 2, width) + torch.linspace(-1, 1, width)).div(grain).round().mul(grain)


@functools.cache
def train(rule: Rule, state: Any = None, *, steps: int = 3, seed: int = 100, **kind: Any) -> Any:
    """The rule's state after so many steps of random batches."""
    state = rule.init() if state is None else state
    for step in range(steps):
        scores = make_scores(seed + step, width=rule.num_scores, **kind)
        observation = rule.route(scores, state, training=True).observation
        state = rule.update(state, observation)
    return state


def pool_of(rule: Rule, batch: int = BATCH, time: int = TIME) -> int:
    """Tokens of one pool on one rank."""
    assert isinstance(rule, ByCutoff)
    return {"sequence": time, "batch": batch * time, "global": batch * time}.get(rule.pool, rule.pool)


def promised_load(rule: Rule, state: Any, tokens: int) -> tuple[int, int]:
    """Fewest and most tokens of an expert in a pool of a training batch."""
    k = int(tokens * Fraction(str(rule.experts_per_token)) / EXPERTS)
    if isinstance(rule, ExpertChoice) or state.step < rule.warmup_steps:
        return k, k
    if rule.capacity_slack is None:
        return 0, tokens
    slack = Fraction(str(rule.capacity_slack))
    return max(int(k * (1 - slack)), 0), min(int(k * (1 + slack)), tokens)


def modes(rule: Rule) -> tuple[tuple[type[Rule], str, Any], ...]:
    """The options that choose a code path: all but numbers."""
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


@each(TOKEN_CHOICE | BY_CUTOFF)
@both_modes
def test_an_observation_has_the_same_shapes_and_dtypes_everywhere(rule: Rule, training: bool) -> None:
    observation = rule.route(make_scores(), train(rule), training=training).observation
    counts = {"tokens": (), "pools": (), "fanout_counts": (EXPERTS + 1,)}
    counts |= dict.fromkeys(("load", "raw_load", "dropped", "filled"), (EXPERTS,))
    sums: dict[str, tuple[int, ...]] = {"target": ()}
    sums |= dict.fromkeys(("cutoff_sum", "score_sum", "score_sq_sum", "gate_sum", "gate_sq_sum"), (EXPERTS,))
    sums |= {"sketch_sum": (LEVELS, EXPERTS)}
    if not isinstance(rule, ByCutoff):
        counts = {name: counts[name] for name in ("tokens", "fanout_counts", "load")}
        del sums["cutoff_sum"], sums["sketch_sum"]
    named = {name.removeprefix("sums."): tensor for name, tensor in observation.tensors().items()}
    assert {name: (tuple(x.shape), x.dtype) for name, x in named.items()} == {
        **{name: (shape, torch.int64) for name, shape in counts.items()},
        **{name: (shape, torch.float32) for name, shape in sums.items()},
    }


@each(CASES)
@both_modes
def test_gates_are_no_views_of_which_fsdp2_would_warn(rule: Rule, training: bool) -> None:
    scores = make_scores(width=rule.num_scores).requires_grad_()
    assert not rule.route(scores, train(rule), training=training).gates._is_view()


# Loads


@each(BY_CUTOFF)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_in_training_every_pool_keeps_the_promised_load(rule: Rule, steps: int, shift: float) -> None:
    state = train(rule, steps=steps)
    assignment = rule.route(make_scores(grain=1) + shift, state, training=True).assignment
    low, high = promised_load(rule, state, pool_of(rule))
    load = assignment.reshape(-1, pool_of(rule), EXPERTS).sum(1)
    assert low <= load.min() <= load.max() <= high


@each(TOKEN_CHOICE)
@both_modes
def test_token_choice_gives_every_token_its_experts(rule: Rule, training: bool) -> None:
    assignment = rule.route(make_scores(grain=1), train(rule), training=training).assignment
    assert (assignment.sum(-1) == rule.experts_per_token).all()


@each(TOKEN_CHOICE)
def test_token_choice_takes_the_best_and_the_lower_of_equals(rule: TokenChoice) -> None:
    if rule.biased_top_k(rule.init()) is None:
        pytest.skip("over gates or in groups, see test_gates")
    scores, state = make_scores(grain=1), train(rule)
    assignment = rule.route(scores, state, training=True).assignment
    for row, chosen in zip((scores + state.bias).flatten(0, 1), assignment.flatten(0, 1), strict=True):
        order = sorted(range(EXPERTS), key=lambda expert: (-row[expert].item(), expert))
        assert chosen.nonzero().flatten().tolist() == sorted(order[: int(rule.experts_per_token)])


@each(BY_CUTOFF)
def test_usage_in_inference_comes_to_the_target(rule: Rule) -> None:
    if rule.experts_per_token == EXPERTS:
        pytest.skip("no cutoff lies below the lowest of all scores")
    changes: dict[str, Any] = {"decay": 0.95, "pool": rule.pool if isinstance(rule.pool, str) else 8 * rule.pool}
    rule = replace(rule, **changes)  # type: ignore[type-var]
    state = train(rule, steps=80, time=384, grain=1e-6)
    usage = rule.route(
        make_scores(1, 64, 384, grain=1e-6, width=rule.num_scores), state, training=False
    ).observation.usage
    torch.testing.assert_close(usage, torch.full((EXPERTS,), rule.experts_per_token / EXPERTS), rtol=0.06, atol=0)


@each(BY_CUTOFF)
def test_inference_is_a_strict_comparison_with_the_cutoff(rule: Rule) -> None:
    scores, state = make_scores(), train(rule)
    scores[0, 0] = cutoff(state)
    routing = rule.route(scores, state, training=False)
    assert torch.equal(routing.assignment, scores > cutoff(state))
    assert not routing.assignment[0, 0].any()


# Causality and independence


def is_causal(rule: Rule, state: Any, *, training: bool) -> bool:
    """Return True if new scores after a position leave everything up to it unchanged."""
    scores = make_scores()
    before = rule.route(scores, state, training=training).assignment
    for position in (1, TIME // 2, TIME - 1):
        for shift in (-2, 2):
            changed = scores.clone()
            changed[:, position:] = make_scores(7)[:, position:] + shift
            after = rule.route(changed, state, training=training).assignment
            if not torch.equal(before[:, :position], after[:, :position]):
                return False
    return True


@each({name: rule for name, rule in EXPERT_CHOICE.items() if rule.experts_per_token < EXPERTS})
def test_expert_choice_in_training_is_not_causal(rule: Rule) -> None:
    assert not is_causal(rule, train(rule), training=True)


@each(TOKEN_CHOICE | {name: CASES[name] for name in ("expert threshold, no capacity", "expert threshold, large slack")})
def test_training_is_causal_where_no_load_is_enforced(rule: Rule) -> None:
    assert is_causal(rule, train(rule), training=True)


@each(BY_CUTOFF)
def test_in_inference_experts_do_not_compete(rule: Rule) -> None:
    scores, state = make_scores(), train(rule)
    changed = scores.clone()
    changed[..., 1:] = make_scores(7)[..., 1:]
    before, after = (rule.route(s, state, training=False).assignment for s in (scores, changed))
    assert torch.equal(before[..., 0], after[..., 0])


# Gradients


@each(CASES)
@both_modes
def test_only_what_balances_by_a_loss_has_one_and_in_training_alone(rule: Rule, training: bool) -> None:
    scores = make_scores(width=rule.num_scores).requires_grad_()
    loss = rule.route(scores, train(rule), training=training).loss
    if training and (isinstance(rule, ReLU) or getattr(rule, "balance", None) in ("aux", "global_aux")):
        assert loss is not None
        assert loss.shape == ()
        (gradient,) = torch.autograd.grad(loss, scores)
        assert (gradient > 0).any()
        assert getattr(rule, "gate", "").startswith("softmax") or (gradient >= 0).all()  # shares have both signs
    else:
        assert loss is None


# Purity, state and records


@each(CASES)
def test_a_saved_state_goes_on_as_if_never_saved(rule: Rule, tmp_path: Path) -> None:
    state = train(rule)
    save_file(state._asdict(), tmp_path / "state.safetensors")
    loaded = type(state)(**load_file(tmp_path / "state.safetensors"))
    assert same(loaded, state)
    assert same(train(rule, loaded, steps=2, seed=9), train(rule, state, steps=2, seed=9))


@each(CASES)
@both_modes
def test_every_record_is_a_pytree(rule: Rule, training: bool) -> None:
    state = train(rule)
    routing = rule.route(make_scores(width=rule.num_scores), state, training=training)
    for record in (state, routing, routing.observation, Cut(torch.zeros(1, 2), torch.zeros(1, 2))):
        leaves, shape = pytree.tree_flatten(record)
        assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
        rebuilt = pytree.tree_unflatten(leaves, shape)
        assert type(rebuilt) is type(record)
        assert same(rebuilt, record)


@each(CASES)
def test_a_rule_round_trips_through_json(rule: Rule) -> None:
    record = json.loads(json.dumps(rule_to_dict(rule)))
    assert RULES[record["name"]] is type(rule)
    assert rule_from_dict(record) == rule
    assert hash(rule_from_dict(record)) == hash(rule)


def test_no_rule_is_dense() -> None:
    assert rule_to_dict(None) == {"name": "dense"}
    assert rule_from_dict({"name": "dense"}) is None
    assert rule_name(None) == "dense"


# Observations


@each(CASES)
@both_modes
def test_observations_add_up(rule: Rule, training: bool) -> None:
    scores, state = make_scores(width=rule.num_scores), train(rule)
    whole = rule.route(scores, state, training=training).observation
    halves = [rule.route(half, state, training=training).observation for half in scores.chunk(2)]
    total = halves[0] + halves[1]
    assert isinstance(total, Observation)
    alike = {name.removeprefix("sums.") for name in total.tensors()}
    if training and isinstance(rule, ByCutoff):  # a sketch is of the tokens of one forward
        wanted = (batch_sketch(halves[0]) + batch_sketch(halves[1])) / 2
        torch.testing.assert_close(batch_sketch(total), wanted)
        alike -= {"sketch_sum"}
    if training and isinstance(rule, QuantileBalancing):  # each half has prices of its own
        alike -= {"pools", "price_sum"}
    if training and isinstance(rule, ByCutoff) and rule.pool in ("batch", "global"):
        # Each half is a pool of its own.
        assert (whole.pools, total.pools) == (1, 2)
        torch.testing.assert_close(total.batch_cutoff, (halves[0].batch_cutoff + halves[1].batch_cutoff) / 2)
        alike -= {"pools", "cutoff_sum", "load", "dropped", "filled", "fanout_counts"}
    for name in alike:
        torch.testing.assert_close(getattr(total, name), getattr(whole, name))


@each(CASES)
@both_modes
def test_an_observation_says_what_happened(rule: Rule, training: bool) -> None:
    scores, state = make_scores(width=rule.num_scores), train(rule)
    of_experts = scores[..., :EXPERTS]
    routing = rule.route(scores, state, training=training)
    seen, z, gates = routing.observation, routing.assignment.flatten(0, 1), routing.gates
    assert seen.tokens == BATCH * TIME
    assert torch.equal(seen.load, z.sum(0))
    assert seen.fanout_counts.tolist() == [int((z.sum(1) == n).sum()) for n in range(EXPERTS + 1)]
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
        fixed = isinstance(rule, TopP) and not rule.controller  # nothing is aimed at
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
        rule.route(make_scores(time=1), state, training=True)
    assert "\n" not in str(error.value)
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    rule.route(make_scores(time=smallest), state, training=True)
    if smallest > 1:
        with pytest.raises(ValueError, match="= 0"):
            rule.route(make_scores(time=smallest - 1), state, training=True)
    assert rule.route(make_scores(time=1), state, training=False).assignment.shape == (BATCH, 1, EXPERTS)


@pytest.mark.parametrize("kind", [ExpertChoice, ExpertThreshold])
def test_a_pool_that_does_not_divide_the_batch_is_refused_in_training_alone(kind: type[ExpertChoice]) -> None:
    rule = kind(EXPERTS, pool=50)
    with pytest.raises(ValueError, match="pool=50 does not divide the batch of 4 × 48 = 192 tokens; use a divisor"):
        rule.route(make_scores(), rule.init(), training=True)
    rule.route(make_scores(), rule.init(), training=False)


NAN, INFINITY = float("nan"), float("inf")
NONSENSE: list[tuple[type[Rule], str, list[Any]]] = [
    *[(kind, "num_experts", [0, -1, 1.5, True, "8", None]) for kind in RULES.values()],
    *[(kind, "experts_per_token", [0, -1, 17, NAN, INFINITY, True, "1", None]) for kind in RULES.values()],
    (TokenChoice, "experts_per_token", [1.5, 0.5]),
    (TokenChoice, "balance", ["auxiliary", "", None, 0]),
    (TokenChoice, "aux_strength", [-0.1, NAN, INFINITY, "0.1", None]),
    (TokenChoice, "bias_rate", [-0.1, NAN, INFINITY, "0.1", None]),
    (TokenChoice, "gate", ["relu", "", None, 0]),
    (TokenChoice, "gate_scale", [0, -1, NAN, INFINITY, True, "1", None]),
    (TokenChoice, "over", ["logits", "", None, 0]),
    (TokenChoice, "num_groups", [0, -1, 3, 32, 2.5, True, None]),
    (TokenChoice, "groups_per_token", [0, 2, 1.5, True, None]),
    *[(kind, "pool", ["rank", "", 0, -4, 8.0, True, None]) for kind in (ExpertChoice, ExpertThreshold)],
    *[(kind, "decay", [1, 1.5, -0.1, NAN, "0.9", None]) for kind in (ExpertChoice, ExpertThreshold)],
    *[(kind, "debias", [0, 1, None, "no"]) for kind in (ExpertChoice, ExpertThreshold)],
    (ExpertThreshold, "warmup_steps", [-1, 2.5, True, None, "10"]),
    (ExpertThreshold, "capacity_slack", [-0.5, NAN, INFINITY, True, "0.5"]),
]


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [(kind, option, value) for kind, option, values in NONSENSE for value in values],
    ids=lambda x: x.__name__ if isinstance(x, type) else repr(x),
)
def test_nonsense_is_refused_with_option_value_and_remedy(kind: type[Rule], option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option) as error:
        kind(**{option: value})
    message = str(error.value)
    assert message.startswith(f"{option}={value!r} ")
    assert any(remedy in message for remedy in ("use ", "must "))
    assert "\n" not in message


def test_a_whole_number_of_experts_is_stored_as_one() -> None:
    rule = TokenChoice(EXPERTS, 2.0)  # type: ignore[arg-type]
    assert rule == TokenChoice(EXPERTS, 2)
    assert type(rule.experts_per_token) is int


def test_numbers_of_numpy_are_stored_as_python_s() -> None:
    assert type(TokenChoice(EXPERTS, np.float32(2)).experts_per_token) is int  # type: ignore[arg-type]
    rule = ExpertChoice(np.int64(EXPERTS), np.int32(1), pool=np.int64(8), decay=np.float32(0.5))  # type: ignore[arg-type]
    assert rule == ExpertChoice(EXPERTS, 1, pool=8, decay=0.5)
    assert {type(rule.num_experts), type(rule.experts_per_token), type(rule.pool)} == {int}
    assert type(rule.decay) is float


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"name": "random"}, "rule='random' is unknown; use one of dense, token_choice, expert_choice, expert_thr"),
        ({}, "rule=None is unknown"),
        ({"name": ["x"]}, "rule=\\['x'\\] is unknown"),
        (
            {"name": "token_choice", "pool": "batch"},
            "pool: rule token_choice has no such option; leave it out, or use expert_choice",
        ),
        ({"name": "dense", "decay": 0.9}, "decay: rule dense has no such option; leave it out, or use expert_choice"),
        ({"name": "expert_choice", "decay": 2}, "decay=2 must"),
    ],
)
def test_an_unknown_rule_or_option_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule_from_dict(record)


def test_the_defaults_are_the_papers() -> None:
    assert ExpertThreshold() == ExpertThreshold(
        num_experts=16, experts_per_token=1, decay=0.999, warmup_steps=4000, capacity_slack=0.5, pool="global"
    )
    assert TokenChoice() == TokenChoice(16, 1, balance="none", aux_strength=0.001, bias_rate=0.005)
    assert ExpertChoice() == ExpertChoice(num_experts=16, experts_per_token=1, decay=0.999)


# Compilation


@each(
    {
        name: CASES[name]
        for name in (
            "token choice, aux, 2 of them",
            "token choice, loss_free, 1 of them",
            "expert choice, sequence",
            "expert threshold, past warmup",
        )
    }
)
def test_training_compiles_to_one_graph_that_outlives_warmup_and_changing_loads(rule: Rule) -> None:
    def route(scores: Tensor, state: Any) -> Routing:
        return rule.route(scores, state, training=True)

    torch.compiler.reset()
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=False)
    state = rule.init()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(5):
            scores = make_scores(step) + step
            routing, expected = compiled(scores, state), rule.route(scores, state, training=True)
            assert torch.equal(routing.assignment, expected.assignment)
            torch.testing.assert_close(routing.observation, expected.observation)
            state = rule.update(state, routing.observation)


@pytest.mark.parametrize("pool", ["sequence", "batch", "global", 8])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_no_tokens_at_all_give_an_empty_assignment_whatever_the_pool(pool: Any, shape: tuple[int, int]) -> None:
    for rule in (ExpertChoice(16, 1, pool=pool), ExpertThreshold(16, 1, pool=pool)):
        routing = rule.route(torch.zeros(*shape, 16), rule.init(), training=True)
        assert routing.assignment.shape == (*shape, 16)
        assert int(routing.observation.pools) == 0

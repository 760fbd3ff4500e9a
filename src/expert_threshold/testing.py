"""Checks that a routing rule satisfies its contract, for use in the tests of any project.

    from expert_threshold.testing import PROPERTIES, check_rule

    def test_my_rule() -> None:
        check_rule(MyRule())

`check_rule` raises AssertionError with the name of the property that fails. `PROPERTIES` contains the same checks,
keyed by name, for `pytest.mark.parametrize`. `check_ranks` checks many rules in one pair of processes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_all_start_methods, start_processes  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from .moe import Router
from .routing import RULES, Routing, Rule, rule_from_dict, rule_to_dict
from .routing.registry import has_own_fields

BATCH, TIME = 4, 48
"""The number of sequences in a test batch and their length. The pools of a rule under test must fit in a batch."""

Check = Callable[[Rule], None]
PROPERTIES: dict[str, Check] = {}


def check_rule(rule: Rule, *, ranks: bool = True) -> None:
    """Check every property of a rule. Raises AssertionError with the name of the property that fails.

    ranks: also check two ranks, which starts two processes that must be able to import the class of the rule.
    """
    for name, check in PROPERTIES.items():
        try:
            check(rule)
        except AssertionError as error:
            raise AssertionError(f"{rule}: {name.replace('_', ' ')}: {error}") from error
    if ranks:
        check_ranks([rule])


def make_scores(rule: Rule, seed: int = 0, *, batch: int = BATCH, time: int = TIME, grain: float = 1 / 8) -> Tensor:
    """Return scores (batch, time, num_scores) with a different mean and spread for each expert. All scores are
    multiples of `grain`, so there are many ties.
    """
    scores = torch.randn(batch, time, rule.num_scores, generator=torch.Generator().manual_seed(seed))
    spread, mean = torch.linspace(0.5, 2, rule.num_scores), torch.linspace(-1, 1, rule.num_scores)
    return (scores * spread + mean).div(grain).round().mul(grain)


def trained(rule: Rule, *, steps: int = 3) -> Any:
    """Return the state of the rule after optimizer steps on random batches."""
    state = rule.init()
    for step in range(steps):
        state = rule.update(state, rule.route(make_scores(rule, 100 + step), state, training=True).observation)
    return state


def same(a: Any, b: Any) -> bool:
    """Return True if two records are equal, bit for bit."""
    (a_leaves, a_shape), (b_leaves, b_shape) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return a_shape == b_shape and all(
        x is y or (x.dtype == y.dtype and torch.equal(x.nan_to_num(12345), y.nan_to_num(12345)))
        for x, y in zip(a_leaves, b_leaves, strict=True)
    )


def close(a: Any, b: Any) -> bool:
    """Return True if two records are equal up to the rounding of one function. A processor may round the last numbers
    of a row differently if they do not fill a vector register.
    """
    a_leaves, b_leaves = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(a_leaves) == len(b_leaves) and all(
        x is y or (x.dtype == y.dtype and x.shape == y.shape and torch.allclose(x, y, rtol=2**-20, atol=2**-40))
        for x, y in zip(a_leaves, b_leaves, strict=True)
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _property(check: Check) -> Check:
    PROPERTIES[check.__name__.strip("_")] = check
    return check


def _states(rule: Rule) -> list[Any]:
    return [rule.init(), trained(rule)]


def _decided(routing: Routing) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors that a layer computes with. Gates are zero where the assignment is False."""
    return routing.assignment, routing.gates.detach() * routing.assignment, routing.passthrough


def _of(routing: Routing, *index: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if part is None else part[index] for part in _decided(routing))


@_property
def _is_a_frozen_dataclass_with_plain_options(rule: Rule) -> None:
    _require(isinstance(rule, Rule), "the rule is not derived from Rule")
    hash(rule)
    _require(has_own_fields(type(rule)), "the rule is not a dataclass")
    _require(rule.num_scores >= rule.num_experts, "num_scores is less than num_experts")
    _require(bool(rule.label), "the label is empty")
    if type(rule) in RULES.values():
        record = rule_to_dict(rule)
        _require(rule_from_dict(json.loads(json.dumps(record))) == rule, f"{record} does not restore the rule")


@_property
def _shapes_and_dtypes_are_those_of_the_contract(rule: Rule) -> None:
    for state, training in product(_states(rule), (True, False)):
        scores = make_scores(rule)
        routing = rule.route(scores, state, training=training)
        _require(routing.scores is scores, "scores are not returned as given")
        _require(routing.assignment.dtype == torch.bool, "the assignment is not boolean")
        _require(routing.gates.dtype == torch.float32, "gates are not float32")
        _require(routing.gates.shape == routing.assignment.shape, "gates and assignment differ in shape")
        expected, found = (*scores.shape[:2], rule.num_experts), tuple(routing.gates.shape)
        _require(found == expected, f"gates are {found}")
        _require(bool(routing.gates.isfinite().all()), "gates are not finite")
        through = routing.passthrough
        _require(through is None or through.shape == scores.shape[:2], "passthrough has the wrong shape")
        if not training:
            _require(routing.loss is None, "there is a loss at inference")
        elif routing.loss is not None:
            _require(routing.loss.shape == () and bool(routing.loss.isfinite()), "the loss is not a finite number")


@_property
def _observations_count_what_was_assigned_and_add_up(rule: Rule) -> None:
    for state, training in product(_states(rule), (True, False)):
        routings = [rule.route(make_scores(rule, seed), state, training=training) for seed in (0, 1)]
        for routing in routings:
            seen, assignment = routing.observation, routing.assignment.flatten(0, 1)
            _require(int(seen.tokens) == len(assignment), "tokens are miscounted")
            _require(torch.equal(seen.load, assignment.sum(0)), "load is not the sum of the assignment")
            counts = torch.bincount(assignment.sum(1), minlength=assignment.shape[1] + 1)
            _require(torch.equal(seen.fanout_counts, counts), "fanout_counts do not match the assignment")
        a, b = (routing.observation.tensors() for routing in routings)
        both = (routings[0].observation + routings[1].observation).tensors()
        _require(same(both, {name: a[name] + b[name] for name in a}), "observations do not add up")


@_property
def _no_two_records_share_memory(rule: Rule) -> None:
    """Sums may be reduced over ranks in place, and the state is updated in place."""
    for state, training in product(_states(rule), (True, False)):
        scores = make_scores(rule)
        seen = rule.route(scores, state, training=training).observation.tensors()
        records = {"scores": scores, **seen} | {f"state.{name}": value for name, value in state._asdict().items()}
        owner: dict[int, str] = {}
        for name, tensor in records.items():
            other = owner.setdefault(tensor.untyped_storage().data_ptr(), name)
            _require(other == name or tensor.numel() == 0, f"{name} shares memory with {other}")


@_property
def _scores_that_are_no_numbers_do_not_crash(rule: Rule) -> None:
    for bad, training in product((float("nan"), float("inf"), -float("inf")), (True, False)):
        scores, state = make_scores(rule), trained(rule)
        scores[:1, ::3] = bad
        routing = rule.route(scores, state, training=training)
        _require(routing.assignment.shape[:2] == scores.shape[:2], "the assignment has the wrong shape")
        rule.update(state, routing.observation)


@_property
def _empty_batches_are_routed_and_move_nothing(rule: Rule) -> None:
    for state, training in product(_states(rule), (True, False)):
        routing = rule.route(make_scores(rule)[:0], state, training=training)
        _require(routing.assignment.shape[:2] == (0, TIME), "an empty batch is not routed")
        if training:
            _require(same(rule.update(state, routing.observation), state), "a step without tokens changed the state")


@_property
def _inference_is_causal_and_of_each_sequence_alone(rule: Rule) -> None:
    for state in _states(rule):
        scores = make_scores(rule)
        whole = rule.route(scores, state, training=False)
        for position, shift in product((1, TIME // 2, TIME - 1), (-2, 2)):
            changed = scores.clone()
            changed[:, position:] = make_scores(rule, 7)[:, position:] + shift
            after = rule.route(changed, state, training=False)
            before = (slice(None), slice(position))
            _require(same(_of(after, *before), _of(whole, *before)), f"changing token {position} changed earlier ones")
            short = rule.route(scores[:, :position], state, training=False)
            _require(close(_decided(short), _of(whole, *before)), f"the first {position} tokens depend on later ones")
        for row in range(BATCH):
            alone = rule.route(scores[row : row + 1], state, training=False)
            _require(close(_decided(alone), _of(whole, slice(row, row + 1))), "other sequences changed a sequence")


@_property
def _scopes_are_kept_and_not_exaggerated(rule: Rule) -> None:
    _require(rule.scope(False) in ("token", "sequence"), f"scope(False) is {rule.scope(False)!r}")
    declared = type(rule).scope is not Rule.scope
    for state, training in product(_states(rule), (True, False)):
        scope, scores = rule.scope(training), make_scores(rule)
        routing = rule.route(scores, state, training=training)
        kept = {"token": (0, 0), "sequence": (0,)}.get(scope)
        changes = []
        for seed, shift in product((7, 8), (-3, -1, 1, 3)):
            others = make_scores(rule, seed) * abs(shift) + shift  # shares depend on a shift only through a factor
            if kept is not None:
                within = others.clone()
                within[kept] = scores[kept]
                after = rule.route(within, state, training=training)
                _require(same(_of(after, *kept), _of(routing, *kept)), f"scope is {scope}, but scores beyond it matter")
            others[0, 0] = scores[0, 0]
            changes.append(not same(_of(rule.route(others, state, training=training), 0, 0), _of(routing, 0, 0)))
        if training and declared and scope != "token" and not routing.assignment.all():
            _require(any(changes), f"scope is {scope}, but no other token's scores matter; declare a narrower one")


@_property
def _routing_and_updating_are_pure(rule: Rule) -> None:
    for state, training in product(_states(rule), (True, False)):
        scores = make_scores(rule)
        before = pytree.tree_map(torch.clone, (scores, state))
        first, second = (rule.route(scores, state, training=training) for _ in range(2))
        _require(same(first, second), "routing twice gives two different results")
        rule.update(state, first.observation)
        _require(same((scores, state), before), "routing or updating changed its arguments")


@_property
def _gradients_reach_scores_through_gates_alone(rule: Rule) -> None:
    for state, training in product(_states(rule), (True, False)):
        scores = make_scores(rule).requires_grad_()
        routing = rule.route(scores, state, training=training)
        _require(not routing.assignment.requires_grad, "the assignment has a gradient")
        seen = routing.observation.tensors().values()
        _require(not any(t.requires_grad for t in seen), "an observation has a gradient")
        _require(routing.gates.requires_grad, "gates have no gradient")
        weight = torch.randn(routing.gates.shape, generator=torch.Generator().manual_seed(5))
        weighted = (routing.assignment * routing.gates * weight).sum()
        (gradient,) = torch.autograd.grad(weighted, scores, retain_graph=True)
        _require(bool(gradient.isfinite().all()), "the gradient of the scores is not finite")
        if rule.sigmoid_gates:
            _require(torch.equal(routing.gates, scores.sigmoid()), "sigmoid_gates is True, but gates are not σ(scores)")
            _require(routing.passthrough is None, "sigmoid_gates is True, but x itself is passed through")
        if rule.softmax_gates:
            shares = scores.softmax(-1)[..., : rule.num_experts]
            _require(torch.equal(routing.gates, shares), "softmax_gates is True, but gates are not softmax(scores)")
            _require(routing.passthrough is None, "softmax_gates is True, but x itself is passed through")
        if routing.loss is not None:
            _require(routing.loss.requires_grad, "the loss has no gradient")


@_property
def _states_are_named_tuples_of_float32_that_survive_a_module(rule: Rule) -> None:
    state = trained(rule)
    _require(isinstance(state, tuple) and hasattr(state, "_fields"), "the state is not a NamedTuple")
    for old, new in zip(rule.init(), state, strict=True):
        _require((old.shape, old.dtype) == (new.shape, new.dtype), "updating changed a shape or a dtype")
        _require(not new.is_floating_point() or new.dtype == torch.float32, "a state is not float32")
        _require(not new.requires_grad, "a state has a gradient")
    router = Router(8, rule)
    for step in range(3):
        router.update(rule.route(make_scores(rule, 100 + step), router.state, training=True).observation)
    _require(same(tuple(router.state), tuple(state)), "a module's state is updated differently")
    loaded = Router(8, rule)
    loaded.load_state_dict(router.state_dict())
    _require(same(tuple(loaded.to(torch.bfloat16).half().state), tuple(state)), "saving or casting changed the state")
    with torch.device("meta"):
        late = Router(8, rule)
    first = tuple(late.to_empty(device="cpu").state)
    _require(same(first, tuple(rule.init())), "a module built without data has a different initial state")


@_property
def _bounds_hold(rule: Rule) -> None:
    for state, training in product(_states(rule), (True, False)):
        for shift in (-3.0, 0.0, 3.0):
            scores = make_scores(rule) + shift
            load = rule.route(scores, state, training=training).assignment[..., : rule.num_experts].flatten(0, 1).sum(0)
            pairs = rule.max_pairs(BATCH * TIME, training=training, ranks=1)
            _require(pairs is None or int(load.sum()) <= pairs, f"{int(load.sum())} pairs exceed max_pairs={pairs}")


@_property
def _answers_about_inference_are_true(rule: Rule) -> None:
    for state in _states(rule):
        scores = make_scores(rule)
        thresholds, best = rule.thresholds(state), rule.biased_top_k(state)
        if thresholds is not None:
            of_experts = scores[..., : rule.num_experts]
            of_experts[0, 0] = thresholds
            assignment = rule.route(scores, state, training=False).assignment
            _require(torch.equal(assignment, of_experts > thresholds), "inference is not scores > thresholds")
        if best is not None:
            biased = scores[..., : rule.num_experts] + best[0]
            order = biased.sort(dim=-1, descending=True, stable=True).indices[..., : best[1]]
            chosen = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, order, True)
            assignment = rule.route(scores, state, training=False).assignment
            _require(torch.equal(assignment, chosen), "inference is not the k largest of experts' scores + bias")
        with suppress(ValueError):
            none, every = (rule.at_rate(state, rate) for rate in (0, rule.num_experts))
            fanout = [rule.route(scores, s, training=False).observation.fanout_mean for s in (none, every)]
            _require([float(f) for f in fanout] == [0, rule.num_experts], "the rates 0 and num_experts are not reached")
        seen = rule.route(make_scores(rule), state, training=True).observation
        shown = rule.describe(state) | rule.measure(state, seen)
        _require(
            all(isinstance(value, Tensor) and value.ndim <= 1 for value in shown.values()),
            "describe or measure returned a tensor that is not () or (n,)",
        )


@_property
def _calibration_sets_the_thresholds_that_pools_measure(rule: Rule) -> None:
    if type(rule).calibrated is Rule.calibrated:
        return
    pooled, state = rule.calibration_rule(rule.experts_per_token), trained(rule)
    _require(pooled.num_scores == rule.num_scores, "calibration_rule has a different number of scores")
    routings = [each.route(make_scores(rule), state, training=True) for each in (rule, pooled)]
    plain = rule.sigmoid_gates or rule.softmax_gates
    _require(not plain or torch.equal(routings[0].gates, routings[1].gates), "calibration_rule has different gates")
    measured = routings[1].observation
    found = rule.thresholds(rule.calibrated(state, measured))
    _require(found is not None and close(found, measured.batch_cutoff), "calibrated does not set the measured cutoffs")


@_property
def _compiled_equals_eager(rule: Rule) -> None:
    for training in (True, False):
        torch.compiler.reset()

        def route(scores: Tensor, state: Any, training: bool = training) -> Routing:
            return rule.route(scores, state, training=training)

        compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
        for state in _states(rule):
            scores = make_scores(rule)
            a, b = compiled(scores, state), route(scores, state)
            _require(torch.equal(a.assignment, b.assignment), "the compiled assignment differs")
            torch.testing.assert_close(a.gates, b.gates)
            torch.testing.assert_close(a.observation.tensors(), b.observation.tensors())


def check_ranks(rules: Sequence[Rule]) -> None:
    """Check, in two processes, that two ranks, each with half of a batch, route and update like one with all of it.

    If the scope or pool_scope of a rule in training is "batch", each rank treats its half separately, just as one rank
    treats two micro-batches. Raises AssertionError with the name of the rule.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Processes forked from a server, where available, do not repeat the server's imports.
        method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
        start_processes(_rank, (list(rules), str(Path(folder) / "store")), nprocs=2, start_method=method)


def _rank(rank: int, rules: Sequence[Rule], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for rule in rules:
            _compare_with_one_rank(rank, rule)
    finally:
        dist.destroy_process_group()


def _compare_with_one_rank(rank: int, rule: Rule) -> None:
    state = alone = rule.init()
    for step in range(3):
        parts = make_scores(rule, 100 + step).chunk(2)
        mine = rule.route(parts[rank], state, training=True, group=dist.group.WORLD)
        if "batch" in (rule.scope(True), rule.pool_scope()):
            whole = [rule.route(part, alone, training=True) for part in parts]
            expected, seen = whole[rank].assignment, whole[0].observation + whole[1].observation
        else:
            one = rule.route(torch.cat(parts), alone, training=True)
            expected, seen = one.assignment.chunk(2)[rank], one.observation
        if not torch.equal(mine.assignment, expected):
            raise AssertionError(f"{rule}: two ranks assign tokens differently from one rank")
        for tensor in mine.observation.tensors().values():
            dist.all_reduce(tensor)  # in place
        state, alone = rule.update(state, mine.observation), rule.update(alone, seen)
        shown = [rule.describe(each) or each._asdict() for each in (state, alone)]
        torch.testing.assert_close(*shown, msg=lambda text: f"{rule}: two ranks: {text}")

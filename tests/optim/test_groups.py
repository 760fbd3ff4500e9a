"""Groups, schedules and state: the paper's tables at their exact points, and resuming bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from expert_threshold.optim import NANOCHAT, RELEASE, AdamW, Muon, OptimConfig, Optimizers, make_optimizers
from expert_threshold.optim.groups import falling, momentum_at, warmup, weight_decay_at

SHAPES = {
    "embed.weight": (12, 8), "blocks.0.attention.query.weight": (8, 8), "blocks.0.feed_forward.up.weight": (16, 8),
    "blocks.1.moe.router.weight": (4, 8), "blocks.1.moe.experts.up": (4, 16, 8),
    "blocks.1.moe.experts.down": (4, 8, 16), "blocks.1.moe.shared.up.weight": (16, 8), "head.weight": (12, 8),
}  # fmt: skip
SHORT = OptimConfig(ns_dtype="float32", adamw_warmup_steps=3, momentum_warmup_steps=4)


def model(seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def optimizers(named: dict[str, nn.Parameter], config: OptimConfig = SHORT, d_model: int = 768) -> Optimizers:
    return make_optimizers(named.items(), config, d_model)


def set_gradients(named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(named: dict[str, nn.Parameter], optimizer: Optimizers, first: int, last: int, steps: int = 10) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        set_gradients(named, step)
        optimizer.step(step, steps)


def members(optimizer: Optimizers, *groups: str) -> list[list[str]]:
    return [list(optimizer.groups[group].parameters) for group in groups]


def kinds(optimizer: Optimizers) -> dict[str, type]:
    """The optimizers of each group, which are all of one class."""
    return {name: type(each) for name, group in optimizer.groups.items() for each in group.optimizers}


def test_embedding_and_head_get_adamw_and_every_matrix_muon() -> None:
    optimizer = optimizers(model())
    assert kinds(optimizer) == {"matrix": Muon, "expert": Muon, "embed": AdamW, "head": AdamW, "router": Muon}
    experts = ["blocks.1.moe.experts.up", "blocks.1.moe.experts.down"]
    own = [["embed.weight"], ["head.weight"], ["blocks.1.moe.router.weight"], experts]
    assert members(optimizer, "embed", "head", "router", "expert") == own
    assert {name for names in members(optimizer, *optimizer.groups) for name in names} == set(SHAPES)


TRUNK = {
    "embed.weight": (12, 8), "blocks.1.attention.value_embed.weight": (12, 8),
    "blocks.1.attention.value_gate.weight": (2, 8), "residual_scalars": (2,), "skip_scalars": (2,),
    "smear_gate.weight": (1, 8), "smear_scalar": (1,), "backout_scalar": (1,),
}  # fmt: skip


def test_value_embeddings_have_half_the_embeddings_rate_and_scalars_theirs_at_any_width() -> None:
    config = dataclasses.replace(NANOCHAT, min_lr_ratio=1.0, adamw_warmup_steps=0, muon_warmup_steps=0)
    optimizer = optimizers(model(shapes=TRUNK), config, d_model=192)
    own = {"value_embed", "residual", "skip", "smear"}
    assert kinds(optimizer) == {"embed": AdamW, "matrix": Muon, **dict.fromkeys(own, AdamW)}
    gate, embedding = ([f"blocks.1.attention.value_{part}.weight"] for part in ("gate", "embed"))
    smear = ["smear_gate.weight", "smear_scalar", "backout_scalar"]
    assert members(optimizer, "matrix", "value_embed", "smear") == [gate, embedding, smear]
    rates = optimizer.learning_rates(5, 10)
    expected = {"embed": 0.6, "value_embed": 0.3, "residual": 0.005, "skip": 0.5, "smear": 0.2, "matrix": 0.02}
    assert rates == pytest.approx(expected)
    options = {name: optimizer.groups[name].optimizers[0].param_groups[0] for name in ("embed", *own)}
    assert {name: (given["betas"], given["weight_decay"]) for name, given in options.items()} == {
        "embed": ((0.8, 0.995), 0.001),
        "value_embed": ((0.8, 0.995), 0.01),
        "residual": ((0.8, 0.95), 0.05),
        "skip": ((0.96, 0.95), 0.0),
        "smear": ((0.8, 0.95), 0.0),
    }


def test_a_parameter_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("blocks.0.norm.weight of shape (8,)")):
        optimizers(model(shapes={"blocks.0.norm.weight": (8,)}))


LATE: dict[str, Any] = {"adamw_warmup_steps": 0, "min_lr_ratio": 1.0}  # rates at their peaks
MUON, ADAMW = ("matrix", "expert", "router"), ("embed", "head")
RATES: dict[str, tuple[OptimConfig, int, tuple[int, int], dict[str, float]]] = {
    **{
        f"the paper's table times λ, {width}": (
            OptimConfig(**LATE), width, (5, 10),
            dict.fromkeys(MUON, 0.02 * lam) | {"embed": 0.2 * lam, "head": 0.004 * lam},
        )
        for width, lam in ((768, 1.0), (1280, 0.7745966692414834), (256, 1.7320508075688772))
    },
    "the first step": (
        OptimConfig(), 768, (0, 20_000), dict.fromkeys(MUON, 0.02) | {"embed": 0.2 / 250, "head": 0.004 / 250}
    ),
    "the end of the warmup": (OptimConfig(), 768, (249, 20_000), {"embed": 0.2 * (1 - 0.9 * 249 / 20_000)}),
    "the middle": (OptimConfig(), 768, (10_000, 20_000), dict.fromkeys(MUON, 0.011) | {"embed": 0.11, "head": 0.0022}),
    "the end": (OptimConfig(), 768, (20_000, 20_000), dict.fromkeys(MUON, 0.002) | {"embed": 0.02, "head": 0.0004}),
    "the release, whose Muon is not scaled": (
        RELEASE, 3072, (5, 10), {"matrix": 0.02, "expert": 0.02, "router": 0.002, "embed": 0.1, "head": 0.002}
    ),
    "Muon's warmup": (OptimConfig(**LATE, muon_warmup_steps=4), 768, (0, 10), dict.fromkeys(MUON, 0.005)),
    "their own": (OptimConfig(**LATE, router_lr=0.5, expert_lr=1), 768, (5, 10), {"router": 0.5, "expert": 1}),
    "routers under AdamW": (
        OptimConfig(router_optimizer="adamw", router_lr=0.5, adamw_warmup_steps=2), 768, (0, 10), {"router": 0.25}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "d_model", "at", "expected"), RATES.values(), ids=RATES)
def test_learning_rates(config: OptimConfig, d_model: int, at: tuple[int, int], expected: dict[str, float]) -> None:
    optimizer = optimizers(model(), config, d_model)
    rates = optimizer.learning_rates(*at)
    assert {name: rates[name] for name in expected} == pytest.approx(expected)
    assert kinds(optimizer)["router"] is (Muon if config.router_optimizer == "muon" else AdamW)


SCHEDULES: dict[str, tuple[Callable[[int], float], dict[int, float]]] = {
    "the release's rates fall over the last fifth": (
        lambda step: falling(step, 1000, 0.0, RELEASE.cooldown), {0: 1, 400: 1, 800: 1, 900: 0.5, 1000: 0}
    ),
    "momentum rises in a straight line over 300 steps": (
        lambda step: momentum_at(step, step, 20_000, OptimConfig()),
        {0: 0.85, 150: 0.90, 300: 0.95, 10_000: 0.95, 20_000: 0.95},
    ),
    "momentum without a warmup": (lambda at: momentum_at(at, at, 9, OptimConfig(momentum_warmup_steps=0)), {0: 0.95}),
    # nanochat's training script has these values for 2,000 steps with a cooldown over the last 1,300.
    "nanochat's momentum rises over 400 steps and falls with the rates": (
        lambda step: momentum_at(step, step, 2000, NANOCHAT),
        {0: 0.85, 200: 0.91, 400: 0.97, 700: 0.97, 1350: 0.935, 2000: 0.90},
    ),
    "it falls by the progress, not by the step": (lambda at: momentum_at(400, at, 2000, NANOCHAT), {1350: 0.935}),
    "weight decay follows half a cosine to zero": (
        lambda at: weight_decay_at(at, 1000, NANOCHAT), {0: 0.28, 250: 0.14 * (1 + 0.5**0.5), 500: 0.14, 1000: 0.0}
    ),
    "no weight decay": (lambda at: weight_decay_at(at, 1000, OptimConfig()), {900: 0}),
}  # fmt: skip


@pytest.mark.parametrize(("value", "points"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_at_their_points(value: Callable[[int], float], points: dict[int, float]) -> None:
    assert {at: value(at) for at in points} == pytest.approx(points)


@given(steps=st.integers(1, 50_000), end=st.floats(0, 1), cooldown=st.floats(0.01, 1) | st.just(1.0), data=st.data())
def test_rates_fall_from_the_peak_to_their_end(steps: int, end: float, cooldown: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps - 1))
    assert falling(0, steps, end, cooldown) == pytest.approx(1)
    assert falling(steps, steps, end, cooldown) == pytest.approx(end)
    after, before = (falling(progress, steps, end, cooldown) for progress in (step + 1, step))
    assert end - 1e-9 <= after <= before + 1e-9


@given(step=st.integers(0, 10_000), warmup_steps=st.integers(0, 1000))
def test_warmup_rises_from_one_step_to_one(step: int, warmup_steps: int) -> None:
    value = warmup(step, warmup_steps)
    assert 0 < value <= warmup(step + 1, warmup_steps) <= 1
    assert (value == 1) == (step + 1 >= warmup_steps)


@pytest.mark.parametrize(("weight", "rate", "decay"), [("embed", 0.2, 0.001), ("head", 0.004, 0.01)])
@pytest.mark.parametrize("decays", [False, True])
def test_embedding_and_head_move_as_in_torch(weight: str, rate: float, decay: float, decays: bool) -> None:
    named, decay = model(), decays * decay
    config = dataclasses.replace(SHORT, adamw_warmup_steps=0, min_lr_ratio=1.0, weight_decay=0.3 * decays)
    optimizer, mine = optimizers(named, config), named[f"{weight}.weight"]
    twin = nn.Parameter(mine.detach().clone())
    oracle = torch.optim.AdamW([twin], lr=rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=decay, foreach=False)
    for step in range(5):
        train(named, optimizer, step, step + 1)
        twin.grad = mine.grad
        oracle.step()
    torch.testing.assert_close(mine, twin)


RESUMED: dict[str, dict[str, Any]] = {
    "router under AdamW": {"router_optimizer": "adamw", "clip": 1.0},
    "polar express": {"orthogonalizer": "polar_express", "equilibrate": "columns", "renormalize": "matrix"},
    **{f"normuon of {side}": {"normuon": side} for side in ("rows", "columns", "longer")},
    "weight decay": {"weight_decay": 0.1},
    "betas": {"betas": (0, 0.96), "muon_warmup_steps": 3, "momentum_end": 0.5},
    "betas of nanochat": {"betas": "nanochat"},
    "experts in turns": {"expert_period": 3},
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_ten_steps_equal_five_saved_loaded_and_five_more_in_every_byte(options: dict[str, Any]) -> None:
    config = dataclasses.replace(SHORT, **options)
    straight, resumed = model(), model(seed=1)
    through, second = optimizers(straight, config), optimizers(resumed, config)
    train(straight, through, 0, 5)
    tensors, counters = through.state_dict()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    train(resumed, second, 0, 2)  # state of another life, which loading must replace
    with torch.no_grad():
        for name, parameter in resumed.items():
            parameter.copy_(straight[name])
    second.load_state_dict(tensors, json.loads(json.dumps(counters)))
    for named, optimizer in ((straight, through), (resumed, second)):
        train(named, optimizer, 5, 10)
    assert all(torch.equal(straight[name], resumed[name]) for name in SHAPES)
    ours, theirs = through.state_dict(), second.state_dict()
    assert ours.counters == theirs.counters
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())


@pytest.mark.parametrize("held", ["whole", "as rows of a shard, in reverse"])
def test_layers_take_turns_at_moving_their_experts_and_nothing_else_waits(held: str) -> None:
    """A matrix that ZeRO-1 held as a stack of one waited, too, and which one moved depended on their order."""
    parts = {"up": (4, 16, 8), "gate": (4, 16, 8), "down": (4, 8, 16)}
    shapes = {f"blocks.{layer}.moe.experts.{part}": shape for layer in (1, 2, 3) for part, shape in parts.items()}
    named = model(shapes=SHAPES | shapes)
    if held != "whole":
        named = {name: nn.Parameter(p[None]) if p.ndim == 2 else p for name, p in reversed(named.items())}
    optimizer = optimizers(named, dataclasses.replace(SHORT, expert_period=2))
    for step in range(4):
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        train(named, optimizer, step, step + 1)
        stayed = {name for name in named if torch.equal(before[name], named[name])}
        waiting = (1, 3) if step % 2 == 0 else (2,)
        assert stayed == {f"blocks.{layer}.moe.experts.{part}" for layer in waiting for part in parts}


def test_the_state_is_flat_and_named_after_the_parameters() -> None:
    tensors, counters = optimizers(model()).state_dict()
    assert "muon.blocks.1.moe.experts.up.momentum" in tensors
    assert {name for name in tensors if name.startswith("adamw.")} == {
        f"adamw.{part}.weight.{moment}" for part in ("embed", "head") for moment in ("exp_avg", "exp_avg_sq")
    }
    assert counters == {"adamw.embed.weight.step": 0, "adamw.head.weight.step": 0}


STRANGE: dict[str, Any] = {
    "muon.extra.momentum": torch.zeros(1),
    "adamw.head.weight.exp_avg": None,
    "adamw.embed.weight.exp_avg": torch.zeros(2, 2),
    "adamw.embed.weight.exp_avg_sq": torch.zeros(12, 8).half(),
    "adamw.head.weight.step": None,
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(name: str) -> None:
    named = model()
    saved = optimizers(named)
    train(named, saved, 0, 1)
    tensors, counters = ({**part} for part in saved.state_dict())
    for part in (tensors, counters):
        part.pop(name, None)
    if STRANGE[name] is not None:
        tensors[name] = STRANGE[name]
    optimizer = optimizers(model())
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        optimizer.load_state_dict(tensors, counters)
    assert "\n" not in str(error.value)
    assert all((tensor == 0).all() for tensor in optimizer.state_dict().tensors.values())


def test_the_gradient_norm_is_global_and_zero_without_gradients() -> None:
    named = model()
    optimizer = optimizers(named)
    assert optimizer.grad_norm() == 0
    set_gradients(named, 0)
    everything = torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None])
    torch.testing.assert_close(optimizer.grad_norm(), everything.norm())
    optimizer.zero_grad()
    assert all(p.grad is None for p in named.values())


@pytest.mark.parametrize("clip", [None, 1.0, 1e6])
def test_gradients_are_scaled_to_the_clip_only_above_it(clip: float | None) -> None:
    named = model()
    optimizer = optimizers(named, dataclasses.replace(SHORT, clip=clip))
    set_gradients(named, 0)
    norm = optimizer.grad_norm().item()
    optimizer.step(0, 10)
    assert optimizer.grad_norm().item() == pytest.approx(1.0 if clip == 1.0 else norm, rel=1e-5)


def test_parameters_without_gradients_stay() -> None:
    named = model()
    optimizer = optimizers(named, dataclasses.replace(SHORT, clip=1.0))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer.step(0, 10)
    assert all(torch.equal(named[name], before[name]) for name in named)
    assert optimizer.state_dict().counters["adamw.embed.weight.step"] == 0


def test_moved_names_each_parameter_once_quick_optimizers_first() -> None:
    named = model()
    told: list[str] = []
    set_gradients(named, 0)
    optimizers(named).step(0, 10, moved=told.extend)
    assert sorted(told) == sorted(SHAPES)
    assert set(told[:2]) == {"embed.weight", "head.weight"}

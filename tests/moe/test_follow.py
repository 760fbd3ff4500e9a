"""`follow`: other training loops update the rules as ours do."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases import RULES
from expert_threshold.model import GPT, GPTConfig
from expert_threshold.moe import Follower, MoE, follow
from expert_threshold.optim import AdamW, Muon
from expert_threshold.routing import ExpertThreshold, Observation, Rule, TokenChoice
from ranks import run_on_ranks

ROOT = Path(__file__).parents[2]
ROUTED = [rule for rule in (RULES["expert_threshold"], RULES["expert_choice"], RULES["loss_free"]) if rule]


class Foreign(nn.Module):
    """Another project's model with two MoE layers, with or without activation checkpointing."""

    def __init__(self, rule: Rule, *, z_loss: float | None = None, checkpointed: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.layers = nn.ModuleList([MoE(8, 12, rule, z_loss=z_loss) for _ in range(2)])
        self.use_reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            if self.use_reentrant is None:
                y, _ = layer(x)
                y += x  # with `fully_shard(layer)`, this ended in a segmentation fault when y was a view
                x = y
            else:
                x = x + checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=self.use_reentrant)
        return x

    def states(self) -> list[Tensor]:
        return [value.clone() for layer in self.layers for value in layer.router.state]


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(1)))


X = batches(1)[0]


def followed(model: nn.Module | None = None, **options: Any) -> tuple[Any, torch.optim.SGD, Follower]:
    """Return a followed model, its optimizer and its follower."""
    model = Foreign(ROUTED[0]) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, follow(model, optimizer, **options)


def tokens_seen(follower: Follower) -> list[int]:
    return [int(seen.tokens) for seen in follower.observations.values()]


def assert_all_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Muon, AdamW])
@pytest.mark.parametrize("rule", ROUTED, ids=lambda rule: type(rule).__name__)
def test_three_steps_of_two_micro_batches_equal_the_manual_updates(rule: Rule, kind: Any) -> None:
    followed, manual = Foreign(rule), Foreign(rule)
    optimizers = [kind(model.layers.parameters(), lr=0.02) for model in (followed, manual)]
    follow(followed, optimizers[0])
    for first, second in zip(*[iter(batches(6))] * 2, strict=True):
        observations = []
        for x in (first, second):
            followed(x).square().mean().backward()
            h, seen = manual.inner(x), []
            for layer in manual.layers:
                y, observation = layer(h)
                h = h + y
                seen.append(observation)
            h.square().mean().backward()
            observations.append(seen)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for layer, one, two in zip(manual.layers, *observations, strict=True):
            layer.router.update(one + two)
        assert_all_equal(followed.states(), manual.states())
    assert_all_equal(list(followed.parameters()), list(manual.parameters()))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("rule", ROUTED, ids=lambda rule: type(rule).__name__)
def test_recomputation_under_activation_checkpointing_counts_once(rule: Rule, use_reentrant: bool) -> None:
    plain, checkpointed = Foreign(rule), Foreign(rule, checkpointed=use_reentrant)
    for model in (plain, checkpointed):
        _, optimizer, follower = followed(model)
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert tokens_seen(follower) == [16, 16]
            optimizer.step()
    torch.testing.assert_close(checkpointed.states(), plain.states())


SCALED = ("skipped by a GradScaler", "skipped by a GradScaler in a fused optimizer")
SKIPPED = (
    "in evaluation mode", "without gradients", "without backward", "cleared by the optimizer", "cleared by the model",
    "cleared after the next forward", "cleared before the step", *SCALED,
)  # fmt: skip


@pytest.mark.parametrize("factor", [1000.0, float("nan")])
@pytest.mark.parametrize("skipped", SKIPPED)
def test_a_forward_that_took_part_in_no_step_changes_no_rule(skipped: str, factor: float) -> None:
    """Regression: one discarded batch with values 1000 times as large moved the cutoffs from 0.5 to 176."""
    states = []
    for spikes in (True, False):
        model = Foreign(ExpertThreshold(4, decay=0.5, warmup_steps=100), z_loss=0.01)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=skipped == SCALED[1])
        scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled=skipped in SCALED)
        follower = follow(model, optimizer)
        for step, x in enumerate(batches(4)):
            if step == 2 and spikes:
                model.train(skipped != "in evaluation mode")
                with torch.set_grad_enabled(skipped != "without gradients"):
                    loss = model(factor * x).square().mean()
                model.train()
                if loss.requires_grad and skipped != "without backward":
                    scaler.scale(loss * torch.inf if skipped in SCALED else loss).backward()
                if skipped in SCALED:
                    scaler.step(optimizer)
                    scaler.update()
                    follower.loss_scale = scaler.get_scale()
                if skipped.startswith("cleared b"):
                    (model if skipped == "cleared by the model" else optimizer).zero_grad()
                if skipped == "cleared before the step":
                    optimizer.step()
            follower.loss_scale = scaler.get_scale() if skipped in SCALED else None
            loss = model(x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        states.append(model.states())
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)  # a scale of gradients rounds


def test_a_graph_that_is_kept_for_two_backwards_counts_once() -> None:
    model, _, follower = followed()
    y = model(X)
    y.mean().backward(retain_graph=True)
    y.square().mean().backward()
    assert tokens_seen(follower) == [16, 16]


def test_a_step_without_the_gradient_of_one_parameter_counts_and_one_that_saw_nothing_moves_nothing() -> None:
    """Some loops freeze a layer for a few steps by setting its gradients to None."""
    model, optimizer, follower = followed()
    before = model.states()
    for _ in range(2):
        model(X).square().mean().backward()
        next(model.parameters()).grad = None
    assert tokens_seen(follower) == [32, 32]
    optimizer.step()
    after = model.states()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    optimizer.step()
    assert_all_equal(model.states(), after)


@pytest.mark.parametrize("trained", ["experts", "head"])
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_layers_below_all_that_trains_count_too(trained: str, use_reentrant: bool | None) -> None:
    model = nn.Sequential(Foreign(ROUTED[0], checkpointed=use_reentrant), nn.Linear(8, 8))
    model.requires_grad_(False)
    (model[1] if trained == "head" else model[0].layers[0].experts).requires_grad_(True)
    *_, follower = followed(model)
    model(X).mean().backward()
    assert tokens_seen(follower) == [16, 16]


@pytest.mark.parametrize("again", ["the same optimizer", "another optimizer"])
def test_a_model_followed_again_is_followed_once(again: str) -> None:
    """Regression: running a notebook cell again, or using two optimizers, updated the rules twice a step."""
    once, twice = (Foreign(ROUTED[0]) for _ in range(2))
    for model in (once, twice):
        optimizers = [torch.optim.SGD(model.layers.parameters(), 0.1), torch.optim.SGD(model.inner.parameters(), 0.1)]
        if model is twice:
            follow(model, optimizers[1 if again == "the same optimizer" else 0])
        follower = follow(model, optimizers[1])
        model(X).mean().backward()
        assert tokens_seen(follower) == [16, 16]
        for optimizer in optimizers:
            optimizer.step()
    assert_all_equal(once.states(), twice.states())


def test_a_part_of_a_followed_model_is_not_followed_again() -> None:
    """The rules of the other layers would no longer be updated."""
    model = Foreign(ROUTED[0])
    *_, follower = followed(model)
    with pytest.raises(ValueError, match="is part of one that is followed"):
        follow(model.layers[0], torch.optim.SGD(model.layers[0].parameters(), 0.1))
    model(X).mean().backward()
    assert tokens_seen(follower) == [16, 16]
    del model.layers[1]
    followed(model)


class Wrapper(torch.optim.Optimizer):
    """A wrapper like Accelerate's, which is an optimizer by its class only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_wrapped_optimizers_are_followed_and_others_refused() -> None:
    model = Foreign(ROUTED[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    follow(model, Wrapper(Wrapper(optimizer)))
    model(X).mean().backward()
    before = model.states()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(model.states(), before, strict=True))
    for other, kind in ((None, "None"), ([optimizer], "a list"), (model, "a Foreign")):
        with pytest.raises(ValueError, match=f"optimizer is {kind}, not a torch.optim.Optimizer"):
            follow(model, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_followed_model_is_not_followed(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, _, follower = followed()
    twin = copied(model)
    twin(X).mean().backward()
    assert not follower.observations
    model(X).mean().backward()
    assert_all_equal(gradients(twin), gradients(model))


WITH_LOSSES: list[tuple[Rule, float | None]] = [
    (TokenChoice(4, 1, balance="aux", aux_strength=0.1), 0.01),
    (TokenChoice(4, 1, balance="global_aux", aux_strength=0.1), None),
    (ExpertThreshold(4, warmup_steps=1), 0.01),
]


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def by_hand(model: Foreign, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the sum of the routing losses, as in a loop without `follow`."""
    h, losses = model.inner(x), torch.zeros(())
    for layer in model.layers:
        routing = layer.router(h)
        h, losses = h + layer.compute(h, routing), losses + routing.loss
    return h, losses


@pytest.mark.parametrize("scale", [None, 0.5, 1024.0])
@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.parametrize(("rule", "z_loss"), WITH_LOSSES, ids=str)
def test_backward_adds_losses(rule: Rule, z_loss: float | None, checkpointed: bool | None, scale: float | None) -> None:
    """Regression: users had to add the losses, which was undocumented and failed with reentrant checkpointing."""
    model, _, follower = followed(Foreign(rule, z_loss=z_loss, checkpointed=checkpointed), loss_scale=scale)
    manual = Foreign(rule, z_loss=z_loss)
    for x in batches(2):
        (model(x).square().mean() * (scale or 1)).backward()
        y, losses = by_hand(manual, x)
        ((y.square().mean() + losses) * (scale or 1)).backward()
        torch.testing.assert_close(follower.loss(), losses.detach())
        assert follower.loss() == 0.0
    torch.testing.assert_close(gradients(model), gradients(manual), rtol=1e-5, atol=1e-6 * (scale or 1))
    for layer in manual.layers:  # and they are no small part of them
        layer.router.weight.grad = None
    by_hand(manual, x)[0].square().mean().backward()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gradients(model), gradients(manual), rtol=0.01, atol=1e-5)


def test_a_model_that_adds_routing_losses_itself_has_them_once() -> None:
    """GPT is such a model, and also returns its observations."""
    models = []
    for is_followed in (True, False):
        torch.manual_seed(0)
        config = GPTConfig.preset("tiny", rule=WITH_LOSSES[0][0], z_loss=0.01, vocab_size=64, context=16, d_model=32)
        model = GPT(config).train()
        torch.nn.init.normal_(model.head.weight)
        if is_followed:
            followed(model)
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2))
        output = model(tokens, tokens)
        output.loss.backward()
        models.append((model, output))
    (one, mine), (other, theirs) = models
    torch.testing.assert_close(mine.loss, theirs.loss)
    torch.testing.assert_close(gradients(one), gradients(other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dispatch", ["reference", "grouped", "static"])
def test_losses_reach_the_router_where_no_token_goes_to_an_expert(dispatch: str) -> None:
    moe = MoE(8, 12, ExpertThreshold(4, warmup_steps=0, capacity_slack=None), 0, dispatch, z_loss=0.01)
    followed(moe)
    moe.router.state_mean.fill_(1e9)
    moe.router.state_weight.fill_(1)
    x = X.requires_grad_()
    y, observation = moe(x)
    assert int(observation.load.sum()) == 0
    y.sum().backward()
    assert moe.router.weight.grad.any()
    assert x.grad.any()


def test_accumulation_without_a_scale_of_losses_warns_once() -> None:
    rule, z_loss = WITH_LOSSES[0]
    for scale, rule_, warns in ((None, rule, True), (1.0, rule, False), (0.5, rule, False), (None, ROUTED[0], False)):
        model, optimizer, _ = followed(Foreign(rule_, z_loss=z_loss if rule_ is rule else None), loss_scale=scale)
        for step in range(2):
            for x in batches(2):
                model(x).mean().backward()
            if warns and step == 0:
                with pytest.warns(UserWarning, match=r"2 backward passes .*loss_scale=1 / 2"):
                    optimizer.step()
            else:
                optimizer.step()


@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_loop_in_evaluation_mode_warns(first: str) -> None:
    """Regression: if a loop called `eval()` for a validation but never `train()`, updates stopped silently."""
    model, optimizer, _ = followed()
    if first == "train":
        model(X).mean().backward()
        optimizer.step()
    model.eval()(X).mean().backward()
    with pytest.warns(UserWarning, match=r"call model.train\(\)"):
        optimizer.step()
    if first == "eval":
        optimizer.step()  # warns once


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rule", ROUTED, ids=lambda rule: type(rule).__name__)
def test_scores_that_are_not_finite_move_no_rule_and_are_reported(rule: Rule, value: float) -> None:
    model = Foreign(rule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # which makes no weight NaN
    follow(model, optimizer)
    model(X).mean().backward()
    optimizer.step()
    before = model.states()
    row = model.layers[1].router.weight.data[2]
    whole = row.clone()
    row[0] = value
    model(X).mean().backward()
    with pytest.warns(UserWarning, match=r"scores of expert 2 in layers\.1\.router are not finite; this step"):
        optimizer.step()
    assert_all_equal(model.states(), before)
    row.copy_(whole)
    model(X).mean().backward()
    optimizer.step()
    with pytest.raises(AssertionError):
        assert_all_equal(model.states(), before)
    assert all(state.isfinite().all() for state in model.states())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # so is that
def test_a_compiled_model_is_followed_too() -> None:
    rule, z_loss = WITH_LOSSES[0]
    plain, compiled = Foreign(rule, z_loss=z_loss), Foreign(rule, z_loss=z_loss)
    for model, forward in ((plain, plain), (compiled, torch.compile(compiled, backend="aot_eager"))):
        _, optimizer, follower = followed(model, loss_scale=0.5)
        for first, second in zip(*[iter(batches(6))] * 2, strict=True):
            optimizer.zero_grad()
            for x in (first, second):
                (forward(x).square().mean() / 2).backward()
            assert tokens_seen(follower) == [32, 32]
            optimizer.step()
    torch.testing.assert_close([*compiled.parameters()], [*plain.parameters()])
    torch.testing.assert_close(compiled.states(), plain.states())


def test_a_frozen_router_has_losses_without_gradient() -> None:
    model = Foreign(TokenChoice(4, 1, balance="aux")).requires_grad_(False)
    follower = follow(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    model(X)
    assert float(follower.loss()) > 0


def test_a_layer_used_twice_in_one_forward_is_observed_twice_and_is_no_accumulation() -> None:
    moe, optimizer, follower = followed(MoE(8, 12, ROUTED[0], z_loss=0.01))
    moe(moe(X)[0])[0].mean().backward()
    assert int(follower.observations[moe.router].tokens) == 32
    optimizer.step()


def test_after_remove_nothing_is_seen_and_nothing_moves() -> None:
    model, optimizer, follower = followed()
    model(X).sum().backward()
    follower.remove()
    states = model.states()
    model(X)
    optimizer.step()
    assert_all_equal(model.states(), states)


def test_follow_uses_the_given_group_or_the_default_group_once_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `Trainer` of transformers may initialise torch.distributed after `follow`."""
    *_, follower = followed()
    assert follower.group is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert follower.group is torch.distributed.group.WORLD


def test_ranks_train_as_one_process_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).with_name("follow_across_ranks.py"), 2, tmp_path)


def test_what_the_readme_shows_ends_with_the_fanout_aimed_at() -> None:
    """Regression: the README used a running mean, which does not settle in 60 steps, so the fanout was 0.5."""
    torch.manual_seed(0)
    shown: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec("".join(blocks), shown)
    assert int(shown["model"].moe.router.state.step) == 60
    seen: list[Observation] = []
    shown["model"].moe.register_forward_hook(lambda _, __, output: seen.append(output[1]))
    with torch.no_grad():
        shown["model"].eval()(shown["rows"])
    (observation,) = seen
    assert 0.8 < float(observation.fanout_mean) < 1.25


def test_a_model_without_experts_is_refused() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="model Linear has no Mixture-of-Experts layer to follow; build it with MoE"):
        follow(model, torch.optim.SGD(model.parameters(), 0.1))

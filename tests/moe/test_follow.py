"""`follow`: a foreign training loop moves the rules as a loop of ours would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expert_threshold.moe import MoE, follow
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice

RULES: list[Rule] = [
    ExpertThreshold(4, decay=0.5, warmup_steps=1),
    ExpertChoice(4, decay=0.5),
    TokenChoice(4, 1, balance="loss_free", bias_rate=0.1),
]


class Foreign(nn.Module):
    """A model that is not ours, with two MoE layers, checkpointed or not."""

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
                x = x + layer(x)[0]
            else:
                x = x + checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=self.use_reentrant)
        return x

    def states(self) -> list[Tensor]:
        return [value.clone() for layer in self.layers for value in layer.router.state]


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(1)))


def assert_all_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_three_steps_of_two_micro_batches_equal_the_manual_updates(rule: Rule) -> None:
    followed, manual = Foreign(rule), Foreign(rule)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (followed, manual)]
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
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_recomputation_under_activation_checkpointing_counts_once(rule: Rule, use_reentrant: bool) -> None:
    plain, checkpointed = Foreign(rule), Foreign(rule, checkpointed=use_reentrant)
    for model in (plain, checkpointed):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        follower = follow(model, optimizer)
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert [int(seen.tokens) for seen in follower.observations.values()] == [16, 16]
            optimizer.step()
    for found, expected in zip(checkpointed.states(), plain.states(), strict=True):
        torch.testing.assert_close(found, expected)


def test_only_forwards_in_training_mode_count() -> None:
    model = Foreign(RULES[0])
    follower = follow(model, torch.optim.SGD(model.parameters(), 0.1))
    model.eval()(batches(1)[0])
    assert not follower.observations
    model.train()(batches(1)[0])
    assert len(follower.observations) == 2


def test_a_step_that_saw_nothing_moves_nothing() -> None:
    model = Foreign(RULES[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    follow(model, optimizer)
    model(batches(1)[0]).sum().backward()
    optimizer.step()
    states = model.states()
    optimizer.step()
    assert_all_equal(model.states(), states)


def test_the_losses_of_all_layers_and_micro_batches_are_handed_over_once() -> None:
    model = Foreign(TokenChoice(4, 1, balance="aux", aux_strength=0.1), z_loss=0.01)
    follower = follow(model, torch.optim.SGD(model.parameters(), 0.1))
    expected = 0.0
    for x in batches(2):
        model(x)
        h = model.inner(x)
        for layer in model.layers:
            routing = layer.router.forward(h)
            assert routing.loss is not None
            expected += float(routing.loss.detach())
            h = h + layer.compute(h, routing)
    loss = follower.loss()
    assert isinstance(loss, Tensor)
    torch.testing.assert_close(float(loss.detach()), expected)
    loss.backward()
    assert all(layer.router.weight.grad is not None for layer in model.layers)
    assert follower.loss() == 0.0


@pytest.mark.parametrize("checkpointed", [None, False])
def test_losses_reach_the_router_from_inside_of_checkpointing_too(checkpointed: bool | None) -> None:
    model = Foreign(TokenChoice(4, 1, balance="aux", aux_strength=0.1), checkpointed=checkpointed)
    follower = follow(model, torch.optim.SGD(model.parameters(), 0.1))
    y = model(batches(1)[0])
    (0 * y.sum() + follower.loss()).backward()
    for layer in model.layers:
        assert layer.router.weight.grad is not None
        assert layer.router.weight.grad.any()


def test_losses_that_could_not_train_are_refused_rather_than_ignored() -> None:
    """Reentrant checkpointing runs its first forward without gradients."""
    model = Foreign(TokenChoice(4, 1, balance="aux"), checkpointed=True)
    follow(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(batches(1)[0])


def test_a_frozen_router_has_losses_without_gradient() -> None:
    model = Foreign(TokenChoice(4, 1, balance="aux")).requires_grad_(False)
    follower = follow(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    model(batches(1)[0])
    assert float(follower.loss()) > 0


def test_a_rule_without_a_loss_adds_nothing_to_the_training_loss() -> None:
    model = Foreign(RULES[0])
    follower = follow(model, torch.optim.SGD(model.parameters(), 0.1))
    model(batches(1)[0])
    assert follower.loss() == 0.0


def test_a_layer_used_twice_in_one_forward_is_observed_twice() -> None:
    moe = MoE(8, 12, RULES[0])
    follower = follow(moe, torch.optim.SGD(moe.parameters(), 0.1))
    moe(moe(batches(1)[0])[0])
    assert int(follower.observations[moe.router].tokens) == 32


def test_after_remove_nothing_is_seen_and_nothing_moves() -> None:
    model = Foreign(RULES[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    follower = follow(model, optimizer)
    model(batches(1)[0]).sum().backward()
    follower.remove()
    states = model.states()
    model(batches(1)[0])
    optimizer.step()
    assert_all_equal(model.states(), states)


def test_a_model_without_experts_is_refused() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="model Linear has no Mixture-of-Experts layer to follow; build it with MoE"):
        follow(model, torch.optim.SGD(model.parameters(), 0.1))

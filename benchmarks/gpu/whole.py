"""A whole model with random weights and settled rules, and one step of its training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expert_threshold.model import GPT, GPTConfig
from expert_threshold.optim import OptimConfig, Optimizers, make_optimizers
from expert_threshold.routing import ExpertChoice, ExpertThreshold, QuantileBalancing, Rule, TokenChoice

from .setting import Setting

SETTLING = 8
EXPERTS = 16
RULES: dict[str, Rule | None] = {
    "dense": None,
    "expert_threshold": ExpertThreshold(EXPERTS, 1, decay=0.9, warmup_steps=0),
    "token_choice": TokenChoice(EXPERTS, 1),
    "expert_choice": ExpertChoice(EXPERTS, 1, pool="batch"),
    "quantile_balancing": QuantileBalancing(EXPERTS, 1),
}
"""Rules that are timed, of equal active FLOPs; decay as short as the settling."""


def config_of(preset: str, rule: Rule | None, setting: Setting) -> GPTConfig:
    """Return a preset with a rule; a toy in a dry run."""
    toy = {
        "vocab_size": 96, "context": 32, "layers": 2, "d_model": 32, "heads": 2, "kv_heads": 2, "d_expert": 64,
        "d_feed_forward": 128,
    }  # fmt: skip
    return GPTConfig.preset(preset, rule=rule, **setting.pick({}, toy))


def batch_of(config: GPTConfig, sequences: int, setting: Setting) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets."""
    tokens = torch.randint(config.vocab_size, (sequences, config.context + 1), device=setting.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def random_model(config: GPTConfig, sequences: int, setting: Setting) -> GPT:
    """Return a model in training mode whose weights are all random: zeros would be multiplied faster.

    Its rule has seen a few batches, so that loads vary by chance, as they do in training.
    """
    torch.manual_seed(0)
    with setting.device:
        model = GPT(config, compute_dtype=setting.dtype)
    for weight in model.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    with torch.no_grad():
        for _ in range(SETTLING if config.rule is not None else 0):
            model.update_rules(model(*batch_of(config, sequences, setting)).observations)
    return model


def forward_backward(model: GPT, tokens: Tensor, targets: Tensor) -> None:
    """Run forward, backward and the rules' update."""
    output = model(tokens, targets)
    output.loss.backward()
    model.update_rules(output.observations)


def optimizers_of(model: GPT) -> Optimizers:
    return make_optimizers(model.named_parameters(), OptimConfig(), model.config.d_model)

"""Cutoffs that move while a model of Hugging Face transformers is fine-tuned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..moe import Follower, Router, rule_from_dict
from ..moe import follow as follow_routers


def follow(model: nn.Module, optimizer: torch.optim.Optimizer) -> Follower:
    """From now on `model` routes in training as it did in pre-training, and each `optimizer.step()` moves its rules.

    Without it cutoffs and biases stay as they were trained. model: as `AutoModelForCausalLM` loads it, also with
    `trust_remote_code`; for `Trainer`, give it the optimizer too, `Trainer(..., optimizers=(optimizer, None))`.
    Padding would move the cutoffs, so that in training an attention_mask with zeros raises ValueError: pack texts
    instead. Raises ValueError if the model has no Mixture-of-Experts layer.
    """
    for layer in list(model.modules()):
        frozen = getattr(layer, "router", None)
        if frozen is not None and not isinstance(frozen, Router):
            layer.router = _thawed(frozen, model.config.z_loss)  # type: ignore[union-attr, arg-type]
    follower = follow_routers(model, optimizer)
    model.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    return follower


def _thawed(frozen: nn.Module, z_loss: float | None) -> Router:
    """The router of our own layer in place of the exported one's, with the same weight and buffers."""
    assert isinstance(frozen.rule, dict)
    assert isinstance(frozen.weight, nn.Parameter)
    rule = rule_from_dict(frozen.rule)
    assert rule is not None
    router = Router(frozen.weight.shape[1], rule, z_loss)
    router.weight = frozen.weight
    for name, buffer in frozen.named_buffers():
        # Older folders bring code that loads the counter of steps as a number.
        setattr(router, name, buffer.to(getattr(router, name).dtype))
    return router.train(frozen.training)


def _refuse_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if model.training and mask is not None and not mask.all():
        raise ValueError("attention_mask has padding, which would move the cutoffs; pack texts, or do not follow")

"""Updates cutoffs while an exported model is fine-tuned with Hugging Face transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..moe import Follower, Router
from ..moe import follow as follow_routers
from ..routing import rule_from_dict


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    loss_scale: float | None = None,
) -> Follower:
    """Make `model` route as in pre-training while it is trained, and update its rules in each `optimizer.step()`.

    Without this, cutoffs and biases never change, and rules add no losses. The model may have been loaded by
    `AutoModelForCausalLM` with or without `trust_remote_code`. With `Trainer`, use
    `Trainer(..., optimizers=(optimizer, None))` and loss_scale=1 / gradient_accumulation_steps. See
    `expert_threshold.moe.follow` for `group` and `loss_scale`. Raises ValueError if the model has no Mixture-of-Experts
    layer, and in training if the attention_mask contains padding, which would bias the cutoffs.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for layer in list(model.modules()):
        frozen = getattr(layer, "router", None)
        if frozen is not None and not isinstance(frozen, Router):
            _make_trainable(frozen, model.config)
    follower = follow_routers(model, optimizer, group=group, loss_scale=loss_scale)
    model.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    return follower


def _make_trainable(frozen: nn.Module, config: Any) -> None:
    """Turn an exported model's router into our `Router`, which has the same weight but returns the whole routing.

    The module is changed in place, since FSDP2 gathers weights only for modules that it was given.
    """
    rule = rule_from_dict(config.rule)
    assert rule is not None
    assert isinstance(frozen.weight, nn.Parameter)
    with torch.device("meta"):
        ours = Router(frozen.weight.shape[1], rule, config.z_loss)
    frozen.__class__ = Router
    for name in vars(ours).keys() - vars(nn.Module()).keys():
        setattr(frozen, name, getattr(ours, name))


def _refuse_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if model.training and mask is not None and not mask.all():
        raise ValueError("attention_mask contains padding, which would bias the cutoffs; pack texts or remove follow()")

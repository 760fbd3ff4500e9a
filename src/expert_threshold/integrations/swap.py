"""Our rules in the mixtures of transformers: the routers change, experts and weights stay."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ..moe import Router
from ..routing import Rule, TokenChoice, rule_from_dict, rule_to_dict
from .transformers import chosen

Model = TypeVar("Model", bound=nn.Module)

SAVED = "routing_rule"
"""Entry of a model's configuration: the rule that was put into it."""


def _of_softmax(router: Any) -> TokenChoice:
    gate = "softmax_chosen" if getattr(router, "norm_topk_prob", True) else "softmax"
    return TokenChoice(router.num_experts, router.top_k, gate=gate)  # type: ignore[arg-type]


def _of_sigmoid(router: Any) -> TokenChoice:
    return TokenChoice(
        router.num_experts,
        router.top_k,
        balance="loss_free",
        gate="sigmoid_normalised" if router.norm_topk_prob else "sigmoid",
        gate_scale=router.routed_scaling_factor,
        over="gates",
        num_groups=router.num_group,
        groups_per_token=router.topk_group,
    )


ROUTERS = {
    "MixtralTopKRouter": _of_softmax,
    "OlmoeTopKRouter": _of_softmax,
    "Qwen3MoeTopKRouter": _of_softmax,
    "GptOssTopKRouter": _of_softmax,
    "DeepseekV3TopkRouter": _of_sigmoid,
    "NemotronHTopkRouter": _of_sigmoid,
}
"""The routers that can be swapped, by class, each with the rule that routes as it does."""


class SwappedRouter(Router):
    """A router of ours in the place of one of transformers, with its weights, under its names.

    A call returns what theirs returns: scores (tokens, num_scores), weights and ids of experts (tokens, K). K is the
    most experts of any token; a token with fewer has others with weight 0. Hooks see the whole routing, as `follow`
    needs.
    """

    bias: Tensor | None

    def __init__(self, old: Any, rule: Rule) -> None:
        with torch.device("meta"):
            super().__init__(old.weight.shape[1], rule)
        experts, nulls = rule.num_experts, rule.num_scores - rule.num_experts
        bias = getattr(old, "bias", None)
        if len(old.weight) == rule.num_scores:
            self.weight, self.bias = old.weight, bias
        else:
            self.weight = nn.Parameter(F.pad(old.weight.data[:experts], (0, 0, 0, nulls)))
            self.bias = None if bias is None else nn.Parameter(F.pad(bias.data[:experts], (0, nulls)))
        self.to_empty_state(old.weight.device)
        own = getattr(old, "e_score_correction_bias", None)
        if own is not None and getattr(rule, "balance", None) == "loss_free":
            self.state.bias.copy_(own)
        self.rows: tuple[int, int] | None = None  # (batch, time) of the model's inputs
        self.mask: Tensor | None = None  # (batch, time), where there is padding
        self.train(old.training)

    def to_empty_state(self, device: torch.device) -> None:
        """Make the state's buffers on the device, before the first step."""
        for name, value in self.rule.init()._asdict().items():
            setattr(self, f"state_{name}", value.to(device))

    def score(self, x: Tensor) -> Tensor:
        scores = super().score(x)
        return scores if self.bias is None else scores + self.bias.float()

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        rows, width = self.rows, hidden.shape[-1]
        x = hidden.reshape(*rows, width) if rows is not None else hidden.reshape(1, -1, width)
        mask = self.mask if self.training else None  # in inference a token is routed by itself
        scores, weights, ids = chosen(self.rule, super().__call__(x, mask=mask), None)
        return scores, weights.to(hidden.dtype), ids


def routers(model: nn.Module) -> dict[str, Any]:
    """Return the routers of a mixture by name. Raises ValueError if the model has none that we know."""
    found = {n: m for n, m in model.named_modules() if type(m).__name__ in ROUTERS or isinstance(m, SwappedRouter)}
    if not found:
        known = ", ".join(sorted(name.partition("TopK")[0].partition("Topk")[0] for name in ROUTERS))
        raise ValueError(f"{type(model).__name__} has no router that can be swapped; use a mixture of {known}")
    return found


def own_rule(model: nn.Module) -> Rule:
    """Return the rule that routes as the model does. Raises ValueError if the model has no router that we know."""
    router = next(iter(routers(model).values()))
    return router.rule if isinstance(router, SwappedRouter) else ROUTERS[type(router).__name__](router)


def swap_rule(model: Model, rule: Rule | None = None) -> Model:
    """Make a mixture of transformers route by `rule`, in place, and return it; experts and all weights stay.

    rule: None is the rule in the model's configuration, with which it was saved. Where the configuration has this
    rule, its state is read from the folder that the model was loaded from; else the state starts anew, but for the
    biases of a loss-free checkpoint. `follow(model, optimizer)` then trains the rule. Tokens whose attention_mask is 0
    take part in nothing. Raises ValueError for a model or a rule that does not fit.
    """
    saved = getattr(model.config, SAVED, None)
    if rule is None:
        if saved is None:
            raise ValueError("the model's configuration has no rule; pass one, or own_rule(model) for the model's own")
        rule = rule_from_dict(saved)
    _require_fits(rule, model)
    assert rule is not None
    for name, old in routers(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SwappedRouter(old, rule))
    if saved == rule_to_dict(rule):
        _restore(model)
    setattr(model.config, SAVED, rule_to_dict(rule))
    base: Any = getattr(model, "base_model", model)
    if _note_inputs not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(_note_inputs, with_kwargs=True)
    return model


def _require_fits(rule: Any, model: nn.Module) -> None:
    if not isinstance(rule, Rule):
        raise ValueError(f"rule={rule!r} is not a rule; use ExpertThreshold(), say")
    experts = {
        len(old.weight) if type(old).__name__ in ROUTERS else old.rule.num_experts for old in routers(model).values()
    }
    if experts != {rule.num_experts}:
        raise ValueError(f"rule has num_experts={rule.num_experts}; the model has {', '.join(map(str, experts))}")
    if rule.scope(training=False) != "token":
        raise ValueError(f"{type(rule).__name__} looks at whole sequences, which no cache of transformers keeps")
    probe = rule.route(torch.zeros(1, rule.num_experts, rule.num_scores), rule.init(), training=False)
    if probe.passthrough is not None:
        raise ValueError(f"{type(rule).__name__} copies tokens, which the blocks of transformers cannot do")


def _note_inputs(base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Tell the routers, which see a flat list of tokens, its rows and which tokens are padding."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    rows: tuple[int, int] = (tokens.shape[0], tokens.shape[1])
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all()
    for module in base.modules():
        if isinstance(module, SwappedRouter):
            module.rows = rows
            module.mask = mask[:, -rows[1] :].bool() if padded else None


def _restore(model: Any) -> None:
    """Read the routers' states from the folder of the model, if it was loaded from one.

    transformers saves some architectures under other names than it loads them; the numbers in them are the layers.
    """
    states: defaultdict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)
    for file in Path(str(model.name_or_path)).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  no mapping
                name, found, field = key.rpartition(".state_")
                if found:
                    states[tuple(map(int, re.findall(r"\d+", name)))][field] = tensors.get_tensor(key)
    for (_, state), router in zip(sorted(states.items()), routers(model).values(), strict=bool(states)):
        for field, value in state.items():
            getattr(router.state, field).copy_(value)

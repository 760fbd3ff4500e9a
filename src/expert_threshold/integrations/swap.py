"""Puts our rules into Mixture-of-Experts models from transformers by replacing their routers. Weights stay the same."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe import Router
from ..routing import Rule, TokenChoice, rule_from_dict, rule_to_dict
from .transformers import chosen

Model = TypeVar("Model", bound=nn.Module)

OWN_BIAS = "e_score_correction_bias"
SAVED = "routing_rule"
"""The entry of a model's configuration that stores the rule that was swapped in."""


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
"""The router classes that can be swapped, each with a function that returns the rule by which it routes."""


class Inputs(NamedTuple):
    """The shape (batch, time) of a model's input, which routers see flattened, and its mask if there is padding."""

    rows: tuple[int, int]
    mask: Tensor | None


class SwappedRouter(Router):
    """Our router in place of one from transformers, with the same weights under the same names.

    A call returns what the original router returns: scores (tokens, num_scores), and weights and ids of experts
    (tokens, K). K is the largest fanout of any token, and tokens with fewer experts are padded with others of weight 0.
    Hooks receive the whole routing because `follow` needs it.
    """

    bias: Tensor | None

    def __init__(self, old: Any, rule: Rule) -> None:
        with torch.device("meta"):
            super().__init__(old.weight.shape[1], rule)
        self.weight, self.bias = old.weight, getattr(old, "bias", None)
        for name, value in rule.init()._asdict().items():
            setattr(self, f"state_{name}", value.to(old.weight.device))
        if (own := getattr(old, OWN_BIAS, None)) is not None:  # kept for swapping back
            self.register_buffer(OWN_BIAS, own)
            if getattr(rule, "balance", None) == "loss_free":
                self.state.bias.copy_(own)
                self.register_state_dict_post_hook(_save_biases)
        self.inputs: Inputs | None = None
        self.waits = self.mixed = self.recomputed = False  # see `note`
        self.train(old.training)

    def score(self, x: Tensor) -> Tensor:
        scores = super().score(x)
        return scores if self.bias is None else scores + self.bias.float()

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        rows, mask = self._inputs_of(hidden)
        x = hidden.reshape(*rows, hidden.shape[-1])
        mask = mask if self.training else None  # at inference each token is routed independently
        scores, weights, ids = chosen(self.rule, super().__call__(x, mask=mask), None)
        return scores, weights.to(hidden.dtype), ids

    def note(self, inputs: Inputs, checkpointed: bool) -> None:
        """Store the inputs of a forward pass and whether they differ from a pass that may yet be recomputed."""
        if self.recomputed or not self.waits:
            self.waits, self.mixed = checkpointed and self.training and torch.is_grad_enabled(), False
        elif self.inputs is not None:
            self.mixed |= inputs.rows != self.inputs.rows or inputs.mask is not None or self.inputs.mask is not None
        self.inputs, self.recomputed = inputs, False

    def _inputs_of(self, hidden: Tensor) -> Inputs:
        tokens = hidden.numel() // hidden.shape[-1]
        if torch._C._current_graph_task_id() != -1:  # inside backward, under activation checkpointing
            self.recomputed = True
            if self.mixed:
                raise ValueError(
                    "activation checkpointing would recompute a forward pass after one with another shape or padding; "
                    "call backward after each forward pass, or switch checkpointing off"
                )
        if self.inputs is None or self.inputs.rows[0] * self.inputs.rows[1] != tokens:
            return Inputs((1, tokens), None)  # the block was called on its own
        return self.inputs


def _save_biases(router: Any, saved: dict[str, Tensor], prefix: str, _metadata: object) -> None:
    """Also save trained biases under the model's own name for them, the only one that transformers reads."""
    if router.rule.over == "gates" and router.rule.gate.startswith("sigmoid"):  # as in the model
        saved[prefix + OWN_BIAS] = router.state.bias.to(router.e_score_correction_bias.dtype, copy=True)


def routers(model: nn.Module) -> dict[str, Any]:
    """Return the routers of a transformers model, keyed by name. Raises ValueError if none of them can be swapped."""
    found = {n: m for n, m in model.named_modules() if type(m).__name__ in ROUTERS or isinstance(m, SwappedRouter)}
    if not found:
        known = ", ".join(sorted(name.partition("TopK")[0].partition("Topk")[0] for name in ROUTERS))
        raise ValueError(f"{type(model).__name__} has no router that can be swapped; use one of {known}")
    return found


def own_rule(model: nn.Module) -> Rule:
    """Return the rule by which the model routes. Raises ValueError if no router can be swapped."""
    router = next(iter(routers(model).values()))
    return router.rule if isinstance(router, SwappedRouter) else ROUTERS[type(router).__name__](router)


def swap_rule(model: Model, rule: Rule | None = None) -> Model:
    """Make a transformers model with experts route by `rule`, in place, and return it. Its weights do not change.

    If `rule` is None, the rule saved in the model's configuration is used, and its state is read from the folder or the
    cached repository that the model was loaded from. If the model already has the rule, nothing changes. Otherwise the
    state is new, except for the biases of a loss-free checkpoint. Swap before calling `fully_shard`, `compile`, or
    `follow(model, optimizer)`, which trains the rule. Tokens whose attention_mask is 0 are ignored.
    Raises ValueError if the model or the rule is unsuitable.
    """
    found = routers(model)
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no configuration; pass the transformers model, not a wrapper")
    if saved := rule is None:
        if getattr(config, SAVED, None) is None:
            raise ValueError("the model's configuration has no rule; pass rule=own_rule(model) or another rule")
        rule = rule_from_dict(getattr(config, SAVED))
    assert rule is not None
    _require_fits(rule, found.values())
    changed = {name: old for name, old in found.items() if getattr(old, "rule", None) != rule}
    states = _saved_states(model, len(found)) if saved and changed else []
    for name, old in changed.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SwappedRouter(old, rule))
    for state, router in zip(states, routers(model).values(), strict=bool(states)):
        for field, value in state.items():
            getattr(router.state, field).copy_(value)
    setattr(config, SAVED, rule_to_dict(rule))
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # the model's own loss reads its own routers' outputs
    base: Any = getattr(model, "base_model", model)
    if _note_inputs not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(_note_inputs, with_kwargs=True)
    return model


def _require_fits(rule: object, found: Iterable[Any]) -> None:
    if not isinstance(rule, Rule):
        raise ValueError(f"rule={rule!r} is not a rule; use a rule such as ExpertThreshold()")
    for old in found:
        if isinstance(old.weight, DTensor):
            raise ValueError("the model is already sharded; call swap_rule before fully_shard")
        if len(old.weight) != rule.num_experts:
            raise ValueError(f"the rule has num_experts={rule.num_experts}, but the model has {len(old.weight)}")
    if rule.num_scores != rule.num_experts:
        raise ValueError(f"{type(rule).__name__} needs more scores than one per expert, which the checkpoint lacks")
    if rule.scope(training=False) != "token":
        raise ValueError(f"{type(rule).__name__} needs whole sequences, which the caches of transformers do not keep")


def _note_inputs(base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Pass the input's shape and padding mask to the routers, which see only a flat list of tokens."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    batch, time = tokens.shape[:2]
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all()
    inputs = Inputs((batch, time), mask[:, -time:].bool() if padded else None)
    # transformers has renamed this property, and reading it under the old name raises a warning.
    name = "is_activation_checkpointing"
    checkpointed = getattr(base, name if hasattr(type(base), name) else "is_gradient_checkpointing")
    for module in base.modules():
        if isinstance(module, SwappedRouter):
            module.note(inputs, checkpointed)


def _saved_states(model: Any, layers: int) -> list[dict[str, Tensor]]:
    """Return the routers' states, in layer order, from the model's folder or cached repository.

    transformers saves some architectures under other names than it loads them by, so layers are matched by number.
    """
    folder = Path(str(model.name_or_path))
    if not folder.is_dir():
        import huggingface_hub

        folder = Path(huggingface_hub.snapshot_download(model.name_or_path, local_files_only=True))
    states: defaultdict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  no mapping
                name, found, field = key.rpartition(".state_")
                if found:
                    states[tuple(map(int, re.findall(r"\d+", name)))][field] = tensors.get_tensor(key)
    if len(states) != layers:
        raise ValueError(f"{folder} has states for {len(states)} routers, not {layers}; pass a rule for a new state")
    return [state for _, state in sorted(states.items())]

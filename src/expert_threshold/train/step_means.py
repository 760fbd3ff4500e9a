"""What is measured once in every optimizer step. Metrics have its mean over steps, the same whatever --log-every is.

Of sums over many steps these would be something else: the largest of summed loads is nearer to their mean, and the mean
of batch cutoffs nearer to the cutoff, the more steps are summed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..model import GPT, Observation

Values = dict[str, Tensor]
"""By `layer.name`, without gradient, on the model's device: of one step, or summed over several."""


def step_values(model: GPT, observations: tuple[Observation, ...]) -> Values:
    """Of the step that saw `observations`, before it moves the rules: cutoffs and biases are those it was routed by."""
    found: Values = {}
    for (layer, moe), seen in zip(model.moe_layers(), observations, strict=True):
        values = {name: getattr(seen, name) for name in ("load_spread", "fanout_std", "score_std", "gate_std")}
        rule, state = moe.router.rule, moe.router.state
        values |= {name: value.clone() for name, value in rule.describe(state).items()}  # the router moves it in place
        values |= rule.measure(state, seen)
        found |= {f"{layer}.{name}": value for name, value in values.items()}
    return found


def add_steps(a: Values, b: Values) -> Values:
    """Both together."""
    return {name: value + b[name] for name, value in a.items()}


def of_layer(values: Mapping[str, Tensor], layer: int) -> Values:
    """Those of one layer, by name."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

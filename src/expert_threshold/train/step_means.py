"""Values measured once per optimizer step; metrics hold their mean over steps, which is independent of --log-every.

Computed from sums over several steps they would depend on the number of steps: the more are summed, the closer is the
largest load to the mean load, and the mean batch cutoff to the cutoff.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..model import GPT, Observation

Values = dict[str, Tensor]
"""One step's values, or their sum over several steps, by `layer.name`; without gradient, on the model's device."""


def step_values(model: GPT, observations: tuple[Observation, ...]) -> Values:
    """Return the values of a step; call it before the rules are updated, for the cutoffs and biases that routed it."""
    found: Values = {}
    for (layer, moe), seen in zip(model.moe_layers(), observations, strict=True):
        values = {name: getattr(seen, name) for name in ("load_spread", "fanout_std", "score_std", "gate_std")}
        rule, state = moe.router.rule, moe.router.state
        values |= {name: value.clone() for name, value in rule.describe(state).items()}  # updated in place
        values |= rule.measure(state, seen)
        found |= {f"{layer}.{name}": value for name, value in values.items()}
    return found


def add_steps(a: Values, b: Values) -> Values:
    """Return the sum of both, value by value."""
    return {name: value + b[name] for name, value in a.items()}


def of_layer(values: Mapping[str, Tensor], layer: int) -> Values:
    """Return the values of one layer, by name."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

"""Load balance, its cost at scale, and the routing objective compared with its optimum."""

from __future__ import annotations

import math
from importlib.util import find_spec
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...model import GPTConfig, flops_per_token, parameter_counts
from ...model.trace import Trace
from ..material import Material, Study, of_each_method, over_methods
from ..measures import best_expert_choice, best_token_choice, routing_objective
from ..measures import load_spread as spread_of
from ..plain import Data, NotShownError, array
from ..records import Run
from ..sentences import each, fixed, listed, percent, pool_size
from .plot import draw_key, log2_axis, name_lines, panels, ratio_axis, rows_of, single
from .style import MUTED, NARROW, WIDE, Figure, strokes

TOKENS_PER_EXPERT = (64, 256, 1024, 4096, 16384, 65536)
EXPERTS = 4096
DEVICES = (8, 32, 128, 512, 2048, 4096)
AT = 1024
"""The number of tokens per expert at which numbers of devices are compared."""
STEPS = 64
"""The number of steps drawn for each size."""
REFERENCE = "d20"
"""The preset that gives the share of FLOPs in routed experts."""
BATCH, BATCHES, LAYERS = 128, 4, 4
"""Tokens per batch, batches per layer, and the maximum number of layers for which the optimum is computed."""


@of_each_method
def load_balance(material: Material, run: Run) -> Data:
    """Compute the largest load / mean load of each layer under causal routing."""
    trace = material.trace(run)
    loads = torch.stack([trace.assignment(layer).sum(0) for layer in trace.layers])
    return {"layers": trace.layers, "spread": spread_of(loads)}


def draw_load_balance(data: Data) -> Figure:
    figure, axes = single(NARROW, 2, "largest load / mean load", "layer")
    for entry, stroke in zip(data["methods"], strokes(data["methods"]).values(), strict=True):
        axes.plot(entry["layers"], array(entry["spread"]), **stroke, marker="o")
    layers = sorted({layer for entry in data["methods"] for layer in entry["layers"]})
    axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axes.set_xticks(layers[:: -(-len(layers) // 8)])
    ratio_axis(axes)
    name_lines(axes, list(axes.lines))
    return figure


def say_load_balance(data: Data) -> str:
    def worst(entry: Data) -> str:  # a dash where no token is routed
        return fixed(max((value for value in entry["spread"] if value is not None), default=None), 2)

    return f"In the worst layer, the largest load divided by the mean is {each(data, worst)}."


def objective(material: Material) -> Data:
    """Compute the mean score of a routed token, Σ z·r / Σ z, under each rule and at the optima (paper, Eq. 3 to 5).

    All use the same tokens, `BATCHES` batches of `BATCH` spread evenly over the trace. Values are standard deviations
    above the layer's mean score, averaged over layers, so random routing has 0. Routing fewer tokens gives higher
    scores, so the optima route as many tokens as the rule; `load` is its load divided by the target load. With free
    fanouts, the optimum is each expert's best tokens: `population`, with equal loads over all batches (Eq. 5 on
    average), and `choice`, with equal loads in each batch (Eq. 4). `balanced` also bounds fanouts, by linear
    programming (Eq. 3): no token has more experts than the mean fanout, rounded. `shares`: the rule's value divided by
    the optimum, with free and with fixed fanouts.
    """

    def compute(run: Run) -> Data:
        trace = material.trace(run)
        layers = trace.layers[:LAYERS]
        found = [each for layer in layers if (each := _objectives(trace.scores(layer), trace.assignment(layer)))]
        if not found:
            raise NotShownError("no token is routed, or its scores do not vary")
        means = {name: np.mean([each[name] for each in found]) for name in found[0] if all(name in e for e in found)}
        optima = {"free": means["population"], "fixed": means.get("balanced", 0)}
        shares = {name: means["rule"] / best for name, best in optima.items() if best > 0}
        means["load"] /= run.rule.experts_per_token
        return {**means, "shares": shares}

    data = over_methods(material.each("routing objective", material.routed), compute)
    if find_spec("scipy") is None:
        data["left_out"]["Eq. 3"] = "it needs scipy, which is missing; pip install scipy"
    return {"batch": BATCH, **data}


def draw_objective(data: Data) -> Figure:
    """Draw the mean score of routed tokens under each rule next to the optima with as many routed tokens."""
    methods = data["methods"]
    marks: dict[str, tuple[str, dict[str, Any]]] = {
        "rule": ("the rule", {"marker": "o", "markersize": 6}),
        "balanced": ("Eq. 3, token bounded, expert fixed", {"marker": "s", "markersize": 5, "markerfacecolor": "none"}),
        "choice": ("Eq. 4, expert fixed per batch", {"marker": "D", "markersize": 5, "markerfacecolor": "none"}),
        "population": ("Eq. 5, expert on average", {"marker": "^", "markersize": 6, "markerfacecolor": "none"}),
    }
    figure, axes = rows_of(NARROW, [f"{entry['method']}, load {100 * entry['load']:.0f} %" for entry in methods])
    drawn = {name: mark for name, mark in marks.items() if any(entry.get(name) is not None for entry in methods)}
    draw_key(figure, {name: {"color": MUTED, "linestyle": "none", **mark} for name, mark in drawn.values()})
    for row, (entry, stroke) in enumerate(zip(methods, strokes(methods).values(), strict=True)):
        for name, (_, mark) in drawn.items():
            if entry.get(name) is not None:
                axes.plot(entry[name], row, linestyle="none", color=stroke["color"], **mark)
    figure.supxlabel("mean score of a routed token (standard deviations)", color=MUTED, fontsize=9, x=0.99, ha="right")
    return figure


def say_objective(data: Data) -> str:
    def clause(entry: Data) -> str:
        shares = " and ".join(f"{percent(share)} with {name} fanouts" for name, share in entry["shares"].items())
        return f"{shares} (load {percent(entry['load'])})"

    return (
        "The mean score of a routed token above the layer's mean, as a share of the optimum with equal loads and as "
        f"many routed tokens (load: as a share of the target load), is {each(data, clause)}. With free fanouts "
        "(Eq. 5), the optimum is each expert's best tokens; with fixed fanouts (Eq. 3), no token has more experts than "
        "the mean, rounded. Unequal loads can put a rule above an optimum."
    )


def _objectives(scores: Tensor, assignment: Tensor) -> dict[str, float] | None:
    """Return the objectives of a layer's scores and assignment (tokens, experts).

    Return None if no token is routed, or if scores do not vary, which makes all assignments equally good.
    """
    tokens, experts = scores.shape
    size = max(BATCH // experts, 1) * experts
    if tokens < size * BATCHES:
        raise NotShownError(f"it needs a trace of {size * BATCHES} tokens or more; use a larger --tokens")
    begin = torch.arange(BATCHES)[:, None] * (tokens // BATCHES)
    sample = begin + torch.arange(size)  # (batches, tokens)
    batches, assignment = scores[sample], assignment[sample]
    fanout = float(assignment.sum() / sample.numel())
    mean, std = batches.double().mean(), batches.double().std()
    if fanout == 0 or std == 0:
        return None

    def edge(chosen: Tensor, of: Tensor) -> float:
        return float((routing_objective(of, chosen).sum() / chosen.sum() - mean) / std)

    together = batches.flatten(0, 1)[None]
    population = best_expert_choice(together, max(round(fanout * sample.numel() / experts), 1))
    found = {"rule": edge(assignment, batches), "population": edge(population, together), "load": fanout}
    if k := int(assignment.sum()) // (BATCHES * experts):
        found["choice"] = edge(best_expert_choice(batches, k), batches)
    if find_spec("scipy") is not None:
        most = max(round(fanout), 1)
        load = min(max(round(size * fanout / experts), 1), size * most // experts)
        found["balanced"] = edge(torch.stack([best_token_choice(batch, most, load) for batch in batches]), batches)
    return found


def load_at_scale(material: Material) -> Data:
    """Compute the largest / mean load of experts and devices as their numbers and tokens grow, and the waiting.

    Resampled: each expert of a large layer copies a recorded one, and a step gives it random whole windows of the trace
    with the intended mean load, so that clustering and mean usage stay as recorded. Closed form: loads are normal with
    variance

        (load / mean)² = φ · (1 − p) / tokens_per_expert + s²,

    where p is the mean usage, φ the variance relative to independent tokens, and s the relative standard deviation of
    usage over experts; for a device with n experts it is 1/n of this. The expected largest of m loads is
    Φ⁻¹((m − 3/8) / (m + 1/4)) standard deviations above the mean (Blom). A step waits for the busiest device, and
    experts account for the same share of its time as of its FLOPs, `experts_share`.
    """

    def compute(run: Run) -> Data:
        trace, generator = material.trace(run), np.random.Generator(np.random.PCG64(0))
        loads = window_loads(trace)
        spread = spread_of_windows(loads, trace.context)
        drawn = {tokens: resample(loads, tokens, generator) for tokens in TOKENS_PER_EXPERT}
        return {
            **spread._asdict(),
            "by_tokens": {
                "resampled": [busiest(drawn[tokens], EXPERTS) for tokens in TOKENS_PER_EXPERT],
                "closed_form": [spread.closed_form(tokens, EXPERTS, EXPERTS) for tokens in TOKENS_PER_EXPERT],
            },
            "by_devices": {
                "resampled": [busiest(drawn[AT], devices) for devices in DEVICES],
                "closed_form": [spread.closed_form(AT, EXPERTS, devices) for devices in DEVICES],
            },
            "exact": run.bounds is not None and len(set(run.bounds)) == 1,
        }

    model = GPTConfig.preset(REFERENCE)
    assert model.rule is not None
    routed = parameter_counts(model)["routed_experts"] * model.rule.experts_per_token / model.rule.num_experts
    return {
        "tokens_per_expert": TOKENS_PER_EXPERT,
        "experts": EXPERTS,
        "devices": DEVICES,
        "at": AT,
        "experts_share": 6 * routed / flops_per_token(model),
        "reference": REFERENCE,
        **over_methods(material.each("load at scale", material.routed), compute),
    }


def draw_load_at_scale(data: Data) -> Figure:
    """Draw the largest / mean load by tokens and by devices, and the waiting: resampled (dots) and computed (lines)."""
    methods = data["methods"]
    dots: dict[str, Any] = {"color": MUTED, "linestyle": "none", "marker": "o"}
    tokens, devices = data["tokens_per_expert"], data["devices"]
    key = {**strokes(methods), "resampled": dots, "closed form": {"color": MUTED, "linewidth": 1}}
    titles = [
        f"{pool_size(data['experts'])} experts: busiest / mean",
        f"with {pool_size(data['at'])} tokens: busiest device",
        f"a step of {data['reference']} waits (%)",
    ]
    figure, every = panels(WIDE, titles, 1.8, columns=3, share=False, key=key)
    for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
        dot = dots | {"color": stroke["color"], "label": f"{entry['method']}, resampled"}
        for axes, x, found in zip(every, (tokens, devices), (entry["by_tokens"], entry["by_devices"]), strict=False):
            axes.plot(x, array(found["closed_form"]), **stroke, linewidth=1)
            axes.plot(x, array(found["resampled"]), **dot)
        wait = 100 * data["experts_share"] * (array(entry["by_devices"]["resampled"]) - 1)
        every[2].plot(devices, wait, **stroke, marker="o", linewidth=1)
    places = ("tokens per expert", tokens, 1), ("devices", devices, 1), ("devices", devices, 0)
    for axes, (label, ticks, least) in zip(every, places, strict=True):
        axes.set_xlabel(label, loc="right")
        log2_axis(axes, ticks[::2])
        axes.set_ylim(bottom=least)
    return figure


def say_load_at_scale(data: Data) -> str:
    def clause(entry: Data) -> str:
        spread = entry["by_devices"]["resampled"][-1]
        return f"{spread:.2f} times the mean load ({percent(data['experts_share'] * (spread - 1))})"

    text = (
        f"With {data['experts']:,} experts, one per device, and {pool_size(data['at'])} tokens per expert on "
        f"average, the busiest device has {each(data, clause)}. In brackets is how much longer a step takes if "
        f"routed experts are {percent(data['experts_share'])} of it, as in {data['reference']}."
    )
    exact = [entry["method"] for entry in data["methods"] if entry["exact"]]
    known = f" In training, all loads of {listed(exact)} are exact; here routing is as at inference." if exact else ""
    return text + known


class Spread(NamedTuple):
    """The statistics of recorded loads that determine load imbalance."""

    usage: float  # mean share of the tokens
    clustering: float  # φ, the variance of a window's load relative to independent tokens
    usage_spread: float  # s, the standard deviation of mean usage over experts, relative to its mean

    def closed_form(self, tokens: int, experts: int, devices: int) -> float:
        """Return the expected largest / mean load of devices; see `load_at_scale`."""
        variance = self.clustering * (1 - self.usage) / tokens + self.usage_spread**2
        return 1 + largest_of(devices) * math.sqrt(variance * devices / experts)


def window_loads(trace: Trace) -> np.ndarray:
    """Return the load of every expert of every layer in each window, (windows, layers · experts)."""
    windows = len(trace) // trace.context
    if windows < 2:
        raise NotShownError(f"it needs a trace of {2 * trace.context} tokens or more; use a larger --tokens")
    whole = (trace.assignment(layer)[: windows * trace.context] for layer in trace.layers)
    return torch.cat([z.view(windows, trace.context, -1).sum(1) for z in whole], 1).double().numpy()


def spread_of_windows(loads: np.ndarray, context: int) -> Spread:
    """Return the statistics of loads (windows, experts) in windows of `context` tokens."""
    usage = loads.mean(0) / context
    mean = max(usage.mean(), 1e-12)
    independent = max((context * usage * (1 - usage)).sum(), 1e-12)
    return Spread(float(mean), float(loads.var(0, ddof=1).sum() / independent), float(usage.std() / mean))


def resample(loads: np.ndarray, tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Resample loads (windows, columns) into loads of `EXPERTS` experts in `STEPS` steps, (steps, experts).

    tokens: mean load of an expert. Columns are reused, each time with newly drawn windows.
    """
    windows, columns = loads.shape
    drawn = max(round(tokens / max(loads.mean(), 1e-12)), 1)
    layers = -(-EXPERTS // columns)
    steps = []
    for _ in range(STEPS):
        counts = generator.multinomial(drawn, np.full(windows, 1 / windows), size=layers)
        steps.append(generator.permutation((counts @ loads).ravel())[:EXPERTS])
    return np.stack(steps)


def busiest(loads: np.ndarray, devices: int) -> float:
    """Return the largest / mean load of devices, averaged over steps. loads: (steps, experts)."""
    device = loads.reshape(len(loads), devices, -1).sum(2)
    return float((device.max(1) / np.maximum(device.mean(1), 1e-12)).mean())


def largest_of(count: int) -> float:
    """Return the expected maximum of `count` standard normals (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


FIGURES = [
    Study("load_balance", "Load balance", load_balance, draw_load_balance, say_load_balance),
    Study("objective", "Routing objective", objective, draw_objective, say_objective),
    Study("load_at_scale", "Load at scale", load_at_scale, draw_load_at_scale, say_load_at_scale),
]

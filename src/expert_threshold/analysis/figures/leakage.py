"""Leakage of future tokens through assignments: bounds in closed form, and measured in traces (paper, Appendix A)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ...model.trace import Trace
from ..leakage import MoELayers, bound, decode, encode, finite_leakage, leakage, limit, log2_choices
from ..material import Material
from ..methods import Subject, pool_tokens
from ..plain import Data, NotShownError, array
from ..sentences import counted, listed, pool_size, two_digits
from .axes import method_strokes, outer_labels, panels, plain_ticks
from .study import Study
from .style import ACCENT, INK, MUTED, SMALL, WIDE, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POOLS = tuple(2**power for power in range(8, 25, 2))
"""Pool sizes in tokens for the closed form."""
PRECISIONS = (16, 32)
"""Bits of a cutoff in bfloat16 and float32."""
EXAMPLE = (False, True, True, False, False, True, False, True)
"""A choice to encode into a cutoff and decode back."""
PROBED = tuple(2**power for power in range(6, 19, 2))
"""Pool sizes in tokens for the probe."""
SAMPLES, DRAWS, TOKENS = 128, 512, 2**16
"""Probed tokens, random pools drawn for each of them, and tokens of the trace that pools are drawn from."""


LEAST = 1e-6
"""Bits per token below which nothing is drawn."""


def leakage_bounds(material: Material) -> Data:
    """Compute the closed form for the model of the run in focus."""
    subject = material.focus
    rule = subject.run.rule
    per_token, experts = rule["experts_per_token"], rule["num_experts"]
    if per_token != int(per_token) or experts % per_token or experts == per_token:
        raise NotShownError("Eq. 7 needs a whole number of experts per token that divides the experts and is fewer")
    return closed_form(MoELayers(experts // int(per_token), int(per_token), len(subject.layers)))


def closed_form(model: MoELayers) -> Data:
    """Return bits per token by pool size: Eq. 7 exactly, its bound, its limit, and finite cutoffs."""
    lower, upper = encode(EXAMPLE)
    choice, scores, _ = decode((lower + upper) / 2, len(EXAMPLE))
    assert tuple(choice) == EXAMPLE
    return {
        **model._asdict(),
        "tokens": POOLS,
        "exact": [leakage(model, tokens) for tokens in POOLS],
        "limit": limit(model),
        "bound": bound(model),
        "per_expert": [log2_choices(tokens, tokens // model.expansion) for tokens in POOLS],
        "if_superlinear": [model.layers * model.granularity * np.log2(tokens) for tokens in POOLS],
        "finite": {bits: [finite_leakage(model, tokens, bits) for tokens in POOLS] for bits in PRECISIONS},
        "example": {
            "choice": EXAMPLE,
            "cutoff": float((lower + upper) / 2),
            "scores": [float(score) for score in scores],
            "intervals": [[float(low), float(high)] for low, high in intervals(EXAMPLE)],
        },
    }


def intervals(choice: Sequence[bool]) -> list[tuple[Fraction, Fraction]]:
    """Return the cutoffs that remain before each token and after the last (paper, Algorithm 2)."""
    return [encode(choice[:place]) for place in range(len(choice) + 1)]


def draw_leakage_bounds(data: Data) -> Figure:
    """Draw bits per token over pool size, by Eq. 7 and with finite cutoffs, and the decoding of one choice."""
    exact: dict[str, Any] = {"color": ACCENT, "marker": "o"}
    lines: dict[str, tuple[str, dict[str, Any]]] = {
        "exact": ("Eq. 7, exactly", exact),
        "limit": ("its limit G·E·h(1/E)", {"color": ACCENT, "linestyle": (0, (1, 1.4))}),
        "bound": ("bound G·log₂(E − 1)", {"color": INK, "linestyle": (0, (4, 1.6)), "linewidth": 1}),
        "if_superlinear": ("if N·log₂ N", {"color": MUTED, "linewidth": 1}),
    }
    tokens = data["tokens"]
    figure, every = panels(WIDE, 3, height=1.9, left=0.5, columns=3, share=False, key=dict(lines.values()))
    for name, (_, stroke) in lines.items():
        values = array(data[name]) if isinstance(data[name], list) else np.full(len(tokens), data[name])
        every[0].plot(tokens, values, **stroke)
    every[0].set_ylim(0, max(2.2 * data["limit"], 1.05 * data["if_superlinear"][2]))  # every named line is in view
    every[0].set_title(f"bits per token, {data['layers']} layers")
    for shift, (bits, values) in zip((-10, 6), data["finite"].items(), strict=True):
        every[1].plot(tokens, array(values), color=ACCENT)
        middle = len(tokens) // 2
        every[1].annotate(
            f"{bits} bits", (tokens[middle], values[middle]), (shift, shift), textcoords="offset points",
            color=MUTED, ha="left" if shift > 0 else "right", va="center", fontsize=SMALL,
        )  # fmt: skip
    every[1].axhline(data["limit"], **lines["limit"][1])
    every[1].set_title("with cutoffs of finite precision")
    every[1].set_yscale("log")
    plain_ticks(every[1].yaxis, 7)
    for axes in every[:2]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens[::2], [pool_size(tick) for tick in tokens[::2]])
        axes.set_xlabel("tokens in the pool", loc="right")
    _binary_search(every[2], data["example"])
    return figure


def say_leakage_bounds(data: Data) -> str:
    model = MoELayers(data["expansion"], data["granularity"], data["layers"])
    last = data["tokens"][-1]
    return (
        f"{counted(model.layers, 'layer')} with {model.granularity} of {model.granularity * model.expansion} experts "
        f"per token can leak {data['exact'][-1]:.1f} bits per token by Eq. 7 with pools of {last:,} tokens, and never "
        f"more than {data['limit']:.1f}, so the bits of a pool grow linearly with its tokens; the paper's bound is "
        f"{data['bound']:.1f}. Cutoffs of 32 bits can leak {two_digits(data['finite']['32'][-1])} bits per token."
    )


def leakage_probe(material: Material) -> Data:
    """Compute the bits per token that an assignment leaks in training, over all layers and experts, by pool size.

    A token's score depends on its past only; its assignment may depend on more. `future`: information about later
    tokens of its sequence, I(z_t; r_{>t} | r_{≤t}); `next`: about the next token alone; `pool`: about everything but
    its past, H(z_t | r_{≤t}). Experts are treated as independent and summed, which is an upper bound. Other futures are
    the ends of random windows of the trace, other sequences are random windows. A rule that trains by its cutoffs
    depends on them by its bounds alone; one of token scope does not depend on them.
    """
    methods: list[dict[str, Any]] = []
    left_out = {}
    for subject in material.each("leakage", material.routed):
        own = pool_tokens(subject.run)
        if subject.rule.scope(training=True) == "token":
            methods.append({**subject.tag, "own": None, "tokens": [], **{name: [] for name in Bits._fields}})
            continue
        if subject.bounds is None and (subject.rule.looks_ahead or not subject.run.has_cutoffs):
            left_out[subject.method] = "its rule does not say how many tokens of a pool an expert takes"
            continue
        trace = material.trace(subject)
        sizes = sorted({size for size in (*PROBED, own) if size is not None and _fits(size, trace, subject)})
        bits = _probe(trace, subject, sizes)
        columns = {name: [getattr(each, name) for each in bits] for name in Bits._fields}
        methods.append({**subject.tag, "own": own, "tokens": sizes, **columns})
    if not any(entry["tokens"] for entry in methods):
        silent = [entry["method"] for entry in methods if entry["own"] is None]
        if silent and len(silent) == len(methods):
            raise NotShownError(f"in {listed(silent)} an assignment depends on nothing but its own token")
        raise NotShownError("no pool can be formed from these traces; give more --tokens")
    return {
        "left_out": left_out,
        "methods": methods,
        "layers": len(material.focus.layers),
        "experts": material.focus.run.rule["num_experts"],
    }


def draw_leakage_probe(data: Data) -> Figure:
    """Draw the bits that an assignment in training leaks over pool size; a large dot is the pool trained with."""
    titles = {"pool": "of the rest of the pool", "future": "of its own future", "next": "of the next token"}
    methods = [entry for entry in data["methods"] if any((array(entry[name]) > LEAST).any() for name in titles)]
    key = dict(method_strokes(methods))
    if any(entry["own"] in entry["tokens"] for entry in methods):
        key["pool in training"] = {"color": MUTED, "linestyle": "none", "marker": "o", "markersize": 6}
    figure, every = panels(WIDE, 3, height=1.9, left=0.75, columns=3, key=key)
    ticks = sorted({size for entry in methods for size in entry["tokens"]})
    for axes, (name, title) in zip(every, titles.items(), strict=True):
        for entry, stroke in zip(methods, strokes(methods), strict=True):
            bits = array(entry[name])
            shown = np.where(bits > LEAST, bits, np.nan)
            axes.plot(entry["tokens"], shown, **stroke, marker="o", markersize=2)
            if entry["own"] in entry["tokens"]:
                own = entry["tokens"].index(entry["own"])
                axes.plot(entry["own"], shown[own], "o", color=stroke["color"], markersize=6)
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    ticks = ticks[:: -(-len(ticks) // 5)]
    every[0].set_xticks(ticks, [pool_size(tick) for tick in ticks])
    plain_ticks(every[0].yaxis, 8)
    outer_labels(every, "tokens in the pool", "bits per token, all layers")
    return figure


def _binary_search(axes: Axes, example: Data) -> None:
    """Draw the cutoffs that remain before each token, with its score; filled if it exceeds the cutoff."""
    rows = range(len(example["choice"]))
    for row in rows:
        low, high = example["intervals"][row]
        axes.plot([low, high], [row, row], color=MUTED, linewidth=3, alpha=0.4, solid_capstyle="butt")
        fill = ACCENT if example["choice"][row] else "none"
        axes.plot(example["scores"][row], row, "o", color=ACCENT, markersize=5, markerfacecolor=fill)
    axes.axvline(example["cutoff"], color=INK, linewidth=0.8, linestyle=(0, (2, 1.5)))
    axes.set_yticks(rows, [f"{row + 1}: {int(example['choice'][row])}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(False)
    axes.set_title("token: choice, told by one cutoff")
    axes.set_xlabel("score, cutoff", loc="right")


def say_leakage_probe(data: Data) -> str:
    told = [entry for entry in data["methods"] if entry["own"] in entry["tokens"]]
    parts = []
    for entry in told:
        place = entry["tokens"].index(entry["own"])
        future, following = entry["future"][place], entry["next"][place]
        pool = f"pools of {pool_size(entry['own'])} tokens"
        parts.append(f"{two_digits(future)} and {two_digits(following)} in {entry['method']} ({pool})")
    silent = [entry["method"] for entry in data["methods"] if entry["own"] is None and not entry["tokens"]]
    text = (
        "In training the assignment of a token leaks these bits about its whole future and about the next token: "
        f"{listed(parts)}"
        if parts
        else "No run's own pool fits into its trace"
    )
    return f"{text}; none in {listed(silent)}." if silent else f"{text}."


class Bits(NamedTuple):
    """Bits per token; see `leakage_probe`."""

    pool: float
    future: float
    next: float


def _fits(size: int, trace: Trace, subject: Subject) -> bool:
    """Return True if k ≥ 1 in such a pool, and pools are whole windows or windows are whole pools."""
    longer, shorter = max(size, trace.context), min(size, trace.context)
    return longer % shorter == 0 and size * subject.run.target >= 1 and len(trace) >= 2 * shorter


class Pool(NamedTuple):
    """A pool: a token's own sequence with `others` more, and an expert's bounds in it."""

    others: int
    k_min: int
    k_max: int


def _probe(trace: Trace, subject: Subject, sizes: Sequence[int]) -> list[Bits]:
    """Return the bits of pools of each size, over all layers and experts."""
    rule = subject.rule
    found = []
    for time, alike in groupby(sizes, lambda size: min(size, trace.context)):
        pools = [
            Pool(size // time - 1, *(rule.load_bounds(size) or (0, size)))  # no bounds, nothing is enforced
            for size in alike
        ]
        totals = np.zeros((len(pools), len(Bits._fields)))
        for layer in trace.layers:
            scores = trace.scores(layer)[: max(TOKENS, 2 * time)]
            always = None if rule.looks_ahead else rule.thresholds(trace.state(layer))
            rows = scores[: len(scores) // time * time].view(-1, time, scores.shape[1])
            totals += np.array(probe_layer(rows, pools, always))
        found += [Bits(*row) for row in totals.tolist()]
    return found


def probe_layer(rows: Tensor, pools: Sequence[Pool], always: Tensor | None) -> list[Bits]:
    """Return the bits in each pool of scores (sequences, time, experts): means over tokens, summed over experts.

    always: cutoffs (experts,), or None if the bounds are equal, so that no cutoff matters.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    sequences, time, experts = rows.shape
    even = np.full(sequences, 1 / sequences)
    drawn = [generator.multinomial(pool.others, even, size=DRAWS).astype(np.float32) for pool in pools]
    totals = np.zeros((len(pools), len(Bits._fields)))
    for sample in range(SAMPLES):
        position = sample * time // SAMPLES
        own = rows[int(generator.integers(sequences))]
        score = own[position]
        above = np.zeros(experts, bool) if always is None else (score > always).numpy()
        past = (own[:position] > score).sum(0).numpy()  # (experts,)
        greater = rows > score
        follows = greater[:, position + 1 : position + 2].sum(1).numpy()  # (sequences, experts): 0 or 1
        later = greater[:, position + 2 :].sum(1).numpy()
        in_window = greater.sum(1).float().numpy()
        for place, pool in enumerate(pools):
            room = np.where(above, pool.k_max, pool.k_min) - past
            elsewhere = np.sort(drawn[place] @ in_window, axis=0)  # (draws, experts)
            for expert in range(experts):
                totals[place] += _bits(room[expert], elsewhere[:, expert], follows[:, expert], later[:, expert])
    return [Bits(*row) for row in (totals / SAMPLES).tolist()]


def _bits(room: int, elsewhere: np.ndarray, follows: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Return the bits of one token and one expert, which takes it if fewer than `room` tokens not past score higher.

    elsewhere: the number that score higher in other sequences, sorted, for each draw; follows, later: the same for the
    next token, 0 or 1, and for those after it, for each future.
    """

    def taken(greater: np.ndarray) -> np.ndarray:
        return np.searchsorted(elsewhere, room - greater, side="left") / len(elsewhere)

    by_future = taken(follows + later)
    all_of_it = _entropy(by_future.mean())
    shares = [1 - follows.mean(), follows.mean()]
    by_next = [taken(later + step).mean() for step in (0, 1)]
    of_next = _entropy(np.dot(shares, by_next)) - np.dot(shares, _entropy(np.array(by_next)))
    return np.array([all_of_it, all_of_it - _entropy(by_future).mean(), max(float(of_next), 0.0)])


def _entropy(p: Any) -> Any:
    """Return h(p) in bits."""
    q = 1 - p
    return -(p * np.log2(np.maximum(p, 1e-300)) + q * np.log2(np.maximum(q, 1e-300)))


FIGURES = [
    Study("leakage_bounds", "Leakage", "Bounds on leakage",
          leakage_bounds, draw_leakage_bounds, say_leakage_bounds),
    Study("leakage_probe", "Leakage", "Leakage in training",
          leakage_probe, draw_leakage_probe, say_leakage_probe),
]  # fmt: skip

"""Bounds on what an expert's choice of tokens reveals about the future, and bits in traces of runs (Appendix A).

    python examples/paper/leakage.py [RUN...] [--num-experts 16] [--experts-per-token 2] [--layers 9] [--out FOLDER]

One expert takes k = ⌊N/E⌋ of a pool of N tokens, those whose score exceeds a cutoff that depends on the whole pool.
Leakage is the least advice, in bits, with which a causal decoder could make the same choice. A layer has granularity ·
expansion experts (the paper's G and E); each token goes to G of them on average.

The paper calls log2 C(N, N/E) superlinear in N, O(N log N). For a fixed E it is linear: by Stirling's formula

    log2 C(N, pN) = N·h(p) − ½ log2(2π·N·p·(1 − p)) + O(1/N),    h(p) = −p log2 p − (1 − p) log2(1 − p),

so that a token's share of it rises towards the constant h(1/E) per expert.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby, permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from torch import Tensor

from expert_threshold.analysis.figures.plot import log2_axis, log_ticks, panels
from expert_threshold.analysis.figures.style import ACCENT, INK, MUTED, SMALL, WIDE, Axes, Figure, strokes
from expert_threshold.analysis.material import Material
from expert_threshold.analysis.page import save_figure
from expert_threshold.analysis.plain import Data, array
from expert_threshold.analysis.records import Run
from expert_threshold.analysis.results import markdown
from expert_threshold.analysis.sentences import counted, pool_size
from expert_threshold.cli.analyze import open_material
from expert_threshold.model.trace import Trace
from expert_threshold.train.log import Display

POOLS = tuple(2**power for power in range(8, 25, 2))  # tokens, for the closed form
PRECISIONS = (16, 32)  # bits of a cutoff in bfloat16 and float32
EXAMPLE = (False, True, True, False, False, True, False, True)  # a choice to encode into a cutoff and decode back
LARGEST = 4  # tokens of the pool that is searched exhaustively, which takes about a second
PROBED = tuple(2**power for power in range(6, 19, 2))  # tokens, for the probe
# Probed tokens, random pools drawn for each of them, and tokens of the trace that pools are drawn from.
SAMPLES, DRAWS, TOKENS = 128, 512, 2**16
LEAST = 1e-6  # bits per token below which nothing is drawn


class MoELayers(NamedTuple):
    """A model with `layers` MoE layers of granularity · expansion experts; each token goes to `granularity` of them."""

    expansion: int
    granularity: int
    layers: int

    @property
    def experts(self) -> int:
        """The number of experts in all layers."""
        return self.layers * self.granularity * self.expansion


def leakage(model: MoELayers, tokens: int) -> float:
    """Return bits per token with cutoffs of infinite precision, GE/N · log2 C(N, ⌊N/E⌋) per layer (paper, Eq. 7)."""
    return model.experts * log2_choices(tokens, tokens // model.expansion) / tokens


def limit(model: MoELayers) -> float:
    """Return G·E·h(1/E) bits per token and layer, which `leakage` approaches from below as the pool grows."""
    return model.experts * float(entropy(1 / model.expansion))


def bound(model: MoELayers) -> float:
    """Return G·log2(E − 1) bits per token and layer, a lower bound of `leakage` if E divides N (paper, Eq. 7)."""
    return model.layers * model.granularity * math.log2(model.expansion - 1)


def finite_leakage(model: MoELayers, tokens: int, bits: int) -> float:
    """Return the most bits per token that cutoffs of `bits` bits can leak (paper, Finite-precision cutoff).

    A cutoff determines the choice, and the choice itself is advice too, so this never exceeds `leakage`.
    """
    return min(model.experts * bits / tokens, leakage(model, tokens))


def entropy(p: Any) -> Any:
    """Return h(p) in bits."""
    q = 1 - p
    return -(p * np.log2(np.maximum(p, 1e-300)) + q * np.log2(np.maximum(q, 1e-300)))


def log2_choices(n: int, k: int) -> float:
    """Return log2 C(n, k) for 0 ≤ k ≤ n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


Cutoffs = tuple[Fraction, Fraction]
"""A half-open interval of cutoffs, [first, second)."""


def encode(choice: Sequence[bool]) -> Cutoffs:
    """Return the cutoffs from which a causal decoder reads this choice, 2⁻ᴺ of [0, 1) (paper, Encoding Strategy).

    The lower end belongs to the interval because a score must exceed the cutoff. With the paper's r ≥ c, a score equal
    to the cutoff would be taken although the choice says no.
    """
    lower = Fraction(int("0" + "".join("01"[not taken] for taken in choice), 2), 2 ** len(choice))
    return lower, lower + Fraction(1, 2 ** len(choice))


def decode(cutoff: Fraction, tokens: int) -> tuple[list[bool], list[Fraction], Cutoffs]:
    """Decode the choice in a cutoff from [0, 1) token by token (paper, Algorithm 2), in exact arithmetic.

    Returns the choice, the scores, and the cutoffs that remain after the last token. Each score is the middle of the
    cutoffs that remain before its token.
    """
    lower, upper = Fraction(0), Fraction(1)
    choice, scores = [], []
    for _ in range(tokens):
        score = (lower + upper) / 2
        taken = score > cutoff
        lower, upper = (lower, score) if taken else (score, upper)
        choice.append(taken)
        scores.append(score)
    return choice, scores, (lower, upper)


def least_advice(tokens: int, k: int, levels: int) -> int:
    """Return the fewest labels that let a causal decoder choose the k largest of `tokens` distinct scores.

    Scores take `levels` values. log2 of the result is the leakage (paper, Definition of Future Information Leakage).
    The search over all sequences of scores is exhaustive. Two sequences need different labels if they agree up to a
    token that only one of them takes: groups that differ in the choice for the latest token add up, groups that differ
    in its score can share labels.
    """

    def labels(sequences: Sequence[tuple[int, ...]], token: int) -> int:
        """Return the labels needed for sequences that agree before `token`."""
        if len(sequences) == 1:
            return 1
        groups: dict[int, dict[bool, list[tuple[int, ...]]]] = {}
        for scores in sequences:
            taken = scores[token] in sorted(scores)[tokens - k :]
            groups.setdefault(scores[token], {}).setdefault(taken, []).append(scores)
        return max(sum(labels(group, token + 1) for group in choices.values()) for choices in groups.values())

    return labels(list(permutations(range(levels), tokens)), 0)


def draw_leakage_bounds(model: MoELayers) -> Figure:
    """Draw bits per token over pool size, by Eq. 7 and with finite cutoffs, and the decoding of one choice."""
    exact = [leakage(model, tokens) for tokens in POOLS]
    superlinear = [model.layers * model.granularity * math.log2(tokens) for tokens in POOLS]
    dotted: dict[str, Any] = {"color": ACCENT, "linestyle": (0, (1, 1.4))}
    lines: dict[str, tuple[list[float], dict[str, Any]]] = {
        "Eq. 7, exactly": (exact, {"color": ACCENT, "marker": "o"}),
        "its limit G·E·h(1/E)": ([limit(model)] * len(POOLS), dotted),
        "bound G·log₂(E − 1)": ([bound(model)] * len(POOLS), {"color": INK, "linestyle": (0, (4, 1.6))}),
        "if N·log₂ N": (superlinear, {"color": MUTED, "linewidth": 1}),
    }
    parts = ("with cutoffs of finite precision", "token: choice, encoded in one cutoff")
    titles = [f"bits per token, {model.layers} layers", *parts]
    key = {name: stroke for name, (_, stroke) in lines.items()}
    figure, every = panels(WIDE, titles, 1.9, columns=3, share=False, key=key)
    for values, stroke in lines.values():
        every[0].plot(POOLS, values, **stroke)
    every[0].set_ylim(0, max(2.2 * limit(model), 1.05 * superlinear[2]))  # every named line is in view
    middle = len(POOLS) // 2
    for shift, bits in zip((-10, 6), PRECISIONS, strict=True):
        values = [finite_leakage(model, tokens, bits) for tokens in POOLS]
        every[1].plot(POOLS, values, color=ACCENT)
        every[1].annotate(
            f"{bits} bits", (POOLS[middle], values[middle]), (shift, shift), textcoords="offset points",
            color=MUTED, ha="left" if shift > 0 else "right", va="center", fontsize=SMALL,
        )  # fmt: skip
    every[1].axhline(limit(model), **dotted)
    every[1].set_yscale("log")
    log_ticks(every[1].yaxis, 7)
    for axes in every[:2]:
        log2_axis(axes, POOLS[::2])
        axes.set_xlabel("tokens in the pool", loc="right")
    _binary_search(every[2], EXAMPLE)
    return figure


def _binary_search(axes: Axes, example: Sequence[bool]) -> None:
    """Draw the cutoffs that remain before each token, with its score; filled if it exceeds the cutoff."""
    lower, upper = encode(example)
    _, scores, _ = decode((lower + upper) / 2, len(example))
    for row, (taken, score) in enumerate(zip(example, scores, strict=True)):
        low, high = encode(example[:row])
        axes.plot([low, high], [row, row], color=MUTED, linewidth=3, alpha=0.4, solid_capstyle="butt")
        fill = ACCENT if taken else "none"
        axes.plot(score, row, "o", color=ACCENT, markersize=5, markerfacecolor=fill)
    axes.axvline((lower + upper) / 2, color=INK, linewidth=0.8, linestyle=(0, (2, 1.5)))
    axes.set_yticks(range(len(example)), [f"{row + 1}: {int(taken)}" for row, taken in enumerate(example)])
    axes.set_ylim(len(example) - 0.5, -0.5)
    axes.grid(False)
    axes.set_xlabel("score, cutoff", loc="right")


BITS = {"pool": "of the rest of the pool", "future": "of its own future", "next": "of the next token"}
"""The quantities of `leakage_probe`, in bits, with their panel titles."""


def leakage_probe(material: Material) -> list[Data]:
    """Return by method the bits per token that an assignment leaks in training, over all layers and experts, by pool.

    A token's score depends on its past only; its assignment may depend on more. `future`: information about later
    tokens of its sequence, I(z_t; r_{>t} | r_{≤t}); `next`: about the next token alone; `pool`: about everything but
    its past, H(z_t | r_{≤t}). Experts are treated as independent and summed, which is an upper bound. Other futures are
    the ends of random windows of the trace, other sequences are random windows. A rule that trains by its cutoffs
    depends on them by its bounds alone; one of token scope does not depend on them.
    """
    methods: list[Data] = []
    for run in material.each("leakage", material.routed):
        own, sizes, bits = run.pool, list[int](), np.zeros((0, len(BITS)))
        bounded = run.bounds is not None or (run.has_cutoffs and not run.rule.looks_ahead)
        if run.rule.scope(training=True) != "token" and bounded:
            trace = material.trace(run)
            sizes = sorted({size for size in (*PROBED, own) if size is not None and _fits(size, trace, run)})
            bits = _probe(trace, run, sizes)
        methods.append({**run.tag, "own": own, "tokens": sizes, **dict(zip(BITS, bits.T, strict=True))})
    return methods


def draw_leakage_probe(probed: Sequence[Data]) -> Figure:
    """Draw the bits that an assignment in training leaks over pool size; a large dot is the pool trained with."""
    methods = [entry for entry in probed if any((array(entry[name]) > LEAST).any() for name in BITS)]
    key = strokes(methods)
    if any(entry["own"] in entry["tokens"] for entry in methods):
        key["pool in training"] = {"color": MUTED, "linestyle": "none", "marker": "o", "markersize": 6}
    x, y = "tokens in the pool", "bits per token, all layers"
    figure, every = panels(WIDE, list(BITS.values()), 1.9, x, y, columns=3, key=key)
    ticks = sorted({size for entry in methods for size in entry["tokens"]})
    for axes, name in zip(every, BITS, strict=True):
        for entry, stroke in zip(methods, strokes(methods).values(), strict=True):
            bits = array(entry[name])
            shown = np.where(bits > LEAST, bits, np.nan)
            axes.plot(entry["tokens"], shown, **stroke, marker="o", markersize=2)
            if entry["own"] in entry["tokens"]:
                own = entry["tokens"].index(entry["own"])
                axes.plot(entry["own"], shown[own], "o", color=stroke["color"], markersize=6)
    log2_axis(every[0], ticks[:: -(-len(ticks) // 5)])  # shared, like the settings below
    every[0].set_yscale("log")
    log_ticks(every[0].yaxis)
    return figure


def say_leakage_probe(entry: Data) -> str:
    """Return a line on a method's own pool."""
    method, own = entry["method"], entry["own"]
    if own not in entry["tokens"]:
        depends = "by its own token alone" if own is None else "with pools that its trace is too short for"
        return f"{method}: not measured; it is trained {depends}"
    future, following = (entry[name][entry["tokens"].index(own)] for name in ("future", "next"))
    return (
        f"{method}: in training, with pools of {pool_size(own)} tokens, the assignment of a token leaks {future:.2g} "
        f"bits about its whole future, {following:.2g} about the next token"
    )


def _fits(size: int, trace: Trace, run: Run) -> bool:
    """Return True if k ≥ 1 in such a pool, and pools are whole windows or windows are whole pools."""
    longer, shorter = max(size, trace.context), min(size, trace.context)
    return longer % shorter == 0 and size * run.target >= 1 and len(trace) >= 2 * shorter


class Pool(NamedTuple):
    """A pool: a token's own sequence with `others` more, and an expert's bounds in it."""

    others: int
    k_min: int
    k_max: int


def _probe(trace: Trace, run: Run, sizes: Sequence[int]) -> np.ndarray:
    """Return the bits of pools of each size, (sizes, 3), over all layers and experts."""
    rule = run.rule
    found = []
    for time, alike in groupby(sizes, lambda size: min(size, trace.context)):
        # Where there are no bounds, nothing is enforced.
        pools = [Pool(size // time - 1, *(rule.load_bounds(size) or (0, size))) for size in alike]
        totals = np.zeros((len(pools), len(BITS)))
        for layer in trace.layers:
            scores = trace.scores(layer)[: max(TOKENS, 2 * time)]
            always = None if rule.looks_ahead else rule.thresholds(trace.state(layer))
            rows = scores[: len(scores) // time * time].view(-1, time, scores.shape[1])
            totals += probe_layer(rows, pools, always)
        found.append(totals)
    return np.concatenate([np.zeros((0, len(BITS))), *found])


def probe_layer(rows: Tensor, pools: Sequence[Pool], always: Tensor | None) -> np.ndarray:
    """Return the bits in each pool of scores (sequences, time, experts), (pools, 3): means over tokens, summed over
    experts.

    always: cutoffs (experts,), or None if the bounds are equal, so that no cutoff matters.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    sequences, time, experts = rows.shape
    even = np.full(sequences, 1 / sequences)
    drawn = [generator.multinomial(pool.others, even, size=DRAWS).astype(np.float32) for pool in pools]
    totals = np.zeros((len(pools), len(BITS)))
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
    return totals / SAMPLES


def _bits(room: int, elsewhere: np.ndarray, follows: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Return the bits of one token and one expert, which takes it if fewer than `room` tokens not past score higher.

    elsewhere: the number that score higher in other sequences, sorted, for each draw; follows, later: the same for the
    next token, 0 or 1, and for those after it, for each future.
    """

    def taken(greater: np.ndarray) -> np.ndarray:
        return np.searchsorted(elsewhere, room - greater, side="left") / len(elsewhere)

    by_future = taken(follows + later)
    all_of_it = entropy(by_future.mean())
    shares = [1 - follows.mean(), follows.mean()]
    by_next = [taken(later + step).mean() for step in (0, 1)]
    of_next = entropy(np.dot(shares, by_next)) - np.dot(shares, entropy(np.array(by_next)))
    return np.array([all_of_it, all_of_it - entropy(by_future).mean(), max(float(of_next), 0.0)])


def main(arguments: Sequence[str]) -> None:
    """Write the figures, and print tables and what runs leak."""
    parser = ArgumentParser(description="Draw how much expert choice can reveal about the future; of runs, how much.")
    parser.add_argument("run", nargs="*", help="runs in whose traces to measure it")
    for name, default in (("num-experts", 16), ("experts-per-token", 2), ("layers", 9), ("tokens", 32768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path("runs/leakage"))
    given = parser.parse_args(arguments)
    per_token = given.experts_per_token
    expansion, rest = divmod(given.num_experts, max(per_token, 1))
    if min(per_token, given.layers, given.tokens) < 1 or rest or expansion < 2:
        parser.error("numbers must be positive, and --num-experts a multiple of --experts-per-token")
    given.out.mkdir(parents=True, exist_ok=True)
    model = MoELayers(expansion, per_token, given.layers)
    save_figure(lambda: draw_leakage_bounds(model), given.out / "leakage_bounds")
    head = ["tokens in the pool", "log₂ C(N, N/E)", "bits per token", *(f"{bits}-bit cutoffs" for bits in PRECISIONS)]
    rows = [
        [f"{n:,}", f"{log2_choices(n, n // model.expansion):,.1f}", f"{leakage(model, n):.3f}"]
        + [f"{finite_leakage(model, n, bits):.3g}" for bits in PRECISIONS]
        for n in POOLS
    ]
    print(f"{counted(model.layers, 'layer')} with {per_token} of {given.num_experts} experts per token\n")
    print(markdown(head, rows))
    print(f"never more than {limit(model):.1f} bits per token; the paper's bound is {bound(model):.1f}\n")
    pools = [(n, k) for n in range(2, LARGEST + 1) for k in range(1, n)]
    found = [[str(n), str(k), str(least_advice(n, k, 2**n - 1)), str(math.comb(n, k))] for n, k in pools]
    print(markdown(["tokens", "k", "labels needed, by exhaustive search", "C(N, k)"], found))
    if given.run:
        with Display(Console(stderr=True), name="leakage") as display:
            options = {"run": given.run, "data": None, "tokens": given.tokens, "device": "auto", "dtype": "auto"}
            probed = leakage_probe(open_material(options, given.out, display))
        print("\n".join(map(say_leakage_probe, probed)))
        if any(entry["tokens"] for entry in probed):
            save_figure(lambda: draw_leakage_probe(probed), given.out / "leakage_probe")


if __name__ == "__main__":
    main(sys.argv[1:])

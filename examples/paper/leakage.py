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
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from torch import Tensor

from expert_threshold.analysis.figures.axes import log_ticks, method_strokes, panels
from expert_threshold.analysis.figures.style import ACCENT, INK, MUTED, SMALL, WIDE, strokes
from expert_threshold.analysis.material import Material
from expert_threshold.analysis.methods import Subject, pool_tokens
from expert_threshold.analysis.page import Exhibit, attempt, exhibits, left_out, page, save_figure, table
from expert_threshold.analysis.plain import Data, NotShownError, array, plain
from expert_threshold.analysis.sentences import counted, listed, pool_size
from expert_threshold.cli.analyze import open_material
from expert_threshold.model.trace import Trace
from expert_threshold.train.log import Display

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
LARGEST = 4
"""Tokens of the pool that is searched exhaustively, which takes about a second."""


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
    return model.experts * binary_entropy(1 / model.expansion)


def bound(model: MoELayers) -> float:
    """Return G·log2(E − 1) bits per token and layer, a lower bound of `leakage` if E divides N (paper, Eq. 7)."""
    return model.layers * model.granularity * math.log2(model.expansion - 1)


def finite_leakage(model: MoELayers, tokens: int, bits: int) -> float:
    """Return the most bits per token that cutoffs of `bits` bits can leak (paper, Finite-precision cutoff).

    A cutoff determines the choice, and the choice itself is advice too, so this never exceeds `leakage`.
    """
    return min(model.experts * bits / tokens, leakage(model, tokens))


def binary_entropy(p: float) -> float:
    """Return h(p) in bits."""
    return 0.0 if p in (0, 1) else -(p * math.log2(p) + (1 - p) * math.log1p(-p) / math.log(2))


def log2_choices(n: int, k: int) -> float:
    """Return log2 C(n, k) for 0 ≤ k ≤ n with a relative error of about 1e-14 at any size.

    Stirling's main terms are combined by hand, because differences of lgamma cancel.
    """
    if k in (0, n):
        return 0.0
    rest = n - k
    main = k * math.log(n / k) - rest * math.log1p(-k / n)  # n · h(k / n)
    nats = main + 0.5 * math.log(n / k / rest / (2 * math.pi))
    return (nats + _stirling_rest(n) - _stirling_rest(k) - _stirling_rest(rest)) / math.log(2)


def _stirling_rest(n: int) -> float:
    """Return ln n! − ln(√(2πn)·(n/e)^n)."""
    if n < 16:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / n**2) / n**2) / n**2) / n


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
    sequences = [
        (scores, [score in sorted(scores)[tokens - k :] for score in scores])
        for scores in permutations(range(levels), tokens)
    ]
    return _labels(sequences, 0)


def _labels(sequences: Sequence[tuple[tuple[int, ...], list[bool]]], token: int) -> int:
    """Return the labels needed for sequences that agree before `token`."""
    if len(sequences) == 1:
        return 1
    groups: dict[int, dict[bool, list[tuple[tuple[int, ...], list[bool]]]]] = {}
    for scores, choice in sequences:
        groups.setdefault(scores[token], {}).setdefault(choice[token], []).append((scores, choice))
    return max(sum(_labels(group, token + 1) for group in taken.values()) for taken in groups.values())


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
    titles = [f"bits per token, {data['layers']} layers", "with cutoffs of finite precision"]
    titles.append("token: choice, told by one cutoff")
    figure, every = panels(WIDE, titles, 1.9, columns=3, share=False, key=dict(lines.values()))
    for name, (_, stroke) in lines.items():
        values = array(data[name]) if isinstance(data[name], list) else np.full(len(tokens), data[name])
        every[0].plot(tokens, values, **stroke)
    every[0].set_ylim(0, max(2.2 * data["limit"], 1.05 * data["if_superlinear"][2]))  # every named line is in view
    for shift, (bits, values) in zip((-10, 6), data["finite"].items(), strict=True):
        every[1].plot(tokens, array(values), color=ACCENT)
        middle = len(tokens) // 2
        every[1].annotate(
            f"{bits} bits", (tokens[middle], values[middle]), (shift, shift), textcoords="offset points",
            color=MUTED, ha="left" if shift > 0 else "right", va="center", fontsize=SMALL,
        )  # fmt: skip
    every[1].axhline(data["limit"], **lines["limit"][1])
    every[1].set_yscale("log")
    log_ticks(every[1].yaxis, 7)
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
        f"{data['bound']:.1f}. Cutoffs of 32 bits can leak {data['finite']['32'][-1]:.2g} bits per token."
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
    x, y = "tokens in the pool", "bits per token, all layers"
    figure, every = panels(WIDE, list(titles.values()), 1.9, x, y, columns=3, key=key)
    ticks = sorted({size for entry in methods for size in entry["tokens"]})
    for axes, name in zip(every, titles, strict=True):
        for entry, stroke in zip(methods, strokes(methods), strict=True):
            bits = array(entry[name])
            shown = np.where(bits > LEAST, bits, np.nan)
            axes.plot(entry["tokens"], shown, **stroke, marker="o", markersize=2)
            if entry["own"] in entry["tokens"]:
                own = entry["tokens"].index(entry["own"])
                axes.plot(entry["own"], shown[own], "o", color=stroke["color"], markersize=6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    ticks = ticks[:: -(-len(ticks) // 5)]
    every[0].set_xticks(ticks, [pool_size(tick) for tick in ticks])
    log_ticks(every[0].yaxis)
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
    axes.set_xlabel("score, cutoff", loc="right")


def say_leakage_probe(data: Data) -> str:
    told = [entry for entry in data["methods"] if entry["own"] in entry["tokens"]]
    parts = []
    for entry in told:
        place = entry["tokens"].index(entry["own"])
        future, following = entry["future"][place], entry["next"][place]
        pool = f"pools of {pool_size(entry['own'])} tokens"
        parts.append(f"{future:.2g} and {following:.2g} in {entry['method']} ({pool})")
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


def bounds_rows(data: Data) -> tuple[list[str], list[list[str]]]:
    """Return the table of Eq. 7 over pool sizes."""
    head = ["tokens in the pool", "log₂ C(N, N/E)", "per token", "bits per token, all layers"]
    head += [f"{bits}-bit cutoffs" for bits in PRECISIONS]
    rows = []
    for place, tokens in enumerate(data["tokens"]):
        bits = data["per_expert"][place]
        finite = [f"{data['finite'][str(each)][place]:.3g}" for each in PRECISIONS]
        rows.append([f"{tokens:,}", f"{bits:,.1f}", f"{bits / tokens:.5f}", f"{data['exact'][place]:.3f}", *finite])
    return head, rows


def search_rows() -> tuple[list[str], list[list[str]]]:
    """Return the table of the least advice found by exhaustive search, beside C(N, k) (paper, lower bound)."""
    pools = [(tokens, k) for tokens in range(2, LARGEST + 1) for k in range(1, tokens)]
    return ["tokens", "k", "labels needed", "C(N, k)"], [
        [str(n), str(k), str(least_advice(n, k, 2**n - 1)), str(math.comb(n, k))] for n, k in pools
    ]


def draw(out: Path, name: str, title: str, data: Data) -> Exhibit:
    """Draw and save a figure of this script."""
    figure = save_figure(lambda: globals()[f"draw_{name}"](data), out / name)
    return Exhibit(title, globals()[f"say_{name}"](data), figure)


def main(arguments: Sequence[str]) -> None:
    """Write the page and the figures, and print what they say."""
    parser = ArgumentParser(description="Draw how much expert choice can reveal about the future; of runs, how much.")
    parser.add_argument("run", nargs="*", help="runs in whose traces to measure it")
    for name, default in (("num-experts", 16), ("experts-per-token", 2), ("layers", 9), ("tokens", 32768)):
        parser.add_argument(f"--{name}", type=count, default=default)
    parser.add_argument("--out", type=Path, default=Path("runs/leakage"))
    given = parser.parse_args(arguments)
    expansion, rest = divmod(given.num_experts, given.experts_per_token)
    if rest or not 2 <= expansion <= POOLS[-2]:
        parser.error("--num-experts must be a multiple of --experts-per-token, and 2 to 4,194,304 times as many")
    given.out.mkdir(parents=True, exist_ok=True)
    data = plain(closed_form(MoELayers(expansion, given.experts_per_token, given.layers)))
    entries = [draw(given.out, "leakage_bounds", "Bounds on leakage", data)]
    if given.run:
        with Display(Console(stderr=True), name="leakage") as display:
            options = {"run": given.run, "data": None, "tokens": given.tokens, "device": "auto", "dtype": "auto"}
            material = open_material(options, given.out, display)
            title = "Leakage in training"
            entries.append(
                attempt(title, lambda: draw(given.out, "leakage_probe", title, plain(leakage_probe(material))))
            )
    for entry in entries:
        print(entry.sentence if isinstance(entry, Exhibit) else f"{entry.title}: {entry.reason}")
    tables = [table(*bounds_rows(data), "Bounds by pool"), table(*search_rows(), "Exhaustive search")]
    body = ["<h1>Leakage of expert choice</h1>", exhibits("Leakage", entries), left_out(entries), *tables]
    (given.out / "leakage.html").write_text(page("Leakage of expert choice", body), encoding="utf-8")
    print(f"page: {given.out / 'leakage.html'}")


def count(text: str) -> int:
    """Return a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, not {text}")
    return int(text)


if __name__ == "__main__":
    main(sys.argv[1:])

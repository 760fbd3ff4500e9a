"""Measures how the gap between expert threshold and dense grows with tokens and parameters, predicted beforehand.

    python benchmarks/evidence/ladder.py --data FOLDER/tokens --out FOLDER [--widths …] [--megatokens …] [--seeds …]
    python benchmarks/evidence/ladder.py --predict WIDTH MEGATOKENS --out FOLDER > prediction.json
    python benchmarks/evidence/ladder.py --show FOLDER
    python benchmarks/evidence/ladder.py --data FOLDER/tokens --out FOLDER --matrix-lr 0.01 0.04 [--widths …] …

Each rung is a width of `et train quickstart` and a number of tokens with its own schedule. Under one seed, the methods
see the same tokens in the same order. The gap, a method's loss minus dense's, is fitted as g₀ + a·log₂ tokens + b·log₂
parameters + an effect of the seed. A prediction leaves out the pairs of its own rung; its 95 % interval is for the mean
gap of as many new pairs as `--seeds`, from 10,000 bootstrap samples of residuals and seeds. FOLDER/records.jsonl holds
one JSON line per finished run. If the command is repeated, it skips these runs and resumes an interrupted one.
test.jsonl holds the runs' losses on the test part, as `et evaluate RUN… --data TEST --eval-tokens 400000 --json` gives
them, where TEST is a folder with linux/test/test.parquet and any other Parquet file, which makes all test documents
held-out text. rates.jsonl holds the records of runs with other learning rates of matrices than the preset's,
rates-test.jsonl their losses on the test part, and prediction-*.json the predictions to be drawn.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import numpy as np
from frontier import SHARED, SOFTMAX
from study import Record, parser, read, record_run, run_script, widening

from expert_threshold.analysis.figures.style import INK, METHODS, WIDE, style
from expert_threshold.analysis.results import markdown
from expert_threshold.compare.paired import corrected, paired
from expert_threshold.config import resolve
from expert_threshold.model import parameter_counts
from expert_threshold.recipes import PAPER_TOKENS

RULES = {
    "dense": "--rule dense",
    "expert threshold": f"--rule expert_threshold {SOFTMAX}",
    "expert threshold (trend)": f"--rule expert_threshold {SOFTMAX} --rule.estimator trend --rule.decay 0.6",
    "token choice": f"--rule token_choice --rule.balance aux --rule.aux-strength 0.01 {SOFTMAX}",
    "quantile balancing": f"--rule quantile_balancing {SOFTMAX}",
    "expert threshold (sigmoid)": "--rule expert_threshold",
    "loss-free": "--rule token_choice --rule.balance loss_free --rule.bias-rate 0.03",
}
ET, ET_SIGMOID = "expert threshold", "expert threshold (sigmoid)"
RIVALS = {"token choice": ET, "quantile balancing": ET, "loss-free": ET_SIGMOID}  # each beside the one with its gates
Rung = tuple[int, int]  # width and tokens
LONGEST = 16_000_000  # tokens
IDENTITY = ("method", "width", "tokens", "seed")
WIDTHS = {"all widths": (64, 128, 256), "width 64": (64,), "without width 64": (128, 256)}
D12 = (768, PAPER_TOKENS)


@cache
def dense_parameters(width: int) -> int:
    """Return the number of parameters of the dense model, which is `quickstart` of this width, or else d12."""
    run = resolve("d12" if width == D12[0] else "quickstart", {"model.d_model": width, "rule.name": "dense"})
    return parameter_counts(run.model)["total"]


class Gaps:
    """The gaps of one method to another, and their fit over log₂ tokens and log₂ dense parameters."""

    def __init__(self, records: list[Record], method: str, baseline: str = "dense") -> None:
        of = {itemgetter(*IDENTITY)(each): each for each in records}
        self.pairs: list[tuple[Rung, int, float]] = []  # rung, seed, gap
        for (name, width, tokens, seed), base in sorted(of.items()):
            other = of.get((method, width, tokens, seed))
            if name == baseline and other:
                if base["corpus"] != other["corpus"]:
                    raise ValueError(f"width {width}, {tokens} tokens, seed {seed}: the pair's texts differ")
                self.pairs.append(((width, tokens), seed, other["loss"] - base["loss"]))

    def widths(self) -> set[int]:
        """Return the widths that have pairs."""
        return {width for (width, _), *_ in self.pairs}

    @staticmethod
    def row(rung: Rung) -> list[float]:
        """Return the factors of a and b, so that g₀ refers to 2M tokens and a million parameters."""
        width, tokens = rung
        return [math.log2(tokens / 2e6), math.log2(dense_parameters(width) / 1e6)]

    def bootstrap(self, rung: Rung, pairs: int, without: Rung | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return samples of g₀, a and b, and of the mean gap of pairs with new seeds on a rung.

        Gaps of one seed are alike on different rungs, so the fit has an effect of each seed, whose mean is g₀. Samples
        draw residuals and, with the variance that remains without the residuals', effects, widened as by Student's t.
        """
        data = [(self.row(each), seed, gap) for each, seed, gap in self.pairs if each != without]
        rows, seeds, gaps = (np.array(part) for part in zip(*data, strict=True))
        member = (seeds[:, None] == np.unique(seeds)).astype(float)
        design = np.hstack([rows, member])
        free = len(gaps) - np.linalg.matrix_rank(design)
        count, random = member.shape[1], np.random.default_rng(0)
        if free < 2 or np.linalg.matrix_rank(design) < design.shape[1]:
            raise ValueError(
                f"{len(gaps)} pairs of {count} seeds are too few for the fit: "
                f"it needs {count + 4}, within a seed at two widths and two lengths"
            )
        inverse = np.linalg.pinv(design)
        slopes, effects = np.split(inverse @ gaps, [2])
        residuals = (gaps - design @ np.r_[slopes, effects]) * math.sqrt(len(gaps) / free)
        spread = effects - effects.mean()
        if spread.any():  # what residuals add to the variance of effects is taken away
            added = residuals.var() * ((inverse[2:] - inverse[2:].mean(0)) ** 2).sum() / (count - 1)
            spread *= widening(count - 1) * math.sqrt(max(0.0, spread.var(ddof=1) - added) / spread.var())
        residuals *= widening(free)
        new = random.choice(spread, (10_000, count)) @ member.T + random.choice(residuals, (10_000, len(gaps)))
        samples = (rows @ slopes + effects.mean() + new) @ inverse.T
        coefficients = np.column_stack([samples[:, 2:].mean(1), samples[:, :2]])
        pair = (random.choice(spread, (10_000, pairs)) + random.choice(residuals, (10_000, pairs))).mean(1)
        return coefficients, coefficients @ np.array([1.0, *self.row(rung)]) + pair


def interval(samples: np.ndarray) -> list[float]:
    """Return the mean and the 95 % interval of samples."""
    return [round(float(value), 4) for value in (samples.mean(), *np.quantile(samples, (0.025, 0.975)))]


def predict(records: list[Record], rung: Rung, pairs: int) -> Record:
    """Return the prediction of every method's gap on a rung, without looking at runs of that rung."""
    made: Record = {"width": rung[0], "tokens": rung[1], "pairs": pairs, "gap": {}, "coefficients": {}}
    for method in list(RULES)[1:]:
        gaps = Gaps(records, method)
        if len({each for each, *_ in gaps.pairs} - {rung}) > 1:
            coefficients, new = gaps.bootstrap(rung, pairs, without=rung)
            made["gap"][method] = interval(new)
            made["coefficients"][method] = {
                name: interval(column) for name, column in zip(("g0", "a", "b"), coefficients.T, strict=True)
            }
    return made


def bounds(samples: np.ndarray) -> str:
    """Return the mean and the 95 % interval of samples as text."""
    return "{:+.4f} ({:+.4f} to {:+.4f})".format(*interval(samples))


def over_seeds(values: Sequence[float]) -> str:
    """Return the mean of values, with its 95 % interval over seeds, and their number."""
    if not values:
        return ""
    found = paired(values, 0.01)
    ends = "" if found.low is None else f"{found.low:+.4f} to {found.high:+.4f}; "
    return f"{found.mean:+.4f} ({ends}{len(values)})"


def slopes(gaps: Gaps) -> list[float]:
    """Return each seed's slope over log₂ tokens, fitted with a level for each width."""
    of_seeds = []
    for seed in sorted({seed for _, seed, _ in gaps.pairs}):
        points = [(width, math.log2(tokens), gap) for (width, tokens), its, gap in gaps.pairs if its == seed]
        widths, logs, its_gaps = map(np.array, zip(*points, strict=True))
        logs -= [logs[widths == width].mean() for width in widths]
        if logs.any():
            of_seeds.append(float(logs @ its_gaps / (logs @ logs)))
    return of_seeds


def growth(columns: Mapping[str, tuple[list[Record], list[Record]]]) -> str:
    """Return a Markdown table of the gap to dense: its growth with tokens, the longest runs at 0.01, and d12.

    columns: by name, the records of the ladder and those of runs at other learning rates.
    """
    table: dict[str, list[str]] = defaultdict(list)
    for records, others in columns.values():
        every = {name: Gaps([each for each in records if each["width"] in its], ET) for name, its in WIDTHS.items()}
        fits = {name: gaps.bootstrap(D12, 1) for name, gaps in every.items() if len(gaps.widths()) > 1}
        for name, (coefficients, _) in fits.items():
            table[f"per doubling, fit, {name}"].append(bounds(coefficients[:, 1]))
        for name, gaps in every.items():
            table[f"per doubling within seeds, {name}"].append(over_seeds(slopes(gaps)))
        lower = Gaps([each for each in others if each["matrix_lr"] == 0.01], ET)
        for width in WIDTHS["all widths"]:
            last = [gap for rung, _, gap in lower.pairs if rung == (width, LONGEST)]
            table[f"at 16M tokens and a rate of 0.01, width {width}"].append(over_seeds(last))
        for name, (_, new) in fits.items():
            table[f"extrapolated to d12, {name}"].append(bounds(new))
    return markdown(["gap to dense", *columns], [[name, *cells] for name, cells in table.items()])


def read_growth(folder: Path) -> dict[str, tuple[list[Record], list[Record]]]:
    """Return the columns of the table of growth for which the folder has records."""
    files = {"validation": ("records", "rates"), "test": ("test", "rates-test")}
    made = {
        name: (read(folder / f"{one}.jsonl"), read(folder / f"{other}.jsonl")) for name, (one, other) in files.items()
    }
    return {name: each for name, each in made.items() if each[0]}


def rivals(records: list[Record]) -> str:
    """Return a Markdown table of expert threshold's loss, with the same gates, minus each rival's.

    Differences are averaged over the rungs of a seed, since those are alike. Intervals and verdicts are over seeds.
    """
    pairs = {rival: Gaps(records, like, rival).pairs for rival, like in RIVALS.items()}
    seeds = {
        rival: [[gap for _, its, gap in each if its == seed] for seed in sorted({seed for _, seed, _ in each})]
        for rival, each in pairs.items()
    }
    seeds = {rival: each for rival, each in seeds.items() if len(each) > 1}
    means = [[fmean(gaps) for gaps in each] for each in seeds.values()]
    verdicts, lines = [corrected(means, margin) for margin in (0.005, 0.01)], []
    for (rival, each), of_seeds, *judged in zip(seeds.items(), means, *verdicts, strict=True):
        found, words = paired(of_seeds, 0.01), [one.verdict for one in judged]
        counts = [f"{sum(map(len, each))}", f"{len(each)}"]
        lines.append([rival, *counts, f"{found.mean:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}", *words])
    head = ["rival", "pairs", "seeds", "expert threshold minus rival", "95 % interval", "verdict, margin 0.005", "0.01"]
    return markdown(head, lines)


def rates(others: list[Record], ladder: list[Record]) -> str:
    """Return a Markdown table of losses by learning rate of matrices, with a row per rung, seed and method.

    Runs of the ladder, whose longest rungs were trained at 0.02, complete the rows. Rows with one rate are left out.
    """
    records = [each | {"matrix_lr": 0.02} for each in ladder if each["tokens"] == LONGEST] + others
    columns = sorted({each["matrix_lr"] for each in records})
    losses: dict[tuple[int, int, int, str], dict[float, str]] = defaultdict(dict)
    for each in records:
        key = each["width"], each["tokens"] // 1_000_000, each["seed"], each["method"]
        losses[key][each["matrix_lr"]] = f"{each['loss']:.4f}"
    lines = [
        [f"{width}, {megatokens}M, {seed}, {method}", *(row.get(rate, "") for rate in columns)]
        for (width, megatokens, seed, method), row in sorted(losses.items())
        if len(row) > 1
    ]
    return markdown(["width, tokens, seed, method", *map(str, columns)], lines)


def draw(records: list[Record], predictions: list[Record], path: Path) -> None:
    """Draw each pair's gap against tokens, a panel per method, a line per width, and predictions as intervals."""
    from matplotlib.figure import Figure

    rungs = {name: {rung for rung, *_ in Gaps(records, name).pairs} for name in list(RULES)[1:]}
    methods = [name for name, each in rungs.items() if len(each) > 1]
    with style():
        figure = Figure(figsize=(WIDE, 3.6), layout="constrained")
        panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
        for panel, method in zip(panels, methods, strict=True):
            gaps = Gaps(records, method)
            panel.axhline(0, color=INK, linewidth=0.8)
            for number, width in enumerate(sorted({rung[0] for rung, *_ in gaps.pairs})):
                points = sorted((rung[1] / 1e6, gap) for rung, _, gap in gaps.pairs if rung[0] == width)
                means = [(x, fmean(gap for _, gap in each)) for x, each in itertools.groupby(points, itemgetter(0))]
                colour = METHODS[number]
                panel.plot(*zip(*means, strict=True), color=colour, linewidth=1.0)
                panel.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, label=f"width {width}")
                for each in predictions:
                    if each["width"] == width and method in each["gap"]:
                        mean, low, high = each["gap"][method]
                        x, ends = each["tokens"] / 1e6 * (1.05 + 0.05 * number), [[mean - low], [high - mean]]
                        look = {"marker": "_", "color": colour, "linewidth": 1.0, "capsize": 3}
                        panel.errorbar(x, mean, ends, **look, label=f"predicted, width {width}")
            panel.set(xscale="log", xlabel="training tokens, millions", title=f"{method} minus dense")
            ticks = sorted({tokens / 1e6 for (_, tokens), *_ in gaps.pairs})
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        panels[0].set_ylabel("gap in validation loss, nats per token")
        handles, labels = panels[0].get_legend_handles_labels()
        key = dict(zip(labels, handles, strict=True))  # a width may have several predictions
        panels[0].legend(key.values(), key.keys(), frameon=False)
        figure.savefig(path, dpi=160, facecolor="white")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--predict", type=int, nargs=2, metavar=("WIDTH", "MEGATOKENS"))
    options.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    options.add_argument("--megatokens", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--methods", choices=RULES, nargs="+", default=["dense", "expert threshold"])
    options.add_argument("--matrix-lr", type=float, nargs="+", default=[None], metavar="RATE")
    asked = options.parse_args()
    records = read((asked.out or asked.show) / "records.jsonl")
    if asked.predict:
        width, megatokens = asked.predict
        print(json.dumps(predict(records, (width, megatokens * 1_000_000), len(asked.seeds)), indent=1))
    elif asked.show:
        tests, others = (read(asked.show / name) for name in ("test.jsonl", "rates.jsonl"))
        print(rivals(records), rivals(tests), rates(others, records), growth(read_growth(asked.show)), sep="\n")
        predictions = [json.loads(path.read_text(encoding="utf-8")) for path in asked.show.glob("prediction-*")]
        draw(records, predictions, asked.show / "ladder.png")
    else:
        for rate, seed, megatokens, width, method in itertools.product(
            asked.matrix_lr, asked.seeds, asked.megatokens, asked.widths, asked.methods
        ):
            run = {"method": method, "width": width, "tokens": megatokens * 1_000_000, "seed": seed}
            given = f"{SHARED} --d-model {width} {RULES[method]}"
            if rate:
                run["matrix_lr"] = rate
                given += f" --optim.matrix-lr {rate}"
            record_run(run, given, asked.data, asked.out, 4)


if __name__ == "__main__":
    run_script("ladder", main)

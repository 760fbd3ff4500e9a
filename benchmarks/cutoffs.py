"""Cutoffs that keep up: lag and batch noise of expert threshold's running mean apart, and other estimators against it.

    python benchmarks/cutoffs.py --data FOLDER --out FOLDER [--seeds 3] [--variants A,B,…] [-- OPTIONS OF et train]

Every variant is trained with the same seeds; what is finished is not done again. Of the first, the paper's mean, some
checkpoints are held still while --batches training batches pass: the mean of their k-th largest scores is what the
cutoff should be, their spread is the noise of a batch, and the difference to the cutoff is its lag. Writes
results.json, results.md and results.png with losses, loads and the gap between training and inference, each a mean over
seeds ± its spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bare import origin
from common import call, machine, over_seeds
from torch import Tensor

from expert_threshold.analysis.figures.style import THEME, style
from expert_threshold.data import Loader, open_source, pack
from expert_threshold.routing import CutoffState, ExpertThreshold, Observation
from expert_threshold.runs import RunFolder, load_model

# From what an estimator remembers of an expert's past (nothing before the first step), the cutoff it gave and what was
# seen with it, to what it remembers now and the next cutoff, the memory's first row.
Estimator = Callable[[Tensor | None, Tensor, Observation], Tensor]


class Variant(NamedTuple):
    what: str
    options: tuple[str, ...] = ()
    estimator: Estimator | None = None


def growing(share: float) -> Estimator:
    """The mean over about the last `share` of the steps so far. Memory: mean, step."""

    def estimate(memory: Tensor | None, cutoff: Tensor, seen: Observation) -> Tensor:
        step = 1.0 if memory is None else float(memory[1, 0]) + 1
        gain = min(1.0, 1 / (share * step))
        mean = seen.batch_cutoff if memory is None else memory[0] + gain * (seen.batch_cutoff - memory[0])
        return torch.stack([mean, torch.full_like(mean, step)])

    return estimate


def feedback(gain: float) -> Estimator:
    """Stochastic approximation of the quantile: the cutoff rises where more tokens than meant were above it.

    A step is Newton's for normal scores: (usage − p) σ / φ(z_p). Memory: cutoff.
    """

    def estimate(memory: Tensor | None, cutoff: Tensor, seen: Observation) -> Tensor:
        if memory is None:
            return seen.batch_cutoff[None]
        p = float(seen.target / seen.tokens)
        z = statistics.NormalDist().inv_cdf(1 - p)
        density = statistics.NormalDist().pdf(z)
        return (memory[0] + gain * (seen.raw_load / seen.tokens - p).clamp(max=2 * p) * seen.score_std / density)[None]

    return estimate


MEAN = ("--estimator", "mean", "--decay", "0.9")
ADAMW = ("--router-optimizer", "adamw", "--router-lr", "0.004")
VARIANTS = {
    "mean-0.9": Variant("running mean, decay 0.9 (what a recipe scales to)", MEAN),
    "mean-0.5": Variant("running mean, decay 0.5", ("--estimator", "mean", "--decay", "0.5")),
    "mean-0.8": Variant("running mean, decay 0.8", ("--estimator", "mean", "--decay", "0.8")),
    "mean-0.97": Variant("running mean, decay 0.97", ("--estimator", "mean", "--decay", "0.97")),
    "mean-0.99": Variant("running mean, decay 0.99", ("--estimator", "mean", "--decay", "0.99")),
    "mean-0.999": Variant("running mean, decay 0.999, the paper's", ("--estimator", "mean", "--decay", "0.999")),
    "growing": Variant("mean over the last tenth of the steps so far", MEAN, growing(0.1)),
    "trend-0.8": Variant("trend, decay 0.8", ("--estimator", "trend", "--decay", "0.8")),
    "trend-0.6": Variant("trend, decay 0.6", ("--estimator", "trend", "--decay", "0.6")),
    "feedback": Variant("feedback from the load, gain 0.2", MEAN, feedback(0.2)),
    "router-slow": Variant("running mean, decay 0.9; router's learning rate × 1/4", (*MEAN, "--router-lr", "0.005")),
    "router-adamw": Variant("running mean, decay 0.9; router under AdamW", (*MEAN, *ADAMW)),
    "router-adamw-trend": Variant(
        "trend, decay 0.6; router under AdamW", ("--estimator", "trend", "--decay", "0.6", *ADAMW)
    ),
    "small-pools": Variant("running mean, decay 0.9; four pools of 1,024 tokens", (*MEAN, "--pool", "1024")),
    "large-pools": Variant("running mean, decay 0.9; a pool of 16,384, 4 × the tokens", (*MEAN, "--batch-size", "128")),
}


@contextlib.contextmanager
def estimator_of(variant: Variant) -> Iterator[None]:
    """Expert threshold with the variant's estimator. What it remembers of a layer goes by the place of its buffer."""
    original, memories = ExpertThreshold.update, dict[int, Tensor]()

    def update(self: ExpertThreshold, state: CutoffState, observation: Observation) -> CutoffState:
        assert variant.estimator is not None
        place = state.mean.data_ptr()
        memory = memories[place] = variant.estimator(memories.get(place), state.mean, observation)
        return state._replace(mean=memory[0], weight=torch.ones_like(state.weight), step=state.step + 1)

    if variant.estimator is not None:
        ExpertThreshold.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExpertThreshold.update = original  # type: ignore[method-assign]


def train(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    out: Path = arguments.out / name / f"seed_{seed}"
    variant = VARIANTS[name]
    if not (out / "evaluation.json").exists():
        with estimator_of(variant):
            options = [*arguments.options, "--data", arguments.data, "--seed", seed, *variant.options, "--out", out]
            call("train", arguments.preset, "--rule", "expert_threshold", *options)
        call("evaluate", out, "--bundle", "none", "--eval-tokens", arguments.eval_tokens)
    return out


def read(out: Path) -> dict[str, float]:
    """The results of one run. Loads are those after warmup."""
    folder = RunFolder.open(out)
    validation = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["validation"]
    steps, warmup = folder.config["train"]["steps"], folder.config["model"]["rule"]["warmup_steps"]
    records = [record for record in folder.metrics.read() if record["split"] == "train"]
    last = [record["cross_entropy"] for record in records if record["step"] > 0.9 * steps]
    after = [layer for r in records if r["step"] > warmup for layer in r["layers"].values()]
    rule = folder.config["model"]["rule"]
    p, slack = rule["experts_per_token"] / rule["num_experts"], rule["capacity_slack"]
    used = [usage / p for layer in after for usage in layer["usage"]]
    final = [r for r in folder.metrics.read() if r["split"] == "validation"][-1]["layers"].values()
    return {
        "loss": validation["loss"],
        "train_loss": statistics.mean(last),
        "gap": validation["loss"] - statistics.mean(last),
        "at_lower_bound": statistics.mean(u <= 1 - slack + 1e-3 for u in used),
        "at_upper_bound": statistics.mean(u >= 1 + slack - 1e-3 for u in used),
        "fanout": statistics.mean(layer["fanout_mean"] for layer in after),
        "raw_fanout": statistics.mean(sum(layer["raw_usage"]) for layer in after),
        "saturation": statistics.mean(sum(layer["saturation"]) / len(layer["usage"]) for layer in after),
        "starvation": statistics.mean(sum(layer["starvation"]) / len(layer["usage"]) for layer in after),
        "validation_fanout": statistics.mean(layer["fanout_mean"] for layer in final),
        "validation_spread": statistics.mean(layer["load_spread"] for layer in final),
    }


@torch.no_grad()
def lag_and_noise(arguments: argparse.Namespace, out: Path) -> list[dict[str, float]]:
    """Compare checkpoints of a run: medians over layers and experts, in standard deviations of the expert's scores."""
    folder = RunFolder.open(out)
    config, found = folder.config, []
    packed = pack(open_source(arguments.data), folder.tokenizer(), "train")
    for step in folder.checkpoints()[:: arguments.every]:
        model, _ = load_model(out, step)
        model.train()
        loader = Loader(packed, config["train"]["batch_size"], config["model"]["context"], seed=10_000 + step)
        seen = [model((batch := next(loader)).tokens, batch.targets).observations for _ in range(arguments.batches)]
        noise, lag, load = [], [], []
        for i, (_, moe) in enumerate(model.moe_layers()):
            cutoffs = torch.stack([observations[i].batch_cutoff for observations in seen])
            whole = seen[0][i]
            for observations in seen[1:]:
                whole = whole + observations[i]
            noise.append(cutoffs.std(0) / whole.score_std)
            lag.append((moe.router.thresholds() - cutoffs.mean(0)) / whole.score_std)
            load.append(whole.raw_load / whole.target)
        found.append(
            {
                "step": step,
                "noise": float(torch.cat(noise).median()),
                "lag": float(torch.cat(lag).median()),
                "lag_size": float(torch.cat(lag).abs().median()),
                "load_q10": float(torch.cat(load).quantile(0.1)),
                "load_median": float(torch.cat(load).median()),
                "load_q90": float(torch.cat(load).quantile(0.9)),
            }
        )
    return found


def to_markdown(result: dict[str, Any]) -> str:
    def show(value: dict[str, float], digits: int = 3) -> str:
        return f"{value['mean']:.{digits}f} ± {value['spread']:.{digits}f}"

    columns = {
        "validation, nats": ("loss", 3),
        "− training": ("gap", 3),
        "at lower bound": ("at_lower_bound", 3),
        "at upper bound": ("at_upper_bound", 3),
        "fanout": ("fanout", 3),
        "without bounds": ("raw_fanout", 3),
        "in validation": ("validation_fanout", 3),
    }
    machine = result["machine"]
    lines = [
        f"{machine['cpu']}, torch {machine['torch']}, {result['date']}, commit {result['commit'][:8]}; "
        f"{result['tokens']:,} tokens a run, {result['seeds']} seeds",
        "",
        f"| variant | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for name, values in result["variants"].items():
        shown = " | ".join(show(values[key], digits) for key, digits in columns.values())
        lines.append(f"| {VARIANTS[name].what} | {shown} |")
    lines += [
        "",
        "| step | noise of a batch, σ | lag, σ | size of lag, σ | load over target, 10 % | median | 90 % |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in result["lag_and_noise"]:
        lines.append(
            f"| {r['step']} | {r['noise']:.3f} | {r['lag']:+.3f} | {r['lag_size']:.3f} | {r['load_q10']:.2f} | "
            f"{r['load_median']:.2f} | {r['load_q90']:.2f} |"
        )
    return "\n".join([*lines, ""])


def draw(result: dict[str, Any], path: Path) -> None:
    """Left, lag and noise along the run; right, the experts per token that training got of the one it was given."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
        steps = [r["step"] for r in result["lag_and_noise"]]
        for key, label in (("lag", "lag of the mean, β = 0.9"), ("noise", "noise of a batch")):
            left.plot(steps, [r[key] for r in result["lag_and_noise"]], marker="o", label=label)
        left.set(xlabel="step", title="standard deviations of scores", ylim=(-0.05, 0.36))
        left.legend(frameon=False, loc="upper right", fontsize=8)
        names = list(result["variants"])[::-1]
        for key, label, marker in (("fanout", "within the bounds", "o"), ("raw_fanout", "without them", "|")):
            values = [result["variants"][name][key] for name in names]
            means, spreads = ([v[part] for v in values] for part in ("mean", "spread"))
            right.errorbar(means, range(len(names)), xerr=spreads, fmt=marker, label=label)
        right.axvline(1, color=THEME["ink"][0], linewidth=0.8)
        right.set_yticks(range(len(names)), [VARIANTS[name].what for name in names], fontsize=8)
        right.set(title="experts per token in training, aim 1", xlim=(0, None))
        right.legend(frameon=False, loc="center left", fontsize=8)
        figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--eval-tokens", type=int, default=262_144)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=24, help="training batches seen with weights held still")
    parser.add_argument("--every", type=int, default=2, help="of the checkpoints, look at one in so many")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("options", nargs="*", help="more options of et train, after --")
    arguments = parser.parse_args()
    names = arguments.variants.split(",")
    folders = {(name, seed): train(arguments, name, seed) for seed in range(arguments.seeds) for name in names}
    runs = {name: [read(folders[name, seed]) for seed in range(arguments.seeds)] for name in names}
    config = RunFolder.open(folders[names[0], 0]).config
    tokens = config["train"]["steps"] * config["train"]["batch_size"] * config["model"]["context"]
    result = {
        "options": arguments.options,
        "tokens": tokens,
        "seeds": arguments.seeds,
        **origin(),
        "machine": machine(),
        "variants": {
            name: {key: over_seeds([run[key] for run in found]) for key in found[0]} for name, found in runs.items()
        },
        "lag_and_noise": lag_and_noise(arguments, folders[names[0], 0]),
        "runs": runs,
    }
    (arguments.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "results.md").write_text(to_markdown(result), encoding="utf-8")
    draw(result, arguments.out / "results.png")
    print((arguments.out / "results.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

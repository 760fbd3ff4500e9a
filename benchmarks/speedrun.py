"""Loss by tokens and by seconds: nanochat's dense model and ours, trained on the same batches.

    python benchmarks/speedrun.py --out FOLDER [--nanochat CHECKOUT] [--steps 300] [--seeds 3] [--data embedded]
        [--ours "NAME: OPTIONS OF et train" …] [--no-compile] [--threads N]
    python benchmarks/speedrun.py --redraw --out FOLDER

Every contestant of ours is a run of `et train quickstart --context 256 --batch-size 16 --compile on`, to which --ours
adds options; without --ours there are dense and expert threshold.
A contestant that names its own --steps learns as much as it can in these, on the first of the same batches: a whole
schedule is the fair way to reach a loss early.
nanochat (github.com/karpathy/nanochat) is imported from the checkout. It has the same depth, widths, vocabulary and
context, and its own optimizer, schedules, initialisation and default rates, which are not scaled by the batch.
Under one seed all contestants see the same tokens in the same order and validate causally on the same text.
Seconds are those of optimizer steps alone. Compiling is left out: of nanochat's, the first two steps count as much as
the median; of ours, the first interval between validations counts as much as the median of the others.

Contestants train one after the other, so nothing else should run. Finished runs are kept, and the same command
continues. Writes speedrun.json, speedrun.md and speedrun.png into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bare import origin
from common import call, compute_dtype, machine, over_seeds, positive, require_same, run
from rich.console import Console
from rich.progress import Progress

from expert_threshold.analysis.sentences import counted
from expert_threshold.data import Loader, Tokens, open_source, pack, windows
from expert_threshold.files import corrupted_file_error
from expert_threshold.runs import RunFolder

OURS = ["dense: --rule dense", "expert threshold: --rule expert_threshold"]
NANOCHAT = "nanochat"
# nanochat's defaults at 92d63d4 (scripts/base_train.py, July 2026).
RATES = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5, "weight_decay": 0.28}
WARMUP, COOLDOWN, LAST_RATE = 40, 0.65, 0.05
MOMENTUM_WARMUP, MOMENTA = 400, (0.85, 0.97, 0.90)
COMPILED_STEPS = 2  # steps during which torch.compile works; their seconds are replaced by the median

Curve = list[tuple[int, float, float]]  # tokens, seconds of training, validation loss


def train_ours(arguments: argparse.Namespace, options: list[str], seed: int, out: Path) -> None:
    """Train one contestant of ours as a user would; one that was stopped anew, since it would compile once more.

    Raises ValueError if a finished one has other options.
    """
    every = max(1, arguments.steps // arguments.points)
    threads = [] if arguments.threads is None else ["--threads", arguments.threads]
    own = fixed_options(arguments) | {"--steps": arguments.steps}
    fixed = [word for name, value in own.items() if name not in options for word in (name, value)]
    fixed += ["--data", arguments.data, "--seed", seed, "--eval-every", every]
    fixed += ["--log-every", every, "--eval-tokens", arguments.eval_tokens, "--sample-every", "none", *threads]
    if (out / "report.html").exists():
        require_same(out, ["quickstart", *fixed, *options])
        return
    shutil.rmtree(out, ignore_errors=True)
    call("train", "quickstart", *fixed, *options, "--out", out)


def fixed_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options of `et train quickstart` that our contestants have unless they name others."""
    return {"--context": 256, "--batch-size": 16, "--compile": "off" if arguments.no_compile else "on"}


def curve_of(out: Path) -> Curve:
    """Return the validations of a run of ours."""
    folder = RunFolder.open(out)
    records = folder.metrics.read()
    seconds = {record["step"]: record["seconds"] for record in records if record["split"] == "train"}
    tokens = tokens_per_step(folder)
    compiling = seconds_of_compiler(seconds) if folder.config["compiled"] else 0.0
    return [
        (r["step"] * tokens, seconds[r["step"]] - compiling, r["loss"]) for r in records if r["split"] == "validation"
    ]


def seconds_of_compiler(seconds: dict[int, float]) -> float:
    """Return what the first steps of a compiled run took beyond the median of later ones.

    seconds: since the start, by step. With one interval alone it is not known, and 0.
    """
    steps = [0, *seconds]
    since = [0.0, *seconds.values()]
    per_step = [(b - a) / (j - i) for (i, j), (a, b) in zip(pairwise(steps), pairwise(since), strict=True)]
    return max(0.0, (per_step[0] - statistics.median(per_step[1:] or per_step)) * steps[1])


def tokens_per_step(folder: RunFolder) -> int:
    options = folder.config["train"]
    tokens: int = options["batch_size"] * options["accumulation"] * folder.config["model"]["context"]
    return tokens


def train_nanochat(arguments: argparse.Namespace, ours: RunFolder, seed: int) -> Curve:
    """Train nanochat on the batches of a run of ours and return its validations."""
    model = nanochat_model(ours.config["model"], seed)
    optimizer = model.setup_optimizer(**RATES)
    forward = model if arguments.no_compile else torch.compile(model, dynamic=False)
    options, corpus, tokenizer = ours.config["train"], open_source(arguments.data), ours.tokenizer()
    context = ours.config["model"]["context"]
    loader = Loader(pack(corpus, tokenizer, "train"), options["batch_size"], context, seed)
    text = pack(corpus, tokenizer, "validation", max_tokens=arguments.eval_tokens + context)
    every = options["eval_every"]
    curve: Curve = []
    seconds: list[float] = []
    with Progress(console=Console(stderr=True)) as progress:
        for step in progress.track(range(arguments.steps), description=f"{NANOCHAT}, seed {seed}"):
            start = time.perf_counter()
            for _ in range(options["accumulation"]):
                batch = next(loader)
                (forward(batch.tokens, batch.targets) / options["accumulation"]).backward()
            schedule(optimizer, step, arguments.steps)
            optimizer.step()
            model.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
            if (step + 1) % every == 0 or step + 1 == arguments.steps:
                middle = statistics.median(seconds)
                spent = sum(middle if i < COMPILED_STEPS else value for i, value in enumerate(seconds))
                loss = validation_loss(model, text, context, options["batch_size"], arguments.eval_tokens)
                curve.append(((step + 1) * tokens_per_step(ours), spent, loss))
    return curve


def nanochat_model(sizes: dict[str, Any], seed: int) -> Any:
    """Return nanochat's model of the same sizes, initialised from the seed."""
    from nanochat.gpt import GPT, GPTConfig

    config = GPTConfig(
        sequence_len=sizes["context"],
        vocab_size=sizes["vocab_size"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        n_kv_head=sizes["kv_heads"],
        n_embd=sizes["d_model"],
    )
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    return model


def schedule(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Set nanochat's learning rates, Muon's momentum and its weight decay for a step."""
    cooldown = round(COOLDOWN * steps)
    left = (steps - step) / cooldown
    rate = (step + 1) / WARMUP if step < WARMUP else 1.0 if left >= 1 else left + (1 - left) * LAST_RATE
    first, peak, last = MOMENTA
    momentum = min(left, 1) * peak + (1 - min(left, 1)) * last
    if step < MOMENTUM_WARMUP:
        momentum = first + (peak - first) * step / MOMENTUM_WARMUP
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate
        if group["kind"] == "muon":
            group["momentum"] = momentum
            group["weight_decay"] = RATES["weight_decay"] * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def validation_loss(model: Any, text: Tokens, context: int, batch_size: int, most: int) -> float:
    """Return the loss in nats per token over the windows that `et train` validates on."""
    rows = list(windows(text, context))[: math.ceil(min(most, len(text) - 1) / context)]
    total, count = 0.0, 0
    for first in range(0, len(rows), batch_size):
        tokens = torch.stack([row.tokens for row in rows[first : first + batch_size]])
        targets = torch.stack([row.targets for row in rows[first : first + batch_size]])
        total += float(model(tokens, targets, loss_reduction="sum"))
        count += int((targets >= 0).sum())
    return total / count


def reached(curve: Curve, goal: float, axis: int) -> float | None:
    """Return the tokens (axis 0) or seconds (1) at which a curve, linear between validations, is at the goal."""
    if curve[0][2] <= goal:
        return curve[0][axis]
    for before, after in pairwise(curve):
        if after[2] <= goal:
            share = (before[2] - goal) / (before[2] - after[2])
            return before[axis] + share * (after[axis] - before[axis])
    return None


def summarise(runs: dict[str, list[Curve]]) -> dict[str, Any]:
    """Return each contestant's last loss and speed, and its distance to nanochat's, over seeds."""
    found: dict[str, Any] = {}
    for name, curves in runs.items():
        row: dict[str, Any] = {
            "loss": over_seeds([curve[-1][2] for curve in curves]),
            "seconds": statistics.median(curve[-1][1] for curve in curves),
            "tokens_per_second": statistics.median(curve[-1][0] / curve[-1][1] for curve in curves),
        }
        if NANOCHAT in runs and name != NANOCHAT:
            theirs = runs[NANOCHAT]
            pairs = list(zip(curves, theirs, strict=True))
            if all(a[-1][0] == b[-1][0] for a, b in pairs):
                row["minus_nanochat"] = over_seeds([a[-1][2] - b[-1][2] for a, b in pairs])
            for axis, what in enumerate(("tokens", "seconds")):
                shares = [(reached(a, b[-1][2], axis), b[-1][axis]) for a, b in pairs]
                values = [mine / whole for mine, whole in shares if mine is not None]
                row[f"share_of_{what}"] = statistics.median(values) if len(values) == len(shares) else None
        found[name] = row
    return found


def to_markdown(result: dict[str, Any]) -> str:
    here = result["machine"]
    spread = lambda found: f" ± {found['spread']:.3f}" if result["seeds"] > 1 else ""  # noqa: E731
    lines = [
        f"{result['steps']} steps, {result['tokens']:,} tokens of {result['data']}, "
        f"{counted(result['seeds'], 'seed')}, {result['dtype']}; "
        f"{here['cpu']}, {counted(here['threads'], 'thread')}, torch {here['torch']}, "
        f"{result['date']}, commit {str(result['commit'])[:8]}",
        "",
        "| | validation loss | minus nanochat | tokens/s | seconds | share of nanochat's tokens | of its seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in result["contestants"].items():
        less, alone = row.get("minus_nanochat"), "share_of_tokens" not in row
        shares = [row.get(f"share_of_{what}") for what in ("tokens", "seconds")]
        cells = [
            f"{row['loss']['mean']:.3f}" + spread(row["loss"]),
            "–" if less is None else f"{less['mean']:+.3f}" + spread(less),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds']:,.0f}",
            *("–" if alone else "not reached" if share is None else f"{share:.2f}" for share in shares),
        ]
        tokens = result["runs"][name][0][-1][0]
        length = "" if tokens == result["tokens"] else f" ({tokens * result['steps'] // result['tokens']:,} steps)"
        lines.append(f"| {name}{length} | {' | '.join(cells)} |")
    lines += [
        "",
        "Loss in nats per token, ± its standard deviation over seeds; differences are at equal tokens. Shares are of "
        "the tokens and seconds that nanochat needs to its last loss: medians over seeds, linear between validations. "
        "nanochat has its default rates, not scaled by the batch as its script does for its own. The seconds of "
        "compilers are left out.",
        "",
    ]
    if result["left_out"]:
        lines += [f"Left out: {result['left_out']}.", ""]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the losses by tokens and by seconds: the mean of the seeds as a line, each seed as a thin one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for colour, (name, curves) in enumerate(result["runs"].items()):
        for axes, axis, unit in ((left, 0, 1e6), (right, 1, 60)):
            means = [[statistics.mean(values) for values in zip(*at, strict=True)] for at in zip(*curves, strict=True)]
            for points, stroke in (
                *((curve, {"alpha": 0.3, "linewidth": 0.8}) for curve in curves),
                (means, {"label": name}),
            ):
                axes.plot([p[axis] / unit for p in points], [p[2] for p in points], color=f"C{colour}", **stroke)
    losses = sorted(point[2] for curves in result["runs"].values() for curve in curves for point in curve)
    left.set_ylim(losses[0] - 0.1, losses[int(0.9 * (len(losses) - 1))])  # the first validations would flatten the rest
    left.set_xlabel("million tokens")
    right.set_xlabel("minutes of training")
    left.set_ylabel("validation loss (nats per token)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=160)


def write(out: Path, result: dict[str, Any]) -> None:
    (out / "speedrun.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "speedrun.md").write_text(to_markdown(result), encoding="utf-8")
    draw(result, out / "speedrun.png")


def prepare_nanochat(checkout: Path | None, dtype: torch.dtype) -> str:
    """Make nanochat importable; returns why it is left out, or an empty string."""
    if checkout is None:
        return "nanochat, since no --nanochat names its checkout"
    if not (checkout / "nanochat" / "gpt.py").is_file():
        raise ValueError(
            f"--nanochat {checkout} has no nanochat/gpt.py; name a checkout of github.com/karpathy/nanochat"
        )
    os.environ["NANOCHAT_DTYPE"] = str(dtype).removeprefix("torch.")
    sys.path.append(str(checkout))
    return ""


def commit_of(checkout: Path | None) -> str | None:
    if checkout is None:
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def begin(arguments: argparse.Namespace, contestants: dict[str, list[str]], dtype: torch.dtype) -> None:
    """Write what decides the runs into the folder. Raises ValueError if it holds runs of another kind."""
    names = ("steps", "data", "points", "eval_tokens", "threads", "no_compile")
    now = {name: getattr(arguments, name) for name in names} | {"dtype": str(dtype), "contestants": contestants}
    now["fixed"] = fixed_options(arguments)
    path = arguments.out / "options.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else now
    for name, value in now.items():
        if value != before.get(name):
            raise ValueError(
                f"{name}={value!r} differs from {before.get(name)!r} in {arguments.out}; name another --out"
            )
    path.write_text(json.dumps(now), encoding="utf-8")


def require_alike(folders: list[RunFolder]) -> None:
    """Raise ValueError if contestants do not see the same tokens in the same batches."""
    options = [folder.config["model"] | folder.config["train"] for folder in folders]
    names = ("context", "vocab_size", "batch_size", "accumulation", "seed")
    seen = [tuple(option[name] for name in names) for option in options]
    if len(set(seen)) > 1:
        raise ValueError(f"contestants differ in context, vocabulary, batch or seed: {seen}; give them the same")
    if len({folder.config["corpus"]["hash"] for folder in folders}) > 1:
        raise ValueError("contestants differ in their text; give it by --data")


def folder_of(name: str) -> str:
    """Return the folder of a contestant's runs."""
    return name.replace(" ", "_")


def parse_contestants(entries: list[str]) -> dict[str, list[str]]:
    """Return each contestant's options. Raises ValueError for an entry that cannot be read or have a folder alone."""
    contestants: dict[str, list[str]] = {}
    for entry in entries:
        name, colon, options = (part.strip() for part in entry.partition(":"))
        if not colon:
            raise ValueError(f"--ours {entry!r} needs a name and options, as in {OURS[0]!r}")
        if folder_of(name) in {"", NANOCHAT, *map(folder_of, contestants)} or set(name) & set("/\\."):
            raise ValueError(f"--ours {entry!r}: {name!r} cannot name a folder of its own; give another name")
        try:
            contestants[name] = shlex.split(options)
        except ValueError as error:
            raise ValueError(f"--ours {entry!r}: {error}") from None
    return contestants


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat; left out without one")
    parser.add_argument("--ours", action="append", help="a contestant, 'NAME: OPTIONS OF et train'; may be repeated")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--points", type=positive, default=15, help="validations of a run")
    parser.add_argument("--eval-tokens", type=positive, default=100_000)
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--no-compile", action="store_true", help="run all models without torch.compile")
    parser.add_argument("--redraw", action="store_true", help="make speedrun.md and speedrun.png anew")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.redraw:
        try:
            text = (arguments.out / "speedrun.json").read_text(encoding="utf-8")
        except OSError:
            raise ValueError(f"{arguments.out} has no speedrun.json to redraw; run without --redraw first") from None
        with corrupted_file_error(arguments.out / "speedrun.json", "run without --redraw"):
            write(arguments.out, json.loads(text))
        return
    contestants = parse_contestants(arguments.ours or OURS)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    dtype = compute_dtype("auto")
    left_out = prepare_nanochat(arguments.nanochat, dtype)
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin(arguments, contestants, dtype)

    runs: dict[str, list[Curve]] = {name: [] for name in contestants}
    for seed in range(arguments.seeds):
        folders = []
        for name, options in contestants.items():
            out = arguments.out / "runs" / folder_of(name) / f"seed_{seed}"
            train_ours(arguments, options, seed, out)
            runs[name].append(curve_of(out))
            folders.append(RunFolder.open(out))
        require_alike(folders)
        if not left_out:
            path = arguments.out / "runs" / NANOCHAT / f"seed_{seed}.json"
            if not path.exists():
                curve = train_nanochat(arguments, folders[0], seed)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(curve), encoding="utf-8")
            runs.setdefault(NANOCHAT, []).append(json.loads(path.read_text(encoding="utf-8")))

    result = {
        "steps": arguments.steps,
        "tokens": arguments.steps * tokens_per_step(folders[0]),
        "data": arguments.data,
        "seeds": arguments.seeds,
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": not arguments.no_compile,
        "options": {name: shlex.join(options) for name, options in contestants.items()},
        "nanochat": commit_of(arguments.nanochat),
        "left_out": left_out,
        **origin(),
        "machine": machine(),
        "contestants": summarise(runs),
        "runs": runs,
    }
    write(arguments.out, result)
    print((arguments.out / "speedrun.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

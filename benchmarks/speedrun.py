"""Loss by tokens and by seconds: nanochat's dense model trained on the same batches as runs of ours.

    et compare quickstart --rules dense,expert_threshold --seeds 3 --steps 300 --eval-every 20 --eval-tokens 100000 \\
        --context 256 --batch-size 16 --compile on --sample-every none --out runs/ours
    python benchmarks/speedrun.py runs/ours [FOLDER OF et compare …] --nanochat CHECKOUT --out FOLDER

nanochat (github.com/karpathy/nanochat) is imported from the checkout. It has the same depth, widths, vocabulary and
context, and its own optimizer, schedules, initialisation and default rates, which are not scaled by the batch. It takes
as many steps as the longest run of ours; shorter runs, in folders of their own, show how early a whole schedule reaches
its last loss. Under one seed all see the same tokens in the same order and validate causally on the same text.
Seconds are those of optimizer steps alone. Compiling is left out: of nanochat's, the first two steps count as much as
the median; of ours, the first interval between validations counts as much as the median of the others.

Runs train one after the other, so nothing else should run. nanochat's finished runs are kept, and the same command
continues. Writes speedrun.json, speedrun.md and two figures into --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from bare import commit_of, origin
from common import compute_dtype, machine, positive, run
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from expert_threshold.analysis.figures.learning import TOKENS, draw_losses
from expert_threshold.analysis.page import save_figure
from expert_threshold.analysis.records import Run
from expert_threshold.analysis.results import markdown, names_with_sizes, over_seeds, sizes
from expert_threshold.analysis.sentences import counted
from expert_threshold.compare.judgement import read_runs, used_until
from expert_threshold.data import Loader, Tokens, open_source, pack, windows
from expert_threshold.files import replace_file
from expert_threshold.model.attention import delay

NANOCHAT = "nanochat"
SCALARS, KEY_OFFSET = "nanochat, scalar rate 0.15", "nanochat, scalar rate 0.15, key offset"
VARIANTS = (NANOCHAT, SCALARS, KEY_OFFSET)  # with our rate of skip scalars, then with our key offset in the last layer
# nanochat's defaults at 92d63d4 (scripts/base_train.py, July 2026).
RATES = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5, "weight_decay": 0.28}
WARMUP, COOLDOWN, LAST_RATE = 40, 0.65, 0.05
MOMENTUM_WARMUP, MOMENTA = 400, (0.85, 0.97, 0.90)
COMPILED_STEPS = 2  # steps during which torch.compile works; their seconds are replaced by the median

Curve = list[tuple[int, float, float]]  # tokens, seconds of training, validation loss


def curve_of(compared: Run) -> Curve:
    """Return the validations of a finished run of ours, without the seconds of the compiler.

    These are what the first interval of a compiled run took beyond the median of the others; with one interval alone
    they are not known, and 0.
    """
    assert compared.result is not None
    compiling = 0.0
    if compared.config["compiled"]:
        since = [(0, 0.0), *((r["step"], r["seconds"]) for r in compared.train)]
        per_step = [(b - a) / (j - i) for (i, a), (j, b) in pairwise(since)]
        compiling = max(0.0, (per_step[0] - statistics.median(per_step[1:] or per_step)) * since[1][0])
    points = zip(compared.result.curve, compared.result.clock, strict=True)
    return [(tokens, clock - compiling, loss) for (tokens, loss), clock in points if loss is not None]


def train_nanochat(ours: Run, variant: str) -> Curve:
    """Train a variant of nanochat on the batches of a run of ours and return its validations."""
    options, context = ours.config["train"], ours.config["model"]["context"]
    seed, steps, parts = options["seed"], options["steps"], options["accumulation"]
    model = nanochat_model(ours.config["model"], seed)
    if variant == KEY_OFFSET:
        offset_keys(model.transformer.h[-1].attn)
    optimizer = model.setup_optimizer(**RATES | ({} if variant == NANOCHAT else {"scalar_lr": 0.15}))
    forward = torch.compile(model, dynamic=False) if ours.config["compiled"] else model
    corpus, tokenizer = open_source(**ours.config["data"]), ours.folder.tokenizer()
    loader = Loader(pack(corpus, tokenizer, "train"), options["batch_size"], context, seed)
    most = options["eval_tokens"]
    text = pack(corpus, tokenizer, "validation", max_tokens=most and most + context)
    curve: Curve = []
    seconds: list[float] = []
    with Progress(console=Console(stderr=True)) as progress:
        for step in progress.track(range(steps), description=f"{variant}, seed {seed}"):
            start = time.perf_counter()
            for _ in range(parts):
                batch = next(loader)
                (forward(batch.tokens, batch.targets) / parts).backward()
            schedule(optimizer, step, steps)
            optimizer.step()
            model.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
            if (step + 1) % options["eval_every"] == 0 or step + 1 == steps:
                middle = statistics.median(seconds)
                spent = sum(middle if i < COMPILED_STEPS else value for i, value in enumerate(seconds))
                loss = validation_loss(model, text, context, options["batch_size"], most or len(text))
                curve.append(((step + 1) * ours.tokens_per_step, spent, loss))
    return curve


def nanochat_model(sizes: dict[str, Any], seed: int) -> Any:
    """Return nanochat's model of the same sizes, initialised from the seed."""
    from nanochat.gpt import GPT, GPTConfig

    names = {"n_layer": "layers", "n_head": "heads", "n_kv_head": "kv_heads", "n_embd": "d_model"}
    names |= {"sequence_len": "context", "vocab_size": "vocab_size"}
    config = GPTConfig(**{there: sizes[here] for there, here in names.items()})
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    return model


def offset_keys(attention: Any) -> None:
    """Let nanochat's attention take half of each key from the previous token, as ours does."""
    forward = type(attention).forward
    plain = forward.__globals__["flash_attn"].flash_attn_func

    def delayed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return plain(q, delay(k.transpose(1, 2)).transpose(1, 2), v, **options)

    changed = {**forward.__globals__, "flash_attn": SimpleNamespace(flash_attn_func=delayed)}
    attention.forward = MethodType(FunctionType(forward.__code__, changed), attention)


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


def summarise(runs: dict[str, list[Curve]]) -> dict[str, Any]:
    """Return each contestant's last loss and speed, and its shares of nanochat's tokens and seconds, over seeds."""
    found: dict[str, Any] = {}
    for name, curves in runs.items():
        found[name] = {
            "loss": statistics.mean(curve[-1][2] for curve in curves),
            "seconds": statistics.median(curve[-1][1] for curve in curves),
            "tokens_per_second": statistics.median(curve[-1][0] / curve[-1][1] for curve in curves),
        }
        for axis, what in enumerate(("tokens", "seconds")):
            shares = []
            for mine, theirs in zip(curves, runs[NANOCHAT], strict=True):
                used = used_until([(point[axis], point[2]) for point in mine], theirs[-1][2])
                shares.append(None if used is None else used / theirs[-1][axis])
            found[name][f"share_of_{what}"] = over_seeds(statistics.median, shares)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    here = result["machine"]
    head = ["", "validation loss", "tokens/s", "seconds", "share of nanochat's tokens", "of its seconds"]
    lines = []
    for name, row in result["contestants"].items():
        shares = [row["share_of_tokens"], row["share_of_seconds"]]
        shown = ["not reached" if share is None else f"{share:.2f}" for share in shares]
        lines.append([name, f"{row['loss']:.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['seconds']:,.0f}", *shown])
    return f"""{result["tokens"]:,} tokens of {result["data"]}, {counted(result["seeds"], "seed")}, {result["dtype"]}; \
{here["cpu"]}, {counted(here["threads"], "thread")}, torch {here["torch"]}, {result["date"]}, \
commit {str(result["commit"])[:8]}

{markdown(head, lines)}
Loss in nats per token, the mean over seeds. Shares are of the tokens and seconds that nanochat needs to its last loss:
medians over seeds, linear between validations. nanochat has its default rates, not scaled by the batch as its script
does for its own. The seconds of compilers are left out.
"""


def draw(runs: dict[str, list[Curve]], out: Path) -> None:
    """Draw the losses by tokens and by seconds, means over seeds."""
    for name, axis, label in (("tokens", 0, TOKENS), ("seconds", 1, "seconds of training")):
        methods = [
            {
                "method": contestant,
                "kind": contestant,
                "points": [[statistics.mean(p[i] for p in at) for i in (axis, 2)] for at in zip(*curves, strict=True)],
            }
            for contestant, curves in runs.items()
        ]
        save_figure(partial(draw_losses, {"methods": methods}, label), out / name)


def prepare_nanochat(checkout: Path, dtype: torch.dtype) -> None:
    """Make nanochat importable. Raises ValueError if it is not there."""
    if not (checkout / "nanochat" / "gpt.py").is_file():
        raise ValueError(
            f"--nanochat {checkout} has no nanochat/gpt.py; name a checkout of github.com/karpathy/nanochat"
        )
    os.environ["NANOCHAT_DTYPE"] = str(dtype).removeprefix("torch.")
    sys.path.append(str(checkout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", nargs="+", type=Path, help="folders of et compare")
    parser.add_argument("--nanochat", type=Path, required=True, help="a checkout of nanochat")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=[NANOCHAT])
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compared = [run for folder in arguments.ours for run in read_runs(folder) if run.result is not None]
    if not compared:
        raise ValueError(f"{arguments.ours[0]}: has no finished run in METHOD/seed_N; name a folder of et compare")
    options = [each.config["model"] | each.config["train"] | each.config["corpus"] for each in compared]
    alike = ("context", "vocab_size", "batch_size", "accumulation", "hash")
    if len(seen := {tuple(option[name] for name in alike) for option in options}) > 1:
        raise ValueError(f"runs differ in context, vocabulary, batch or text: {sorted(seen)}; give them the same")
    dtype = compute_dtype("auto")
    prepare_nanochat(arguments.nanochat, dtype)
    names, _ = names_with_sizes([(each.method, sizes(each.config)) for each in compared])
    runs: dict[str, list[Curve]] = {}
    for name, each in zip(names, compared, strict=True):
        runs.setdefault(name, []).append(curve_of(each))
    by_length = sorted(compared, key=lambda each: each.config["train"]["steps"])
    longest = {each.seed: each for each in by_length}
    for variant, (seed, ours) in itertools.product(arguments.variants, sorted(longest.items())):
        path = arguments.out / variant.replace(", ", "_").replace(" ", "_") / f"seed_{seed}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(train_nanochat(ours, variant)).encode())
        runs.setdefault(variant, []).append(json.loads(path.read_text(encoding="utf-8")))
    config = by_length[-1].config
    result = {
        "tokens": config["train"]["steps"] * by_length[-1].tokens_per_step,
        "data": Path(config["data"]["source"]).name,
        "seeds": len(longest),
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": config["compiled"],
        "commands": [each.config["command"] for each in compared],
        "nanochat": commit_of(arguments.nanochat),
        **origin(),
        "machine": machine(),
        "contestants": summarise(runs),
        "runs": runs,
    }
    (arguments.out / "speedrun.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "speedrun.md").write_text(to_markdown(result), encoding="utf-8")
    draw(runs, arguments.out)
    print(to_markdown(result))


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

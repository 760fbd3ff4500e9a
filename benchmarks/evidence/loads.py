"""Measures the busiest expert's load with frozen routing, on training and on validation text, and after calibration.

    python benchmarks/evidence/loads.py RUN… [--tokens 400000]

It prints one JSON line per run: the busiest expert's load over the mean in the worst layer, on rows drawn from the
training text and on all validation documents. For rules that route by cutoffs, it prints the same after the cutoffs
were measured again on other rows of the training text, as by `et calibrate`, with the change in the validation loss and
its standard error over documents.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expert_threshold.data import Loader, open_source, pack, windows
from expert_threshold.model import GPT
from expert_threshold.model.calibrate import calibrate
from expert_threshold.routing.cutoffs import ByCutoff
from expert_threshold.runs import RunFolder, load_model

ROWS = 64  # in a batch


@torch.no_grad()
def measure(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, Tensor]:
    """Return the worst layer's load of the busiest expert over the mean, and the loss of every token (tokens,)."""
    loads, nats = [], []
    for tokens, targets in batches:
        output = model(tokens, targets, record=True)
        loads.append(torch.stack([routing.assignment.sum((0, 1)) for routing in output.routings]))
        nats.append(output.token_losses.double().flatten())
    load = torch.stack(loads).sum(0).double()  # (layers, experts)
    return float((load.amax(-1) / load.mean(-1)).max()), torch.cat(nats)


def study(path: Path, most: int) -> dict[str, Any]:
    """Return the loads of a run's last checkpoint."""
    folder = RunFolder.open(path)
    model, tokenizer = load_model(folder.path, compute_dtype=torch.bfloat16)
    source, context = open_source(folder.section("data")["source"]), model.config.context
    text = pack(source, tokenizer, "validation")
    rows = list(windows(text, context))[: len(text) // context]  # of equal length
    held_out = [(torch.stack([r.tokens for r in part]), torch.stack([r.targets for r in part]))
                for part in (rows[i : i + ROWS] for i in range(0, len(rows), ROWS))]  # fmt: skip
    parts = source.parts
    training = pack(source, tokenizer, "train") if parts is None else parts("train", tokenizer)

    def drawn(seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        return islice(Loader(training, ROWS, context, seed), math.ceil(most / (ROWS * context)))

    load, before = measure(model, held_out)
    found: dict[str, Any] = {"run": folder.path.name, "training": measure(model, drawn(1))[0], "validation": load}
    if isinstance(model.config.rule, ByCutoff):
        calibrate(model, drawn(2))
        load, after = measure(model, held_out)
        document = torch.bucketize(torch.arange(len(before)), torch.as_tensor(text.offsets), right=True) - 1
        counts = torch.bincount(document).double()
        change = torch.bincount(document, (after - before)) - (after - before).mean() * counts
        error = math.sqrt(float((change**2).sum())) / len(before)
        found |= {"training, calibrated": measure(model, drawn(1))[0], "validation, calibrated": load}
        found |= {"loss": float(before.mean()), "change": float((after - before).mean()), "error": error}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--tokens", type=int, default=400_000)
    asked = parser.parse_args()
    for path in asked.runs:
        print(json.dumps(study(path, asked.tokens)), flush=True)


if __name__ == "__main__":
    main()

"""Compares frozen, running and recalibrated cutoffs on text that a model was not trained on.

    python benchmarks/evidence/shift.py RUN… --texts NAME=PATH[:FIELD] … [--tokens 200000] > shift.jsonl
    python benchmarks/evidence/shift.py --show shift.jsonl

The C validation text of a RUN comes first, then each of the texts, in one stream of batches of the training's size.
Frozen cutoffs are those of the checkpoint. Running cutoffs are updated after each batch, as in training, so no batch
is routed by its own scores. Recalibrated cutoffs are measured on the training part of the same text, as by
`et calibrate`. It prints a JSON line per run, text and kind of cutoffs: experts per token, the busiest expert's load
over the mean in the worst layer, and the loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from study import Batches, batches_of, busiest, drawn, read, routed

from expert_threshold.analysis.results import markdown
from expert_threshold.data import open_source, pack
from expert_threshold.model import GPT
from expert_threshold.model.calibrate import calibrate
from expert_threshold.runs import RunFolder, load_model

KINDS = ("frozen", "running", "recalibrated")
CALIBRATION = 262_144  # tokens, the default of et calibrate


def measure(model: GPT, batches: Batches, running: bool) -> dict[str, float]:
    """Return the fanout, the worst load and the loss over batches. running: whether to update cutoffs after each."""
    nats, experts = routed(model, batches, running)
    return {"fanout": float(experts.sum(-1).double().mean()), "load": busiest(experts), "loss": float(nats.mean())}


def study(path: Path, texts: dict[str, tuple[str, str]], most: int) -> Iterable[dict[str, Any]]:
    """Yield the measurements of a run's last checkpoint."""
    folder = RunFolder.open(path)
    data, train = folder.section("data"), folder.section("train")
    for kind in KINDS:
        model, tokenizer = load_model(folder.path, compute_dtype=torch.bfloat16)
        context, size = model.config.context, train["batch_size"]
        for name, (source, field) in {"C": (data["source"], data["text_field"]), **texts}.items():
            opened = open_source(source, field)
            if kind == "recalibrated":
                calibrate(model, drawn(opened, tokenizer, context, CALIBRATION, 0))
            batches = batches_of(pack(opened, tokenizer, "validation"), context, size, most)
            found = {key: round(value, 4) for key, value in measure(model, batches, kind == "running").items()}
            yield {"run": folder.path.name, "seed": train["seed"], "text": name, "cutoffs": kind, **found}


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over runs, with every run's change in loss from frozen cutoffs."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        cells[record["text"], record["cutoffs"]].append(record)
    lines = []
    texts = dict.fromkeys(text for text, _ in cells)
    for text, kind in itertools.product(texts, KINDS):
        mine = cells[text, kind]
        changes = [each["loss"] - base["loss"] for each, base in zip(mine, cells[text, "frozen"], strict=True)]
        fanout, load, loss = (fmean(each[key] for each in mine) for key in ("fanout", "load", "loss"))
        shown = "" if kind == "frozen" else ", ".join(f"{change:+.3f}" for change in changes)
        lines.append([text, kind, f"{fanout:.2f}", f"{load:.2f}", f"{loss:.3f}", shown])
    return markdown(["text", "cutoffs", "experts per token", "busiest load", "loss", "change, by seed"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--texts", nargs="*", default=[], metavar="NAME=PATH[:FIELD]")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--show", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.show is not None:
        print(table(read(asked.show)))
        return
    named = {name: source.partition(":")[::2] for name, _, source in (text.partition("=") for text in asked.texts)}
    texts = {name: (path, field or "text") for name, (path, field) in named.items()}
    for path in asked.runs:
        for record in study(path, texts, asked.tokens):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()

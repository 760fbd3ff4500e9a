"""Measures the busiest expert's load with frozen routing, on training and on validation text, and after calibration.

    python benchmarks/evidence/loads.py RUN… [--tokens 400000]

It prints one JSON line per run: the busiest expert's load over the mean in the worst layer, on rows drawn from the
training text and on all validation documents. For rules that route by cutoffs, it prints the same after the cutoffs
were measured again on other rows of the training text, as by `et calibrate`, with the change in the validation loss and
its standard error over documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from study import batches_of, busiest, drawn, over_documents, print_each_run, routed

from expert_threshold.data import open_source, pack
from expert_threshold.model.calibrate import calibrate
from expert_threshold.routing.cutoffs import ByCutoff
from expert_threshold.runs import RunFolder, load_model


def measure(path: Path, most: int) -> dict[str, Any]:
    """Return the loads of a run's last checkpoint."""
    folder = RunFolder.open(path)
    model, tokenizer = load_model(folder.path, compute_dtype=torch.bfloat16)
    source, context = open_source(folder.section("data")["source"]), model.config.context
    text = pack(source, tokenizer, "validation")
    held_out = batches_of(text, context, 64, len(text))
    before, experts = routed(model, held_out)
    training = busiest(routed(model, drawn(source, tokenizer, context, most, 1))[1])
    found: dict[str, Any] = {"run": folder.path.name, "training": training, "validation": busiest(experts)}
    if isinstance(model.config.rule, ByCutoff):
        calibrate(model, drawn(source, tokenizer, context, most, 2))
        after, experts = routed(model, held_out)
        tokens = torch.cat([tokens.flatten() for tokens, _ in held_out])
        change, error = over_documents(after - before, tokens, tokenizer.bos)
        training = busiest(routed(model, drawn(source, tokenizer, context, most, 1))[1])
        found |= {"training, calibrated": training, "validation, calibrated": busiest(experts)}
        found |= {"loss": float(before.mean()), "change": change, "error": error}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


if __name__ == "__main__":
    print_each_run("loads", __doc__, measure)

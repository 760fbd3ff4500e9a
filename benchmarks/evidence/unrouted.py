"""Counts the tokens without an expert, and measures their loss and the effect of a floor of one expert per token.

    python benchmarks/evidence/unrouted.py RUN… [--tokens 400000]

Each RUN must route by expert threshold. The script prints a JSON line per run: the fraction of tokens without an expert
in each layer, the loss by the number of layers in which a token has no expert, and the loss with the floor, under which
such a token goes to the expert whose cutoff it misses least. The standard error of the difference is over documents.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from study import batches_of, over_documents, print_each_run, routed
from torch import Tensor

from expert_threshold.data import open_source, pack
from expert_threshold.routing import CutoffState, ExpertThreshold, Routing
from expert_threshold.routing.cutoffs import cutoff
from expert_threshold.runs import RunFolder, load_model


class AtLeastOne(ExpertThreshold):
    """Expert threshold with a floor of one expert per token."""

    def route(self, scores: Tensor, state: CutoffState, **options: Any) -> Routing:
        routing = super().route(scores, state, **options)
        nearest = (self.without_nulls(scores) - cutoff(state)).argmax(-1, keepdim=True)
        lacking = ~routing.assignment.any(-1, keepdim=True)
        floor = torch.zeros_like(routing.assignment).scatter(-1, nearest, lacking)
        return routing._replace(assignment=routing.assignment | floor)


def measure(path: Path, most: int) -> dict[str, Any]:
    """Return the measurements of a run. Raises ValueError if its rule is not expert threshold."""
    folder = RunFolder.open(path)
    model, tokenizer = load_model(folder.path)
    text = pack(open_source(folder.section("data")["source"]), tokenizer, "validation")
    rows = batches_of(text, model.config.context, 1, most)
    nats, experts = routed(model, rows)
    fanouts = experts.sum(-1)
    without = (fanouts == 0).sum(0)
    for _, moe in model.moe_layers():
        if not isinstance(moe.router.rule, ExpertThreshold):
            raise ValueError(f"{path}: its rule is {moe.router.rule.label}, not expert threshold; name another run")
        moe.router.rule = AtLeastOne(**asdict(moe.router.rule))
    floored, more = routed(model, rows)
    tokens = torch.cat([tokens.flatten() for tokens, _ in rows])
    difference, error = over_documents(floored - nats, tokens, tokenizer.bos)
    return {
        "run": folder.path.name,
        "tokens": len(nats),
        "documents": int(tokens.eq(tokenizer.bos).sum()),
        "without_expert": (fanouts == 0).double().mean(1).tolist(),
        "loss_by_layers_without": {
            str(layers): {"share": float(mine.double().mean()), "loss": float(nats[mine].mean())}
            for layers, mine in enumerate(without == torch.arange(len(fanouts) + 1)[:, None])
        },
        "loss": float(nats.mean()),
        "fanout": fanouts.double().mean(1).tolist(),
        "with_floor": {"fanout": more.sum(-1).double().mean(1).tolist(), "difference": difference, "error": error},
    }


if __name__ == "__main__":
    print_each_run("unrouted", __doc__, measure)

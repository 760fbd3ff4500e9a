"""Counts the tokens without an expert, and measures their loss and the effect of a floor of one expert per token.

    python benchmarks/evidence/unrouted.py RUN [--tokens 400000]

RUN must route by expert threshold. The script prints one JSON object: the fraction of tokens without an expert in each
layer, the loss by the number of layers in which a token has no expert, and the loss with the floor, under which such a
token goes to the expert whose cutoff it misses least. The standard error of the difference is over documents.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expert_threshold.data import open_source, pack, windows
from expert_threshold.model import GPT
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


@torch.no_grad()
def losses(model: GPT, rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, (tokens,), and its fanout in every layer, (layers, tokens)."""
    found = []
    for tokens, targets in rows:
        output = model(tokens[None], targets[None], record=True)
        fanout = torch.stack([routing.assignment.sum(-1)[0] for routing in output.routings])
        found.append((output.token_losses[0].double(), fanout))
    nats, fanouts = zip(*found, strict=True)
    return torch.cat(nats), torch.cat(fanouts, 1)


def measure(path: Path, most: int) -> dict[str, Any]:
    """Return the measurements of a run. Raises ValueError if its rule is not expert threshold."""
    folder = RunFolder.open(path)
    model, tokenizer = load_model(folder.path)
    text = pack(open_source(folder.section("data")["source"]), tokenizer, "validation")
    chosen = islice(windows(text, model.config.context), most // model.config.context)
    rows = [(row.tokens, row.targets) for row in chosen]
    nats, fanouts = losses(model, rows)
    without = (fanouts == 0).sum(0)
    for _, moe in model.moe_layers():
        if not isinstance(moe.router.rule, ExpertThreshold):
            raise ValueError(f"{path}: its rule is {moe.router.rule.label}, not expert threshold; name another run")
        moe.router.rule = AtLeastOne(**asdict(moe.router.rule))
    floored, more = losses(model, rows)
    document = torch.cat([tokens for tokens, _ in rows]).eq(tokenizer.bos).cumsum(0)
    of_document = torch.zeros(int(document.max()) + 1, 2, dtype=torch.float64)
    of_document.index_add_(0, document, torch.stack([floored - nats, torch.ones_like(nats)], 1))
    difference, share = of_document.sum(0)[0] / len(nats), of_document[:, 1] / len(nats)
    residuals = of_document[:, 0] / len(nats) - difference * share
    return {
        "tokens": len(nats),
        "documents": len(of_document),
        "without_expert": (fanouts == 0).double().mean(1).tolist(),
        "loss_by_layers_without": {
            str(layers): {
                "share": float((without == layers).double().mean()),
                "loss": float(nats[without == layers].mean()),
            }
            for layers in range(len(fanouts) + 1)
        },
        "loss": float(nats.mean()),
        "fanout": fanouts.double().mean(1).tolist(),
        "with_floor": {
            "fanout": more.double().mean(1).tolist(),
            "difference": float(difference),
            "error": float(residuals.square().sum().sqrt()),
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=400_000)
    asked = parser.parse_args()
    try:
        print(json.dumps(measure(asked.run, asked.tokens)))
    except ValueError as error:
        parser.error(str(error))

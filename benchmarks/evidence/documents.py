"""Intervals over seeds and documents: resamples both and compares paired runs on whole held-out documents.

    python benchmarks/evidence/documents.py --data TEST --base RUN… --runs RUN… [--tokens 400000]

TEST is a folder as for ladder.py, all of whose held-out documents are read, up to a number of tokens. The i-th run is
compared with the i-th base run, which has the same seed. The script prints one JSON object: each pair's difference in
loss (nats per token) with a 95 % interval over documents, and the mean difference with its interval over documents
alone and over documents and pairs, from 10,000 bootstrap samples. Differences between pairs are widened as by Student's
t.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import batches_of, run_script, widening

from expert_threshold.data import open_source, pack
from expert_threshold.runs import load_model

SAMPLES = 10_000


@torch.no_grad()
def by_document(path: Path, data: str, most: int) -> np.ndarray:
    """Return the nats and the number of targets of each document, (2, documents)."""
    model, tokenizer = load_model(path)
    text = pack(open_source(data), tokenizer, "validation")
    batches = batches_of(text, model.config.context, 16, most)
    nats = torch.cat([model(*batch).token_losses.flatten().double() for batch in batches])
    document = torch.cat([targets.flatten() for _, targets in batches]).eq(tokenizer.bos).cumsum(0)
    return torch.stack([torch.bincount(document, each) for each in (nats, torch.ones_like(nats))]).numpy()


def compare(nats: np.ndarray, targets: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Return intervals of the mean difference. nats: differences, (pairs, documents); targets: (documents,)."""
    pairs, documents = nats.shape
    random = np.random.default_rng(seed)
    weights = random.multinomial(documents, np.full(documents, 1 / documents), SAMPLES)
    by_pair = (weights @ nats.T) / (weights @ targets)[:, None]  # (samples, pairs)
    chosen = random.integers(pairs, size=(SAMPLES, pairs))

    def interval(samples: np.ndarray) -> list[float]:
        return [round(float(end), 5) for end in np.quantile(samples, (0.025, 0.975))]

    effects = nats.sum(1) / targets.sum()
    wider = widening(pairs - 1) * (pairs / (pairs - 1)) ** 0.5 if pairs > 1 else 1.0
    over_pairs = wider * (effects[chosen].mean(1) - effects.mean())
    return {
        "documents": documents,
        "targets": int(targets.sum()),
        "pairs": [
            {"difference": round(float(each.sum() / targets.sum()), 5), "over_documents": interval(samples)}
            for each, samples in zip(nats, by_pair.T, strict=True)
        ],
        "difference": round(float(nats.sum() / targets.sum() / pairs), 5),
        "over_documents": interval(by_pair.mean(1)),
        "over_both": interval(by_pair.mean(1) + over_pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--base", type=Path, nargs="+", required=True, metavar="RUN")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, metavar="RUN")
    parser.add_argument("--tokens", type=int, default=400_000)
    asked = parser.parse_args()
    if len(asked.base) != len(asked.runs):
        raise ValueError(f"{len(asked.runs)} runs cannot be paired with {len(asked.base)}; name as many of both")
    base, runs = (
        np.stack([by_document(path, asked.data, asked.tokens) for path in paths]) for paths in (asked.base, asked.runs)
    )
    print(json.dumps(compare(runs[:, 0] - base[:, 0], base[0, 1]), indent=1))


if __name__ == "__main__":
    run_script("documents", main)

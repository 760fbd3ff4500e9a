"""One rank of the campaign of layouts, see `ranks.run_on_ranks`: a run goes on in another layout every few steps."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

from torch.distributed import FileStore

from expert_threshold.data import Batch, Loader
from expert_threshold.distributed import ALONE, Rendezvous
from expert_threshold.model import gpt
from expert_threshold.routing import ExpertThreshold
from expert_threshold.runs import RunFolder
from expert_threshold.train import prepare
from train.across_ranks import ADDITIONS, CONFIG, assert_same, draw_no_zeros, run

RULE = ExpertThreshold(4, 1, warmup_steps=3, decay=0.9)
STEPS = 10
LAYOUTS = ({}, {"expert_parallel": 2}, {"shard": True}, {"shard": True, "expert_parallel": 2})
rows: list[str] = []
"""The rows that this rank has trained on, in order."""


class Recorded(Loader):
    def __next__(self) -> Batch:
        batch = super().__next__()
        rows.extend(row.numpy().tobytes().hex() for row in batch.tokens)
        return batch


def stop(*_: object) -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return ""


def trial(rank: int, ranks: int, seed: int, turns: FileStore, alone: RunFolder, expected: Counter[str]) -> None:
    chance, folder = random.Random(seed), alone.path.parent
    path = folder / f"run{seed}"
    config = replace(CONFIG, steps=STEPS, eval_every=None, checkpoint_every=5)
    rows.clear()
    for last in [*sorted(chance.sample(range(1, STEPS), 3)), STEPS]:
        count = chance.choice([1, 2, 4])
        options = chance.choice(LAYOUTS) if count > 1 else {}
        if rank < count:
            store = FileStore(str(folder / f"store{seed}_{last}"), count)
            rendezvous = Rendezvous(store, rank, count, rank, count)
            here = replace(config, sample_every=last if last < STEPS else None, **options)
            run(path, folder / "corpus.jsonl", RULE, here, rendezvous, ADDITIONS, "nanochat", sample=stop)
        turns.set(f"{seed} {last} {rank}", json.dumps(rows))
        turns.wait([f"{seed} {last} {each}" for each in range(ranks)])
    if rank == 0:
        assert_same(RunFolder(path), alone, 1e-5)
        found = [row for each in range(ranks) for row in json.loads(turns.get(f"{seed} {STEPS} {each}"))]
        assert Counter(found) == expected
        (folder / "done").write_text(str(seed + 1))
        turns.set(f"{seed}", "")
    turns.wait([f"{seed}"])


def main(rank: int, ranks: int, folder: Path, trials: str) -> None:
    prepare.Loader = Recorded  # type: ignore[misc]
    gpt._draw = draw_no_zeros
    config = replace(CONFIG, steps=STEPS, eval_every=None, checkpoint_every=5)
    turns, alone = FileStore(str(folder / "turns"), ranks), RunFolder(folder / "alone")
    if rank == 0:
        run(alone.path, folder / "corpus.jsonl", RULE, config, ALONE, ADDITIONS, "nanochat")
    expected = Counter(rows)
    for seed in range(int(trials)) if (only := os.environ.get("ET_TRIAL")) is None else [int(only)]:
        trial(rank, ranks, seed, turns, alone, expected)

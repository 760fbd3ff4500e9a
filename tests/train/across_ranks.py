"""One rank of the tests across ranks, see `ranks.run_on_ranks`: runs of several ranks are compared with runs of one."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from expert_threshold.data import DataConfig
from expert_threshold.distributed import ALONE, Rendezvous
from expert_threshold.model import TRUNKS, gpt
from expert_threshold.optim import OptimConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from expert_threshold.runs import RunFolder
from expert_threshold.train import RunConfig, TrainConfig, train
from train.conftest import tiny

draw_weight = gpt._draw


def draw_no_zeros(part: str, *arguments: Any) -> None:
    """Draw a weight as the paper does, but none at zero.

    With outputs of zero, equal tokens would have equal scores in any context at first, and rounding would decide which
    of them an expert takes.
    """
    draw_weight("up" if part in ("output", "down") else part, *arguments)


STEPS = 5
# Newton-Schulz in bfloat16, and a division by the size of gradients next to 0, would make much of rounding.
OPTIM = OptimConfig(ns_dtype="float32", eps=1e-3, adamw_warmup_steps=5, momentum_warmup_steps=5)
ADDITIONS = replace(
    OPTIM, orthogonalizer="polar_express", equilibrate="rows", renormalize="matrix", normuon="longer", expert_period=2,
    weight_decay=0.1,
)  # fmt: skip
CONFIG = TrainConfig(
    steps=STEPS, batch_size=4, accumulation=2, log_every=1, eval_every=STEPS, checkpoint_every=None, threads=1,
    dtype="float32", timeout=200,
)  # fmt: skip


THRESHOLD = ExpertThreshold(4, 1, warmup_steps=3, decay=0.9)
GLOBAL_RULES: dict[str, Rule | None] = {
    "dense": None,
    "token_choice": TokenChoice(4, 1),
    "global_aux": TokenChoice(4, 1, balance="global_aux"),
    "loss_free": TokenChoice(4, 2, balance="loss_free"),
    "expert_choice": ExpertChoice(4, 1, pool="global"),
    "expert_choice_sequence": ExpertChoice(4, 1, pool="sequence"),
    "expert_threshold": THRESHOLD,
}
"""Rules whose runs do not depend on how a batch is shared out."""
LOCAL_RULES: dict[str, Rule] = {
    "aux": TokenChoice(4, 1, balance="aux"),
    "expert_choice_batch": ExpertChoice(4, 1, pool="batch"),
    "expert_threshold_batch": replace(THRESHOLD, pool="batch"),
}
"""Rules in which tokens compete only within their micro-batch, which is one rank's."""
FEW = (
    "dense", "global_aux", "expert_choice", "expert_threshold", "aux", "expert_choice_batch", "whole_micro_batches",
    "sharded_experts_apart",
)  # fmt: skip
"""The runs of two ranks in `make test`: sums over ranks, pools over ranks and within one, every kind of sharding."""


def text() -> str:
    """Documents of random letters, so that few equal tokens have equal contexts."""
    chance = random.Random(0)
    letters = [chr(code) for code in range(33, 127)]
    texts = ("".join(chance.choices(letters, k=chance.randint(20, 200))) for _ in range(40))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def run(
    path: Path,
    corpus: Path,
    rule: Rule | None,
    config: TrainConfig,
    rendezvous: Rendezvous,
    optim: OptimConfig = OPTIM,
    trunk: str = "paper",
    **options: Any,
) -> RunFolder:
    """Train there from the beginning or, if it exists, from its last checkpoint."""
    folder = RunFolder(path)
    resume = (path / "config.json").exists()
    if rendezvous.is_main:
        path.mkdir(exist_ok=True)
    model, data = tiny(rule, **TRUNKS[trunk]), DataConfig(str(corpus))
    train(folder, RunConfig(model, data, optim, config), resume=resume, rendezvous=rendezvous, **options)
    return folder


def assert_same(one: RunFolder, other: RunFolder, tolerance: float) -> None:
    """Losses of every step, validations, weights, moments and rules."""
    for a, b in zip(one.metrics.read(), other.metrics.read(), strict=True):
        assert (a["step"], a["split"]) == (b["step"], b["split"])
        assert abs(a.get("loss", 0) - b.get("loss", 0)) < tolerance, (one.path, a["step"], a["split"])
    mine, theirs = one.load_checkpoint(), other.load_checkpoint()
    assert mine.state["position"] == theirs.state["position"]
    assert (mine.step, mine.state["tokens"]) == (theirs.step, theirs.state["tokens"])
    for part in ("model", "optimizer"):
        assert mine.tensors[part].keys() == theirs.tensors[part].keys()
        for name, tensor in mine.tensors[part].items():
            if not name.endswith("state_sketch"):  # of each forward, and no part of training
                say = lambda text, name=name: f"{one.path} {name}: {text}"  # noqa: E731
                expected = theirs.tensors[part][name]
                torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance, msg=say)


LAYOUTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2, 1, {}), (3, 2, {}), (4, 4, {}), (5, 4, {"expert_parallel": 2}), (6, 2, {"shard": True}), (7, 2, {}),
    (8, 2, {"shard": True, "expert_parallel": 2}), (10, 1, {}),
)  # fmt: skip
"""Last step, ranks and options, one after the other."""


def change_layouts(folder: Path, corpus: Path, rank: int) -> None:
    """A run that goes on in another layout every few steps has the losses of one that never stopped.

    With all of Muon's additions, since they have state, and read weights, that layouts split, and with nanochat's
    trunk, since some of its parameters have fewer rows than there are ranks.
    """
    config = replace(CONFIG, steps=10, eval_every=None, checkpoint_every=5)
    turns = FileStore(str(folder / "turns"), 4)

    def stop(*_: object) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    for number, (last, ranks, options) in enumerate(LAYOUTS):
        if rank < ranks:
            store = FileStore(str(folder / f"layout{number}"), ranks)
            rendezvous = Rendezvous(store, rank, ranks, rank, ranks)
            here = replace(config, sample_every=last if last < config.steps else None, **options)
            run(folder / "layouts", corpus, THRESHOLD, here, rendezvous, ADDITIONS, "nanochat", sample=stop)
        if rank == 0:
            turns.set(str(number), "")
        turns.wait([str(number)])
    if rank == 0:
        one = run(folder / "layouts_alone", corpus, THRESHOLD, config, ALONE, ADDITIONS, "nanochat")
        assert_same(RunFolder(folder / "layouts"), one, 1e-5)
        turns.set("compared", "")
    turns.wait(["compared"])  # else the others' next run would wait for this rank, and for some seconds only


def main(rank: int, ranks: int, folder: Path, which: str) -> None:
    gpt._draw = draw_no_zeros
    corpus = folder / "corpus.jsonl"
    cases = {name: (rule, CONFIG, CONFIG) for name, rule in GLOBAL_RULES.items()}
    # Where a rank's micro-batch is the pool, one process gets micro-batches of that size.
    split = replace(CONFIG, accumulation=1)
    alone = replace(CONFIG, batch_size=CONFIG.batch_size // ranks, accumulation=ranks)
    cases |= {name: (rule, split, alone) for name, rule in LOCAL_RULES.items()}
    whole = replace(CONFIG, accumulation=ranks)
    cases["whole_micro_batches"] = (ExpertChoice(4, 1, pool="batch"), whole, whole)
    cases["sharded"] = (THRESHOLD, replace(CONFIG, shard=True), CONFIG)
    apart = replace(CONFIG, shard=True, expert_parallel=2, activation_checkpointing=True)  # sends tokens again
    cases["sharded_experts_apart"] = (THRESHOLD, apart, CONFIG)
    if ranks > 2:
        change_layouts(folder, corpus, rank)
        cases = {name: cases[name] for name in ("expert_threshold", "loss_free")}
    elif which == "few":
        cases = {name: cases[name] for name in FEW}
    for name, (rule, config, _) in cases.items():
        store = FileStore(str(folder / f"store_{name}"), ranks)
        run(folder / name, corpus, rule, config, Rendezvous(store, rank, ranks, rank, ranks))
    for name, (rule, _, config) in list(cases.items())[rank::ranks]:
        one = run(folder / f"{name}_alone", corpus, rule, config, ALONE)
        assert_same(RunFolder(folder / name), one, 2e-5)

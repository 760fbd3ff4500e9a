"""Measures the cost of many ranks: bytes sent, and time on this machine.

    python benchmarks/scaling.py count   [--ranks 2 4] [--layouts replicate expert_parallel] [--batch-sizes 2 4 8]
    python benchmarks/scaling.py measure [--ranks 1 2 4] [--layouts …] [--sequences 4]

count: bytes that a rank sends in a step, by kind, against the least that has to be sent. An all-reduce of n bytes over
r ranks counts as 2 n (r - 1) / r, a reduce-scatter or an all-gather as half of it, as the best algorithms send.
Fails if bytes per token grow with the batch.
measure: strong scaling, the same step shared out, and weak scaling, the same work for each rank; gloo, on this machine.
Each prints a flat JSON object a line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bare import origin
from common import compute_dtype, machine, run
from torch.utils._python_dispatch import TorchDispatchMode

from expert_threshold.config import RunConfig, resolve
from expert_threshold.data import Loader, open_source
from expert_threshold.data.tokens import Tokens
from expert_threshold.distributed import Parallel, Rendezvous, local_batch, parallelize, process_groups
from expert_threshold.distributed.rendezvous import launch
from expert_threshold.model import GPT, GPTConfig, parameter_counts
from expert_threshold.optim import make_optimizers
from expert_threshold.routing.observation import observe
from expert_threshold.train import train_step
from expert_threshold.train.device import pick_device
from expert_threshold.train.state import TrainState

Row = dict[str, Any]
FLOAT32, INT64 = 4, 8  # bytes
LAYOUTS = ("replicate", "shard", "expert_parallel")

# Who asked for a collective, innermost first: function or file, and the kind of what it sends.
KINDS = {
    "selection.py": "selection",
    "radix.py": "selection",
    "cutoffs.py": "selection",
    "by_count": "counts",
    "expert_parallel.py": "all_to_all",
    "fsdp.py": "matrices",  # full ones, for Muon, and their updates back
    "state.py": "observations",
    "reduce": "gradients",
    "gather": "weights",
    "foreach_reduce": "gradients",
    "foreach_all_gather": "weights",
}


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends, by kind, while in force."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.__name__:
            kind = _kind()
            self.bytes[kind] += sent(func._schema.name.removeprefix("c10d::"), args)
            self.collectives[kind] += 1
        return func(*args, **(kwargs or {}))


def sent(name: str, args: Any) -> float:
    """Bytes that leave a rank in the best algorithm for large messages. Raises ValueError for an unknown collective."""
    group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
    ranks, me = group.size(), group.rank()
    others = (ranks - 1) / ranks
    if name == "allreduce_":
        return 2 * others * sum(tensor.nbytes for tensor in args[0])
    if name == "alltoall_base_":
        rows, splits = args[1], args[4]
        own = splits[me] / max(len(rows), 1) if splits else 1 / ranks
        return (1 - own) * rows.nbytes
    if name in ("_allgather_base_", "allgather_"):
        own = args[1] if isinstance(args[1], list) else [args[1]]
        return (ranks - 1) * sum(tensor.nbytes for tensor in own)
    if name == "_reduce_scatter_base_":
        return others * args[1].nbytes
    if name == "broadcast_":
        return sum(tensor.nbytes for tensor in args[0]) / ranks
    raise ValueError(f"collective {name} is not counted yet; add it to benchmarks/scaling.py")


def _kind() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        for name in (frame.f_code.co_name, os.path.basename(frame.f_code.co_filename)):
            if name in KINDS:
                return KINDS[name]
        frame = frame.f_back  # type: ignore[assignment]
    return "other"


def text_as_bytes() -> Tokens:
    """The embedded text, every byte a token: loads of real text without the time that a tokenizer takes to train."""
    documents = [np.frombuffer(text.encode(), np.uint8) for text in open_source("embedded").documents("validation")]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return Tokens(np.concatenate(documents).astype(np.uint16), offsets, int(offsets[-1]))


def configuration(preset: str, batch_size: int, layout: str, ranks: int, dtype: str) -> RunConfig:
    run = resolve(preset, {"rule.name": "expert_threshold", "rule.warmup_steps": 1, "rule.decay": 0.9})
    own = {"shard": layout == "shard", "expert_parallel": ranks if layout == "expert_parallel" else 1}
    return replace(run, train=replace(run.train, batch_size=batch_size, device="cpu", dtype=dtype, **own))


def rank_main(preset: str, dtype: str, layout: str, batch_sizes: list[int], steps: int, out: str) -> None:
    """One rank: trains for some steps with each batch; the main rank writes what was sent, and seconds, as JSON."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    runs = [configuration(preset, size, layout, ranks, dtype) for size in batch_sizes]
    tokens, config = text_as_bytes(), runs[0].train
    split = {"expert_parallel": config.expert_parallel, "shard": config.shard, "timeout": config.timeout}
    with process_groups(Rendezvous.from_env(), pick_device(config.device), **split) as parallel:  # type: ignore[arg-type]
        found = [steps_of(run, tokens, parallel, steps) for run in runs]
        if parallel.ranks.is_main:
            Path(out).write_text(json.dumps(found))


def steps_of(run: RunConfig, tokens: Tokens, parallel: Parallel, steps: int) -> Row:
    """Bytes that a rank sends in the third step, the mean over ranks, and the time of so many steps after it."""
    torch.manual_seed(0)
    model = GPT(run.model, compute_dtype(run.train.dtype)).train()
    shards = parallelize(model, run.optim, parallel)
    optimizers = make_optimizers(shards.parameters.items(), run.optim, run.model.d_model)
    local = local_batch(run.train.batch_size, run.train.accumulation, run.model.rule, parallel.ranks.world_size)
    place = parallel.ranks.rank, parallel.ranks.world_size
    loader = Loader(tokens, local.batch_size, run.model.context, 0, *place, group=parallel.world)
    state = TrainState(model, optimizers, loader, run.train, parallel=parallel, local=local, shards=shards)
    remote: list[int] = []  # rows that the tokens would send to other ranks, in each forward of a router

    def count_rows(_module: object, _inputs: object, routing: Any) -> None:
        owners = routing.assignment.flatten(0, 1).unflatten(1, (parallel.ranks.world_size, -1)).any(2)
        remote.append(int(owners.sum() - owners[:, parallel.ranks.rank].sum()))

    for _, moe in model.moe_layers():
        moe.router.register_forward_hook(count_rows)
    train_step(state)
    train_step(state)
    remote.clear()
    counter = Sent()
    with counter:
        train_step(state)
    rows = sum(remote) / max(len(model.moe_layers()), 1)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        train_step(state)
        seconds.append(time.perf_counter() - start)
    kinds = sorted(set(KINDS.values()))
    totals = torch.tensor([*(counter.bytes[kind] for kind in kinds), rows], dtype=torch.float64)
    if parallel.world is not None:
        dist.all_reduce(totals, group=parallel.world)
    *by_kind, rows = (totals / parallel.ranks.world_size).tolist()
    return {
        "bytes": dict(zip(kinds, by_kind, strict=True)),
        "other": counter.bytes["other"],
        "collectives": dict(counter.collectives),
        "rows": rows,
        "seconds": statistics.median(seconds) if seconds else None,
        "tokens": local.batch_size * local.accumulation * run.model.context,
    }


def on_ranks(given: argparse.Namespace, ranks: int, layout: str, batch_sizes: Sequence[int], steps: int) -> list[Row]:
    """Run `rank_main` on that many processes; return what it finds for each batch, sequences of all ranks."""
    with TemporaryDirectory() as folder:
        orders = given.preset, given.dtype, layout, batch_sizes, steps, f"{folder}/out"
        if launch([__file__, "rank", json.dumps(orders)], ranks):
            raise ValueError(f"{ranks} ranks, {layout}: a rank failed; its output is above")
        found: list[Row] = json.loads(Path(folder, "out").read_text())
    return found


def minimum_bytes(run: RunConfig, layout: str, ranks: int, rows: float, itemsize: int) -> dict[str, float]:
    """Bytes that a rank has to send in a step, by kind; rows: of all its tokens, to other ranks, in one layer.

    Every gradient is summed once and every weight brought back once, as float32; what is sharded is gathered twice, in
    the compute dtype. Of selection no minimum is known.
    """
    config, share = run.model, (ranks - 1) / ranks
    counts = parameter_counts(config)
    whole = counts["total"] * FLOAT32 * share
    if layout == "expert_parallel":
        whole -= counts["routed_experts"] * FLOAT32 * share
    gathered = 2 * counts["total"] * itemsize * share if layout == "shard" else whole
    least = {"gradients": whole, "weights": gathered}
    if config.rule is not None:
        layers, nothing = config.layers - config.dense_layers, torch.zeros(1, 1, config.rule.num_experts)
        observed = observe(nothing, nothing > 0, target=0).tensors().values()
        least["observations"] = 2 * share * layers * sum(tensor.nbytes for tensor in observed)
        if layout == "expert_parallel":
            least["all_to_all"] = layers * rows * row_bytes(config, ranks, itemsize)
            least["counts"] = layers * (ranks - 1) * INT64
    return least


def row_bytes(config: GPTConfig, owners: int, itemsize: int) -> int:
    """A row out and back, and its gradients likewise; out and, as gradients, back, it has its gates with it."""
    assert config.rule is not None
    return 4 * config.d_model * itemsize + 2 * config.rule.num_experts // owners * FLOAT32


def count(given: argparse.Namespace) -> Iterator[Row]:
    """A line for each kind, layout, number of ranks and batch. Raises ValueError if bytes per token grow."""
    dtype = compute_dtype(given.dtype)
    for ranks, layout in itertools.product(given.ranks or [2, 4], given.layouts):
        per_token: dict[str, float] = {}
        sizes = [size * ranks for size in given.batch_sizes]
        for size, found in zip(sizes, on_ranks(given, ranks, layout, sizes, 0), strict=True):
            run = configuration(given.preset, size, layout, ranks, given.dtype)
            least = minimum_bytes(run, layout, ranks, found["rows"], dtype.itemsize)
            if found["other"]:
                raise ValueError(f"{found['other']} bytes were sent by nobody known; add it to KINDS")
            for kind, sent_bytes in found["bytes"].items():
                if not sent_bytes and not least.get(kind):
                    continue
                mean = sent_bytes / found["tokens"]
                # How many experts tokens choose varies from batch to batch, so rows are compared with rows.
                cost = sent_bytes / found["rows"] if kind == "all_to_all" else mean
                if cost > per_token.get(kind, cost) * 1.001:
                    raise ValueError(f"{layout}, {ranks} ranks: {kind} takes more bytes per token in a larger batch")
                per_token[kind] = cost
                minimum = least.get(kind)
                yield {
                    "what": "bytes", "preset": given.preset, "layout": layout, "ranks": ranks,
                    "tokens_per_rank": found["tokens"], "dtype": str(dtype).removeprefix("torch."), "kind": kind,
                    "bytes": round(sent_bytes), "minimum": minimum and round(minimum),
                    "ratio": minimum and round(sent_bytes / minimum, 4),
                    "bytes_per_token": round(mean, 2), "collectives": found["collectives"].get(kind, 0),
                }  # fmt: skip


def measure(given: argparse.Namespace) -> Iterator[Row]:
    """Tokens a second, and over those of the fewest ranks."""
    every, dtype = given.ranks or [1, 2, 4], str(compute_dtype(given.dtype)).removeprefix("torch.")
    for layout in given.layouts:
        base: dict[str, float] = {}
        for ranks in every:
            sizes = {"strong": max(every) * given.sequences, "weak": given.sequences * ranks}
            results = on_ranks(given, ranks, layout, list(sizes.values()), given.steps)
            for scaling, found in zip(sizes, results, strict=True):
                tokens = found["tokens"] * ranks
                rate = tokens / found["seconds"]
                yield {
                    "what": "scaling", "scaling": scaling, "preset": given.preset, "layout": layout, "ranks": ranks,
                    "tokens_per_step": tokens, "dtype": dtype, "tokens_per_second": round(rate, 1),
                    "speedup": round(rate / base.setdefault(scaling, rate), 3), "steps": given.steps,
                    "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
                }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank_main(*json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["count", "measure"])
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 4, 8], help="sequences of a rank, for count")
    parser.add_argument("--sequences", type=int, default=4, help="of a rank, where there are most of them, for measure")
    parser.add_argument("--steps", type=int, default=10, help="that are timed, for measure")
    given = parser.parse_args()
    for line in {"count": count, "measure": measure}[given.command](given):
        print(json.dumps(line | origin() | machine()), flush=True)


if __name__ == "__main__":
    run(main)

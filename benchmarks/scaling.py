"""Measures the cost of many ranks: bytes sent, and time on this machine.

    python benchmarks/scaling.py count   [--ranks 2 4] [--layouts replicate expert_parallel] [--json]
    python benchmarks/scaling.py measure [--ranks 1 2 4] [--json]
    python benchmarks/scaling.py rows    --run RUN [--json]

count: bytes that a rank sends in a step, by kind, against the least that has to be sent. An all-reduce of n bytes over
r ranks counts as 2 n (r - 1) / r, a reduce-scatter or an all-gather as half of it, as the best algorithms send.
Fails if bytes per token grow with the batch.
measure: strong scaling, the same step shared out, and weak scaling, the same work for each rank; gloo, on this machine.
rows: rows that expert parallelism sends, one for each rank with some of a token's experts or one for each expert.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bare import origin
from cluster import LAYOUTS, Loads, minimum_bytes, row_bytes
from common import compute_dtype, machine
from torch.utils._python_dispatch import TorchDispatchMode

from expert_threshold.config import RunConfig, resolve
from expert_threshold.data import Loader, open_source
from expert_threshold.data.tokens import Tokens
from expert_threshold.distributed import Parallel, Rendezvous, local_batch, parallelize, process_groups
from expert_threshold.model import GPT
from expert_threshold.optim import make_optimizers
from expert_threshold.train import train_step
from expert_threshold.train.device import pick_device
from expert_threshold.train.state import TrainState

Row = dict[str, Any]

# Who asked for a collective, innermost first: function or file, and the kind of what it sends.
KINDS = {
    "selection.py": "selection",
    "radix.py": "selection",
    "pools.py": "selection",
    "balance.py": "selection",
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


def rank_main(arguments: argparse.Namespace) -> None:
    """One rank: trains for some steps with each batch; the main rank prints what was sent, and seconds, as JSON."""
    torch.set_num_threads(1)
    sizes, ranks = arguments.batch_sizes, int(os.environ["WORLD_SIZE"])
    runs = [configuration(arguments.preset, size, arguments.layout, ranks, arguments.dtype) for size in sizes]
    tokens = text_as_bytes()
    config = runs[0].train
    with process_groups(
        Rendezvous.from_env(), pick_device(config.device), expert_parallel=config.expert_parallel, shard=config.shard,
        timeout=config.timeout,
    ) as parallel:  # fmt: skip
        for run in runs:
            result = steps_of(run, tokens, parallel, arguments.steps)
            if parallel.is_main:
                print(json.dumps(result), flush=True)


def steps_of(run: RunConfig, tokens: Tokens, parallel: Parallel, steps: int) -> Row:
    """Bytes that a rank sends in the third step, the mean over ranks, and the time of so many steps after it."""
    torch.manual_seed(0)
    model = GPT(run.model, compute_dtype(run.train.dtype)).train()
    shards = parallelize(model, run.optim, parallel)
    optimizers = make_optimizers(shards.parameters.items(), run.optim, run.model.d_model)
    local = local_batch(run.train.batch_size, run.train.accumulation, run.model.rule, parallel.world_size)
    loader = Loader(
        tokens, local.batch_size, run.model.context, 0, parallel.rank, parallel.world_size, group=parallel.world
    )
    state = TrainState(model, optimizers, loader, run.train, parallel=parallel, local=local, shards=shards)
    remote = count_rows(model, parallel.world_size, parallel.rank)
    train_step(state)
    train_step(state)
    remote.clear()
    counter = Sent()
    with counter:
        train_step(state)
    rows = sum(remote) / max(len(model.moe_layers()), 1)
    seconds, processor = [], []
    for _ in range(steps):
        start, spent = time.perf_counter(), time.process_time()
        train_step(state)
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - spent)
    kinds = sorted(set(KINDS.values()))
    totals = torch.tensor([*(counter.bytes[kind] for kind in kinds), rows], dtype=torch.float64)
    if parallel.world is not None:
        dist.all_reduce(totals, group=parallel.world)
    *by_kind, rows = (totals / parallel.world_size).tolist()
    return {
        "bytes": dict(zip(kinds, by_kind, strict=True)),
        "other": counter.bytes["other"],
        "collectives": dict(counter.collectives),
        "rows": rows,
        "seconds": statistics.median(seconds) if seconds else None,
        "processor_seconds": statistics.median(processor) if processor else None,
        "tokens": local.batch_size * local.accumulation * run.model.context,
    }


def count_rows(model: GPT, ranks: int, rank: int) -> list[int]:
    """Grows, with every forward of a router, by the rows that the tokens would send to other ranks."""
    rows: list[int] = []

    def hook(_module: object, _inputs: object, routing: Any) -> None:
        owners = routing.assignment.flatten(0, 1).unflatten(1, (ranks, -1)).any(2)
        rows.append(int(owners.sum() - owners[:, rank].sum()))

    for _, moe in model.moe_layers():
        moe.router.register_forward_hook(hook)
    return rows


def on_ranks(ranks: int, preset: str, layout: str, batch_sizes: Sequence[int], dtype: str, steps: int) -> list[Row]:
    """Run `rank_main` on that many processes; return what the first one prints for each batch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, __file__, "rank", "--preset", preset, "--layout", layout, "--dtype", dtype,
        "--steps", str(steps), "--batch-sizes", *map(str, batch_sizes),
    ]  # fmt: skip
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": "0"}
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{ranks} ranks, {layout}: a rank failed; what it said stands above")
    return [json.loads(line) for line in outputs[0].splitlines()[-len(batch_sizes) :]]


def dtype_name(name: str) -> str:
    return str(compute_dtype(name)).removeprefix("torch.")


def count(arguments: argparse.Namespace) -> Iterator[Row]:
    """A line for each kind, layout, number of ranks and batch. Raises SystemExit if bytes per token grow."""
    itemsize = compute_dtype(arguments.dtype).itemsize
    for ranks, layout in itertools.product(arguments.ranks, arguments.layouts):
        per_token: dict[str, float] = {}
        sizes = [size * ranks for size in arguments.batch_sizes]
        for size, found in zip(
            sizes, on_ranks(ranks, arguments.preset, layout, sizes, arguments.dtype, 0), strict=True
        ):
            run = configuration(arguments.preset, size, layout, ranks, arguments.dtype)
            least = minimum_bytes(run, layout, ranks, ranks, found["rows"], itemsize)
            least.pop("selection", None)  # no smaller way is known, and none proven impossible
            if found["other"]:
                raise SystemExit(f"{found['other']} bytes were sent by nobody known; add it to KINDS")
            for kind, sent_bytes in found["bytes"].items():
                if not sent_bytes and not least.get(kind):
                    continue
                mean = sent_bytes / found["tokens"]
                # How many experts tokens choose varies from batch to batch, so rows are compared with rows.
                cost = sent_bytes / found["rows"] if kind == "all_to_all" else mean
                if cost > per_token.get(kind, cost) * 1.001:
                    raise SystemExit(f"{layout}, {ranks} ranks: {kind} takes more bytes per token in a larger batch")
                per_token[kind] = cost
                yield (
                    {
                        "what": "bytes", "preset": arguments.preset, "layout": layout, "ranks": ranks,
                        "tokens_per_rank": found["tokens"], "dtype": dtype_name(arguments.dtype), "kind": kind,
                        "bytes": round(sent_bytes), "minimum": round(least[kind]) if kind in least else None,
                        "ratio": round(sent_bytes / least[kind], 4) if least.get(kind) else None,
                        "bytes_per_token": round(mean, 2), "collectives": found["collectives"].get(kind, 0),
                    }
                )  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Tokens a second by the clock, and by the time that processors were at work for the rank."""
    for layout in arguments.layouts:
        base: dict[str, dict[str, float]] = {}
        for ranks in arguments.ranks:
            sizes = {"strong": max(arguments.ranks) * arguments.sequences, "weak": arguments.sequences * ranks}
            results = on_ranks(ranks, arguments.preset, layout, list(sizes.values()), arguments.dtype, arguments.steps)
            for scaling, found in zip(sizes, results, strict=True):
                tokens = found["tokens"] * ranks
                rates = {
                    "tokens_per_second": tokens / found["seconds"],
                    "tokens_per_processor_second": tokens / (ranks * found["processor_seconds"]),
                }
                clock, processor = (rate / base.setdefault(scaling, rates)[name] for name, rate in rates.items())
                yield {
                    "what": "scaling", "scaling": scaling, "preset": arguments.preset, "layout": layout, "ranks": ranks,
                    "tokens_per_step": tokens, "dtype": dtype_name(arguments.dtype),
                    **{name: round(rate, 1) for name, rate in rates.items()}, "speedup": round(clock, 3),
                    "processor_efficiency": round(processor, 3), "steps": arguments.steps, "cores": os.cpu_count(),
                    "load_average": round(os.getloadavg()[0], 1),
                }  # fmt: skip


def recorded(run: Path) -> Loads:
    """Return the last training record of a run's metrics. Raises SystemExit if it has no experts."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    last = [line for line in lines if line["split"] == "train"][-1]
    if not last["layers"]:
        raise SystemExit(f"--run {run} has no experts; give a run that has")
    return Loads([layer["usage"] for layer in last["layers"].values()])


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Bytes of a token of d12 out and back, in bfloat16, its gradients too: by rank, gates included, and by expert."""
    loads, config = recorded(arguments.run), resolve("d12").model
    for fanout, owners in itertools.product((0.5, 1, 2, 4, 8), (2, 4, 8, 16)):
        scaled = loads.at(fanout)
        by_rank = 2 * scaled.rows_per_token(owners) * sum(row_bytes(config, owners, 2, gates=g) for g in (True, False))
        by_expert = 4 * scaled.pairs_per_token(owners) * row_bytes(config, owners, 2, gates=False)
        yield (
            {
                "what": "rows", "fanout": fanout, "owners": owners, "bytes_by_rank": round(by_rank),
                "bytes_by_expert": round(by_expert), "ratio": round(by_rank / by_expert, 4),
                "owner_spread": round(scaled.spread(owners), 4),
            }
        )  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("count", "measure", "rows", "rank"):
        command = commands.add_parser(name)
        if name in ("count", "measure", "rank"):
            command.add_argument("--preset", default="quickstart")
            command.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
        if name in ("count", "measure"):
            command.add_argument("--ranks", type=int, nargs="+", default=[2, 4] if name == "count" else [1, 2, 4])
            command.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
        if name == "count":
            command.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 4, 8], help="sequences of a rank")
        if name == "measure":
            command.add_argument("--sequences", type=int, default=4, help="of a rank, where there are most of them")
        if name in ("measure", "rank"):
            command.add_argument("--steps", type=int, default=10)
        if name == "rank":
            command.add_argument("--layout", choices=LAYOUTS)
            command.add_argument("--batch-sizes", type=int, nargs="+", help="sequences of all ranks")
        if name == "rows":
            command.add_argument("--run", type=Path, required=True, help="whose recorded loads are taken")
        command.add_argument("--json", action="store_true", help="one flat JSON object a line")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.command == "rank":
        rank_main(arguments)
        return
    lines = {"count": count, "measure": measure, "rows": rows}[arguments.command](arguments)
    here = origin() | (machine() if arguments.command in ("count", "measure") else {})
    for line in lines:
        if arguments.json:
            print(json.dumps(line | here), flush=True)
        else:
            print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)


if __name__ == "__main__":
    main()

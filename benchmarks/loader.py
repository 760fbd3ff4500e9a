"""Tokens per second of the loader over shards, by worker threads, and the cores that a node of GPUs needs.

    python benchmarks/loader.py [--data FOLDER] [--preset d12] [--gpus 8] [--utilisation 0.5] [--peak-tflops 989]
        [--json]

`text` reads Parquet and tokenizes while it goes; `tokens` reads a token folder made of the same text. One epoch each,
in batches of 32 sequences, as a trainer would take them that does nothing else. tokens_per_core_second is by processor
time, which holds where other programs keep the cores busy; tokens_per_second and its scaling over workers are by the
clock. The cores needed are those on which the loader just keeps up with GPUs that reach the stated utilisation of the
stated peak: more than the share of one GPU's cores is where a token folder should be used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from common import machine

from expert_threshold.data import Corpus, Loader, Tokenizer, open_source
from expert_threshold.data.token_files import write_tokens
from expert_threshold.data.tokens import Parts
from expert_threshold.model import GPTConfig, flops_per_token

BATCH = 32

Line = dict[str, Any]


def write_embedded(folder: Path) -> Path:
    """The embedded corpus as shards, row groups of about a megabyte, like FineWeb-Edu's but smaller."""
    corpus = open_source("embedded")
    for shard, split in enumerate(("train", "validation")):
        table = pyarrow.table({"text": list(corpus.documents(split))})
        pyarrow.parquet.write_table(table, folder / f"shard_{shard}.parquet", row_group_size=100)
    return folder


def run_epoch(parts: Parts, context: int, threads: int) -> Line:
    loader = Loader(parts, BATCH, context, seed=0, threads=threads)
    tokens, wall, processor = 0, time.perf_counter(), time.process_time()
    while loader.position.epoch == 0:
        tokens += next(loader).targets.numel()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    loader.close()
    return {
        "workers": threads,
        "tokens": tokens,
        "tokens_per_second": round(tokens / wall),
        "tokens_per_core_second": round(tokens / processor),
    }


def measure(corpus: Corpus, tokenizer: Tokenizer, folder: Path, context: int, workers: list[int]) -> list[Line]:
    assert corpus.parts is not None
    about = {"corpus": corpus.hash, "sizes": {split: list(size) for split, size in corpus.sizes.items()}}
    write_tokens(folder, {split: corpus.parts(split, tokenizer) for split in corpus.sizes}, tokenizer, about)
    lines: list[Line] = []
    for source, read in (("text", corpus), ("tokens", open_source(str(folder)))):
        assert read.parts is not None
        parts = read.parts("train", tokenizer)
        runs = [run_epoch(parts, context, threads) for threads in workers]
        one = runs[0]["tokens_per_second"]
        lines += [{"source": source, **run, "scaling": round(run["tokens_per_second"] / one, 2)} for run in runs]
    return lines


def needed(lines: list[Line], arguments: argparse.Namespace) -> Line:
    """The cores on which the loader keeps up, from one worker's tokens per core and second."""
    per_token = flops_per_token(GPTConfig.preset(arguments.preset))
    tokens = arguments.gpus * arguments.utilisation * arguments.peak_tflops * 1e12 / per_token
    by_source = {line["source"]: tokens / line["tokens_per_core_second"] for line in lines if line["workers"] == 1}
    return {
        "preset": arguments.preset,
        "gpus": arguments.gpus,
        "utilisation": arguments.utilisation,
        "peak_tflops": arguments.peak_tflops,
        "flops_per_token": per_token,
        "tokens_per_second_needed": round(tokens),
        **{f"cores_{source}": round(cores, 2) for source, cores in by_source.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one flat JSON object a line")
    parser.add_argument("--data", help="a folder of Parquet shards; the embedded corpus, written as such, by default")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--workers", type=int, nargs="+", default=[*range(1, (os.cpu_count() or 1) + 1)])
    parser.add_argument("--preset", default="d12")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--utilisation", type=float, default=0.5)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of one GPU; an H100's in bfloat16 by default")
    arguments = parser.parse_args()
    context = GPTConfig.preset(arguments.preset).context
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        corpus = open_source(arguments.data or str(write_embedded(folder / "shards")))
        tokenizer = Tokenizer.train(corpus.documents("train"), arguments.vocab_size)
        lines = measure(corpus, tokenizer, folder / "tokens", context, arguments.workers)
    lines.append(needed(lines, arguments))
    lines[-1]["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for line in lines:
        shown = line | machine() | {"vocab_size": arguments.vocab_size}
        print(json.dumps(shown) if arguments.json else "  ".join(f"{key} {value}" for key, value in line.items()))


if __name__ == "__main__":
    main()

"""Decoding with the cache: our engine against transformers' `generate`, around the same model, in one run.

    python benchmarks/decode_peers.py [--json] [--preset quickstart] [--batch 1 8] [--tokens 64] [--dtype float32]

The model that `generate` runs is this project's own code, exported (`integrations/transformers.py`): its modules by
PyTorch's operations under transformers' loop, cache and sampling. So this compares two ways to decode our models; it
says nothing of other models in transformers. Both write greedily the same number of tokens behind the same prompts of
16 tokens, all of one length, so that nothing is padded; times are of whole calls, prompts included. Ours also makes the
engine in each. Runs are interleaved; `ratio` is the median of its time over ours. `same` is the share of tokens that
are the same in both: at float32 all but those that are almost equally likely. Weights are random and cutoffs settled,
so that loads are near their target. Presets have another vocabulary here (`--vocab-size`), which `model` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from common import compute_dtype, machine, positive, time_interleaved
from decode import PROMPT, called, settled_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import expert_threshold.integrations.transformers  # noqa: F401  # teaches AutoModelForCausalLM our type
from expert_threshold.data import Tokenizer
from expert_threshold.generate.engine import Engine, Request
from expert_threshold.integrations.export import export_run
from expert_threshold.model import GPT
from expert_threshold.runs import RunFolder


def exported(model: GPT, tokenizer: Tokenizer, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run")
        run.write_config({"model": model.config.to_dict()})
        tokenizer.save(run.tokenizer_path)
        run.save_checkpoint(0, {"model": model.state_dict()}, {})
        to = export_run(run.path, Path(folder) / "exported")
        return AutoModelForCausalLM.from_pretrained(to, dtype=dtype).eval()


def write_ours(model: GPT, tokenizer: Tokenizer, prompts: Tensor, tokens: int) -> list[list[int]]:
    engine = Engine(model, tokenizer, slots=len(prompts), capacity=prompts.shape[1] + tokens)
    requests = [Request(tuple(p), tokens, temperature=0, stop_at_document_end=False) for p in prompts.tolist()]
    writings = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
    return [[step.token for step in writing.steps] for writing in writings]


def write_theirs(model: Any, prompts: Tensor, tokens: int) -> list[list[int]]:
    mask = torch.ones_like(prompts)
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    written: Tensor = model.generate(prompts, attention_mask=mask, **options)
    return written[:, prompts.shape[1] :].tolist()  # type: ignore[no-any-return]


def measure(
    preset: str, vocab_size: int, batches: list[int], tokens: int, dtype: torch.dtype, repeats: int
) -> list[dict[str, Any]]:
    model = settled_model(preset, vocab_size, dtype)
    pairs = [bytes(divmod(i, 256)) for i in range(vocab_size - 257)]
    tokenizer = Tokenizer([bytes([byte]) for byte in range(256)] + pairs)
    theirs, rows = exported(model, tokenizer, dtype), []
    for batch in batches:
        prompts = torch.randint(vocab_size - 1, (batch, PROMPT))
        written: dict[str, list[list[int]]] = {}

        def ours_writes(prompts: Tensor = prompts, written: dict[str, Any] = written) -> None:
            written["ours"] = write_ours(model, tokenizer, prompts, tokens)

        def theirs_writes(prompts: Tensor = prompts, written: dict[str, Any] = written) -> None:
            written["theirs"] = write_theirs(theirs, prompts, tokens)

        times = time_interleaved({"ours": ours_writes, "theirs": theirs_writes}, repeats, warmup=1)
        here, there = torch.tensor(written["ours"]), torch.tensor(written["theirs"])
        assert here.shape == there.shape == (batch, tokens)
        ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
        speeds = {name: round(batch * tokens / statistics.median(seconds), 1) for name, seconds in times.items()}
        rows.append(
            {
                "model": called(preset, vocab_size),
                "theirs": "transformers' generate on this project's exported code",
                "preset": preset,
                "vocab_size": vocab_size,
                "weights": "random",
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "prompt": PROMPT,
                "tokens": tokens,
                **{f"{name}_tokens_per_second": speed for name, speed in speeds.items()},
                "ratio": round(statistics.median(ratios), 2),
                "ratio_lowest": round(min(ratios), 2),
                "ratio_highest": round(max(ratios), 2),
                "same": round(float((here == there).float().mean()), 3),
                "repeats": repeats,
                **machine(),
                "transformers": transformers.__version__,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["quickstart"])
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="float32")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--json", action="store_true", help="one flat JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    for preset in args.preset:
        for row in measure(preset, args.vocab_size, args.batch, args.tokens, compute_dtype(args.dtype), args.repeats):
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{row['model']}  {row['dtype']}  batch {row['batch']}: {row['ours_tokens_per_second']} tokens/s, "
                    f"{row['theirs']} {row['theirs_tokens_per_second']}: {row['ratio']}x, "
                    f"same tokens {row['same']:.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

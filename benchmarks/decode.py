"""Decoding one sequence with the cache, against reading the active weights once per token, in one run.

    python benchmarks/decode.py [--preset quickstart d8] [--tokens 64] [--dtype float32]

A batch of one is bound by reading weights. `read_ms` is the time to read as many bytes as one token's weights have:
those every token meets and those of the experts it was sent to, counted while decoding; the fastest of a sum, a maximum
and a matrix-vector product over a buffer of so many bytes of float32, whatever the model's dtype, since torch's
operations on bfloat16 are bound by converting. `ratio_to_reading` is the median over interleaved repetitions of the
time per decoded token over `read_ms`; `over_operations` that of the same without the kernel, by torch's operations,
over the kernel's. Weights are random and cutoffs settled, so that loads are near their target. The vocabulary is
`--vocab-size`, not the preset's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from unittest import mock

import torch
from common import compute_dtype, machine, options, positive, time_interleaved

from expert_threshold.data import Tokenizer
from expert_threshold.generate import Step, decoder, generate
from expert_threshold.model import GPT, GPTConfig, parameter_counts
from expert_threshold.routing import ExpertThreshold

PROMPT = 16
NUM_EXPERTS = 16


def settled_model(preset: str, vocab_size: int, dtype: torch.dtype) -> GPT:
    """Random weights, zero-initialised ones included, under cutoffs that have followed them."""
    torch.manual_seed(0)
    rule = ExpertThreshold(num_experts=NUM_EXPERTS, experts_per_token=1, decay=0.8, warmup_steps=0)
    model = GPT(GPTConfig.preset(preset, vocab_size=vocab_size, rule=rule), compute_dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5)
        for _ in range(20):
            model.update_rules(model(torch.randint(vocab_size, (4, min(256, model.config.context)))).observations)
    return model.eval()


def measure(
    preset: str, vocab_size: int, tokens: int, dtype: torch.dtype, repeats: int
) -> dict[str, float | int | str | bool]:
    model = settled_model(preset, vocab_size, dtype)
    config = model.config
    pairs = [bytes(divmod(i, 256)) for i in range(vocab_size - 257)]
    tokenizer = Tokenizer([bytes([byte]) for byte in range(256)] + pairs)
    prompt = torch.randint(vocab_size, (PROMPT,)).tolist()

    def decode(count: int, record: bool = False) -> list[Step]:
        steps = generate(model, tokenizer, prompt, max_tokens=count, seed=0, stop_at_document_end=False, record=record)
        return list(steps)

    def by_operations(count: int) -> list[Step]:
        with mock.patch.object(decoder, "library", return_value=None):
            return decode(count)

    fanouts = [len(layer.experts) for step in decode(tokens, record=True) for layer in step.routing or ()]
    fanout = statistics.mean(fanouts)
    counts = parameter_counts(config)
    idle = counts["routed_experts"] * (1 - fanout / NUM_EXPERTS)
    numbers = round(counts["total"] - counts["embedding"] - idle)

    size = numbers * dtype.itemsize
    buffer, x = torch.randn(max(size // 4 // config.d_model, 1), config.d_model), torch.randn(config.d_model)
    readers: dict[str, Callable[[], object]] = {"sum": buffer.sum, "max": buffer.amax, "product": lambda: buffer @ x}
    calls = readers | {
        "decode": lambda: decode(tokens),
        "first": lambda: decode(1),
        "operations": lambda: by_operations(tokens),
        "operations_first": lambda: by_operations(1),
    }
    times = time_interleaved(calls, repeats)
    token, operations = (
        [(a - b) / (tokens - 1) for a, b in zip(times[all_], times[first], strict=True)]
        for all_, first in (("decode", "first"), ("operations", "operations_first"))
    )
    read = [min(ways) for ways in zip(*(times[way] for way in readers), strict=True)]
    return {
        "preset": preset,
        "d_model": config.d_model,
        "layers": config.layers,
        "vocab_size": vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "fanout": round(fanout, 3),
        "active_mb": round(size / 1e6, 2),
        "tokens_per_second": round(1 / statistics.median(token), 1),
        "token_ms": round(statistics.median(token) * 1e3, 3),
        "read_ms": round(statistics.median(read) * 1e3, 3),
        "read_gb_per_second": round(size / statistics.median(read) / 1e9, 1),
        "ratio_to_reading": round(statistics.median(a / b for a, b in zip(token, read, strict=True)), 3),
        "kernel": decoder.library() is not None,
        "operations_token_ms": round(statistics.median(operations) * 1e3, 3),
        "over_operations": round(statistics.median(a / b for a, b in zip(operations, token, strict=True)), 2),
        "first_token_ms": round(statistics.median(times["first"]) * 1e3, 3),
        "repeats": repeats,
        **machine(),
    }


def main() -> None:
    parser = options(__doc__, repeats=9)
    parser.add_argument("--preset", nargs="+", default=["quickstart", "d8"])
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--tokens", type=positive, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for preset in args.preset:
        row = measure(preset, args.vocab_size, args.tokens, compute_dtype(args.dtype), args.repeats)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Decoding one sequence beside ik_llama.cpp's bfloat16 and Q8_0 on the same active bytes, interleaved in one process.

    pip install gguf ik-llama-cpp-python
    python benchmarks/decode_ik.py [--preset d8] [--repeats 15]

The other model is a random Qwen3 mixture (16 experts, two of them a token) of the preset's depth, widths, heads and
vocabulary, whose experts are as wide as makes the active bytes equal: ours has a shared expert, and no gated ones.
Each prints milliseconds a token, of the thread, and its ratio to our bfloat16, the medians over the repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import torch
from common import machine, positive, run
from decode import NUM_EXPERTS, PROMPT, settled_model
from gguf import GGMLQuantizationType as Kind
from ik_llama_cpp import _internals as ik

from expert_threshold.data import Tokenizer
from expert_threshold.generate import generate
from expert_threshold.model import GPTConfig, parameter_counts

USED = 2  # experts of a token in the other model
KINDS = {"ik_llama.cpp, bfloat16": (Kind.BF16, 32), "ik_llama.cpp, Q8_0": (Kind.Q8_0, 7)}  # with GGUF's file types


def write(path: Path, config: GPTConfig, kind: Kind, file_type: int) -> float:
    """Write the other model; returns the bytes of its weights that a token reads."""
    d, vocab, heads, width = config.d_model, config.vocab_size, config.heads, config.d_model // config.heads
    counts = parameter_counts(config)
    active = counts["total"] - counts["embedding"] - counts["routed_experts"] * (1 - 1 / NUM_EXPERTS)
    attention = 4 * d * d
    d_expert = round((active - vocab * d - config.layers * attention) / (config.layers * USED * 3 * d) / 32) * 32
    numbers = {
        "context_length": 1024, "embedding_length": d, "block_count": config.layers, "head_count": heads,
        "head_count_kv": heads, "key_length": width, "value_length": width, "expert_count": NUM_EXPERTS,
        "expert_used_count": USED, "expert_feed_forward_length": d_expert, "feed_forward_length": d_expert,
        "vocab_size": vocab, "file_type": file_type,
    }  # fmt: skip
    writer, random = gguf.GGUFWriter(path, "qwen3moe"), np.random.default_rng(0)
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["t 0"])
    read = 0.0

    def add(name: str, *shape: int, kind: Kind = kind, share: float = 1.0) -> None:
        nonlocal read
        values = random.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        packed = gguf.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        read += packed.nbytes * share

    add("token_embd", vocab, d, share=0)
    add("output", vocab, d)
    add("output_norm", d, kind=Kind.F32)
    for layer in range(config.layers):
        for name, *shape in (("attn_q", d, d), ("attn_k", d, d), ("attn_v", d, d), ("attn_output", d, d)):
            add(f"blk.{layer}.{name}", *shape)
        for name, size in (("attn_norm", d), ("attn_q_norm", width), ("attn_k_norm", width), ("ffn_norm", d)):
            add(f"blk.{layer}.{name}", size, kind=Kind.F32)
        add(f"blk.{layer}.ffn_gate_inp", NUM_EXPERTS, d, kind=Kind.F32)
        for name, *shape in (("gate", d_expert, d), ("up", d_expert, d), ("down", d, d_expert)):
            add(f"blk.{layer}.ffn_{name}_exps", NUM_EXPERTS, *shape, share=USED / NUM_EXPERTS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="d8")
    parser.add_argument("--vocab-size", type=positive, default=2048)
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens, pairs = args.tokens, [bytes(divmod(i, 256)) for i in range(args.vocab_size - 257)]
    tokenizer = Tokenizer([bytes([byte]) for byte in range(256)] + pairs)
    prompt = list(range(PROMPT))

    def ours(dtype: torch.dtype) -> Callable[[], float]:
        model = settled_model(args.preset, args.vocab_size, dtype)

        def decode() -> float:
            steps = generate(model, tokenizer, prompt, max_tokens=tokens + 1, temperature=0, stop_at_document_end=False)
            next(steps)  # the prompt, and what follows it
            start = time.thread_time()
            list(steps)
            return (time.thread_time() - start) / tokens

        return decode

    def theirs(path: Path) -> Callable[[], float]:
        context = ik.IkContext(ik.IkModel(str(path)), n_ctx=256, n_threads=1, flash_attn=False)

        def decode() -> float:
            context.kv_cache_clear()
            assert context.decode(ik.make_batch(prompt)) == 0
            batches = [ik.make_batch_single(100 + i, PROMPT + i) for i in range(tokens)]
            start = time.thread_time()
            assert all(context.decode(batch) == 0 for batch in batches)
            return (time.thread_time() - start) / tokens

        return decode

    config = GPTConfig.preset(args.preset, vocab_size=args.vocab_size)
    with TemporaryDirectory() as folder:
        calls = {"ours, bfloat16": ours(torch.bfloat16)}
        read = {}
        for name, (kind, file_type) in KINDS.items():
            path = Path(folder, f"{kind.name}.gguf")
            read[name] = write(path, config, kind, file_type)
            calls[name] = theirs(path)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(args.repeats + 1):
            for name, call in calls.items():
                seconds = call()
                if turn:  # the first warms up
                    times[name].append(seconds)
    for name, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, times["ours, bfloat16"], strict=True))
        row = {"engine": name, "token_ms": round(statistics.median(each) * 1e3, 3), "ratio": round(ratio, 3)}
        print(json.dumps(row | {"active_mb": round(read.get(name, 0) / 1e6, 1) or None, "preset": args.preset}))
    print(
        json.dumps(
            machine() | {"date": date.today().isoformat(), "ik_llama_cpp_python": version("ik-llama-cpp-python")}
        )
    )


if __name__ == "__main__":
    run(main)

"""Trains nanochat's dense model and the patched one at equal processor seconds, on Python's standard library.

    git clone https://github.com/karpathy/nanochat dense && git -C dense checkout 92d63d4
    cp -r dense patched && git -C patched apply ../expert_threshold.patch
    python beside.py patched 100 && python beside.py dense 0 SECONDS

The first prints the seconds of its steps, which the second is given. Both need `filelock` beside this project.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import torch

from expert_threshold.data import Loader, Tokenizer, open_source, pack

SIZES: dict[str, Any] = {"n_layer": 4, "n_head": 2, "n_kv_head": 2, "n_embd": 128, "window_pattern": "L"}


def main(checkout: str, steps: int, seconds: float = 0.0) -> tuple[int, float, float]:
    """Train for that many steps, or seconds if steps is 0; return the steps, their seconds and the held-out loss."""
    sys.path.insert(0, checkout)
    from nanochat.gpt import GPT, GPTConfig

    corpus = open_source("embedded")
    tokenizer = Tokenizer.train(corpus.beginning(2_000_000), 1024)
    train = Loader(pack(corpus, tokenizer, "train", max_tokens=1_000_000), 8, 256, seed=0)
    held_out = Loader(pack(corpus, tokenizer, "validation", max_tokens=100_000), 8, 256, seed=0)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=256, vocab_size=1024, **SIZES))
    model.to_empty(device="cpu").init_weights()
    optimizer = model.setup_optimizer()
    spent = 0.0
    for step in itertools.count(1):
        start = time.process_time()
        tokens, targets = next(train)
        model(tokens, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        spent += time.process_time() - start
        if step == steps or (not steps and spent >= seconds):
            break
    model.eval()
    with torch.no_grad():
        losses = [float(model(*next(held_out))) for _ in range(20)]
    return step, spent, sum(losses) / len(losses)


if __name__ == "__main__":
    done, spent, loss = main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:]))
    print(f"{done} steps in {spent:.1f} processor seconds, held-out loss {loss:.4f} nats")

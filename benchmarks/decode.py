"""Decoding one sequence with the cache on this CPU, against reading the active weights once per token, in one run.

    python benchmarks/decode.py [--preset quickstart d8] [--dtype float32]

`gpu/decoding.py` says what is counted and timed. `operations_ms` is the time without the kernel, by torch's operations,
and `over_operations` the median of that over the kernel's. Sampling is left out. The vocabulary is `--vocab-size`, not
the preset's.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch
from common import compute_dtype, machine, options
from gpu.decoding import measure, stepping
from gpu.setting import Setting
from gpu.whole import RULES, random_model

from expert_threshold.generate import decoder
from expert_threshold.model import GPTConfig
from expert_threshold.train.device import gc_frozen


def main() -> None:
    parser = options(__doc__, repeats=None)
    parser.add_argument("--preset", nargs="+", default=["quickstart", "d8"])
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    setting = Setting(Path(), dry=False, cuda=False, data="", dtype=compute_dtype(args.dtype))
    for preset in args.preset:
        config = GPTConfig.preset(preset, vocab_size=args.vocab_size, rule=RULES["expert_threshold"])
        model = random_model(config, 2, setting).eval()
        with mock.patch.object(decoder, "library", return_value=None):
            operations, _ = stepping(model, 1, setting)
        with gc_frozen():
            row = measure(model, 1, setting, operations=operations)
        known = {"preset": preset, "vocab_size": args.vocab_size, "dtype": str(setting.dtype).removeprefix("torch.")}
        compared = {"kernel": decoder.library() is not None, "over_operations": row["operations_ms"] / row["step_ms"]}
        print(json.dumps(known | row | compared | machine()), flush=True)


if __name__ == "__main__":
    main()

"""The MoE layer, forward and backward, against the dense feed-forward of equal active FLOPs, in one run.

    python benchmarks/layer.py [--d-model 256 512 768] [--tokens 8192] [--dtype auto] [--compile]

Weights are already in the compute dtype. Cutoffs settle on other tokens than those that are timed, so that loads vary
by chance as in training: `load_min` and `load_max` say by how much. `ratio_to_dense` is the MoE's median time over
dense's, repetitions interleaved; dense is the faster of the model's own feed-forward and the plain PyTorch expression.
"""

from __future__ import annotations

import json
import statistics

import torch
from common import compute_dtype, machine, options, positive, time_interleaved
from peers_contestants import PlainFeedForward
from torch import Tensor, nn

from expert_threshold.moe import FeedForward, MoE
from expert_threshold.routing import ExpertThreshold

SETTLING = 25  # repetitions until memory is where it stays, as after a run's first dozens of steps


def forward_backward(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    y = layer(x)
    (y[0] if isinstance(y, tuple) else y).backward(grad)
    x.grad = None
    layer.zero_grad(set_to_none=True)


def measure(
    d_model: int, tokens: int, dtype: torch.dtype, repeats: int, compiling: bool
) -> dict[str, float | int | str]:
    torch.manual_seed(0)
    shape = tokens // 512, 512, d_model
    x = torch.randn(shape).to(dtype).requires_grad_()
    grad = torch.randn_like(x)
    rule = ExpertThreshold(num_experts=16, experts_per_token=1, decay=0.9, warmup_steps=0)
    moe = MoE(d_model, 2 * d_model, rule).to(dtype)
    with torch.no_grad():
        for _ in range(20):  # until the cutoffs stand where loads are near their target
            moe.router.update(moe(torch.randn(shape).to(dtype))[1])
        observation = moe(x)[1]
    layers = {
        "moe": moe,
        "dense": FeedForward(d_model, 4 * d_model).to(dtype),
        "dense_plain": PlainFeedForward(d_model, 4 * d_model).to(dtype),
    }
    if compiling:
        layers = {name: torch.compile(layer, fullgraph=True, dynamic=False) for name, layer in layers.items()}
    calls = {name: lambda m=m: forward_backward(m, x, grad) for name, m in layers.items()}
    times = time_interleaved(calls, repeats, warmup=SETTLING)
    medians = {name: statistics.median(values) for name, values in times.items()}
    flops = 3 * 2 * tokens * 2 * d_model * 4 * d_model
    return {
        "d_model": d_model,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": compiling,
        "fanout": round(float(observation.fanout_mean), 4),
        "load_min": int(observation.load.min()),
        "load_max": int(observation.load.max()),
        "ratio_to_dense": round(medians["moe"] / min(medians["dense"], medians["dense_plain"]), 4),
        "ratio_to_plain_dense": round(medians["moe"] / medians["dense_plain"], 4),
        **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in medians.items()},
        "dense_gflops": round(flops / medians["dense"] / 1e9, 1),
        "repeats": repeats,
        **machine(),
    }


def main() -> None:
    parser = options(__doc__, repeats=15)
    parser.add_argument("--d-model", type=positive, nargs="+", default=[256, 512, 768])
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--compile", action="store_true", help="all layers, each as one graph")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for d_model in args.d_model:
        row = measure(d_model, args.tokens, compute_dtype(args.dtype), args.repeats, args.compile)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

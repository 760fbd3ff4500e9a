"""Time of one optimizer step, against the time that Newton-Schulz's products alone need at the machine's own rate.

One flat JSON object a line with --json: a line for the whole step, and one for each group of parameters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from common import positive
from torch import Tensor, nn

from expert_threshold.optim import Group, OptimConfig, Optimizers, fast_dtype, make_optimizers
from expert_threshold.optim.groups import NS_DTYPES


def shapes(layers: int, d_model: int, experts: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """A model's parameters: layer 0 dense, the others with routed experts and a shared one."""
    result: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, d_model), "head.weight": (vocabulary, d_model)}
    for layer in range(layers):
        block = f"blocks.{layer}"
        result |= {f"{block}.attention.{part}": (d_model, d_model) for part in ("query", "key", "value", "output")}
        if layer == 0:
            result |= {f"{block}.up": (2 * width, d_model), f"{block}.down": (d_model, 2 * width)}
            continue
        result |= {f"{block}.router": (experts, d_model)}
        result |= {f"{block}.up": (experts, width, d_model), f"{block}.down": (experts, d_model, width)}
        result |= {f"{block}.shared.up": (width, d_model), f"{block}.shared.down": (d_model, width)}
    return result


def newton_schulz_flops(parameter: Tensor, steps: int) -> int:
    """Operations of the products: X Xᵀ, its square, and the polynomial times X, from the smaller side."""
    small, large = sorted(parameter.shape[-2:])
    matrices = parameter.numel() // (small * large)
    return matrices * steps * (2 * small**2 * large + 2 * small**3 + 2 * small**2 * large)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The quickest of `repeats` calls, after two that are not counted: other load on the machine only adds."""
    times = []
    for _ in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        function()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def step_each(group: Group) -> None:
    for optimizer in group.optimizers:
        optimizer.step()


def measure(optimizers: Optimizers, device: torch.device, repeats: int) -> list[dict[str, str | float]]:
    dtype = NS_DTYPES[optimizers.config.ns_dtype] or fast_dtype(device)
    square = torch.randn(2048, 2048, device=device).to(dtype)
    rate = 2 * 2048**3 / seconds(lambda: square @ square, device, repeats)

    def line(name: str, time_taken: float, flops: int) -> dict[str, str | float]:
        return {
            "name": name,
            "dtype": str(dtype).removeprefix("torch."),
            "milliseconds": time_taken * 1e3,
            "product_gflop": flops / 1e9,
            "product_milliseconds": flops / rate * 1e3,
            "ratio_to_products": time_taken * rate / flops if flops else float("inf"),
            "product_gflop_per_second": rate / 1e9,
        }

    def flops(group: Group) -> int:
        steps = optimizers.config.ns_steps
        return sum(newton_schulz_flops(p, steps) for p in group.parameters.values()) if group.kind == "muon" else 0

    groups = optimizers.groups
    lines = [line("step", seconds(lambda: optimizers.step(0, 1), device, repeats), sum(map(flops, groups.values())))]
    for name, group in groups.items():
        taken = seconds(partial(step_each, group), device, repeats)
        lines.append(line(name, taken, flops(group)) if flops(group) else {"name": name, "milliseconds": taken * 1e3})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--d-model", type=positive, default=256)
    parser.add_argument("--experts", type=positive, default=16)
    parser.add_argument("--width", type=int, default=512, help="of one expert")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--ns-dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    model = shapes(arguments.layers, arguments.d_model, arguments.experts, arguments.width, arguments.vocabulary)
    parameters = {name: nn.Parameter(torch.randn(shape, device=arguments.device)) for name, shape in model.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    config = OptimConfig(ns_dtype=arguments.ns_dtype)
    optimizers = make_optimizers(parameters.items(), config, arguments.d_model)
    for line in measure(optimizers, arguments.device, arguments.repeats):
        if arguments.json:
            print(json.dumps(line))
        else:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in line.items()))


if __name__ == "__main__":
    main()

"""The exact k-th largest score of every expert, against torch's own ways, in one run.

    python benchmarks/selection.py [--json] [--tokens 524288 8192] [--experts 16] [--device cuda]

k is tokens / experts, scores are float32. Ours finds the score and, for ties, the index of the k-th token: from scores
as the router makes them, (tokens, experts) in rows, or from contiguous columns, one per expert; `ours_bounds` finds
three at once, the k-th and those of the capacity bounds. Torch's ways start from contiguous columns and find the score
alone. Times are medians of interleaved repetitions; `ratio_rows` and `ratio_columns` are medians of ours over
`topk(sorted=False).values.amin`.

On a GPU torch's sort is measured too, and `rounds` are how often the scores, `bytes_per_round`, are read.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from common import machine, time_interleaved

from expert_threshold.routing import kth_largest
from expert_threshold.routing.selection import runs_on_kernels


def measure(tokens: int, experts: int, repeats: int, device: torch.device) -> dict[str, object]:
    rows = torch.randn(1, tokens, experts, generator=torch.Generator().manual_seed(0)).to(device)
    columns = rows[0].t().contiguous()
    k = tokens // experts
    calls = {
        "ours_rows": lambda: kth_largest(rows, [k])[0].score[0],
        "ours_columns": lambda: kth_largest(columns.t()[None], [k])[0].score[0],
        "ours_bounds": lambda: kth_largest(rows, [k, k // 2, k + k // 2])[0].score[0],
        "topk_amin": lambda: columns.topk(k, sorted=False).values.amin(1),
        "topk_sorted": lambda: columns.topk(k).values[:, -1],
        "kthvalue": lambda: columns.kthvalue(tokens - k + 1).values,
    }
    if device.type != "cpu":
        calls["sort"] = lambda: columns.sort(descending=True, stable=True).values[:, k - 1]
    expected = calls["kthvalue"]()
    for name, call in calls.items():
        assert torch.equal(call(), expected), name
    times = time_interleaved(calls, repeats, on=device)

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["topk_amin"], strict=True))

    return {
        "tokens": tokens,
        "experts": experts,
        "k": k,
        "ratio_rows": round(ratio("ours_rows"), 3),
        "ratio_columns": round(ratio("ours_columns"), 3),
        **{f"{name}_ms": round(1e3 * statistics.median(seconds), 3) for name, seconds in times.items()},
        **(reads(tokens, experts) if runs_on_kernels(rows) else {}),
    }


def reads(tokens: int, experts: int) -> dict[str, object]:
    from expert_threshold.routing import radix  # needs triton

    rounds = sum(len(digits) for digits in radix.digits(tokens))
    return {"rounds": rounds, "bytes_per_round": tokens * experts * torch.float32.itemsize}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Exact k-th largest per expert.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one flat JSON object a line")
    parser.add_argument("--tokens", type=int, nargs="+", default=[524_288])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        line = measure(tokens, arguments.experts, arguments.repeats, arguments.device)
        if arguments.json:
            print(json.dumps(line | machine(arguments.device)), flush=True)
            continue
        print(f"{tokens} tokens × {arguments.experts} experts, k = {line['k']}")
        for name, value in line.items():
            if name.startswith("ratio") or name.endswith("_ms"):
                print(f"  {name:16} {value:9.3f}", flush=True)
            elif name in ("rounds", "bytes_per_round"):
                print(f"  {name:16} {value:9}", flush=True)


if __name__ == "__main__":
    main()

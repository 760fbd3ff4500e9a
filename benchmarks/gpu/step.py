"""A whole optimizer step of d12 and d20: tokens per second, and model FLOPs over what the card can do.

Model FLOPs are `flops_per_token`'s: 6 for every active weight in a product, and causal attention's products; nothing
that is computed again counts, nor routing, nor Muon's products. `mfu` is over the data sheet's rate in bfloat16,
`share_of_product` over the product measured beside the step. Every rule activates as many FLOPs as dense.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from cases import waits
from expert_threshold.model import flops_per_token, parameter_counts

from .parts import rule_call
from .roof import captured, peak, rates, under_roof
from .setting import Case, NotRunError, Row, Setting
from .whole import RULES, batch_of, config_of, forward_backward, optimizers_of, random_model

FIELDS = (
    "preset", "rule", "way", "sequences", "tokens", "step_ms", "tokens_per_second", "tflops", "mfu",
    "share_of_product", "forward_backward_ms", "optimizer_ms", "rule_ms", "rule_share", "peak_bytes", "params_total",
    "params_active", "flops_per_token", "product_tflops",
)  # fmt: skip
WAYS = {"eager": 10.0, "captured": 12.0, "compiled": 60.0}
"""Seconds that a case takes, about: compiling is slow."""
SEQUENCES = (32, 16, 8, 4, 2, 1)  # tried from the first on until the step fits into memory


def cases(setting: Setting) -> Iterator[Case]:
    """Yield presets × ways × rules: dense first in each, since the others are told beside it."""
    for way, seconds in WAYS.items():
        for preset in setting.pick(("d20", "d12"), ("tiny",)):
            dense = ("dense",) if way != "compiled" else setting.pick(("dense",), ())  # which takes seconds of a CPU
            for rule in (*dense, "expert_threshold", *setting.pick(("token_choice",), ())):
                name = f"{preset} {rule} {way}"
                yield Case(name, lambda p=preset, r=rule, w=way: fitted(p, r, w, setting), seconds)


def fitted(preset: str, rule: str, way: str, setting: Setting) -> Row:
    """Measure with as many sequences as fit into memory."""
    for sequences in setting.pick(SEQUENCES, (2,)):
        gc.collect()
        if setting.cuda:
            torch.cuda.empty_cache()
        try:
            return measure(preset, rule, way, sequences, setting)
        except torch.OutOfMemoryError:
            continue
    raise RuntimeError("not even one sequence fits into memory")


def measure(preset: str, rule_name: str, way: str, sequences: int, setting: Setting) -> Row:
    """Time a step of `sequences` sequences.

    "compiled" is the model as one graph of torch.compile; "captured" replays forward, backward and the rules' update as
    a CUDA graph, and the optimizers, whose rates change from step to step, follow it.
    """
    rule = RULES[rule_name]
    if setting.cuda and way == "captured" and rule is not None and waits("static"):
        raise NotRunError("a captured step needs products of experts that only Hopper GPUs have")
    config = config_of(preset, rule, setting)
    model = random_model(config, sequences, setting)
    optimizers = optimizers_of(model)
    batch = batch_of(config, sequences, setting)
    forward = model
    if way == "compiled":
        kind = setting.pick("inductor", "aot_eager")
        forward = torch.compile(model, fullgraph=True, dynamic=False, backend=kind)

    def run() -> None:
        optimizers.zero_grad()  # in a graph, too: its backward makes gradients anew, in the same memory
        forward_backward(model, forward, *batch)

    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()
    if way == "captured":  # replays allocate nothing, so that the peak is that of the capture
        run = captured(run, setting)  # type: ignore[assignment]

    def step() -> None:
        run()
        optimizers.step(0, 1000)

    calls = {"step": step, "forward_backward": run, "optimizer": lambda: optimizers.step(0, 1000)}
    if rule is not None:
        calls["rule"] = rule_call(rule, sequences, config.context, setting)[0]
    step()
    memory = torch.cuda.max_memory_allocated() if setting.cuda else None
    medians, roof = under_roof(calls, setting, seconds=5.0)
    tokens = sequences * config.context
    rate = flops_per_token(config) * tokens / medians["step"]
    top = peak(setting)
    in_rules = medians.get("rule", 0.0) * len(model.moe_layers())
    counts = parameter_counts(config)
    return {
        "preset": preset,
        "rule": rule_name,
        "way": way,
        "sequences": sequences,
        "tokens": tokens,
        "step_ms": round(medians["step"] * 1e3, 3),
        "tokens_per_second": round(tokens / medians["step"]),
        "tflops": float(f"{rate / 1e12:.5g}"),
        "mfu": None if top is None else round(rate / top, 4),
        "share_of_product": float(f"{rate / roof.flops:.4g}"),
        "forward_backward_ms": round(medians["forward_backward"] * 1e3, 3),
        "optimizer_ms": round(medians["optimizer"] * 1e3, 3),
        "rule_ms": round(in_rules * 1e3, 4),
        "rule_share": round(in_rules / medians["step"], 4),
        "peak_bytes": memory,
        "params_total": counts["total"],
        "params_active": counts["active"],
        "flops_per_token": flops_per_token(config),
        **rates(roof),
    }


def lines(rows: dict[str, Row]) -> list[str]:
    """Return, for each preset and way, tokens per second and MFU, the rate beside dense's, the rule's share."""
    told: dict[str, list[str]] = {}
    for row in rows.values():
        dense = rows.get(f"{row['preset']} dense {row['way']}")
        mfu = row["share_of_product"] if row["mfu"] is None else row["mfu"]
        beside = f", {row['tflops'] / dense['tflops']:.2f} × dense, rule {row['rule_share']:.1%}" if dense else ""
        mine = f"{row['rule']} {row['tokens_per_second']:,} tokens/s (MFU {mfu:.1%}{'' if dense is row else beside})"
        told.setdefault(f"{row['preset']} {row['way']}", []).append(mine)
    return [f"{what}: {'; '.join(rules)}" for what, rules in told.items()]

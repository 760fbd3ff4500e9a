"""A whole optimizer step of d12 and d20: tokens per second, and model FLOPs over what the card can do.

Model FLOPs are `flops_per_token`'s: 6 for every active weight in a product, and causal attention's products; nothing
that is computed again counts, nor routing, nor Muon's products. `mfu` is over the data sheet's rate in bfloat16,
`share_of_product` over the product measured beside the step. Every rule activates as many FLOPs as dense.

The optimizer takes as long whatever the batch: `mfu` counts it whole at the batch that fits, `forward_backward_mfu`
leaves it out, and `batch_mfu` is for the presets' batch of 524,288 tokens, from the times of both.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from functools import partial

import torch

from cases import waits
from expert_threshold.model import flops_per_token, parameter_counts

from .parts import rule_calls
from .record import Record
from .roof import captured, peak, rates, under_roof
from .setting import Case, NotRunError, Row, Setting
from .whole import RULES, batch_of, config_of, forward_backward, optimizers_of, random_model

WAYS = {
    "eager": 10.0,
    "captured": 12.0,
    "compiled": 60.0,
}  # seconds of a case: compiling one block of each kind is slow
SEQUENCES = (32, 16, 8, 4, 2, 1)  # tried from the first on until the step fits into memory
BATCH = 2**19  # tokens in an optimizer step of the presets


def cases(setting: Setting) -> Iterator[Case]:
    """Yield presets × ways × rules × dispatches: dense first in each, since the others are shown beside it."""
    dispatches = setting.pick(("static", "triton"), ("static",))
    for way, seconds in WAYS.items():
        for preset in setting.pick(("d20", "d12"), ("tiny",)):
            rules = [("dense", "auto"), *(("expert_threshold", dispatch) for dispatch in dispatches)]
            if way == "eager" and not setting.dry:
                rules.append(("token_choice", "auto"))
            if way == "compiled" and setting.dry:
                rules = rules[1:]  # compiling takes seconds of a CPU
            for rule, dispatch in rules:
                name = f"{preset} {rule} {dispatch} {way}"
                yield Case(name, partial(fitted, preset, rule, dispatch, way, setting), seconds)


def fitted(preset: str, rule: str, dispatch: str, way: str, setting: Setting) -> Row:
    """Measure with as many sequences as fit into memory, at most those of the eager step, which needs no more."""
    eager = Record(setting.out, "step").having("measured").get(f"{preset} {rule} {dispatch} eager")
    most = eager["sequences"] if eager else SEQUENCES[0]
    for sequences in setting.pick([number for number in SEQUENCES if number <= most], [2]):
        try:
            return measure(preset, rule, way, sequences, setting, dispatch)
        except RuntimeError as failure:  # while capturing, no memory is an AcceleratorError, or one of the capture
            if not (isinstance(failure, torch.OutOfMemoryError) or any(sign in str(failure) for sign in NO_MEMORY)):
                raise
        gc.collect()
        if setting.cuda:
            torch.cuda.empty_cache()
    raise RuntimeError("not even one sequence fits into memory")


NO_MEMORY = ("out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "capture")


def measure(preset: str, rule_name: str, way: str, sequences: int, setting: Setting, dispatch: str = "auto") -> Row:
    """Time a step of `sequences` sequences.

    "compiled" has every block compiled, which compiles one of each kind; "captured" replays forward, backward and the
    rules' update as a CUDA graph, and the optimizers, whose rates change from step to step, follow it.
    """
    rule = RULES[rule_name]
    if setting.cuda and way == "captured" and rule is not None and waits(dispatch):
        raise NotRunError("a captured step needs products of experts that only Hopper GPUs have")
    config = config_of(preset, rule, setting)
    if dispatch != "auto":
        config = dataclasses.replace(config, dispatch=dispatch)
    model = random_model(config, sequences, setting)
    optimizers = optimizers_of(model)
    batch = batch_of(config, sequences, setting)
    if way == "compiled":
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=setting.pick("inductor", "aot_eager"))

    def run() -> None:
        optimizers.zero_grad()  # in a graph, too: its backward makes new gradients, in the same memory
        forward_backward(model, *batch)

    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()
    if way == "captured":  # replays allocate nothing, so that the peak is that of the capture
        run = captured(run, setting)  # type: ignore[assignment]

    def step() -> None:
        run()
        optimizers.step(0, 1000)

    calls = {"step": step, "forward_backward": run, "optimizer": lambda: optimizers.step(0, 1000)}
    if rule is not None:
        calls["rule"] = rule_calls(rule, sequences, config.context, setting)[1]
    step()
    memory = torch.cuda.max_memory_allocated() if setting.cuda else None
    medians, roof = under_roof(calls, setting, seconds=5.0)
    tokens = sequences * config.context
    flops, top = flops_per_token(config) * tokens, peak(setting)
    rate = flops / medians["step"]
    batches = max(BATCH // tokens, 1)
    batch = batches * medians["forward_backward"] + medians["optimizer"]

    def mfu(seconds: float) -> float | None:
        return None if top is None else round(flops / seconds / top, 4)

    in_rules = medians.get("rule", 0.0) * len(model.moe_layers())
    counts = parameter_counts(config)
    return {
        "preset": preset,
        "rule": rule_name,
        "dispatch": dispatch,
        "way": way,
        "sequences": sequences,
        "tokens": tokens,
        "step_ms": round(medians["step"] * 1e3, 3),
        "tokens_per_second": round(tokens / medians["step"]),
        "tflops": float(f"{rate / 1e12:.5g}"),
        "mfu": mfu(medians["step"]),
        "forward_backward_mfu": mfu(medians["forward_backward"]),
        "batch_ms": round(batch * 1e3, 3),
        "batch_mfu": mfu(batch / batches),
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
    found: dict[str, list[str]] = {}
    for row in rows.values():
        dense = rows.get(f"{row['preset']} dense auto {row['way']}")
        shares = [row[name] or 0 for name in ("mfu", "forward_backward_mfu", "batch_mfu")]
        beside = f", {row['tflops'] / dense['tflops']:.2f} × dense, rule {row['rule_share']:.1%}" if dense else ""
        mfu = " / ".join(f"{share:.1%}" for share in shares)
        mine = f"{row['rule']} {row['dispatch']} {row['tokens_per_second']:,} tokens/s (MFU {mfu}"
        found.setdefault(f"{row['preset']} {row['way']}", []).append(f"{mine}{'' if dense is row else beside})")
    return [
        f"{what} (MFU of step / without optimizer / of 524,288 tokens): {'; '.join(r)}" for what, r in found.items()
    ]

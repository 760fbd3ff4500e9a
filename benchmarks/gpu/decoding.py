"""Decoding at d12, one sequence and 64 at a time, beside reading the weights that are active once for every token.

The bytes are those of attention, dense layers, shared experts, head and routers, and of each expert that any of the
sequences was sent to, counted while decoding; in the compute dtype, routers in float32. The floor is these bytes at the
rate of a read of as many bytes, in one go.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from expert_threshold.model import parameter_counts

from .roof import rates, under_roof
from .setting import Case, Row, Setting
from .whole import RULES, config_of, random_model

PROMPT = 16


def cases(setting: Setting) -> Iterator[Case]:
    """Yield one sequence and 64, of expert threshold and of dense."""
    for rule in ("expert_threshold", "dense"):
        for sequences in setting.pick((1, 64), (1, 3)):
            name = f"{rule} {sequences}"
            yield Case(name, lambda r=rule, s=sequences: measure(r, s, setting), 8)


def measure(rule: str, sequences: int, setting: Setting) -> Row:
    """Time one token for each sequence; prompts are random."""
    from expert_threshold.generate.decoder import Decoder  # needs the packages that read text

    config = config_of("d12", RULES[rule], setting)
    model = random_model(config, 2, setting).eval()
    decoder = Decoder(model, sequences, config.context)
    experts_read: list[int] = []
    prompt = setting.pick(PROMPT, PROMPT // 4)
    tokens = torch.randint(config.vocab_size, (config.context, sequences)).tolist()

    def restart() -> None:
        for row in range(sequences):
            decoder.open(row)
            decoder.read(row, [at[row] for at in tokens[:prompt]])

    def step() -> None:
        if decoder.cache.lengths[0] == config.context:
            restart()
        decoded = decoder.step(dict(enumerate(tokens[decoder.cache.lengths[0]])))
        experts_read.append(int(decoded.assignment.any(1).sum()))

    restart()
    for _ in range(4):
        step()
    counts = parameter_counts(config)
    always = counts["total"] - counts["embedding"] - counts["routed_experts"]
    of_expert = 2 * config.d_model * config.d_expert
    # Counted before anything is timed, on tokens of the same kind, since a floor needs a buffer of its own.
    active = always + of_expert * statistics.mean(experts_read)
    size = round(active * setting.dtype.itemsize + counts["routers"] * 2)
    buffer = torch.randn(max(size // 2, 1), device=setting.device, dtype=torch.bfloat16)
    medians, roof = under_roof({"step": step, "read": buffer.amax}, setting, seconds=4.0)
    read = medians["read"]
    return {
        "rule": rule,
        "sequences": sequences,
        "step_ms": round(medians["step"] * 1e3, 4),
        "tokens_per_second": round(sequences / medians["step"], 1),
        "active_bytes": size,
        "experts_read": round(statistics.mean(experts_read), 2),
        "floor_ms": round(read * 1e3, 4),
        "over_floor": round(medians["step"] / read, 3),
        "read_gb_per_second": round(size / read / 1e9, 2),
        **rates(roof),
    }


def lines(rows: dict[str, Row]) -> list[str]:
    """Return tokens per second, and the time of a token over that of reading the active weights."""
    return [
        f"{name} at a time: {row['tokens_per_second']:,} tokens/s, {row['over_floor']:.3g} × reading "
        f"{row['active_bytes'] / 1e6:,.0f} MB"
        for name, row in rows.items()
    ]

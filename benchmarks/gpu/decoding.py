"""Decoding at d12, one sequence and 64 at a time, beside reading the weights that are active once for every token.

The bytes are those of attention, dense layers, shared experts, head and routers, and of each expert that any of the
sequences was sent to, counted while decoding; in the compute dtype, routers in float32. The floor is the time to read
as many bytes in one go: the fastest of a sum, a maximum and a matrix-vector product over float32, whatever the model's
dtype, since a CPU's operations on bfloat16 are bound by converting.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

from expert_threshold.model import GPT, parameter_counts

from .roof import rates, under_roof
from .setting import Case, Row, Setting
from .whole import RULES, config_of, random_model

PROMPT = 16
IN_A_ROW = {"cuda": 1, "cpu": 16}  # tokens that are timed together: a CPU's caches are warm while a text is written


def cases(setting: Setting) -> Iterator[Case]:
    """Yield one sequence and 64, of expert threshold and of dense."""

    def case(rule: str, sequences: int) -> Row:
        model = random_model(config_of("d12", RULES[rule], setting), 2, setting).eval()
        return {"rule": rule, **measure(model, sequences, setting)}

    for rule in ("expert_threshold", "dense"):
        for sequences in setting.pick((1, 64), (1, 3)):
            yield Case(f"{rule} {sequences}", lambda r=rule, s=sequences: case(r, s), 8)


def stepping(model: GPT, sequences: int, setting: Setting) -> tuple[Callable[[], None], list[int]]:
    """Return a call that decodes IN_A_ROW random tokens of each sequence, and where it counts the experts read."""
    from expert_threshold.generate.decoder import Decoder  # needs the packages that read text

    context, count = model.config.context, IN_A_ROW[setting.device.type]
    decoder = Decoder(model, sequences, context)
    experts_read: list[int] = []
    prompt = setting.pick(PROMPT, PROMPT // 4)
    tokens = torch.randint(model.config.vocab_size, (context, sequences)).tolist()

    def restart() -> None:
        for row in range(sequences):
            decoder.open(row)
            decoder.read(row, [at[row] for at in tokens[:prompt]])

    def steps() -> None:
        if decoder.cache.lengths[0] + count > context:
            restart()
        for _ in range(count):
            decoded = decoder.step(dict(enumerate(tokens[decoder.cache.lengths[0]])))
            experts_read.append(int(decoded.assignment.any(1).sum()))

    restart()
    for _ in range(4):
        steps()
    return steps, experts_read


def measure(model: GPT, sequences: int, setting: Setting, **others: Callable[[], object]) -> Row:
    """Time a token for each sequence, and beside it that of other such calls, as NAME_ms."""
    steps, experts_read = stepping(model, sequences, setting)
    config, counts = model.config, parameter_counts(model.config)
    always = counts["total"] - counts["embedding"] - counts["routed_experts"]
    of_expert = 2 * config.d_model * config.d_expert
    # Counted before anything is timed, on tokens of the same kind, since a floor needs a buffer of its own.
    active = always + of_expert * statistics.mean(experts_read)
    size = round(active * setting.dtype.itemsize + counts["routers"] * (4 - setting.dtype.itemsize))
    buffer = torch.randn(max(size // 4 // config.d_model, 1), config.d_model, device=setting.device)
    x = torch.randn(config.d_model, device=setting.device)
    readers = {"by sum": buffer.sum, "by maximum": buffer.amax, "by product": lambda: buffer @ x}
    medians, roof = under_roof({"steps": steps, **readers, **others}, setting, seconds=4.0)
    count, read = IN_A_ROW[setting.device.type], min(medians[name] for name in readers)
    step = medians["steps"] / count
    return {
        "sequences": sequences,
        "step_ms": round(step * 1e3, 4),
        "tokens_per_second": round(sequences / step, 1),
        "active_bytes": size,
        "experts_read": round(statistics.mean(experts_read), 2),
        "floor_ms": round(read * 1e3, 4),
        "over_floor": round(step / read, 3),
        "read_gb_per_second": round(size / read / 1e9, 2),
        **{f"{name}_ms": round(medians[name] / count * 1e3, 4) for name in others},
        **rates(roof),
    }


def lines(rows: dict[str, Row]) -> list[str]:
    """Return tokens per second, and the time of a token over that of reading the active weights."""
    return [
        f"{name} at a time: {row['tokens_per_second']:,} tokens/s, {row['over_floor']:.3g} × reading "
        f"{row['active_bytes'] / 1e6:,.0f} MB"
        for name, row in rows.items()
    ]

"""What a figure shows, in a sentence of numbers computed from what the figure of the same name is drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np

from .records import Points, Record, expert_series, finite, layer_series, series

LATE = 0.75
"""Where the last quarter of the steps begins, over which sentences look at what a run came to."""


def loss(train: Sequence[Record], validation: Sequence[Record]) -> str:
    made, measured = finite(series(train, "cross_entropy")), finite(series(validation, "loss"))
    parts = []
    if made:
        (first, start), (last, end) = made[0], made[-1]
        parts.append(f"training went from {start:.3f} at step {first:,} to {end:.3f} at step {last:,}")
    if measured:
        step, value = measured[-1]
        before = [y for x, y in made if LATE * step < x <= step]
        gap = value - fmean(before) if before else 0
        side = "above" if gap >= 0 else "below"
        than = f", {abs(gap):.3f} {side} the mean of training over the quarter of the steps before" if before else ""
        parts.append(f"validation ended at {value:.3f}{than}{_best(measured)}")
    return _sentence(parts)


def bits_per_byte(points: Points) -> str:
    numbers = finite(points)
    (first, start), (last, end) = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"Validation gave {end:.3f} bits per byte after {short(last)} tokens."
    went = f"It went from {start:.3f} after {short(first)} tokens to {end:.3f} after {short(last)}"
    return f"{went}{_best(numbers, 'tokens')}."


def usage(train: Sequence[Record], target: float) -> str:
    shares = {
        (layer, expert): share
        for layer, values in _late_means(train, "usage").items()
        for expert, share in enumerate(values)
        if math.isfinite(share)
    }
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    if percent(shares[least]) == percent(shares[most]):
        return (
            f"Over the last quarter of the steps every expert got {percent(shares[least])} of the tokens; the target "
            f"is {percent(target)}."
        )
    near = sum(target / 2 <= share <= 2 * target for share in shares.values())
    return (
        f"Over the last quarter of the steps an expert got on average {percent(shares[least])} (expert {least[1]} of "
        f"layer {least[0]}) to {percent(shares[most])} (expert {most[1]} of layer {most[0]}) of the tokens; the "
        f"target is {percent(target)}. {_of_all(near, len(shares), 'expert')} got between half and twice the target."
    )


def load_spread(train: Sequence[Record], validation: Sequence[Record]) -> str:
    """Of training the mean over steps of each step's own spread; of validation that of all its tokens."""
    parts = []
    for what, records in (("a step of training", train), ("a validation", validation)):
        late = {layer: _late(points) for layer, points in layer_series(records, "load_spread").items()}
        means = {layer: fmean(values) for layer, values in late.items() if values}
        if means:
            worst = max(means, key=means.__getitem__)
            parts.append(f"{means[worst]:.2f} times the mean load in {what} (layer {worst})")
    had = " and ".join(parts)
    text = f"Over the last quarter of the steps the busiest expert of the worst layer had on average {had}."
    return f"{text}{_each_point(train)}"


def cutoffs(train: Sequence[Record]) -> str:
    ends = [values[np.isfinite(values).any(1)][-1] for _, values in expert_series(train, "cutoff").values()]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    text = f"The cutoffs end between {low:.2f} and {high:.2f}.".replace("-", "−")
    distances, spreads = (
        [y for points in layer_series(train, key).values() for y in _late(points)]
        for key in ("cutoff_distance", "score_std")
    )
    if not distances or not spreads:  # older runs have no distances of single steps
        return text
    return (
        f"{text} Over the last quarter of the steps the cutoff of a batch (grey) lay on average "
        f"{fmean(distances):.3f} from the cutoff that its scores were compared with (one colour per expert), which is "
        f"{percent(fmean(distances) / fmean(spreads))} of the scores' standard deviation.{_each_point(train)}"
    )


def fanout(counts: Mapping[int, Sequence[int]], target: float) -> str:
    total = np.sum([np.array(tokens, dtype=float) for tokens in counts.values()], axis=0)
    share = total / max(total.sum(), 1)
    mean = float(np.arange(len(share)) @ share)
    most = int(np.flatnonzero(total).max(initial=0))
    return (
        f"A token met {mean:.2f} routed experts in a layer on average, where the target is {target:g}; "
        f"{percent(share[0])} of the tokens met none, and no token met more than {most}."
    )


def saturation(train: Sequence[Record], exact_until: float) -> str:
    """exact_until: the last step at which an expert takes exactly k tokens; infinite in expert choice."""
    return _bounded(train, "saturation", "of the tokens above a cutoff were dropped", exact_until)


def starvation(train: Sequence[Record], exact_until: float) -> str:
    """exact_until: as in `saturation`."""
    return _bounded(train, "starvation", "of the places aimed at were filled with tokens below the cutoff", exact_until)


def score_spread(train: Sequence[Record]) -> str:
    return _went(train, "score_std")


def gate_spread(train: Sequence[Record]) -> str:
    return _went(train, "gate_std")


def speed(train: Sequence[Record]) -> str:
    rates = [y for _, y in finite(series(train, "tokens_per_second"))]
    return f"The median is {median(rates):,.0f} tokens per second; the range is {min(rates):,.0f} to {max(rates):,.0f}."


def counted(count: int, what: str) -> str:
    """1 thread, 2 threads."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def short(count: float) -> str:
    """Three digits and a unit: 16M, 2.43B."""
    unit = ""
    for larger in "kMBT":
        if count >= 999.5:
            count, unit = count / 1000, larger
    return f"{count:.3g}{unit}"


def pool_size(tokens: int) -> str:
    """As the paper writes it: 2k is 2048."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def two_digits(number: float) -> str:
    """24, 0.024, 6.1 × 10⁻⁵."""
    text = f"{number:.2g}"
    if "e" not in text:
        return text
    digits, power = text.split("e")
    return f"{digits} × 10{str(int(power)).translate(SUPERSCRIPTS)}"


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def signed(number: float, digits: int = 3) -> str:
    """+0.012 or −0.012; nothing has no sign."""
    text = f"{number:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _best(points: Points, unit: str = "") -> str:
    """What the lowest was, or that the last is it."""
    x, y = min(points, key=lambda point: point[1])
    if len(points) == 1:
        return ""
    if y == points[-1][1]:
        return "; it was never lower"
    where = f"after {short(x)} {unit}" if unit else f"at step {x:,}"
    return f"; the lowest was {y:.3f} {where}"


def _late(points: Points) -> list[float]:
    """The numbers of the last quarter of the steps; the last number at least, if there is any."""
    numbers = finite(points)
    return [y for x, y in numbers if x > LATE * numbers[-1][0]]


def _late_means(train: Sequence[Record], key: str) -> dict[int, list[float]]:
    """Layer -> mean over the last quarter of the steps, per expert; NaN where there is no number."""
    means = {}
    for layer, (steps, values) in expert_series(train, key).items():
        columns = [[(float(x), float(y)) for x, y in zip(steps, column, strict=True)] for column in values.T]
        means[layer] = [fmean(late) if (late := _late(points)) else math.nan for points in columns]
    return means


def _steps_of_a_line(train: Sequence[Record]) -> int:
    """Steps that a line of metrics is the mean of; 1 where older runs do not say."""
    return max((int(record.get("steps", 1)) for record in train), default=1)


def _each_point(train: Sequence[Record]) -> str:
    steps = _steps_of_a_line(train)
    return "" if steps == 1 else f" Each point of training is the mean of {steps} steps."


def _bounded(train: Sequence[Record], key: str, what: str, exact_until: float) -> str:
    every = [
        (step, value, layer) for layer, points in layer_series(train, key).items() for step, value in finite(points)
    ]
    after = [entry for entry in every if entry[0] > exact_until]
    step, most, layer = max(after or every, key=lambda entry: entry[1])
    mean = fmean(value for _, value, _ in after or every)
    when = "" if exact_until == 0 else "After warmup " if after else "While experts took exactly k tokens, "
    steps = _steps_of_a_line(train)
    most_of = "at most" if steps == 1 else f"in {steps} steps at most"
    return f"{when}{percent(mean)} {what} on average, {most_of} {percent(most)} (layer {layer}, step {step:,})."


def _went(train: Sequence[Record], key: str) -> str:
    lines = {layer: finite(points) for layer, points in layer_series(train, key).items()}
    (start, first), (end, last) = ((max(p[i][0] for p in lines.values()), i) for i in (0, -1))
    widest = max(lines, key=lambda layer: lines[layer][-1][1])
    where = f", largest in layer {widest}" if len(lines) > 1 else ""
    values = [_range([points[i][1] for points in lines.values()]) for i in (first, last)]
    return f"It went from {values[0]} at step {start:,} to {values[1]} at step {end:,}{where}."


def _range(values: Sequence[float]) -> str:
    """The layers' values."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low}–{high}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 9.995 else f"{100 * share:,.0f} %"


def _of_all(some: int, count: int, what: str) -> str:
    return f"All {count} {what}s" if some == count else f"{some} of {count} {what}s"

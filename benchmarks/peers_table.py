"""The tables of `peers.py`: a line for each shape and fanout, a column for each contestant."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from peers_contestants import EQUALISED

Row = dict[str, Any]
Key = tuple[str, int]  # shape, fanout


def to_markdown(rows: list[Row]) -> str:
    timed = [row for row in rows if row["status"] == "timed"]
    if not timed:
        return "\n".join(["Nothing was timed.", "", *_left_out(rows), ""])
    moe = [row for row in timed if not row["contestant"].startswith("dense")]
    first = rows[0]
    where = first.get("gpu") or f"{first['cpu']}, {first['threads']} threads"
    product, copy = (statistics.median(row[key] for row in timed) for key in ("product_tflops", "copy_gb_per_second"))
    lines = [
        f"{where}; torch {first['torch']}, {first['dtype']}, {first['repeats']} repetitions, {first['date']}, commit "
        f"{(first['commit'] or '')[:8]}. Beside the cases, medians: a product at {product * 1e3:,.0f} GFLOP/s, "
        f"a copy at {copy:,.0f} GB/s.",
        "",
        "## Forward + backward, GFLOP/s",
        "",
        *_table(timed, lambda row: _digits(row["tflops"] * 1e3), max, lambda row: row["tflops"]),
        "",
        "## Forward + backward: share of the product's rate",
        "",
        *_table(timed, lambda row: f"{row['share_of_product']:.2f}", max, lambda row: row["share_of_product"]),
    ]
    lines += _fastest(moe)
    for title, key in (
        ("Forward + backward: time per FLOP over the faster dense one's", "ratio_to_dense"),
        ("Forward + backward: time per FLOP over dense in plain PyTorch", "ratio_to_plain_dense"),
        ("Forward: time per FLOP over the faster dense one's", "forward_ratio_to_dense"),
        ("Kept for backward: bytes over the leaner dense one's", "kept_ratio_to_dense"),
    ):
        if key in timed[0]:
            lines += ["", f"## {title}", "", *_table(timed, lambda row, key=key: f"{row[key]:.2f}", min, _of(key))]
    if "peak_bytes" in timed[0]:
        lines += ["", "## Peak of forward + backward, MiB", ""]
        lines += _table(timed, lambda row: f"{row['peak_bytes'] / 2**20:,.0f}", min, _of("peak_bytes"))
    return "\n".join([*lines, *_cost_per_token(moe), "", *_left_out(rows), ""])


def _of(key: str) -> Callable[[Row], float]:
    return lambda row: float(row[key])


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(
    rows: list[Row], show: Callable[[Row], str], better: Callable[..., Any], value: Callable[[Row], float]
) -> list[str]:
    """The best of those with experts in bold."""
    columns = list(dict.fromkeys(row["contestant"] for row in rows))
    cells = {((row["shape"], row["fanout"]), row["contestant"]): row for row in rows}
    lines = [
        f"| d_model | experts | width | per token | tokens | {' | '.join(columns)} |",
        f"| ---: | ---: | ---: | ---: | ---: |{' ---: |' * len(columns)}",
    ]
    for key in dict.fromkeys(key for key, _ in cells):
        here = {name: cells[key, name] for name in columns if (key, name) in cells}
        best = better((row for name, row in here.items() if not name.startswith("dense")), key=value, default=None)
        row = next(iter(here.values()))
        shown = [f"**{show(here[n])}**" if here.get(n) is best else show(here[n]) if n in here else "" for n in columns]
        sizes = (row["d_model"], row["experts"], row["width"], row["experts_per_token"], row["tokens"])
        lines.append(f"| {' | '.join(f'{size:,}' for size in sizes)} | {' | '.join(shown)} |")
    return lines


def _fastest(rows: list[Row]) -> list[str]:
    """Ours against others', by time per FLOP; plain PyTorch is nobody's."""
    lines = []
    for key in dict.fromkeys((row["shape"], row["fanout"]) for row in rows):
        here = [row for row in rows if (row["shape"], row["fanout"]) == key]
        ours, *others = (
            max((row for row in here if row["contestant"].startswith(whose)), key=_of("tflops"), default=None)
            for whose in (("ours",), ("transformers",), ("transformers", "scattermoe", "megablocks", "sonicmoe"))
        )
        if ours and all(others):
            shown = [f"{other['contestant']} | {ours['tflops'] / other['tflops']:.2f}" for other in others]
            lines.append(f"| {key[0]} | {key[1]} | {ours['contestant']} | {' | '.join(shown)} |")
    head = [
        "",
        "## Forward + backward: how many times as fast ours is",
        "",
        "| shape | fanout of 16 | ours | as transformers' | times | as anyone's | times |",
        "| --- | ---: | --- | --- | ---: | --- | ---: |",
    ]
    return [*head, *lines] if lines else []


def _cost_per_token(rows: list[Row]) -> list[str]:
    """Compare shapes that differ only in the number of experts; active width and tokens per expert are equal."""
    took = {(row["shape"], row["fanout"], row["contestant"]): row["ns_per_token"] for row in rows}
    lines = []
    for (shape, fanout, name), ns in took.items():
        base, _, kind = shape.partition("-")
        for end in ("fine", "more"):
            more = {count: took.get((f"{base}-{end}{count}", fanout, name)) for count in (64, 256)}
            if not kind and any(more.values()):
                ratios = [f"{value / ns:.2f}" if value else "" for value in more.values()]
                what = {"fine": "narrower, more per token", "more": "as wide, more tokens"}[end]
                lines.append(f"| {base} | {fanout} | {what} | {name} | {ns:,.0f} | {' | '.join(ratios)} |")
    head = [
        "",
        "## Cost per token with more experts, forward + backward",
        "",
        "| shape | fanout of 16 | experts | contestant | 16 experts, ns per token | 64 | 256 |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    return [*head, *lines] if lines else []


def _left_out(rows: list[Row]) -> list[str]:
    """List what each contestant computed, the errors found, and what could not run, with the reason."""
    lines = ["## What was compared", ""]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for name in names:
        package = next((f" ({row['package']})" for row in rows if row["contestant"] == name and "package" in row), "")
        lines.append(f"- {name}{package}: {EQUALISED[name.split(' ')[0]]}.")
    lines += ["", "## Not timed", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "timed":
            said = f"{'WRONG: ' if row['status'] == 'wrong' else ''}{row['reason']}"
            reasons.setdefault((row["contestant"], said), []).append(f"{row['shape']} × {row['fanout']}")
    cases = len({(row["shape"], row["fanout"]) for row in rows})
    for (name, said), where in reasons.items():
        lines.append(f"- {name}: {said}" + ("" if len(where) == cases else f" ({', '.join(where)})"))
    return lines

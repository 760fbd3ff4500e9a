"""`et leakage`: how much an expert's choice can reveal about the future, and how much it does in traces of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..analysis.atlas import save
from ..analysis.figures.leakage import EXAMPLE, FIGURES, POOLS, PRECISIONS, closed_form, leakage_probe
from ..analysis.figures.style import style
from ..analysis.leakage import MoELayers, decode, encode, least_advice
from ..analysis.plain import Data, NotShownError
from ..analysis.sentences import pool_size
from ..option import Count
from ..train.log import Display, say
from .analyze import TRACING, open_material
from .options import Command, Option, parse_all

OPTIONS = [
    Option("run", str, None, "Runs in whose traces to measure the leakage.", positional=True, many=True),
    Option("num_experts", Count, 16, "Routed experts in a layer."),
    Option("experts_per_token", Count, 2, "Routed experts per token, on average; must divide the experts."),
    Option("layers", Count, 9, "Number of MoE layers."),
    Option("out", str, "runs/leakage", "The folder to write figures and their data to."),
    *TRACING,
]
DESCRIPTION = (
    "Compute how much expert choice can reveal to a token about the future (paper, Appendix A): Eq. 7 for pools of any "
    "size, the binary search that encodes a whole choice in one cutoff, and the lower bound by exhaustive search. With "
    "runs, also measure how much each rule reveals in their traces."
)
STUDY = {study.name: study for study in FIGURES}
LARGEST = 4
"""Tokens of the pool that is searched exhaustively, which takes about a second."""


def run(arguments: Sequence[str]) -> None:
    """Print the tables, and write the figures."""
    options = parse_all(Command("et leakage", DESCRIPTION, {"leakage": OPTIONS}), arguments)
    model = layers_of(options["num_experts"], options["experts_per_token"], options["layers"])
    out, console = Path(options["out"]), Console()
    display = Display(Console(stderr=True), name="et leakage")
    material = open_material(options, out, display) if options["run"] else None
    with style():
        out.mkdir(parents=True, exist_ok=True)
    data = closed_form(model)
    save(STUDY["leakage_bounds"], data, out, [])
    console.print(bounds_table(data))
    say(console, summary(data))
    say(console, construction())
    console.print(search_table())
    if material is not None:
        try:
            with display:
                found = leakage_probe(material)
        except NotShownError as reason:
            raise ValueError(f"leakage cannot be measured in these runs: {reason}") from None
        save(STUDY["leakage_probe"], found, out, [])
        console.print(probe_table(found))
    print(f"figures: {out}")


def layers_of(num_experts: int, experts_per_token: int, layers: int) -> MoELayers:
    """Return the layers in the paper's notation. Raises ValueError if Eq. 7 does not apply."""
    if num_experts % experts_per_token or num_experts < 2 * experts_per_token:
        raise ValueError(
            f"--num-experts {num_experts} must be a multiple of --experts-per-token {experts_per_token}, "
            "at least twice that; change either"
        )
    if num_experts // experts_per_token > POOLS[-2]:
        raise ValueError(
            f"--num-experts {num_experts} for --experts-per-token {experts_per_token}: an expert takes none of "
            f"{POOLS[-2]:,} tokens; give at most {POOLS[-2]:,} experts for each of --experts-per-token"
        )
    return MoELayers(num_experts // experts_per_token, experts_per_token, layers)


def bounds_table(data: Data) -> Table:
    """Return the table of Eq. 7 over pool sizes."""
    finite = [f"{bits}-bit cutoffs" for bits in PRECISIONS]
    names = ("tokens in the pool", "log2 C(N, N/E)", "per token", "bits per token, all layers", *finite)
    table = Table(*names, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for place, tokens in enumerate(data["tokens"]):
        bits = data["per_expert"][place]
        choices = f"{bits:,.1f}" if bits < 10_000 else f"{bits:,.0f}"
        row = [f"{tokens:,}", choices, f"{bits / tokens:.5f}", f"{data['exact'][place]:.3f}"]
        table.add_row(*row, *(f"{data['finite'][each][place]:.3g}" for each in PRECISIONS))
    return table


def summary(data: Data) -> str:
    """Return the limit, the bound, and the statement that the bits of a pool are linear in its tokens."""
    (few, more), (bits, times) = data["tokens"][-2:], data["per_expert"][-2:]
    per_layer = f"{data['granularity']} of {data['granularity'] * data['expansion']} experts per token"
    return (
        f"{data['layers']} layers, {per_layer}: at most {data['limit']:.1f} bits per token, the limit that Eq. 7 "
        f"rises to; the paper's bound, G·log2(E − 1) a layer, exceeds {data['bound']:.1f}.\n"
        f"A pool {more // few} times as large reveals {times / bits:.5f} times as much: for a fixed E, bits are linear "
        "in N, a constant per token, not superlinear."
    )


def construction() -> str:
    """Return an example of a choice encoded as a cutoff, and decoded (paper, Algorithm 2)."""
    lower, upper = encode(EXAMPLE)
    choice, _, _ = decode(lower, len(EXAMPLE))
    bits = ["".join(str(int(taken)) for taken in each) for each in (EXAMPLE, choice)]
    assert bits[0] == bits[1]
    return (
        f"Binary search: the choice {bits[0]} is any cutoff from {lower} up to {upper}; decoded token by token from "
        f"{lower}: {bits[1]}."
    )


def search_table() -> Table:
    """Return the table of the least advice found by exhaustive search, beside C(N, k) (paper, lower bound)."""
    table = Table("tokens", "k", "labels needed", "C(N, k)", box=box.SIMPLE_HEAD, title="Exhaustive search")
    for tokens in range(2, LARGEST + 1):
        for k in range(1, tokens):
            found = least_advice(tokens, k, 2**tokens - 1)
            table.add_row(str(tokens), str(k), str(found), str(math.comb(tokens, k)))
    return table


def probe_table(data: Data) -> Table:
    """Return the table of what assignments reveal, by the pool of each run."""
    title = "Measured in traces: bits that a token's assignment in training reveals, all layers together"
    table = Table("method", "pool", "rest of the pool", "own future", "next token", box=box.SIMPLE_HEAD, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for entry in data["methods"]:
        if entry["own"] in entry["tokens"]:
            place = entry["tokens"].index(entry["own"])
            bits = [f"{entry[name][place]:.3g}" for name in ("pool", "future", "next")]
            table.add_row(entry["method"], pool_size(entry["own"]), *bits)
        elif entry["own"] is None and not entry["tokens"]:
            table.add_row(entry["method"], "–", "0", "0", "0")
    return table

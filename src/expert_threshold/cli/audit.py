"""`et audit`: shows how a language model uses its experts and whether it is causal, from text alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console

from ..analysis.audit import LEAST, audit
from ..analysis.audit_page import audit_page
from ..analysis.figures.style import style
from ..data import embedded, open_held_out
from ..files import replace_file
from ..integrations.audit import load_any
from ..option import Bounds
from ..train.log import Display
from .options import COMPUTE, STEP, Option, parse_all, picked_device

OPTIONS = [
    Option("model", str, None, "A run, or the folder or name of a transformers model.", positional=True, required=True),
    Option("data", str, None, "Text to route; may be repeated. Defaults to embedded code and docs.", many=True),
    Option("tokens", Annotated[int, Bounds(least=LEAST)], 32_768, "Number of tokens on which loads are measured."),
    Option("training", bool, False, "Route tokens as in training, but without dropout."),
    Option("page", str | None, None, "Write an HTML page to this file."),
    Option("json", bool, False, "Print one JSON object instead of the verdict."),
    STEP,
    *COMPUTE,
]
DESCRIPTION = (
    "Audit a causal language model with nothing but text. Measures the loads, fanout, drift and pairs of its experts. "
    "To test causality, changes later tokens, other texts in the batch, padding and the chunks of the prefill, and "
    "compares the logits and experts that must not change. Prints one line. Exits with 1 if the model is not causal."
)


def run(arguments: Sequence[str]) -> None:
    """Print the verdict."""
    options = parse_all("et audit", DESCRIPTION, OPTIONS, arguments)
    named = {name: open_held_out(name).documents("validation") for name in options["data"] or ()}
    if (page := options["page"] and Path(options["page"])) is not None:
        with style():  # fails early without matplotlib
            pass
        if page.is_dir() or not page.parent.is_dir():
            raise ValueError(f"--page {page} must be a file in an existing folder; use another path")
    model, tokenizer = load_any(options["model"], options["step"], *picked_device(options))
    with Display(Console(stderr=True), name=options["model"]) as display:
        how = {"tokens": options["tokens"], "training": options["training"], "progress": display.task}
        found = audit(model, tokenizer, named or _embedded(), name=options["model"], **how)
    if page is not None:
        replace_file(page, audit_page(found).encode())
    print(json.dumps(found.to_dict()) if options["json"] else found.verdict)
    if found.leaks:
        raise SystemExit(1)


def _embedded() -> dict[str, list[str]]:
    """Return the held-out part of the embedded corpus, with code and prose kept apart."""
    texts: dict[str, list[str]] = {}
    for name, text in embedded.documents()[1]:
        texts.setdefault("code" if name.endswith(".py") else "docs", []).append(text)
    return texts

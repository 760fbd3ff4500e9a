"""`et generate`: continues a text with a trained model, and prints it token by token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.segment import Segment, Segments

from ..generate import LEGEND, generate, printable, render_routing
from ..runs import load_model
from .options import COMPUTE, RATE, STEP, Option, parse_all, picked_device

OPTIONS = [
    Option("run", str, None, "The folder of the run.", positional=True, required=True),
    Option("prompt", Literal[""] | str, "", "Text to continue. An empty prompt starts a document."),
    Option("max_tokens", int, 200, "Maximum number of tokens. The end of the document or the context also stops."),
    Option("temperature", float, 1.0, "With 0, the likeliest token is picked; with 1, the distribution is unchanged."),
    Option("top_k", int | None, 50, "Sample from only this many of the likeliest tokens, or from all with none."),
    Option("repetition_penalty", float, 1.0, "Values above 1 make tokens that already occurred less likely."),
    Option("seed", int | None, None, "Seed for sampling. Defaults to a random one."),
    RATE,
    Option("show_routing", bool, False, "Colour each token by the number of experts that it was routed to."),
    STEP,
    *COMPUTE,
]


def run(arguments: Sequence[str]) -> None:
    """Print the continuation, token by token."""
    options = parse_all("et generate", "Continue a text with a trained model.", OPTIONS, arguments)
    prompt = options["prompt"]
    model, tokenizer = load_model(options["run"], options["step"], *picked_device(options))
    sampling = ("max_tokens", "temperature", "top_k", "repetition_penalty", "seed", "rate")
    given = {name: options[name] for name in sampling}
    steps = generate(model, tokenizer, prompt, record=options["show_routing"], **given)
    shown = printable if sys.stdout.isatty() else str
    if not options["show_routing"]:
        print(shown(prompt), end="", flush=True)
        for step in steps:
            print(shown(step.text), end="", flush=True)
        print()
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(LEGEND)
    console.print(Segments([Segment(shown(prompt))]), end="")
    for step in steps:
        console.print(Segments([render_routing(step._replace(text=shown(step.text)))]), end="")
    console.print()

"""`et calibrate`: measures cutoffs for a trained model on a stream of text, without training."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Console

from ..analysis.sentences import fixed
from ..data import Loader, open_source, pack
from ..evaluation import evaluate
from ..files import require_free
from ..install import et
from ..model.calibrate import calibrate
from ..option import Count, NonNegativeInt
from ..runs import RunFolder, load_model
from ..runs.folder import derive
from ..train.device import keep_freed_memory
from ..train.log import Display
from .evaluate import training_batch, validation_text
from .options import COMPUTE, STEP, Option, parse_all, picked_device
from .rates import require_cutoffs
from .tables import table

OPTIONS = [
    Option("run", str, None, "The folder of the run to calibrate. It is not changed.", positional=True, required=True),
    Option("to", str, None, "Folder to create for the run with the new cutoffs.", required=True),
    Option("data", str, "RUN's", "Text to calibrate on, as in et train. Its held-out part gives losses.", derived=True),
    Option("text_field", str, "text", "Name of the field (.jsonl) or column (.parquet) of --data with the text."),
    Option("tokens", Count, 262_144, "Number of tokens to calibrate on, rounded up to whole batches."),
    Option("batch_size", Count, 64, "Sequences per batch. The k-th largest score is measured in each batch."),
    Option("experts_per_token", float | None, None, "Mean routed experts per token. Defaults to the trained number."),
    Option("eval_tokens", Count | None, None, "Maximum number of tokens to measure the loss on. Defaults to all."),
    STEP,
    Option("seed", NonNegativeInt, 0, "Seed for selecting and ordering the rows of the text."),
    *COMPUTE,
]
DESCRIPTION = (
    "Measure the cutoffs of a model whose rule uses them, and the sketch of its scores that --rate needs. This is a "
    "single pass over a text, without training. The loss before and after is measured on held-out text."
)
FILE = "calibration.json"


def run(arguments: Sequence[str]) -> None:
    """Write the new run folder, and print the losses."""
    options = parse_all("et calibrate", DESCRIPTION, OPTIONS, arguments)
    source = RunFolder.open(options["run"])
    for method in ("calibrated", "calibration_rule"):
        require_cutoffs(source, method)
    require_free(options["to"])
    keep_freed_memory()
    saved = source.load_checkpoint(options["step"], parts=("model",))
    model, tokenizer = load_model(source.path, saved.step, *picked_device(options))
    rule = model.config.rule
    assert rule is not None
    if options["experts_per_token"] is not None:
        rule = replace(rule, experts_per_token=options["experts_per_token"])
    if options["data"] is None:
        corpus = validation_text(source, "pass another text with --data")
    else:
        corpus = open_source(options["data"], options["text_field"])

    batch_size, context = options["batch_size"], model.config.context
    batches = math.ceil(options["tokens"] / (batch_size * context))
    losses: dict[str, dict[str, Any]] = {}
    with Display(Console(stderr=True), name=options["run"]) as display:
        held_out = pack(corpus, tokenizer, "validation", display.task("tokenizing text for the loss"))
        tokens = (
            pack(corpus, tokenizer, "train", display.task("tokenizing"))
            if corpus.parts is None
            else corpus.parts("train", tokenizer)
        )
        loader = Loader(tokens, batch_size, context, options["seed"])

        def measure(what: str, **how: Any) -> dict[str, Any]:
            """Return the losses, and the fanout averaged over layers."""
            how |= {"max_tokens": options["eval_tokens"], "progress": display.task(what)}
            found = evaluate(model, held_out, tokenizer, **how)
            return found.losses() | {"fanout": fmean(float(seen.fanout_mean) for seen in found.observations)}

        pooled = training_batch(source) if rule.looks_ahead else None
        if pooled is not None and len(held_out) > pooled * context:
            losses["training pools"] = measure("loss by training pools", batch_size=pooled, training_pools=True)
        losses["cutoffs before"] = measure("loss before")
        counted = display.task("calibrating")
        calibrate(
            model,
            islice(loader, batches),
            experts_per_token=rule.experts_per_token,
            progress=lambda done: counted(done, batches),
        )
        losses["cutoffs after"] = measure("loss after")

    new = {name: value.cpu() for name, value in model.state_dict().items() if ".router.state_" in name}
    facts = {
        "tokens": batches * batch_size * context,
        "batch_size": batch_size,
        "experts_per_token": rule.experts_per_token,
        "seed": options["seed"],
        "text": corpus.hash,
        "losses": losses,
    }
    config = replace(model.config, rule=rule).to_dict()
    derive(source, options["to"], saved.step, saved.tensors["model"] | new, model=config, files={FILE: facts})
    lines = [
        (name, fixed(each["loss"], 4), fixed(each["bits_per_byte"], 4), f"{each['fanout']:.3f}", f"{each['tokens']:,}")
        for name, each in losses.items()
    ]
    Console().print(table(("routing by", "loss", "bits per byte", "routed experts per token", "tokens"), lines))
    print(f"next: {et()} evaluate {shlex.quote(options['to'])} --rates 0.25,0.5,1,2")

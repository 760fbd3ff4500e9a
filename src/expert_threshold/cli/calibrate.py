"""`et calibrate`: measures cutoffs for a trained model on a stream of text, without training."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ..analysis.sentences import fixed
from ..data import Loader, open_source, pack
from ..evaluation import Validation, evaluate
from ..files import require_free
from ..install import et
from ..model.calibrate import calibrate
from ..option import Count, NonNegativeInt
from ..runs import RunFolder, load_model
from ..runs.folder import derive
from ..train.device import keep_freed_memory, pick_device, pick_dtype
from ..train.log import Display
from .evaluate import training_batch, validation_text
from .options import COMPUTE, STEP, Option, parse
from .rates import require_cutoffs

OPTIONS = [
    Option("run", str, None, "The folder of the run to calibrate. It is not changed.", positional=True, required=True),
    Option("to", str, None, "The folder of the new run, which has the new cutoffs.", required=True),
    Option("data", str, "RUN's", "Text to calibrate on, as in et train. The loss is measured on its held-out part."),
    Option("text_field", str, "text", "Name of the field (.jsonl) or column (.parquet) of --data with the text."),
    Option("tokens", Count, 262_144, "Number of tokens to calibrate on, rounded up to whole batches."),
    Option("batch_size", Count, 64, "Sequences per batch. The k-th largest score is measured in each batch."),
    Option(
        "experts_per_token",
        float | None,
        None,
        "Mean number of routed experts per token to calibrate for. Defaults to the trained number.",
    ),
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
    given = parse("et calibrate", DESCRIPTION, OPTIONS, arguments)
    options = {option.name: option.default for option in OPTIONS} | given
    source = RunFolder.open(options["run"])
    for method in ("calibrated", "calibration_rule"):
        require_cutoffs(source, method)
    require_free(options["to"])
    device = pick_device(options["device"])
    keep_freed_memory()
    saved = source.load_checkpoint(options["step"], parts=("model",))
    model, tokenizer = load_model(source.path, saved.step, device, pick_dtype(options["dtype"], device))
    rule = model.config.rule
    assert rule is not None
    if options["experts_per_token"] is not None:
        rule = replace(rule, experts_per_token=options["experts_per_token"])  # type: ignore[type-var]
    corpus = (
        open_source(options["data"], options["text_field"])
        if "data" in given
        else validation_text(source, "pass another text with --data")
    )

    batches = math.ceil(options["tokens"] / (options["batch_size"] * model.config.context))
    found: dict[str, Validation] = {}
    with Display(Console(stderr=True), name=options["run"]) as display:
        held_out = pack(corpus, tokenizer, "validation", display.task("tokenizing text for the loss"))
        tokens = (
            pack(corpus, tokenizer, "train", display.task("tokenizing"))
            if corpus.parts is None
            else corpus.parts("train", tokenizer)
        )
        loader = Loader(tokens, options["batch_size"], model.config.context, options["seed"])

        def measure(what: str, **how: Any) -> Validation:
            progress = display.task(what)
            return evaluate(model, held_out, tokenizer, max_tokens=options["eval_tokens"], progress=progress, **how)

        pooled = training_batch(source) if rule.looks_ahead else None
        if pooled is not None and len(held_out) > pooled * model.config.context:
            found["training pools"] = measure("loss by training pools", batch_size=pooled, training_pools=True)
        found["cutoffs before"] = measure("loss before")
        counted = display.task("calibrating")
        calibrate(
            model,
            islice(loader, batches),
            experts_per_token=rule.experts_per_token,
            progress=lambda done: counted(done, batches),
        )
        found["cutoffs after"] = measure("loss after")

    new = {name: value.cpu() for name, value in model.state_dict().items() if ".router.state_" in name}
    results = {name: _numbers(validation) for name, validation in found.items()}
    facts = {
        "tokens": batches * options["batch_size"] * model.config.context,
        "batch_size": options["batch_size"],
        "experts_per_token": rule.experts_per_token,
        "seed": options["seed"],
        "text": corpus.hash,
        "losses": results,
    }
    derive(
        source,
        options["to"],
        saved.step,
        saved.tensors["model"] | new,
        model=replace(model.config, rule=rule).to_dict(),
        files={FILE: facts},
    )
    Console().print(_table(results))
    print(f"next: {et()} evaluate {shlex.quote(options['to'])} --rates 0.25,0.5,1,2")


def _numbers(found: Validation) -> dict[str, Any]:
    """Return the losses, and the fanout averaged over layers."""
    return found.losses() | {"fanout": fmean(float(observation.fanout_mean) for observation in found.observations)}


def _table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    shown = Table("routing by", "loss", "bits per byte", "routed experts per token", "tokens")
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, found in results.items():
        losses = (fixed(found[loss], 4) for loss in ("loss", "bits_per_byte"))
        shown.add_row(name, *losses, f"{found['fanout']:.3f}", f"{found['tokens']:,}")
    return shown

"""`et retrofit`: converts a top-k checkpoint to variable fanout and compares the two."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from rich.console import Console

from ..data import Corpus, Loader, Tokens, open_source, pack
from ..data.loader import shuffled
from ..data.sources import absolute
from ..evaluation.by_document import Comparison, Sums, compare
from ..files import read_json, replace_file, replace_json, require_free
from ..integrations import retrofit
from ..integrations.retrofit import Calibrator, Checkpoint, Cutoffs, Sample, routers
from ..option import Count, NonNegativeInt, Positive
from ..routing import ExpertThreshold
from ..train.device import keep_freed_memory
from ..train.interrupt import Interrupt
from ..train.log import Display
from .options import COMPUTE, STEP, Option, parse_all, picked_device

OPTIONS = [
    Option("model", str, None, "Folder of a run or model. It is not changed.", positional=True, required=True),
    Option("to", str, None, "The folder to create, in the same format as MODEL.", required=True),
    Option("data", str, None, "Text, as for et train. The models are compared on its held-out part.", required=True),
    Option("text_field", str, "text", "Name of the field (.jsonl) or column (.parquet) of --data with the text."),
    Option("experts_per_token", float | None, None, "Target mean fanout. Defaults to the fanout of the checkpoint."),
    Option("cutoffs", Cutoffs, "scores", "How to set the new model's cutoffs. The report compares all ways."),
    Option("tokens", Count, 65_536, "Number of tokens to calibrate on."),
    Option("distill_routers", NonNegativeInt, 0, "Number of steps that distill the checkpoint into the routers."),
    Option("distill_all", NonNegativeInt, 0, "Number of subsequent steps that distill it into all weights."),
    Option("lr", Positive, 3e-4, "Peak learning rate of the distillation."),
    Option("batch_size", Count, 16, "Sequences per batch."),
    Option("eval_tokens", Count, 400_000, "Number of held-out tokens to compare on, in whole documents."),
    Option("seed", NonNegativeInt, 0, "Seed for selecting the text and for the bootstrap."),
    STEP,
    *COMPUTE,
]
DESCRIPTION = (
    "Convert a mixture from top-k to Expert Threshold routing. The cutoffs are calibrated on a text, and optional "
    "self-distillation follows. The loss is compared with the loss of static top k' for every k' up to twice the "
    "checkpoint's k.\n\nUnfinished work is kept in TO.partial. To continue it, repeat the command."
)
ASKED = "options.json"


def run(arguments: Sequence[str]) -> None:
    """Write the new folder, and print the comparison."""
    options = parse_all("et retrofit", DESCRIPTION, OPTIONS, arguments)
    to = Path(options["to"])
    require_free(to)
    keep_freed_memory()
    source = retrofit.open_checkpoint(options["model"], options["step"], *picked_device(options))
    fanout = source.rule.experts_per_token if options["experts_per_token"] is None else options["experts_per_token"]
    rule = retrofit.threshold_rule(source.rule, float(fanout))
    corpus = open_source(options["data"], options["text_field"])
    asked = options | {"model": absolute(options["model"]), "data": absolute(options["data"])}
    asked |= {"step": source.step, "text": corpus.hash}
    work = to.with_name(f"{to.name}.partial")
    if work.exists() and not ((work / ASKED).is_file() and read_json(work / ASKED) == asked):
        raise ValueError(f"{work} contains unfinished work with other options; use those options, or delete it")
    with Interrupt() as interrupt, Display(Console(stderr=True), name=options["to"]) as display:
        documents = _documents(source, corpus, options)
        steps = max(options["distill_routers"], options["distill_all"]) * options["batch_size"]
        enough = options["tokens"] + (steps + 1) * source.context
        train = pack(corpus, source.tokenizer, "train", display.task("reading text"), max_tokens=enough)
        work.mkdir(parents=True, exist_ok=True)
        replace_json(work / ASKED, asked)
        interrupt.deferred = True
        job = Job(options, source, documents, train, work, display, interrupt)
        model, static, variable = job.do(rule)
    targets = [len(ids) - 1 for ids in documents]
    compared = {name: compare(static, sums, targets, options["seed"]) for name, sums in variable.items()}
    report = {
        "options": options,
        "rule": source.rule.label,
        "text": corpus.hash,
        "documents": len(documents),
        "tokens": sum(targets),
        "static": [float(sums[:, 0].sum() / sum(targets)) for sums in static],
        "variable": {name: found._asdict() for name, found in compared.items()},
    }
    whole = work / "whole"  # the model and its report appear under the final name together
    shutil.rmtree(whole, ignore_errors=True)
    source.save(model, whole)
    replace_json(whole / "retrofit.json", report)
    replace_file(whole / "retrofit.md", (text := _markdown(report, compared)).encode())
    whole.rename(to.resolve())
    shutil.rmtree(work)
    print(text, end="")


def _documents(source: Checkpoint, corpus: Corpus, options: Mapping[str, Any]) -> list[Any]:
    """Return the token ids of randomly drawn held-out documents. Raises ValueError if there are fewer than two."""
    held_out = pack(corpus, source.tokenizer, "validation", max_tokens=8 * options["eval_tokens"])
    found: list[Any] = []
    tokens = 0
    for document in shuffled(held_out.documents, options["seed"]):
        ids = held_out.ids[slice(*held_out.offsets[document : document + 2])]
        if len(ids) > 1 and tokens < options["eval_tokens"]:
            found.append(ids)
            tokens += len(ids)
    if len(found) < 2:
        raise ValueError(f"--data {options['data']} has only {len(found)} held-out documents; at least 2 are needed")
    return found


class Job(NamedTuple):
    """A conversion and its measurements, each of which is saved in the folder `work` as soon as it is made."""

    options: Mapping[str, Any]
    source: Checkpoint
    documents: list[Any]
    train: Tokens
    work: Path
    display: Display
    interrupt: Interrupt

    def do(self, rule: ExpertThreshold) -> tuple[Any, list[Sums], dict[str, Sums]]:
        """Return the new model, the sums for each static k′ and, keyed by name, the sums for variable fanout."""
        source = self.source
        model, first = source.with_rule(rule), self.sample("calibrating", source.model)
        fanouts = [share * rule.experts_per_token for share in (0.25, 0.5, 0.75, 1, 1.5)]
        fanouts = [fanout for fanout in fanouts if fanout <= rule.num_experts]

        def calibrated(way: Cutoffs, measured: Sample) -> Calibrator:
            calibrator = Calibrator.of(way, source, measured.norms)
            calibrator.set(model, measured.scores)
            return calibrator

        variable: dict[str, Sums] = {}
        for way in get_args(Cutoffs):
            calibrated(way, first)
            variable |= self.at(fanouts, way, model)
        static = [*self.at([0], "no experts", model).values()]
        most = source.rule.num_experts * source.rule.groups_per_token // source.rule.num_groups
        for k in range(1, min(2 * source.rule.experts_per_token, most) + 1):
            with retrofit.at_top(source.model, source.rule, k):
                static.append(self.measure(f"top {k}", source.model))
        cutoffs = self.options["cutoffs"]
        calibrator = calibrated(cutoffs, first)
        for seed, stage in enumerate(("routers", "all"), start=1):
            if steps := self.options[f"distill_{stage}"]:
                how: Any = {"routers_only": stage == "routers", "calibrator": calibrator}
                how |= {"progress": self.display.task(f"distilling {stage}"), "stop": lambda: self.interrupt.requested}
                training = self.batches(seed), steps, self.options["lr"], self.work / stage
                retrofit.distill(source.model, model, *training, **how)
                calibrator = calibrated(cutoffs, self.sample("calibrating again", model))
                variable |= self.at(fanouts, f"{cutoffs}, distilled {stage}", model)
        return model, static, variable

    def batches(self, seed: int) -> Loader:
        return Loader(self.train, self.options["batch_size"], self.source.context, self.options["seed"] + seed)

    def sample(self, what: str, model: Any) -> Sample:
        count = -(-self.options["tokens"] // (self.options["batch_size"] * self.source.context))
        shown = self.display.task(what)
        return retrofit.sample(model, islice(self.batches(0), count), lambda done: self.go_on(shown, done, count))

    def at(self, fanouts: Sequence[float], what: str, model: Any) -> dict[str, Sums]:
        """Return a model's sums at each mean fanout, keyed by name."""
        found = {}
        for fanout in fanouts:
            for router in routers(model).values():
                router.rate = fanout
            name = f"{what} at {fanout:g}"
            found[name] = self.measure(name, model)
        for router in routers(model).values():
            router.rate = None
        return found

    def measure(self, name: str, model: Any) -> Sums:
        """Return a model's sums for each document. Saved sums are not measured again."""
        path, shown = self.work / f"{name.replace(' ', '-')}.json", self.display.task(name)
        sums: list[tuple[float, float]] = read_json(path)["sums"] if path.exists() else []
        try:
            for ids in self.documents[len(sums) :]:
                sums.append(retrofit.document_sums(self.source, model, ids))
                self.go_on(shown, len(sums), len(self.documents))
        finally:
            replace_json(path, {"sums": sums})
        return np.array(sums)

    def go_on(self, shown: Any, done: int, total: int) -> None:
        """Show progress. Raises KeyboardInterrupt after a signal."""
        shown(done, total)
        if self.interrupt.requested:
            raise KeyboardInterrupt


def _markdown(report: Mapping[str, Any], compared: Mapping[str, Comparison]) -> str:
    rows = {who: [n for n, found in compared.items() if found.lower == who] for who in ("static", "variable", "open")}
    lines = [
        f"Static top k′ has a lower loss than: {'; '.join(rows['static']) or 'none'}. Variable fanout has a lower "
        f"loss with: {'; '.join(rows['variable']) or 'none'}. Undecided: {'; '.join(rows['open']) or 'none'}.\n",
        f"Losses are in nats per token, on {report['documents']} held-out documents with {report['tokens']:,} tokens. "
        "The static loss is interpolated between two k′. Each row has its own 95 % bootstrap interval over documents.",
        "\n| static top k′ | loss |\n|---:|---:|",
        *(f"| {k} | {loss:.4f} |" for k, loss in enumerate(report["static"])),
        "\n| cutoffs by | fanout | loss | static at that fanout | difference | 95 % interval |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in compared.items():
        beside = " |  | "
        if found.interval is not None:
            low, high = found.interval
            beside = f"{found.static_loss:.4f} | {found.difference:+.4f} | {low:+.4f} to {high:+.4f}"
        lines.append(f"| {name} | {found.fanout:.3f} | {found.loss:.4f} | {beside} |")
    return "\n".join(lines) + "\n"

"""Answers doubts about the comparisons with dense and about the paper's choices: is it the optimizer, or luck?

    python benchmarks/evidence/critics.py --data FOLDER/tokens --out FOLDER [--seeds 0 1 2] [--only QUESTION …]
    python benchmarks/evidence/critics.py --show FILE

adamw: AdamW updates all parameters, at several learning rates of matrices. blocks: Muon orthogonalizes the dense
model's feed-forward matrices in blocks of an expert's shape; its ordinary runs ("whole") are the baseline of the other
questions, too. starved: after a quarter of the steps, 4 is subtracted from all scores of expert 0. Does it recover its
tokens? warmup, shared and pools: steps of warmup, two routed experts instead of one and a shared one, and the pool of
expert choice. Runs have the size of the frontier's.
FOLDER/records.jsonl holds one JSON line per finished run; if the command is repeated, it skips these runs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean
from typing import Any
from unittest.mock import patch

from frontier import SHARED, SOFTMAX
from ladder import RIVALS, RULES
from study import Record, parser, read, record_run, run_script
from torch import Tensor

from expert_threshold.analysis.results import markdown
from expert_threshold.compare.paired import corrected, student
from expert_threshold.moe.router import Router
from expert_threshold.optim import Muon, groups, muon
from expert_threshold.routing import Observation
from expert_threshold.runs import RunFolder

EXPERT_WIDTH = 256  # of quickstart, whose dense feed-forward layers have twice this width
HANDICAP = 4.0
TOKENS = 2_000_000
STEPS = 488
ET, EC = RULES["expert threshold"], f"--rule expert_choice {SOFTMAX} --rule.pool"
PLAIN = {
    "warmup": {f"{steps} steps": f"{ET} --rule.warmup-steps {steps}" for steps in (0, 24, 195)},
    "shared": {"none": f"{ET} --rule.experts-per-token 2 --model.shared-experts 0"},
    "pools": {pool: f"{EC} {pool}" for pool in ("sequence", "1024", "batch")},
}
"""Questions about options alone: each setting's options."""
WORDS = {"blocks": "{}", "warmup": "{} of warmup", "shared": "no shared expert", "pools": "pool {}"}
QUESTIONS = ("adamw", "blocks", "starved", *PLAIN)


@contextmanager
def adamw_everywhere() -> Iterator[None]:
    """Let AdamW update the matrices, too, with a weight decay of 0.1."""
    changes = {"optimizer": lambda config: "adamw", "weight_decay": 0.1}
    rows = {name: groups.GROUPS[name]._replace(**changes) for name in ("matrix", "expert")}
    with patch.dict(groups.GROUPS, rows):
        yield


def blocks_of(matrix: Tensor, width: int = EXPERT_WIDTH) -> Tensor:
    """Return a view (2, width, d) or (2, d, width) of a feed-forward matrix (2 width, d) or (d, 2 width)."""
    rows, columns = matrix.shape
    return matrix.view(2, width, columns) if rows == 2 * width else matrix.view(rows, 2, width).transpose(0, 1)


@contextmanager
def muon_in_blocks(width: int = EXPERT_WIDTH) -> Iterator[None]:
    """Let Muon treat each feed-forward matrix as two matrices of an expert's shape."""
    whole = Muon._piece

    def piece(self: Muon, weight: Tensor, normuon: bool) -> muon._Piece:
        found = whole(self, weight, normuon)
        if weight.ndim != 2 or 2 * width not in weight.shape:
            return found
        return muon._Piece(*(blocks_of(each[0], width) for each in found))

    with patch.object(Muon, "_piece", piece):
        yield


@contextmanager
def starved(after: int) -> Iterator[None]:
    """Subtract HANDICAP from expert 0's scores in every router that has been updated `after` times."""
    score, update, updates = Router.score, Router.update, defaultdict[int, int](int)

    def counted(self: Router, observation: Observation) -> None:
        update(self, observation)
        updates[id(self)] += 1

    def handicapped(self: Router, x: Tensor) -> Tensor:
        scores = score(self, x)
        if updates[id(self)] >= after:
            lower = scores.new_zeros(scores.shape[-1])
            lower[0] = HANDICAP
            scores = scores - lower
        return scores

    with patch.object(Router, "score", handicapped), patch.object(Router, "update", counted):
        yield


def usages(folder: RunFolder) -> Record:
    """Return expert 0's mean load over all layers, relative to an even load, for each eighth of the run."""
    lines = [line for line in folder.metrics.read() if line["split"] == "train"]
    by_eighth = defaultdict[int, list[float]](list)
    for line in lines:
        share = fmean(layer["usage"][0] * len(layer["usage"]) for layer in line["layers"].values())
        by_eighth[min(7, 8 * line["step"] // lines[-1]["step"])].append(share)
    return {"usage": [round(fmean(values), 3) for values in by_eighth.values()]}


def late(folder: RunFolder) -> Record:
    """Return the mean training loss over the last tenth of the run."""
    lines = [line for line in folder.metrics.read() if line["split"] == "train"]
    return {"training": fmean(line["cross_entropy"] for line in lines if line["step"] > 0.9 * lines[-1]["step"])}


def runs(question: str) -> Iterator[tuple[str, str, str, AbstractContextManager[None], Any]]:
    """Yield each run of a question: method, setting, options, the change under which it runs, and what is measured."""
    if question in PLAIN:
        for setting, options in PLAIN[question].items():
            yield options.split()[1].replace("_", " "), setting, options, nullcontext(), late
    elif question == "adamw":
        for method, rate in itertools.product(
            ("dense", "expert threshold", "token choice"), (0.001, 0.002, 0.004, 0.008)
        ):
            options = f"{RULES[method]} --optim.matrix-lr {rate} --optim.router-optimizer adamw"
            yield method, str(rate), options, adamw_everywhere(), late
    elif question == "blocks":
        yield "dense", "in blocks", RULES["dense"], muon_in_blocks(), late
        for method in ("dense", "expert threshold"):
            yield method, "whole", RULES[method], nullcontext(), late
    else:
        for method in ("expert threshold", *RIVALS):
            yield method, "", RULES[method], starved(STEPS // 4), usages


def differences(records: list[Record]) -> str:
    """Return a Markdown table of losses minus ordinary runs' of the same seeds, with Holm-corrected verdicts.

    The first rows are differences from dense, the others from expert threshold.
    """
    runs: dict[tuple[str, str], dict[int, Record]] = defaultdict(dict)
    for each in records:
        if each["question"] not in ("adamw", "starved"):
            runs[each["method"], each["setting"]][each["seed"]] = each
    lines = []
    for base in ("dense", "expert threshold"):  # two families of comparisons
        names = [name for name in runs if (name[0] == "dense") == (base == "dense") and name[1] != "whole"]
        names = [("expert threshold", "whole")] * (base == "dense") + names
        shared = {name: sorted(runs[name].keys() & runs[base, "whole"].keys()) for name in names}
        names = [name for name in names if len(shared[name]) > 1]
        trained, gaps = (
            [[runs[name][seed][loss] - runs[base, "whole"][seed][loss] for seed in shared[name]] for name in names]
            for loss in ("training", "loss")
        )
        for (method, setting), early, each, judged in zip(names, trained, gaps, corrected(gaps, 0.01), strict=True):
            half = judged.error * student(0.95, judged.freedom)
            what = WORDS[next(iter(runs[method, setting].values()))["question"]].format(setting)
            name = ", ".join([method] * (method != base) + [what] * (setting != "whole"))
            mean, ends = fmean(each), f"{fmean(each) - half:+.4f} to {fmean(each) + half:+.4f}"
            lines.append([name, f"{len(each)}", f"{fmean(early):+.4f}", f"{mean:+.4f}", ends, judged.verdict])
    return markdown(["difference", "seeds", "training", "validation", "95 % interval", "verdict, margin 0.01"], lines)


def rates(records: list[Record]) -> str:
    """Return a Markdown table of AdamW's losses with a row per method and a column per learning rate."""
    runs = [each for each in records if each["question"] == "adamw"]
    columns = sorted({each["setting"] for each in runs}, key=float)
    lines = []
    for method in dict.fromkeys(each["method"] for each in runs):
        mine = sorted((each["setting"], each["seed"], each["loss"]) for each in runs if each["method"] == method)
        cells = [", ".join(f"{loss:.3f}" for setting, _, loss in mine if setting == rate) for rate in columns]
        lines.append([method, *cells])
    return markdown(["AdamW", *columns], lines)


def recovery(records: list[Record]) -> str:
    """Return a Markdown table of the starved expert's mean load over seeds in each eighth of the run."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for each in records:
        if each["question"] == "starved":
            runs[each["method"]].append(each)
    lines = [
        [method, *(f"{fmean(column):.2f}" for column in zip(*(each["usage"] for each in mine), strict=True))]
        for method, mine in runs.items()
    ]
    return markdown(["expert 0's load by eighths", *"12345678"], lines)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--seeds", type=int, nargs="*", default=[0])
    given.add_argument("--only", choices=QUESTIONS, nargs="+", default=list(QUESTIONS))
    given.add_argument("--settings", nargs="+", help="only these settings, such as a learning rate")
    asked = given.parse_args()
    if asked.show is not None:
        records = read(asked.show)
        print(differences(records), rates(records), recovery(records), sep="\n")
        return
    for seed, question in itertools.product(asked.seeds, asked.only):
        for method, setting, options, change, measure in runs(question):
            if asked.settings is None or setting in asked.settings:
                run = {"question": question, "method": method, "setting": setting, "tokens": TOKENS, "seed": seed}
                with change:
                    record_run(run, f"{SHARED} {options}", asked.data, asked.out, 4, measure)


if __name__ == "__main__":
    run_script("critics", main)

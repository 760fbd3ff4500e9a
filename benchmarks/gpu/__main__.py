"""Measure a GPU in the given minutes. Each result is written at once, and a second call resumes.

    python -m benchmarks.gpu --minutes 9 --out FOLDER [--stages layer,step] [--retry] [--data FOLDER] [--dry-run]

Each stage runs in a process of its own, and FOLDER/results.json is written after every case. A run that is cut off, by
its time, by Ctrl-C or by the machine, is continued by the same command, at the case that is missing. Cases that other
code measured run again. What is worth keeping is in four files: results.json, SUMMARY.md, compile.md, training.tgz.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import shlex
import sys
import tarfile
import time
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NoReturn

import torch

from . import ROOT
from .compile import to_markdown
from .conduct import clean_processes, conduct
from .record import FAILURES, Record, only_one
from .setting import Setting, card, code, missing
from .stages import NEEDS_NO_CARD, STAGES, summarise

TEXT = ("textbooks", "novels")  # of the folder that is looked for beside the checkout
OLDEST_TORCH = (2, 11)
LAST_SECONDS = 12.0  # for ending the last stage, and for the summary


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong."""
        self.exit(2, f"benchmarks.gpu: {' '.join(message.split())}\n")


def main() -> int:
    """Run the command line; returns 0, 1 if a case failed or timed out, 130 after Ctrl-C. Exits with 2 on bad input."""
    start = time.monotonic()
    parser = _Parser("python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, the summary included")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make, or to continue")
    table = "\n".join(f"  {name:12} {entry.help}" for name, entry in STAGES.items())
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of these, as A,B; default: all\n{table}")
    parser.add_argument("--retry", action="store_true", help="run cases again that failed or timed out")
    parser.add_argument("--data", help="text for training, as for et train; default: shared/data, else embedded")
    parser.add_argument("--dry-run", action="store_true", help="every stage at toy sizes on this CPU: proves no speed")
    arguments = parser.parse_args()
    try:
        stages, setting = prepared(arguments)
        with only_one(setting.out):
            context = clean_processes()
            require_same_machine(setting, stages, context)
            for stage in stages:
                record = Record(setting.out, stage)
                # Training may resume with other code, since its runs name their commits.
                measured_by = record.facts.get("code", "") if stage == "training" else code()
                if (line := record.reopen(measured_by, arguments.retry)) is not None:
                    print(line)
            return measured(stages, setting, start + 60 * arguments.minutes - LAST_SECONDS, context)
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))


def prepared(arguments: argparse.Namespace) -> tuple[list[str], Setting]:
    """Return the stages in the table's order, and make the folder. Raises ValueError or OSError for bad options."""
    wanted = [name.strip() for name in arguments.stages.split(",")]
    if unknown := [name for name in wanted if name not in STAGES]:
        raise ValueError(f"--stages: {unknown[0]} is unknown; use {', '.join(STAGES)}")
    if not 0 < arguments.minutes < 24 * 60:
        raise ValueError(f"--minutes {arguments.minutes}: give a number above 0, such as 9")
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise ValueError(f"torch {torch.__version__} is too old; install torch>={'.'.join(map(str, OLDEST_TORCH))}")
    out = arguments.out.absolute()
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {arguments.out}: is a file; name a folder")
    data = arguments.data or ("embedded" if arguments.dry_run else found_text())
    if data != "embedded" and not Path(data).exists():
        raise ValueError(f"--data {data}: does not exist; name a file or folder of text, or leave it out")
    out.mkdir(parents=True, exist_ok=True)
    cuda = not arguments.dry_run and not set(wanted) <= set(NEEDS_NO_CARD)
    return [name for name in STAGES if name in wanted], Setting(out, arguments.dry_run, cuda, data)


def found_text() -> str:
    """Return the first folder of text in the shared/data of the checkout or of its parent; else the embedded corpus."""
    places = [folder / "shared" / "data" / name for folder in (ROOT, ROOT.parent) for name in TEXT]
    return next((str(place) for place in places if place.is_dir()), "embedded")


def require_same_machine(setting: Setting, stages: list[str], context: BaseContext) -> None:
    """Raise ValueError without a card that the stages need, or if the folder holds another machine's results."""
    if set(stages) <= set(NEEDS_NO_CARD):
        return
    if setting.cuda:  # this process leaves CUDA untouched
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            here = pool.submit(card, setting.device).result()
    else:
        here = card(setting.device)
    for stage in STAGES:
        before = Record(setting.out, stage).facts
        if before and stage not in NEEDS_NO_CARD and before | here != before:
            what = ", ".join(f"{name} {before.get(name)}" for name in here if before.get(name) != here[name])
            raise ValueError(f"--out {setting.out}: was started with {what}; use another --out")


def measured(stages: list[str], setting: Setting, end: float, context: BaseContext) -> int:
    """Run the stages and report what came of them; returns the exit code."""
    for line in missing():
        print(line)
    interrupted = False
    try:
        conduct(stages, setting, end, context)
    except KeyboardInterrupt:
        interrupted = True
    text = summarise(setting.out)
    (setting.out / "SUMMARY.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    compiled = Record(setting.out, "compile")
    if rows := compiled.having("measured"):
        (setting.out / "compile.md").write_text(to_markdown(rows, compiled.facts), encoding="utf-8")
    if (setting.out / "training").is_dir():
        with tarfile.open(setting.out / "training.tgz", "w:gz") as archive:  # without the weights, which no page reads
            light = lambda member: None if "checkpoints" in member.name.split("/") else member  # noqa: E731
            archive.add(setting.out / "training", "training", filter=light)
    records = [Record(setting.out, stage) for stage in stages]
    if not all(record.complete for record in records):
        print(f"incomplete; to go on where it stopped: python -m benchmarks.gpu {shlex.join(sys.argv[1:])}")
    if interrupted:
        return 130
    return int(any(record.having(*FAILURES) for record in records))


if __name__ == "__main__":
    sys.exit(main())

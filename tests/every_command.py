"""Takes a rule of another distribution through every command, in this one process; an argument names a new folder."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from expert_threshold.cli import main
from expert_threshold.runs import RunFolder

FOLDER = Path(sys.argv[1])
CORPUS = FOLDER / "corpus.jsonl"
SIZES = "--layers 2 --d-model 32 --heads 2 --kv-heads 2 --d-expert 16 --vocab-size 300 --context 32 --num-experts 4"
LOOP = "--steps 6 --batch-size 4 --eval-every 6 --checkpoint-every 3 --sample-every none --log-every 2 --threads 1"
RUN = f"{SIZES} {LOOP} --dtype float32 --data {CORPUS}"
RULE = "--rule min_p --experts-per-token 1.5 --p-rate 0.25"
STEPS = [step for step in globals() if False]


def et(line: str, code: int = 0) -> str:
    """Run a command line and return what it printed, stderr behind stdout."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            got = main(line.split())
        except SystemExit as left:  # --help
            got = int(left.code or 0)
    text = out.getvalue() + err.getvalue()
    assert got == code, f"et {line}: exit code {got}\n{text}"
    assert "dense" not in text.replace("--dense-layers", "").replace("dense|", "") or "--help" in line, text
    return text


def refused(line: str, *words: str) -> None:
    text = et(line, 2)
    assert text.count("\n") == 1, text
    assert all(word in text for word in words), text


def trained(run: str) -> None:
    folder = RunFolder.open(FOLDER / run)
    assert folder.section("model")["rule"]["name"] == "min_p"
    shown = [record for record in folder.metrics.read() if record["split"] == "train"]
    assert all(len(layer["p"]) >= 1 for record in shown for layer in [record]), shown[-1]


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)

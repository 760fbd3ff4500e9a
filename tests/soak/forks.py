"""Commands of `et` as forks of one warm process, killed or failing where a test wants it; and small runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commands import CLOCKS, without
from expert_threshold.runs import RunFolder
from train.across_ranks import text

HERE = Path(__file__).parent
SIZES = (
    "--layers 2 --d-model 16 --model.heads 1 --model.kv-heads 1 --model.d-expert 16 --vocab-size 300 --context 16 "
    "--num-experts 4 --steps 12 --batch-size 4 --accumulation 1 --threads 1 --log-every 1 --checkpoint-every 3 "
    "--eval-every 6 --eval-tokens 64 --device cpu --dtype float32"
)
EVERY = 3  # steps between two checkpoints


class Fault(NamedTuple):
    """A fault injected at the n-th change to a file in a folder, or a signal after some CPU time.

    at: 0 only counts changes. error: errno; 0 for death. lasting: later changes fail, too. seconds: 0 sends no signal.
    """

    below: Path
    at: int = 0
    error: int = 0
    lasting: bool = False
    seconds: float = 0
    signal: int = signal.SIGKILL


class Ended(NamedTuple):
    code: int | None  # None for a process that hung
    seconds: float  # of CPU time
    err: str
    changes: int  # to files below the fault's folder; 0 if it was killed


class Forks:
    """Needs Linux and g++. folder: an empty one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        library = folder / "faults.so"
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", HERE / "faults.cpp", "-o", library, "-ldl"], check=True)
        paths = os.pathsep.join(sys.path)
        self._zygote = subprocess.Popen(
            [sys.executable, HERE / "zygote.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self.corpus = folder / "corpus.jsonl"
        self.corpus.write_text(text())

    def close(self) -> None:
        self._zygote.communicate()
        assert self._zygote.returncode == 0

    def _ask(self, task: dict[str, Any]) -> Any:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(task) + "\n")
        self._zygote.stdin.flush()
        return json.loads(self._zygote.stdout.readline())

    def start(self, arguments: list[str], fault: Fault | None = None, name: str = "0", **variables: str) -> int:
        """Start a command; return its process. name: of its output."""
        fault = fault or Fault(self.folder / "nowhere")
        task = {"arguments": arguments, "variables": variables, **fault._asdict(), "below": str(fault.below)}
        return int(self._ask(task | {kind: str(self.folder / f"{name}.{kind}") for kind in ("out", "err")}))

    def end(self, process: int, name: str = "0") -> Ended:
        code, seconds = self._ask({"wait": process})
        out, err = ((self.folder / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        changes = out.rpartition("changes ")[2].strip()
        return Ended(code, seconds, err, int(changes) if changes.isdigit() else 0)

    def run(self, arguments: list[str], fault: Fault | None = None) -> Ended:
        return self.end(self.start(arguments, fault))

    def ranks(self, arguments: list[str], faults: Sequence[Fault | None]) -> list[Ended]:
        """Run the ranks of a command, as a launcher does, each with its fault."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = {name: str(len(faults)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        common = ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [
            self.start(arguments, fault, str(rank), RANK=str(rank), LOCAL_RANK=str(rank), **common)
            for rank, fault in enumerate(faults)
        ]
        return [self.end(process, str(rank)) for rank, process in enumerate(started)]

    def train(self, run: Path, *more: str) -> list[str]:
        """Return the command that starts this run, or resumes it where it has begun."""
        if (run / "config.json").exists():
            return ["train", "--resume", str(run)]
        return ["train", "tiny", *SIZES.split(), *more, "--data", str(self.corpus), "--out", str(run)]


def require_whole(run: Path) -> list[int]:
    """Assert that every checkpoint there loads; return their steps."""
    if not (run / "config.json").exists():
        return []
    folder = RunFolder.open(run)
    return [folder.load_checkpoint(step).step for step in folder.checkpoints()]


def outcome(run: Path) -> tuple[Any, ...]:
    """Everything that a run has learned, to the byte, and recorded, clocks aside."""
    folder = RunFolder.open(run)
    saved, records = folder.load_checkpoint(), without(folder.metrics.read(), CLOCKS)
    files = (folder.checkpoints_path / f"step_{saved.step:06d}").glob("*.safetensors")
    tensors = {file.name: file.read_bytes() for file in files}
    return saved.step, folder.checkpoints(), tensors, without(saved.state, CLOCKS), records


def clear(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

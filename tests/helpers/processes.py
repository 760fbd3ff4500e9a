"""Python processes that start with the package imported: forks of a server that has imported it once.

Imports take an interpreter seconds, which would be most of the time of a test with several processes. A test of
imports, or of variables that imports read, starts an interpreter of its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed", "expert_threshold.cli.train"])

limit: float | None = None
"""Seconds that a process may take, a little less than the test; conftest.py sets it before each test."""


class Python:
    """`python ARGUMENTS` with pipes; the arguments begin with a script, or with -m MODULE or -c PROGRAM.

    environment: variables that differ from this process's. path: folders to import from before those of this process.
    strict: warnings are errors.
    """

    def __init__(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None, path: Sequence[str | Path] = (),
        cwd: Path | None = None, strict: bool = False,
    ) -> None:  # fmt: skip
        (stdin, write), (read_out, stdout), (read_err, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = open(write, "w"), open(read_out), open(read_err)  # noqa: SIM115
        folders = [*map(str, path), *sys.path]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)} | (environment or {})
        place = (dict(os.environ) | variables, folders, str(cwd or Path.cwd()), strict)
        self._process = FORKS.Process(
            target=_run, args=([str(a) for a in arguments], *place, _Pipes(stdin, stdout, stderr))
        )
        self._process.start()
        for end in (stdin, stdout, stderr):
            os.close(end)

    def communicate(self, text: str = "") -> tuple[int, str, str]:
        """Write the text, wait for the end, and return the exit code, minus a signal's number, and what it wrote.

        Raises subprocess.TimeoutExpired with what it wrote, after killing it, if it outlasts `limit`.
        """
        with ThreadPoolExecutor(2) as readers, self.stdin, self.stdout, self.stderr:
            read = [readers.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            try:
                self.stdin.write(text)
                self.stdin.close()
            except BrokenPipeError:
                pass  # it ended without reading
            self._process.join(limit)
            late = self._process.exitcode is None
            self.kill()
            out, err = (each.result() for each in read)
        if late:
            raise subprocess.TimeoutExpired("python", limit or 0, out, err)
        assert self._process.exitcode is not None
        return self._process.exitcode, out, err

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run_python(*arguments: str | Path, **options: Any) -> str:
    """Run it to its end with exit code 0, and return its stdout. options: of `Python`."""
    code, out, err = Python(*arguments, **options).communicate()
    assert code == 0, out + err
    return out


class _Pipes:
    """File descriptors that are sent along to the process."""

    def __init__(self, *ends: int) -> None:
        self.ends = ends

    def __reduce__(self) -> Any:
        return _received, tuple(map(DupFd, self.ends))


def _received(*ends: Any) -> list[int]:
    return [end.detach() for end in ends]


def _run(
    arguments: Sequence[str], environment: Mapping[str, str], path: Sequence[str], cwd: str, strict: bool,
    pipes: Sequence[int],
) -> None:  # fmt: skip
    gc.freeze()  # what the server has imported is no garbage
    for number, end in enumerate(pipes):
        os.dup2(end, number)
        os.close(end)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.resetwarnings()
    warnings.simplefilter("error" if strict else "default")
    first, *rest = arguments
    sys.path[:] = path
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
    sys.stdout.flush()

"""Launches ranks, and shares the main rank's values and every rank's failures without collectives.

Everything goes through the launcher's key-value store, which works before process groups exist and outlives every rank.
torch's `broadcast_object_list` would unpickle what it receives, and would time out if the main rank worked for longer
than `--train.timeout`. torchelastic's `@record` would print a traceback on every rank, where one line is enough.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistError, DistNetworkError, DistStoreError, is_torchelastic_launched
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

INTERRUPTED = "interrupted"
REPORT_TIMEOUT = 5.0  # seconds that ranks wait for each other's reports before they exit
JOIN_TIMEOUT = timedelta(minutes=5)  # the time in which all ranks must start
HEARTBEAT = 5.0  # seconds between heartbeats of the main rank while it works alone
MIN_HEARTBEAT_TIMEOUT = 3 * HEARTBEAT  # seconds without one before the main rank is considered lost
# torch raises plain RuntimeErrors for most lost connections, with no type or code to match on.
LOST = re.compile(
    "connection (was )?(closed|reset|refused)|timed? ?out|broken pipe|remote (process|peer)|heartbeat", re.IGNORECASE
)


class Failure(NamedTuple):
    """The reason why a rank exits, in one line, and its exit code."""

    text: str
    code: int
    is_own: bool = True  # False if another rank may have caused the failure, such as a collective that timed out


class Rendezvous:
    """The ranks that were launched together, and their store. Values are sent as JSON, so nothing is unpickled.

    By default, there is only this process. store: a store for this start only. launch_store: a store whose keys survive
    restarts by the launcher. Defaults to `store`.
    """

    def __init__(
        self, store: Store | None = None, rank: int = 0, world_size: int = 1, local_rank: int = 0,
        local_world_size: int = 1, launch_store: Store | None = None,
    ) -> None:  # fmt: skip
        store = dist.HashStore() if store is None else store  # type: ignore[attr-defined]
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.group_store = PrefixStore("groups", store)
        self._store = PrefixStore("ranks", store)
        self._launch_store = PrefixStore("launch", launch_store or store)
        self._count = 0
        self._compared = 0
        self.heartbeat_timeout = 600.0  # seconds, until `process_groups` sets it
        self._launcher = os.getppid() if is_torchelastic_launched() else None

    @property
    def is_orphaned(self) -> bool:
        """True once torchrun's launcher, this rank's parent process, has exited. Always False with other launchers."""
        return not self.is_alone and self._launcher not in (None, os.getppid())

    @classmethod
    def from_env(cls) -> Rendezvous:
        """Join the ranks that were launched with this one.

        torch's `is_torchelastic_launched` would miss other launchers than torchrun that set the same variables.
        """
        if not (int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ):
            return cls()
        store, rank, world_size = next(iter(rendezvous("env://", timeout=JOIN_TIMEOUT)))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        this_start = PrefixStore(_name_of_start(store, rank, world_size), store)
        return cls(this_start, rank, world_size, local_rank, local_world_size, store)

    @property
    def is_main(self) -> bool:
        """True on the rank that prints, and that writes what all ranks have in common."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """True for a single process."""
        return self.world_size == 1

    def mark(self, key: str) -> None:
        """Set a mark that stays visible to all ranks even after the launcher has restarted them."""
        self._launch_store.set(key, "")

    def is_marked(self, key: str) -> bool:
        """Return True once any rank has called `mark(key)`, before or after a restart."""
        return self._launch_store.check([key])

    def from_main(self, make: Callable[[], Any]) -> Any:
        """Return the result of the main rank's `make()`, which must be a JSON value, on every rank.

        All ranks must make these calls in the same order. `make` may take any amount of time, since the main rank sends
        heartbeats while it runs. If it raises ValueError or OSError, every other rank raises ValueError with the same
        text. Raises DistError after `heartbeat_timeout` seconds without a heartbeat.
        """
        if self.is_alone:
            return make()
        self._count += 1
        key = f"value/{self._count}"
        if self.rank == 0:
            try:
                with self._heartbeats():
                    value = make()
            except (ValueError, OSError) as error:
                self._store.set(key, json.dumps({"error": str(error)}))
                raise
            self._store.set(key, json.dumps({"value": value}))
            return value
        self._wait_for(key)
        answer = json.loads(self._store.get(key))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def require_equal(self, facts: Mapping[str, Any], remedy: str) -> None:
        """Raise ValueError on every rank unless all ranks pass equal facts: JSON values, keyed by name.

        The error names the first rank that differs from the main rank, and up to three facts that differ.
        """
        if self.is_alone:
            return
        self._compared += 1
        key = f"facts/{self._compared}"
        self._store.set(f"{key}/{self.rank}", json.dumps(facts))

        def compare() -> None:
            mine = json.loads(json.dumps(facts))
            for rank in range(1, self.world_size):
                self._wait_for(f"{key}/{rank}", f"rank {rank} did not start training")
                theirs = json.loads(self._store.get(f"{key}/{rank}"))
                differing = [
                    f"{name} is {_shown(theirs, name)}, not {_shown(mine, name)}"
                    for name in mine | theirs
                    if theirs.get(name) != mine.get(name)
                ]
                if differing:
                    raise ValueError(f"rank {rank} differs from rank 0: {'; '.join(differing[:3])}; {remedy}")

        self.from_main(compare)

    @contextlib.contextmanager
    def _heartbeats(self) -> Iterator[None]:
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(DistError):  # the main thread notices a lost store too, and reports it
                while not done.wait(HEARTBEAT):
                    self._store.add("heartbeats", 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _wait_for(self, key: str, late: str = "rank 0 sent no heartbeat") -> None:
        """Wait until another rank has set the key. Raises DistError after a timeout, for which `late` is the reason."""
        pause, seen, since = 0.01, -1, time.monotonic()
        while not self._store.check([key]):
            heartbeats = 0 if self.rank == 0 else self._store.add("heartbeats", 0)
            if heartbeats != seen:
                seen, since = heartbeats, time.monotonic()
            elif time.monotonic() - since > self.heartbeat_timeout:
                raise DistError(f"timed out: {late} for {self.heartbeat_timeout:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def report_failure(self, failure: Failure, remedy: str, say: Callable[[str], None]) -> int:
        """Report on exactly one rank why this launch ends, and return this rank's exit code.

        failure: this rank's failure. remedy: what to do about a lost rank. If the store is gone, every rank reports.
        """
        try:
            self._store.set(f"failure/{self.rank}", json.dumps(failure))
            failures = self._failures()
            own = {rank: each for rank, each in failures.items() if each.is_own}
            text, code = self._explain(failures, remedy), failure.code
            if own:
                rank, first = min(own.items())
                text, code = f"rank {rank}: {first.text}" if rank else first.text, first.code
            if self._store.add("speakers", 1) == 1:
                say(text)
            return failure.code if failure.is_own else code
        except DistError:
            lost = f"lost contact with the launcher or the rank that started first ({failure.text}); {remedy}"
            say(f"rank {self.rank}: {failure.text if failure.is_own else lost}")
            return failure.code

    def _failures(self) -> dict[int, Failure]:
        """Return the failures that ranks report in time, keyed by rank.

        Ranks wait for each other's reports because the launcher kills all others as soon as one rank exits.
        """
        end = time.monotonic() + REPORT_TIMEOUT
        while True:
            found = [rank for rank in range(self.world_size) if self._store.check([f"failure/{rank}"])]
            if len(found) == self.world_size or time.monotonic() > end:
                return {rank: Failure(*json.loads(self._store.get(f"failure/{rank}"))) for rank in found}
            time.sleep(0.05)

    def _explain(self, alive: Mapping[int, Failure], remedy: str) -> str:
        """Return why the launch ends, unless a surviving rank caused it."""
        lost = [str(rank) for rank in range(self.world_size) if rank not in alive]
        names = f"{'ranks' if len(lost) > 1 else 'rank'} {', '.join(lost)} of {self.world_size}"
        texts = [(rank, failure.text) for rank, failure in alive.items() if failure.text != INTERRUPTED]
        late = any("timed out" in text.lower() for _, text in texts)
        if late:
            who = f"{names} did not answer" if lost else f"all {self.world_size} ranks are alive but out of step"
            rank, text = texts[0]
            return f"timed out: {who}; {remedy}; if they are just slow, raise --train.timeout (rank {rank}: {text})"
        if lost:
            return f"{names} exited or stopped responding; {remedy}"
        return " ".join(f"rank {rank}: {text}; {remedy}" for rank, text in texts[:1]) or INTERRUPTED


ALONE = Rendezvous()
"""A single process."""


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "its default"


def _name_of_start(store: Store, rank: int, world_size: int) -> str:
    """Return a name for this start, which is the same on all ranks and differs after every restart.

    The launcher's store keeps keys from earlier starts, including the addresses of dead processes, and the launcher's
    restart count can differ between nodes. The main rank therefore sends a new name to each rank of this start.
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", mine)
        store.wait([f"start/{mine}"], JOIN_TIMEOUT)
        name = store.get(f"start/{mine}").decode()
        store.add(f"joined/{name}", 1)
        return str(name)
    end = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while store.add(f"joined/{mine}", 0) < world_size - 1:
        for other in range(1, world_size):
            if store.check([f"hello/{other}"]):  # if this key is from an earlier start, no rank reads the answer
                store.set(f"start/{store.get(f'hello/{other}').decode()}", mine)
        if time.monotonic() > end:
            raise ValueError(f"not all of the {world_size} ranks started within {JOIN_TIMEOUT}; start them again")
        time.sleep(0.05)
    return mine


def is_lost_rank(error: BaseException) -> bool:
    """Return True for an error that a collective raises if another rank has exited or does not respond."""
    lost = DistNetworkError | DistStoreError
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and bool(LOST.search(str(error))))


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run Python with these arguments in several local processes, and return the exit code.

    torchrun's launcher, which runs in this process, forwards signals and waits for the ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks report their own failures. Setting a level here has no effect, since torch sets one on each child logger.
    launcher = logging.getLogger("torch.distributed.elastic")
    launcher.addHandler(logging.NullHandler())
    launcher.propagate = False
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks report a lost store themselves
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ["SIGHUP"]  # ignored under nohup
    # Without local_addr, ranks would look up the machine's own name, which not every machine can resolve.
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="none", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, local_addr="localhost",
        signals_to_handle=",".join(["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", *hangup]),
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        return max(codes) if max(codes) > 0 else 1  # the code is negative if a signal killed the rank
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0

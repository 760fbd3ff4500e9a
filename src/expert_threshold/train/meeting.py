"""What ranks tell each other beside tensors: values of the first rank, and what went wrong on one of them.

All goes through the store that the launcher keeps, which outlives every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

GRACE = 5.0  # seconds that ranks wait for each other's word before they end
MEETING = timedelta(minutes=5)  # for all ranks to have started
BEAT = 5.0  # seconds between two signs of the first rank while it works alone
LEAST_PATIENCE = 3 * BEAT  # seconds without one after which it may count as lost


class Fault(NamedTuple):
    """Why a rank ends, in a line, and with which exit code."""

    text: str
    code: int


class Meeting:
    """The ranks that were started together. Values are JSON: nothing unpickled.

    launch: a store of all that the launcher starts anew after failures, too; the same by default.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, local_rank: int, local_ranks: int, launch: Store | None = None
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.local_rank = local_rank
        self.local_ranks = local_ranks
        self.store_of_groups = PrefixStore("groups", store)
        self._store = PrefixStore("meeting", store)
        self._launch = PrefixStore("launch", launch or store)
        self._count = 0
        self.patience = 600.0  # seconds, until told otherwise

    def note(self, what: str) -> None:
        """Let those know who are started anew."""
        self._launch.set(what, "")

    def is_noted(self, what: str) -> bool:
        return self._launch.check([what])

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, on every rank; all ranks call this in the same order.

        It may take as long as it likes: meanwhile rank 0 gives signs. Raises ValueError on every rank where it does on
        rank 0, or OSError there; DistError where rank 0 gave none for `patience` seconds.
        """
        self._count += 1
        key = f"value/{self._count}"
        if self.rank == 0:
            try:
                with self._giving_signs():
                    value = make()
            except (ValueError, OSError) as error:
                self._store.set(key, json.dumps({"error": str(error)}))
                raise
            self._store.set(key, json.dumps({"value": value}))
            return value
        self._wait_for(key)
        said = json.loads(self._store.get(key))
        if "error" in said:
            raise ValueError(said["error"])
        return said["value"]

    @contextlib.contextmanager
    def _giving_signs(self) -> Iterator[None]:
        done = threading.Event()

        def give() -> None:
            while not done.wait(BEAT):
                self._store.add("signs", 1)

        thread = threading.Thread(target=give, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _wait_for(self, key: str) -> None:
        signs, since = -1, time.monotonic()
        while True:
            try:
                return self._store.wait([key], timedelta(seconds=min(BEAT, self.patience)))
            except DistStoreError:  # not there yet
                now = self._store.add("signs", 0)
            if now != signs:
                signs, since = now, time.monotonic()
            elif time.monotonic() - since > self.patience:
                raise DistError(f"rank 0 gave no sign for {self.patience:g} seconds")

    def end(self, fault: Fault | None, remedy: str, tell: Callable[[str], None]) -> int:
        """Let one rank tell what ended this launch, rank 0 if it has a fault itself; returns the exit code.

        fault: this rank's own, None where it only lost another one. remedy: what to do about a lost rank.
        """
        if fault is not None:
            self._store.set(f"fault/{self.rank}", json.dumps(fault))
            if self.rank == 0:
                self._tell(fault.text, tell)
            elif not self._is_told(GRACE):
                self._tell(f"rank {self.rank}: {fault.text}", tell)
            self._part()
            return fault.code
        self._store.set(f"alive/{self.rank}", "")
        told = self._is_told(GRACE)
        faults, missing = self._with("fault"), self._without("alive")
        if faults:
            first = Fault(*json.loads(self._store.get(f"fault/{faults[0]}")))
            if not told:
                self._tell(f"rank {faults[0]}: {first.text}", tell)
            return first.code
        if not told:
            names = f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} of {self.ranks}"
            self._tell(f"{names} ended or no longer answered; {remedy}" if missing else "interrupted", tell)
        return 1

    def _tell(self, text: str, tell: Callable[[str], None]) -> None:
        if self._store.add("tellers", 1) == 1:
            tell(text)
            self._store.set("told", "")

    def _is_told(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (told := self._store.check(["told"])) and time.monotonic() < end:
            time.sleep(0.05)
        return told

    def _part(self) -> None:
        """Wait a moment for the others, lest the launcher end them before they have ended as they want to."""
        self._store.add("parting", 1)
        end = time.monotonic() + GRACE / 5
        while self._store.add("parting", 0) < self.ranks and time.monotonic() < end:
            time.sleep(0.02)

    def _with(self, what: str) -> list[int]:
        return [rank for rank in range(self.ranks) if self._store.check([f"{what}/{rank}"])]

    def _without(self, what: str) -> list[int]:
        return sorted(set(range(self.ranks)) - set(self._with(what)))


def is_launched() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def meet() -> Meeting | None:
    """The ranks that were launched together with this one; None where it is alone."""
    if not is_launched():
        return None
    store, rank, ranks = next(iter(rendezvous("env://", timeout=MEETING)))
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    start = PrefixStore(_agree_on_start(store, rank, ranks), store)
    return Meeting(start, rank, ranks, local_rank, local_ranks, store)


def _agree_on_start(store: Store, rank: int, ranks: int) -> str:
    """A name that is new at every start, the same on all ranks.

    The launcher's store still has what the ranks of earlier starts wrote, addresses of processes that are no more among
    it, and its count of restarts differs between nodes. So the first rank answers each of this start's by a name of
    its own.
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", mine)
        store.wait([f"start/{mine}"], MEETING)
        start = store.get(f"start/{mine}").decode()
        store.add(f"met/{start}", 1)
        return str(start)
    end = time.monotonic() + MEETING.total_seconds()
    while store.add(f"met/{mine}", 0) < ranks - 1:
        for other in range(1, ranks):
            if store.check([f"hello/{other}"]):  # maybe of an earlier start: then nobody reads the answer
                store.set(f"start/{store.get(f'hello/{other}').decode()}", mine)
        if time.monotonic() > end:
            raise ValueError(f"not all of the {ranks} ranks have started within {MEETING}; start them again")
        time.sleep(0.05)
    return mine


def from_first(meeting: Meeting | None, make: Callable[[], Any]) -> Any:
    """`Meeting.from_first`; where this process is alone, what it makes."""
    return make() if meeting is None else meeting.from_first(make)

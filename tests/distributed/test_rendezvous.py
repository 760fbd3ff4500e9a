from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed import DistError, HashStore

from expert_threshold.distributed import Rendezvous, mesh, process_groups, rendezvous


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Rendezvous, Rendezvous]:
    monkeypatch.setattr(rendezvous, "HEARTBEAT", 0.05)
    store = HashStore()
    main, other = Rendezvous(store, 0, 2, 0, 2), Rendezvous(store, 1, 2, 1, 2)
    other.heartbeat_timeout = 0.4
    return main, other


def test_ranks_wait_for_the_main_rank_while_it_sends_heartbeats(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    main, other = ranks
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(other.from_main(lambda: "never made")))
    thread.start()

    def make() -> str:
        time.sleep(1.2)  # longer than the other rank's timeout
        return "made"

    assert main.from_main(make) == "made"
    thread.join()
    assert found == ["made"]


def test_without_heartbeats_the_main_rank_counts_as_lost(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    _, other = ranks
    with pytest.raises(DistError, match=r"rank 0 sent no heartbeat for 0\.4 seconds"):
        other.from_main(lambda: "never made")


def test_the_heartbeat_timeout_is_longer_than_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):  # noqa: N818
        pass

    def stop(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(mesh.dist, "init_process_group", stop)
    for timeout, expected in ((1, rendezvous.MIN_HEARTBEAT_TIMEOUT), (900, 900)):
        main = Rendezvous(HashStore(), 0, 2, 0, 2)
        with pytest.raises(Reached), process_groups(main, torch.device("cpu"), timeout=timeout):
            pass
        assert main.heartbeat_timeout == expected > rendezvous.HEARTBEAT

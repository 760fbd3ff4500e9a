from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import DistError, HashStore

from expert_threshold.train import TrainConfig, meeting, parallel
from expert_threshold.train.meeting import Meeting


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Meeting, Meeting]:
    monkeypatch.setattr(meeting, "BEAT", 0.05)
    store = HashStore()
    first, second = Meeting(store, 0, 2, 0, 2), Meeting(store, 1, 2, 1, 2)
    second.patience = 0.4
    return first, second


def test_the_others_wait_for_the_first_rank_as_long_as_it_gives_signs(ranks: tuple[Meeting, Meeting]) -> None:
    first, second = ranks
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(second.from_first(lambda: "never made")))
    thread.start()

    def make() -> str:
        time.sleep(1.2)  # longer than the other's patience
        return "made"

    assert first.from_first(make) == "made"
    thread.join()
    assert found == ["made"]


def test_without_a_sign_the_first_rank_counts_as_lost(ranks: tuple[Meeting, Meeting]) -> None:
    _, second = ranks
    with pytest.raises(DistError, match=r"rank 0 gave no sign for 0\.4 seconds"):
        second.from_first(lambda: "never made")


def test_patience_is_longer_than_the_time_between_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):  # noqa: N818
        pass

    def stop(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(parallel.dist, "init_process_group", stop)
    for timeout, patience in ((1, meeting.LEAST_PATIENCE), (900, 900)):
        first = Meeting(HashStore(), 0, 2, 0, 2)
        with pytest.raises(Reached), parallel.joined(first, TrainConfig(timeout=timeout, device="cpu")):
            pass
        assert first.patience == patience > meeting.BEAT

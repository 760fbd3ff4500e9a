from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import DistError, DistNetworkError, HashStore

from expert_threshold.distributed import INTERRUPTED, Failure, Rendezvous, mesh, process_groups, rendezvous
from expert_threshold.runs import RunFolder
from expert_threshold.train import loop


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Rendezvous, Rendezvous]:
    monkeypatch.setattr(rendezvous, "HEARTBEAT", 0.05)
    store = HashStore()
    main, other = Rendezvous(store, 0, 2, 0, 2), Rendezvous(store, 1, 2, 1, 2)
    other.heartbeat_timeout = 0.4
    return main, other


def on_both(do: Callable[[Rendezvous], Any], ranks: tuple[Rendezvous, Rendezvous]) -> list[str]:
    """Return what each rank returned, or the error that it raised, as text."""

    def answer(rank: Rendezvous) -> str:
        try:
            return str(do(rank))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(answer, ranks))


def test_ranks_that_differ_all_learn_which_one_and_in_what(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    def told(facts: Callable[[int], dict[str, Any]]) -> list[str]:
        return on_both(lambda rank: rank.require_equal(facts(rank.rank), "mend it"), ranks)

    assert told(lambda rank: {"seed": 1, "betas": (0.9, 0.95)}) == ["None"] * 2
    differing = told(lambda rank: {"seed": 1, **[{}, {"eval_tokens": 512}][rank]})
    assert differing == ["rank 1 differs from rank 0: eval_tokens is 512, not its default; mend it"] * 2


def test_ranks_that_do_not_share_the_run_folder_learn_it_before_the_first_step(
    ranks: tuple[Rendezvous, Rendezvous], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learned it at the first save, which may be after the last step."""
    monkeypatch.setattr(loop, "SHARED_WITHIN", 0.1)

    def lock(rank: Rendezvous, name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        with loop._locked(RunFolder(tmp_path / name), rank, {}):
            pass

    assert on_both(lambda rank: lock(rank, "shared"), ranks) == ["None", "None"]
    for told in on_both(lambda rank: lock(rank, f"own{rank.rank}"), ranks):
        assert "put the run folder on a file system that all ranks share" in told


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        ([INTERRUPTED, INTERRUPTED], INTERRUPTED),
        (["Timed out in 9ms", INTERRUPTED], "timed out: all 2 ranks are alive but out of step; resume; .*in 9ms.*"),
        (["Timed out in 9ms", None], "timed out: rank 1 of 2 did not answer; resume; .*in 9ms.*"),
        (["Connection closed by peer", None], "rank 1 of 2 exited or stopped responding; resume"),
        ([INTERRUPTED, "no such interface"], "rank 1: no such interface; resume"),
    ],
)
def test_a_lost_collective_is_reported_with_its_cause(
    texts: list[str | None], line: str, ranks: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these were "interrupted", or blamed the rank that had not failed."""
    monkeypatch.setattr(rendezvous, "REPORT_TIMEOUT", 0.5)
    said: list[str] = []
    alive = tuple(rank for rank, text in zip(ranks, texts, strict=True) if text is not None)
    failures = [Failure(text or "", 1, is_own=False) for text in texts]
    codes = on_both(lambda rank: rank.report_failure(failures[rank.rank], "resume", said.append), alive)
    assert codes == ["1"] * len(alive)
    [told] = said
    assert re.fullmatch(line, told)


def test_a_rank_whose_store_is_gone_reports_by_itself() -> None:
    """It ended in a traceback out of the report."""
    said: list[str] = []
    alone = Rendezvous(HashStore(), 1, 2, 1, 2)
    alone._store = Mock(**{"set.side_effect": DistNetworkError("Broken pipe")})
    assert alone.report_failure(Failure("Connection reset", 1, is_own=False), "resume", said.append) == 1
    [told] = said
    assert told.startswith("rank 1: lost contact with the launcher or the rank that started first (Connection reset)")


def test_ranks_wait_for_the_main_rank_while_it_sends_heartbeats(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    def make(rank: Rendezvous) -> str:
        time.sleep(1.2)  # longer than the other rank's timeout
        return f"made by {rank.rank}"

    assert on_both(lambda rank: rank.from_main(lambda: make(rank)), ranks) == ["made by 0"] * 2


def test_without_heartbeats_the_main_rank_counts_as_lost(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    _, other = ranks
    with pytest.raises(DistError, match=r"rank 0 sent no heartbeat for 0\.4 seconds"):
        other.from_main(lambda: "never made")


def test_the_heartbeat_timeout_is_longer_than_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.dist, "init_process_group", Mock(side_effect=RuntimeError("no connection")))
    for timeout, expected in ((1, rendezvous.MIN_HEARTBEAT_TIMEOUT), (900, 900)):
        main = Rendezvous(HashStore(), 0, 2, 0, 2)
        with pytest.raises(ValueError, match="this rank cannot connect to the others: no connection"):
            process_groups(main, torch.device("cpu"), timeout=timeout).__enter__()
        assert main.heartbeat_timeout == expected > rendezvous.HEARTBEAT

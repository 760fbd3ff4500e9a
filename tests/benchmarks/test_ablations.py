"""`benchmarks/ablations.py`: its pieces, its arithmetic, its errors, and a run that is continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from expert_threshold.cli.run_options import parse_run, resolve_run

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from benchmarks import ablations  # noqa: E402  it imports its neighbours by their bare names


@pytest.mark.parametrize("name", ablations.GROUPS["all"])
def test_without_a_piece_quickstart_is_another_run(name: str) -> None:
    options = ablations.GROUPS["all"][name].split()
    given = parse_run("et train", "", [], ["quickstart", *options])
    whole, without = resolve_run({"preset": "quickstart"}), resolve_run(given)
    changed = [part for part in ("model", "optim") if getattr(whole, part) != getattr(without, part)]
    assert changed == ["model" if name in ablations.TRUNK else "optim"]


def test_worth_is_the_loss_without_a_piece_less_the_loss_with_it_paired_by_seed() -> None:
    rows = ablations.summarise({"whole": [(3.0, 100.0), (3.2, 100.0)], "smear": [(3.1, 110.0), (3.32, 120.0)]})
    assert rows["smear"]["worth"]["mean"] == pytest.approx(0.11)
    assert rows["smear"]["worth"]["low"] < 0.1 < 0.12 < rows["smear"]["worth"]["high"]
    assert rows["smear"]["loss"] == pytest.approx(3.21)
    assert rows["smear"]["speed_without"] == pytest.approx(1.15)
    assert rows["whole"]["worth"]["mean"] == 0


def test_an_unknown_piece_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'smears' is unknown; use trunk, optimizer, all or some of value embeddings"):
        ablations.chosen_pieces("backout,smears")
    assert list(ablations.chosen_pieces("backout, smear")) == ["backout", "smear"]


def test_a_campaign_writes_its_table_and_repeats_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    checked: list[Any] = []

    def call(*arguments: Any) -> None:
        started.append(arguments)
        out = Path(arguments[-1])
        out.mkdir(parents=True)
        (out / "config.json").touch()
        (out / "report.html").touch()
        loss = 3.0 + 0.1 * ("--no-smear" in arguments)
        records = [
            {"split": "train", "step": 1, "tokens_per_second": 100.0},
            {"split": "validation", "step": 1, "loss": loss},
        ]
        (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    monkeypatch.setattr(ablations, "call", call)
    monkeypatch.setattr(ablations.RunFolder, "_read_config", lambda self: {})
    monkeypatch.setattr(ablations, "require_same", lambda out, command: checked.append((out, command)))
    command = ["ablations", "--out", str(tmp_path / "out"), "--pieces", "smear", "--rules", "dense", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", command)
    ablations.main()
    assert [(a[a.index("--seed") + 1], "--no-smear" in a) for a in started] == [(2000, False), (2000, True)]
    assert "| smear | 3.100 | +0.100 | 1.00 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command[:-1], "2"])
    ablations.main()
    assert len(started) == 4
    assert "| smear | 3.100 | +0.100, +0.100 to +0.100 | 1.00 |" in capsys.readouterr().out
    assert [str(out)[-9:] for out, _ in checked] == ["seed_2000"] * 2  # those that were there
    assert [command[-4:] for _, command in checked] == [[*started[i][1:-2]][-4:] for i in (0, 1)]

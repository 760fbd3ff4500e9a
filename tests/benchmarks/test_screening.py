"""`benchmarks/screening.py`: its design, its arithmetic, and a campaign that is continued."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_threshold.cli.run_options import parse_run, resolve_run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from benchmarks import screening

NAMES = list(screening.PIECES)


@pytest.mark.parametrize(("columns", "runs"), [(3, 4), (8, 12), (19, 20), (20, 24)])
def test_columns_are_balanced_and_orthogonal_and_the_last_run_is_whole(columns: int, runs: int) -> None:
    design = screening.plackett_burman(columns)
    signs = np.where(design, 1, -1)
    assert len(design) == runs
    assert (signs.T @ signs == runs * np.eye(design.shape[1])).all()
    assert (design.sum(0) == runs / 2).all()
    assert not design[-1].any()


def test_planted_effects_are_found_exactly() -> None:
    design = screening.plackett_burman(len(NAMES) + 1)
    planted = {name: 0.001 * number for number, name in enumerate(NAMES, start=1)}
    losses = []
    for row in design:
        left_out = {name for name, out in zip(NAMES, row, strict=False) if out}
        acting = [name for name in left_out if screening.PART_OF.get(name) not in left_out]
        losses.append(3 + sum(planted[name] for name in acting) + 0.02 * row[-1])
    assert screening.effects(design, NAMES, losses) == pytest.approx(planted)


def test_no_run_contradicts_itself() -> None:
    whole = resolve_run({"preset": "quickstart"})
    for row in screening.plackett_burman(len(NAMES) + 1)[:-1]:
        options = [
            word for name, out in zip(NAMES, row, strict=False) if out for word in screening.PIECES[name].split()
        ]
        config = resolve_run(parse_run("et train", "", [], ["quickstart", *options]))
        assert (config.model, config.optim) != (whole.model, whole.optim)


def test_a_slow_piece_is_worth_less_at_equal_seconds() -> None:
    design = screening.plackett_burman(len(NAMES) + 1)
    losses = [3.0 + 0.02 * row[NAMES.index("backout")] for row in design]
    speeds = dict.fromkeys(NAMES, 1.0) | {"backout": 1.1}
    rules = ("dense", "relu")
    found = screening.summarise(dict.fromkeys(rules, losses), dict.fromkeys(rules, 3.5), dict.fromkeys(rules, speeds))
    row = found["pieces"]["backout"]
    assert row["mean"] == pytest.approx(0.02)
    assert row["at_equal_seconds"] == pytest.approx(0.02 - 0.5 * np.log(1.1) / np.log(2))
    assert found["half_interval"] == pytest.approx(0, abs=1e-12)  # the rules agree
    assert found["pieces"]["equilibration"]["at_equal_seconds"] == pytest.approx(0, abs=1e-12)


def test_a_step_without_a_piece_is_timed_beside_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def stepper(options: str) -> Any:
        def step() -> float:
            made.append(options)
            return 1.0 if "--no-backout" in options else 1.25

        return step

    monkeypatch.setattr(screening, "stepper", stepper)
    speeds = screening.speeds_without("dense", 3)
    assert speeds == dict.fromkeys(NAMES, 1.0) | {"backout": 1.25}
    assert made.count("--rule dense") == len(NAMES) * 5


def test_a_step_is_one_of_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        screening, "configured", lambda options: resolve_run({"preset": "tiny", "rule": "expert_threshold"})
    )
    step = screening.stepper("")
    assert step() >= 0
    assert step() >= 0


def test_a_campaign_trains_the_design_and_writes_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, str, str, int, int]] = []

    def train(arguments: Any, rule: str, name: str, options: str, seed: int) -> tuple[float, float]:
        made.append((rule, name, options, seed, arguments.steps))
        return 3.0 + 0.03 * ("--no-backout" in options) + 0.5 * (arguments.steps == 4), 100.0

    monkeypatch.setattr(screening, "speeds_without", lambda rule, repeats: dict.fromkeys(NAMES, 1.0))
    monkeypatch.setattr(screening, "train", train)
    monkeypatch.setattr(sys, "argv", ["screening", "--out", str(tmp_path), "--rules", "dense", "--steps", "8"])
    screening.main()
    assert len(made) == 21
    assert made[19] == ("dense", "run 19", "", 2000, 8)
    assert made[20] == ("dense", "half of the steps", "", 2000, 4)
    assert {seed for *_, seed, _ in made} == {2000, 2001}
    told = capsys.readouterr().out
    assert "| backout | +0.030 | +0.030 | +0.030 | 1.000 |" in told
    assert told == (tmp_path / "screening.md").read_text() + "\n"


@pytest.mark.parametrize("option", ["--threads", "--repeats", "--eval-tokens"])
def test_a_count_below_one_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["screening.py", "--out", "out", option, "0"])
    with pytest.raises(SystemExit, match="2"):
        screening.parse()
    assert f"argument {option}: 0 must be at least 1" in capsys.readouterr().err

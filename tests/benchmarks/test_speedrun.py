"""`benchmarks/speedrun.py`: its arithmetic, its errors, and a run without nanochat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from benchmarks import speedrun  # noqa: E402  it imports its neighbours by their bare names

FALLING: speedrun.Curve = [(100, 1.0, 5.0), (200, 2.0, 4.0), (300, 3.0, 4.0), (400, 5.0, 3.0)]


@pytest.mark.parametrize(
    ("goal", "tokens"), [(6, 100), (5, 100), (4.5, 150), (4, 200), (3.5, 350), (3, 400), (2, None)]
)
def test_a_goal_is_reached_between_validations(goal: float, tokens: float | None) -> None:
    assert speedrun.reached(FALLING, goal, 0) == tokens


def test_seconds_are_those_at_the_goal() -> None:
    assert speedrun.reached(FALLING, 3.5, 1) == 4.0


def test_the_compilers_seconds_are_those_beyond_the_median_step() -> None:
    assert speedrun.seconds_of_compiler({10: 25.0, 20: 35.0, 30: 45.0, 35: 50.0}) == 15
    assert speedrun.seconds_of_compiler({10: 9.0, 20: 19.0, 30: 29.0}) == 0
    assert speedrun.seconds_of_compiler({60: 40.0, 120: 50.0}) == 30
    assert speedrun.seconds_of_compiler({60: 40.0}) == 0


@pytest.mark.parametrize("named", [[], ["--compile", "off", "--context", "32"]])
def test_contestants_have_nanochats_batches_and_compiler_unless_they_name_others(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["speedrun", "--out", str(tmp_path), "--steps", "30"])
    called: list[str] = []
    monkeypatch.setattr(speedrun, "call", lambda *words: called.extend(map(str, words)))
    speedrun.train_ours(speedrun.parse(), named, 0, tmp_path / "run")
    given = dict(zip(called[2::2], called[3::2], strict=True))
    expected = {"--context": "256", "--batch-size": "16", "--compile": "on", "--steps": "30"}
    assert given.items() >= (expected | dict(zip(named[::2], named[1::2], strict=True))).items()


def test_shares_are_of_what_nanochat_needs_and_absent_where_a_seed_never_gets_there() -> None:
    theirs: speedrun.Curve = [(200, 10.0, 5.0), (400, 20.0, 3.5)]
    never: speedrun.Curve = [(400, 5.0, 4.0)]
    found = speedrun.summarise({"ours": [FALLING, FALLING], "slow": [FALLING, never], "nanochat": [theirs, theirs]})
    assert found["ours"]["share_of_tokens"] == 350 / 400
    assert found["ours"]["share_of_seconds"] == 4 / 20
    assert found["ours"]["minus_nanochat"]["mean"] == -0.5
    assert found["slow"]["share_of_tokens"] is None


def test_a_contestant_with_a_shorter_schedule_has_shares_but_no_difference_at_equal_tokens() -> None:
    theirs: speedrun.Curve = [(400, 20.0, 3.5), (800, 40.0, 3.2)]
    short: speedrun.Curve = [(200, 6.0, 4.0), (400, 10.0, 3.2)]
    found = speedrun.summarise({"short": [short], "nanochat": [theirs]})["short"]
    assert (found["share_of_tokens"], found["share_of_seconds"]) == (0.5, 0.25)
    assert "minus_nanochat" not in found


def test_nanochats_schedules_rise_hold_and_fall() -> None:
    """The values of its training script for 1,000 steps: 40 of warmup, the last 650 of cooldown."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 1.0, "initial_lr": 2.0, "kind": "muon"}])
    found = {}
    for step in (0, 39, 200, 675, 999):
        speedrun.schedule(optimizer, step, 1000)
        found[step] = [optimizer.param_groups[0][name] for name in ("lr", "momentum", "weight_decay")]
    assert found[0] == pytest.approx([2 / 40, 0.85, 0.28])
    assert found[39][0] == pytest.approx(2)
    assert found[200] == pytest.approx([2, 0.91, 0.28 * 0.5 * (1 + 0.8090169944)])
    assert found[675] == pytest.approx([2 * (0.5 + 0.5 * 0.05), 0.935, 0.28 * 0.5 * (1 - 0.5224985647)])
    assert found[999] == pytest.approx([2 * (1 / 650 + 649 / 650 * 0.05), 0.9 + 0.07 / 650, 0.0], abs=1e-5)


def test_without_nanochat_it_is_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a short text about nothing much" for i in range(3000)))
    small = "--batch-size 2 --context 32 --layers 1 --d-model 32 --heads 2 --kv-heads 2 --vocab-size 300 --rule dense"
    arguments = f"--steps 4 --points 2 --seeds 1 --eval-tokens 100 --no-compile --data {text}".split()
    ours = ["--ours", f"ours: {small}", "--ours", f"short: {small} --steps 2"]
    command = ["speedrun", "--out", str(tmp_path / "out"), *arguments, *ours]
    monkeypatch.setattr(sys, "argv", command)
    speedrun.main()
    result = json.loads((tmp_path / "out" / "speedrun.json").read_text())
    assert "nanochat" in result["left_out"]
    assert [point[0] for point in result["runs"]["ours"][0]] == [2 * 64, 4 * 64]
    assert [point[0] for point in result["runs"]["short"][0]] == [2 * 64]
    assert (result["steps"], result["tokens"]) == (4, 4 * 64)
    result["runs"]["nanochat"] = result["runs"]["ours"]
    result["contestants"] = speedrun.summarise(result["runs"])
    table = speedrun.to_markdown(result).splitlines()
    assert any(line.startswith("| short (2 steps) |") and "| – |" in line and "not reached" in line for line in table)
    assert (tmp_path / "out" / "speedrun.png").exists()
    capsys.readouterr()
    speedrun.main()  # continues, which trains nothing
    assert "4 steps" in capsys.readouterr().out
    run = tmp_path / "out" / "runs" / "ours" / "seed_0" / "config.json"
    config = run.read_text()
    run.write_text(config.replace('"skip_lr": 0.15', '"skip_lr": 0.5'))
    with pytest.raises(ValueError, match=r"skip_lr=0\.15 differs from 0\.5 of"):
        speedrun.main()
    run.write_text(config)
    (tmp_path / "out" / "speedrun.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", [*command, "--redraw"])
    with pytest.raises(ValueError, match=r"speedrun.json: damaged \(no 'machine'\); run without --redraw"):
        speedrun.main()
    monkeypatch.setattr(sys, "argv", [*command, "--steps", "8"])
    with pytest.raises(ValueError, match="steps=8 differs from 4"):
        speedrun.main()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nanochat", "nowhere"], "has no nanochat/gpt.py"),
        (["--ours", "no options"], "needs a name and options"),
        (["--ours", "a b: --lr 1", "--ours", "a_b: --lr 2"], "'a_b' cannot name a folder of its own"),
        (["--ours", "nanochat: --rule dense"], "'nanochat' cannot name a folder of its own"),
        (["--ours", "../up: --rule dense"], "cannot name a folder of its own"),
        (["--ours", ": --rule dense"], "'' cannot name a folder of its own"),
        (["--ours", "x: --context 'oops"], '--ours "x: --context \'oops": No closing quotation'),
        (["--redraw"], "has no speedrun.json"),
    ],
)
def test_bad_input_is_told(options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speedrun", "--out", str(tmp_path / "out"), *options])
    with pytest.raises(ValueError, match=message):
        speedrun.main()
    assert not (tmp_path / "out").exists()

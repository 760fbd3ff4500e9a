"""`et evaluate --rate` and `--rates`: loss against active compute."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from cases import et, said
from commands import Refused, read
from expert_threshold.cli import rates
from expert_threshold.data import open_source, pack
from expert_threshold.evaluation import Point, evaluate
from expert_threshold.model import flops_per_token, parameter_counts
from expert_threshold.routing import ExpertChoice
from expert_threshold.runs import RunFolder, load_model


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def test_rates_give_the_loss_of_each_run_at_each_of_them_as_table_json_and_figure(runs: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra viz")
    both = [runs / "expert_choice", runs / "expert_threshold"]
    printed = said("evaluate", *both, "--rates", "0,0.5,2,4", "--dtype", "float32")
    for run in both:
        points = read(run / "rates.json")["points"]
        assert not (run / "evaluation.json").exists()
        assert [point["rate"] for point in points] == [None, 0, 0.5, 2, 4]
        assert (points[1]["fanout"], points[4]["fanout"]) == (0, 4)
        assert 0 < points[2]["fanout"] < points[3]["fanout"] < 4
        for point in points:
            model, tokenizer = load_model(run, rate=point["rate"])
            tokens = pack(open_source(str(runs / "corpus.jsonl")), tokenizer, "validation")
            expected = evaluate(model, tokens, tokenizer)
            assert point["loss"] == pytest.approx(expected.loss, rel=1e-5)
            assert point["tokens"] == expected.tokens
            fanouts = [float(observation.fanout_mean) for observation in expected.observations]
            assert point["fanouts"] == pytest.approx(fanouts, rel=1e-5)
            assert f"{point['loss']:.4f}" in printed
            active = parameter_counts(model.config, rate=point["fanout"])["active"]
            assert point["params_active"] == pytest.approx(active, abs=1)
            forward = flops_per_token(model.config, rate=point["fanout"]) / 3
            assert point["flops_per_token"] == pytest.approx(forward, rel=1e-4)
        assert points[4]["params_active"] == parameter_counts(model.config)["total"]
    assert (both[0] / "rates.png").read_bytes().startswith(b"\x89PNG")
    drawn = (both[0] / "rates.svg").read_text()
    assert all(text in drawn for text in ("expert_choice", "expert_threshold", "routed experts per token"))
    again = json.loads(said("evaluate", *both, "--rates", "1,1", "--json"))
    assert [found["run"] for found in again] == ["expert_choice", "expert_threshold"]
    assert [point["rate"] for point in again[0]["points"]] == [None, 1]
    assert again == [read(run / "rates.json") for run in both]


def test_without_matplotlib_nothing_is_measured(runs: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("expert_threshold.cli.evaluate.measure_rates", None)
    refused(["evaluate", runs / "expert_choice", "--rates", "1"], "pip install")


def test_losses_that_are_no_numbers_are_shown_and_drawn(runs: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra viz")
    folder = RunFolder.open(runs / "expert_choice")
    point = Point(None, 1.0, (1.0,), math.nan, math.nan, 8, 100, 1000)
    found = rates.record(folder, 1, ExpertChoice(4), [point, point._replace(rate=0.5)])
    json.dumps(found, allow_nan=False)
    assert rates.rates_table({"run": found}).row_count == 2
    rates.draw_dial({"run": found})


def test_results_at_a_rate_are_kept_apart_from_those_as_trained(runs: Path) -> None:
    run = runs / "expert_threshold"
    assert et("evaluate", run, "--dtype", "float32") == 0
    trained = (run / "evaluation.json").read_text()
    printed = said("evaluate", run, "--rate", 4, "--dtype", "float32")
    assert (run / "evaluation.json").read_text() == trained
    dialled = read(run / "evaluation_rate_4.json")
    assert dialled["rate"] == 4
    assert dialled["validation"]["loss"] != json.loads(trained)["validation"]["loss"]
    assert f"{dialled['validation']['loss']:.4f}" in printed

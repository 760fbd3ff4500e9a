"""Metrics for other programs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from expert_threshold.install import install
from expert_threshold.runs import RunFolder
from expert_threshold.train.log import PACKAGES, flatten

from .conftest import Start
from .test_loop import forget_after


def test_flattening_keeps_every_number_and_its_path() -> None:
    record = {"step": 3, "loss": 1.5, "event": "text", "none": None, "layers": {"1": {"usage": [0.25, 0.75]}}}
    assert flatten(record, "train") == {
        "train/step": 3.0, "train/loss": 1.5, "train/layers/1/usage/0": 0.25, "train/layers/1/usage/1": 0.75,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_metrics_also_of_a_resumed_run(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra track")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start(track="tensorboard")
    forget_after(tmp_path / "run", 4)
    start(track="tensorboard", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    records = RunFolder.open(tmp_path / "run").metrics.read()
    for split in ("train", "validation"):
        lines = [record for record in records if record["split"] == split]
        values = events.Scalars(f"{split}/loss")
        assert [value.step for value in values] == [line["step"] for line in lines]
        assert [value.value for value in values] == pytest.approx([line["loss"] for line in lines])
    for name in ("cutoff", "batch_cutoff", "usage", "raw_usage", "saturation", "starvation", "score_std", "gate_std"):
        values = events.Scalars(f"train/layers/1/{name}/3")
        last = [record for record in records if record["split"] == "train"][-1]
        assert values[-1].value == pytest.approx(last["layers"]["1"][name][3])


@pytest.mark.parametrize("track", ["trackio", "wandb"])
def test_other_trackers_get_metrics(track: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package."""
    package = mock.Mock()
    run, lines = package.init.return_value, package.init.return_value.log.call_args_list
    monkeypatch.setitem(sys.modules, track, package)
    start(track=track)
    options = package.init.call_args.kwargs
    assert (options["project"], options["name"], options["resume"]) == ("expert-threshold", "run", "never")
    assert options["config"]["train"]["steps"] == 8
    assert [line.kwargs["step"] for line in lines] == [3, 4, 6, 8, 8]
    assert lines[0].args[0]["train/layers/1/cutoff/0"] != 0
    run.finish.assert_called_once_with()
    forget_after(tmp_path / "run", 4)
    start(track=track, resume=True)
    assert package.init.call_args.kwargs["resume"] == "allow"
    assert [line.kwargs["step"] for line in run.log.call_args_list[5:]] == [6, 8, 8]


@pytest.mark.parametrize(("track", "package"), list(PACKAGES.items()))
def test_a_tracker_that_is_not_installed_is_refused_before_the_text_is_read(
    track: str, package: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("expert_threshold.train.prepare.open_source", None)
    with pytest.raises(ValueError, match=f"track='{track}' needs .*{re.escape(install('track'))}") as error:
        start(track=track)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "run").iterdir()) == []

"""Properties of every figure: legible type, legends that name what is drawn, true colours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, fontManager
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.text import Text

from expert_threshold.analysis.figures import FIGURES, learning, training
from expert_threshold.analysis.figures.style import (
    INK,
    MUTED,
    NARROW,
    OTHER_SCRIPTS,
    SMALL,
    WIDE,
    expert_colours,
    monospaced,
    style,
)
from expert_threshold.analysis.page import CSS
from expert_threshold.analysis.records import read_run
from expert_threshold.runs import RunFolder

EXPERTS = 4  # of the tiny runs
TAG = {"method": "ET", "kind": "expert_threshold"}


@pytest.fixture(scope="module", autouse=True)
def styled() -> Iterator[None]:
    """Figures are drawn as pages draw them."""
    with style():
        yield


DRAW = {study.name: study.draw for study in FIGURES}
DRAWN = [name for name in DRAW if name != "fanout_norm"]  # drawn as shared_expert is


def of_one_layer(value: Any) -> Any:
    """Data with the first layer alone, where layers are keys."""
    if not isinstance(value, dict):
        return value
    few = dict([*value.items()][:1]) if value and all(key.isdigit() for key in value) else value
    return {key: of_one_layer(item) for key, item in few.items()}


@pytest.fixture(scope="module")
def data(out: Path) -> dict[str, Any]:
    """The data of every figure."""
    return {name: json.loads((out / f"{name}.json").read_text()) for name in DRAW}


def alone(data: dict[str, Any]) -> dict[str, Any]:
    """The data of the first method, with its first layer."""
    return data | {"methods": [of_one_layer(entry) for entry in data["methods"][:1]]} if "methods" in data else data


@pytest.fixture(scope="module")
def drawn(data: dict[str, Any], runs: Path) -> list[tuple[str, Figure]]:
    """Every figure of all methods, and of one method with one layer; and every figure of a run's report."""
    of_methods = [(name, DRAW[name](some)) for name in DRAWN for some in (data[name], alone(data[name]))]
    run = read_run(RunFolder.open(runs / "et"))
    return of_methods + [(chart.title, chart.draw(run)) for chart in (*training.LEARNING, *training.ROUTING)]


def test_no_type_is_smaller_than_can_be_read_on_a_phone(drawn: list[tuple[str, Figure]]) -> None:
    """Six pixels was the smallest: 5.5 and 6 points in a figure of 4.4 inches on a page of 390 pixels."""
    phone = 390 - 2 * 16  # pixels between the margins of a page
    assert SMALL / 72 / NARROW * phone >= 9
    least = float(re.search(r"\.wide svg { min-width: ([0-9.]+)rem", CSS)[1]) * 16  # type: ignore[index]
    assert SMALL / 72 / WIDE * least >= 9
    for name, figure in drawn:
        for text in figure.findobj(Text):
            assert not text.get_text().strip() or text.get_fontsize() >= SMALL, (name, text.get_text())


def test_a_key_names_nothing_that_is_not_drawn(drawn: list[tuple[str, Figure]]) -> None:
    """One layer alone had a key for "one layer" and "mean of layers", and methods that leak nothing had lines."""
    for name, figure in drawn:
        lines = [line for axes in figure.axes for line in axes.lines]
        seen = [line for line in lines if np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any()]
        patches = [patch for axes in figure.axes for patch in axes.patches]
        bars = [patch for patch in patches if isinstance(patch, Rectangle) and patch.get_height()]
        colours = {to_hex(line.get_color()) for line in seen} | {to_hex(bar.get_facecolor()) for bar in bars}
        filled = bars or any(isinstance(patch, StepPatch) for patch in patches)
        for sample in (line for legend in figure.legends for line in legend.get_lines()):
            colour = to_hex(sample.get_color())
            assert colour in {to_hex(INK), to_hex(MUTED)} | colours, (name, colour)
            assert filled or any(line.is_dashed() == sample.is_dashed() for line in seen), name


@pytest.mark.parametrize("name", ["fanout_by_position", "fanout_by_loss", "loss_by_fanout", "capacity"])
def test_a_single_layer_has_no_line_beside_the_mean(name: str, data: dict[str, Any]) -> None:
    one, two = (
        {text.get_text() for legend in DRAW[name](some).legends for text in legend.get_texts()}
        for some in (alone(data[name]), data[name])
    )
    assert not one & {"one layer", "mean of layers"}
    assert "one layer" in two


@pytest.mark.parametrize("name", ["routing_consistency", "routing_divergence"])
def test_a_checkpoint_and_itself_have_the_colour_of_their_value(name: str, data: dict[str, Any]) -> None:
    """The diagonal was clear, as if a checkpoint were least similar to itself."""
    measure = {"routing_consistency": "weighted_jaccard", "routing_divergence": "joint_jsd"}[name]
    panels = [axes for axes in DRAW[name](data[name]).axes if axes.images]
    for axes, entry in zip(panels, data[name]["methods"], strict=True):
        image = axes.images[0]
        opacity = image.to_rgba(image.get_array())[..., 3]
        order = np.argsort(np.ravel(entry[measure]), kind="stable")
        assert (np.diff(opacity.ravel()[order]) >= -1e-9).all()
        assert opacity.min() > 0
        if name == "routing_consistency":
            assert (opacity.diagonal() == opacity.max()).all()


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_layers_are_whole_numbers_along_an_axis(layers: int) -> None:
    entry = TAG | {"layers": list(range(1, layers + 1)), "spread": [1.5] * layers}
    axes = DRAW["load_balance"]({"methods": [entry]}).axes[0]
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert {1, layers} <= set(axes.get_xticks()) | {layers}


def test_each_row_of_a_heatmap_has_the_number_of_its_layer() -> None:
    """With more than six layers, every second row had the number of the one before."""
    layers = list(range(1, 13))
    data = {"domains": {"code": ""}, "methods": [TAG | {"layers": layers, "ratios": {"code": [[0.5, 0.1]] * 12}}]}
    axes = DRAW["specialisation"](data).axes[0]
    rows = [(int(text.get_position()[1]), int(text.get_text())) for text in axes.get_yticklabels()]
    assert len(rows) >= 4
    assert all(layers[row] == layer for row, layer in rows)


def test_losses_fill_the_width_of_their_figure() -> None:
    """The axis began at 0 tokens, though losses of the first third were cut off: three validations left two thirds."""
    for count in (2, 3, 10):
        points = [[100 * place, 2 + 4 / place**2] for place in range(1, count + 1)]
        axes = learning.draw_losses({"methods": [TAG | {"points": points}]}).axes[0]
        (low, high), (x, y) = axes.get_xlim(), axes.lines[0].get_data()
        seen = np.asarray(x)[np.asarray(y) <= axes.get_ylim()[1]]
        assert np.ptp(seen) >= 0.8 * (high - low)


def test_long_names_leave_the_width_to_the_lines(data: dict[str, Any]) -> None:
    for name in ("loss_by_method", "load_balance", "objective"):
        for some in (alone(data[name]), data[name]):
            first, *others = some["methods"]
            long = first | {"method": "ET " + "a very long name of a method " * 9}
            figure = DRAW[name]({"methods": [long, *others]})
            figure.draw_without_rendering()
            assert figure.axes[0].get_position().width >= 0.4


def test_fonts_of_other_scripts_are_used_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG showed a box for each character that DejaVu lacks."""
    monkeypatch.setattr(fontManager, "ttflist", [*fontManager.ttflist, FontEntry(name=OTHER_SCRIPTS[0])])
    with style():
        assert OTHER_SCRIPTS[0] in rcParams["font.family"]
        assert OTHER_SCRIPTS[0] in monospaced()


def test_experts_of_a_layer_have_colours_of_their_own(runs: Path) -> None:
    """Sixteen lines were of one colour, that of their layer."""
    assert len(set(expert_colours(16))) == 16
    assert len(expert_colours(300)) == 300
    for axes in training.draw_cutoffs(read_run(RunFolder.open(runs / "et"))).axes[:2]:
        lines = [line for line in axes.lines if str(line.get_label()).startswith("expert")]
        assert [line.get_color() for line in lines] == expert_colours(EXPERTS)


def test_warmup_shows_no_panel_twice(data: dict[str, Any]) -> None:
    found = data["warmup"]
    for some in (found, found | {"other_layer": found["layer"]}):
        titles = [axes.get_title(loc="left") for axes in DRAW["warmup"](some).axes]
        assert len({title.split(") ", 1)[1] for title in titles}) == len(titles)


def test_a_figure_shows_core_of_one_bundle_alone() -> None:
    """Runs evaluated on different bundles shared an axis."""
    first = {"bundle": "a", "max_per_task": None, "baselines": "nanochat", "metric": 0.1}
    others: list[dict[str, Any]] = [{"bundle": "b"}, {"metric": None}, {"max_per_task": 5}]
    sections = [{}, first, *(first | other for other in others), first | {"metric": 0.3}]
    assert learning.comparable_cores(sections) == [None, 0.1, None, None, None, 0.3]

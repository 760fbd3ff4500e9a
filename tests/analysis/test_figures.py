"""Properties of every figure: legible type, legends that name what is drawn, true colours."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
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
    style,
)
from expert_threshold.analysis.material import DOMAINS
from expert_threshold.analysis.page import CSS

METHODS = {
    "TC": "token_choice", "TC aux": "token_choice_aux", "TC loss-free": "token_choice_loss_free",
    "EC 2k": "expert_choice_sequence", "EC 512k": "expert_choice_batch",
    "ET": "expert_threshold", "ET no warmup": "expert_threshold_no_warmup", "ET capacity_slack 0.25 decay 0.9": "other",
}  # fmt: skip
TAGS = [{"method": name, "kind": kind} for name, kind in METHODS.items()]
EXPERTS, POINTS = 16, 5
CHANCE = np.random.Generator(np.random.PCG64(0))


def values(*shape: int) -> Any:
    return CHANCE.uniform(0.1, 1, shape).tolist()


def series() -> list[list[float]]:
    return [[100.0 * (place + 1), value] for place, value in enumerate(values(POINTS))]


def data_of(name: str, methods: int, layers: int) -> dict[str, Any]:
    """Numbers of the shape that the study of this name finds."""
    every, steps = list(range(1, layers + 1)), [10.0 * place for place in range(1, POINTS + 1)]
    rule = {"cutoff": values(3, 6), "taken": [[True, False] * 3] * 3}
    whole: dict[str, Any] = {
        "layer": 1, "experts": EXPERTS, "at": 1024, "experts_share": 0.2, "reference": "d20", "domains": DOMAINS,
        "warmup": 250, "other_layer": layers, "target": 0.2, "tokens_per_expert": [64, 1024], "devices": [8, 64, 4096],
        "expert": 0, "scores": values(3, 6), "rules": [tag | rule for tag in TAGS[2:6]], "layers": every,
    }  # fmt: skip
    shape = {"passage_intensity": (40,), "passage_fanout": (layers, 40), "passage_routing": (layers, 40, EXPERTS)}
    if name in shape:
        counts = CHANCE.integers(0, 2 if name == "passage_routing" else 12, shape[name]).tolist()
        words = ["Every ", "token", " of", " a text"] * 10
        return TAGS[0] | whole | {"passages": [{"name": "GSM8K", "tokens": words, "values": counts}]}
    if name == "rules_overview":
        return TAGS[0] | whole
    # What several studies call by the same name has the same shape, with the exceptions below.
    common: dict[str, Any] = {
        "points": series(), "std": [None, *values(POINTS - 1)], "seeds": 2, "gap": 0.1, "pools_gap": 0.1,
        "layer": 1, "warmup": 15, "target": 0.2, "steps": steps, "values": values(EXPERTS, POINTS), "of": "cutoff",
        "deviation": values(EXPERTS, POINTS), "load": values(EXPERTS, POINTS), "bound": [None, *values(POINTS - 1)],
        "share": 0.1, "by_token": values(3), "by_text": values(3), "law": values(3), "spread": values(layers),
        "x": steps, "mean": values(POINTS), "layers": {str(layer): values(POINTS) for layer in every},
        "ratios": {domain: values(layers, EXPERTS) for domain in DOMAINS},
        "shares": np.full((layers, 2, EXPERTS), 0.5).tolist(),
        **{key: series() for key in ("train", "validation", "cutoff", "batch_cutoff", "other_cutoff", "raw_usage",
                                     "starvation", "score_std", "gate_std")},
        "by_tokens": {"resampled": [3, 2], "closed_form": [3, 2]},
        "by_devices": {"resampled": [1, 2, 3], "closed_form": [1, 2, 3]},
        "weighted_jaccard": np.where(np.eye(POINTS) > 0, 1, 0.9 * np.array(values(POINTS, POINTS))).tolist(),
        "joint_jsd": np.where(np.eye(POINTS) > 0, 0, values(POINTS, POINTS)).tolist(),
        "rule": 1.0, "choice": 0.9, "population": 1.1, "balanced": 0.8, "tokens": [64, 256, 1024],
    }  # fmt: skip
    bars = {"edges": list(range(6)), "all": [9, 90, 500, 90, 9], "assigned": [0, 0, 0, 9, 9], "cutoff": 2.5}
    by_layer = {str(layer): series() for layer in every}
    own: dict[str, dict[str, Any]] = {
        "batch_size_scaling": {"pool": None, "train": 3.0, "validation": 3.1, "core": 0.1},
        "capacity": dict.fromkeys(("raw_usage", "saturation", "starvation"), by_layer),
        "score_histograms": {"tokens": 1000, "experts": [bars | {"layer": 1, "expert": e} for e in (0, 15)]},
        "objective": {"load": 0.71},
        **{key: {"layers": every} for key in ("specialisation", "domain_shares", "load_balance")},
    }
    found = [tag | common | own.get(name, {}) for tag in TAGS[-methods:]]
    if name == "batch_size_scaling":
        found = [TAGS[0] | found[0] | {"pool": pool, "method": f"EC {pool}"} for pool in (64, 512)] + found
    return whole | {"methods": found}


@pytest.fixture(scope="module", autouse=True)
def styled() -> Iterator[None]:
    """Figures are drawn as pages draw them."""
    with style():
        yield


DRAW = {study.name: study.draw for study in FIGURES}
DRAWN = [name for name in DRAW if name != "fanout_norm"]  # drawn as shared_expert is


def run_of(layers: int) -> Any:
    """A run with the lines of metrics.jsonl."""
    per_expert = ("score_std", "gate_std", "usage", "cutoff", "batch_cutoff", "saturation", "starvation")
    every = range(1, layers + 1)
    line = {"steps": 1, "cross_entropy": 3.0, "loss": 3.0, "tokens_per_second": 100.0, "grad_norm": 1.0}
    train = []
    for step in range(1, POINTS + 1):
        layers_of = {str(layer): {"load_spread": 1.5} | {n: values(EXPERTS) for n in per_expert} for layer in every}
        train.append(line | {"step": step, "learning_rate": {"matrix": 0.1 / step, "head": 0.2}, "layers": layers_of})
    return SimpleNamespace(
        train=train, validation=train[-1:], target=0.5, warmup_steps=2, bits_per_byte=[(100, 1.0), (500, 1.0)],
        fanout_counts={layer: [50, 30, 20] for layer in every},
    )  # fmt: skip


def every_figure() -> Iterator[tuple[str, Figure]]:
    """Tried with one, two and twelve layers, one and eight methods."""
    for methods, layers in ((1, 1), (8, 2), (1, 12)):
        for name in DRAWN:
            yield name, DRAW[name](data_of(name, methods, layers))
    for layers in (1, 12):
        for chart in (*training.LEARNING, *training.ROUTING):
            yield chart.title, chart.draw(run_of(layers))


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str, Figure]]:
    return list(every_figure())


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
def test_a_single_layer_has_no_line_beside_the_mean(name: str) -> None:
    one, two = (
        {text.get_text() for legend in DRAW[name](data_of(name, 1, layers)).legends for text in legend.get_texts()}
        for layers in (1, 2)
    )
    assert not one & {"one layer", "mean of layers"}
    assert "one layer" in two


@pytest.mark.parametrize("name", ["routing_consistency", "routing_divergence"])
def test_a_checkpoint_and_itself_have_the_colour_of_their_value(name: str) -> None:
    """The diagonal was clear, as if a checkpoint were least similar to itself."""
    data = data_of(name, 8, 1)
    measure = {"routing_consistency": "weighted_jaccard", "routing_divergence": "joint_jsd"}[name]
    panels = [axes for axes in DRAW[name](data).axes if axes.images]
    for axes, entry in zip(panels, data["methods"], strict=True):
        image = axes.images[0]
        opacity = image.to_rgba(image.get_array())[..., 3]
        order = np.argsort(np.ravel(entry[measure]), kind="stable")
        assert (np.diff(opacity.ravel()[order]) >= -1e-9).all()
        assert opacity.min() > 0
        if name == "routing_consistency":
            assert (opacity.diagonal() == opacity.max()).all()


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_layers_are_whole_numbers_along_an_axis(layers: int) -> None:
    axes = DRAW["load_balance"](data_of("load_balance", 8, layers)).axes[0]
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert {1, layers} <= set(axes.get_xticks()) | {layers}


def test_losses_fill_the_width_of_their_figure() -> None:
    """The axis began at 0 tokens, though losses of the first third were cut off: three validations left two thirds."""
    for points in (2, 3, 10):
        data = {"methods": [{"method": "ET", "kind": "expert_threshold", "points": series()[:points], "std": []}]}
        if points == 3:
            data["methods"][0]["points"] = [[100, 6.0], [200, 4.0], [300, 3.0]]
        axes = learning.draw_losses(data).axes[0]
        (low, high), (x, y) = axes.get_xlim(), axes.lines[0].get_data()
        seen = np.asarray(x)[np.asarray(y) <= axes.get_ylim()[1]]
        assert np.ptp(seen) >= 0.8 * (high - low)


def test_long_names_leave_the_width_to_the_lines() -> None:
    for name in ("loss_by_method", "load_balance", "objective"):
        for methods in (1, 8):
            data = data_of(name, methods, 3)
            data["methods"][0]["method"] = "ET " + "a very long name of a method " * 9
            figure = DRAW[name](data)
            figure.draw_without_rendering()
            assert figure.axes[0].get_position().width >= 0.4


def test_characters_that_dejavu_lacks_are_drawn_in_another_font_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PNG showed a box for each."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0)), pen.lineTo((500, 0)), pen.lineTo((500, 500)), pen.closePath()
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", "sun"])
    font.setupCharacterMap({ord("日"): "sun"})
    font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "sun": pen.glyph()})
    font.setupHorizontalMetrics({".notdef": (1000, 0), "sun": (1000, 0)})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": OTHER_SCRIPTS[0], "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(tmp_path / "other.ttf")
    monkeypatch.setattr(fontManager, "ttflist", list(fontManager.ttflist))
    fontManager.addfont(tmp_path / "other.ttf")
    passage = {"name": "text", "tokens": ["日", "a"], "values": [[1, 2]]}
    data = {"method": "ET", "kind": "expert_threshold", "layers": [1], "passages": [passage]}
    with style(), warnings.catch_warnings():
        warnings.simplefilter("error")
        DRAW["passage_fanout"](data).savefig(tmp_path / "passage.png")


def test_experts_of_a_layer_have_colours_of_their_own() -> None:
    """Sixteen lines were of one colour, that of their layer."""
    assert len(set(expert_colours(EXPERTS))) == EXPERTS
    assert len(expert_colours(300)) == 300
    for axes in training.draw_cutoffs(run_of(2)).axes[:2]:
        lines = [line for line in axes.lines if str(line.get_label()).startswith("expert")]
        assert [line.get_color() for line in lines] == expert_colours(EXPERTS)


def test_warmup_shows_no_panel_twice() -> None:
    for layers in (1, 2, 12):
        data = data_of("warmup", 2, layers)
        titles = [axes.get_title(loc="left") for axes in DRAW["warmup"](data).axes]
        assert len({title.split(") ", 1)[1] for title in titles}) == len(titles)


def test_a_figure_shows_core_of_one_bundle_alone() -> None:
    """Runs evaluated on different bundles shared an axis."""
    first = {"bundle": "a", "max_per_task": None, "baselines": "nanochat", "metric": 0.1}
    others: list[dict[str, Any]] = [{"bundle": "b"}, {"metric": None}, {"max_per_task": 5}]
    sections = [{}, first, *(first | other for other in others), first | {"metric": 0.3}]
    assert learning.comparable_cores(sections) == [None, 0.1, None, None, None, 0.3]

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

KINDS = [
    "token_choice",
    "token_choice_aux",
    "token_choice_loss_free",
    "expert_choice_sequence",
    "expert_choice_batch",
    "expert_threshold",
    "expert_threshold_no_warmup",
    "other",
]
NAMES = ["TC", "TC aux", "TC loss-free", "EC 2k", "EC 512k", "ET", "ET no warmup", "ET capacity_slack 0.25 decay 0.9"]
EXPERTS, POINTS = 16, 5
CHANCE = np.random.Generator(np.random.PCG64(0))


def values(*shape: int) -> Any:
    return CHANCE.uniform(0.1, 1, shape).tolist()


def series() -> list[list[float]]:
    return [[100.0 * (place + 1), value] for place, value in enumerate(values(POINTS))]


def per_layer(layers: int) -> dict[str, Any]:
    return {str(layer): values(POINTS) for layer in range(1, layers + 1)}


def data_of(name: str, methods: int, layers: int) -> dict[str, Any]:
    """Numbers of the shape that the study of this name finds."""
    tags = [{"method": name, "kind": kind} for name, kind in zip(NAMES[-methods:], KINDS[-methods:], strict=True)]
    every = list(range(1, layers + 1))
    steps = [10.0 * place for place in range(1, POINTS + 1)]
    matrix = np.array(values(4, 4))
    entries: dict[str, dict[str, Any]] = {
        "loss_by_method": {"points": series(), "std": values(POINTS), "seeds": 2},
        "token_multiple": {"points": series()},
        "shared_expert": {"points": series(), "std": [None] * POINTS},
        "train_against_validation": {"train": series(), "validation": series(), "gap": 0.1, "pools_gap": 0.1},
        "batch_size_scaling": {"pool": None, "train": 3.0, "validation": 3.1, "core": 0.1},
        "cutoff_stability": {
            "layer": 1, "warmup": 15, "steps": steps, "deviation": values(EXPERTS, POINTS),
            "load": values(EXPERTS, POINTS), "bound": [None, *values(POINTS - 1)],
        },
        "cutoff_law": {"share": 0.1, "tokens": [64, 256, 1024], "by_token": values(3), "by_text": values(3),
                       "law": values(3)},
        "warmup": {name: series() for name in (
            "cutoff", "batch_cutoff", "other_cutoff", "raw_usage", "starvation", "score_std", "gate_std")},
        "capacity": {"target": 0.2} | {
            name: {str(layer): series() for layer in every} for name in ("raw_usage", "saturation", "starvation")},
        "cutoffs_and_biases": {"of": "cutoff", "steps": steps, "values": values(EXPERTS, POINTS)},
        "score_histograms": {"tokens": 1000, "experts": [
            {"layer": 1, "expert": e, "edges": list(range(6)), "all": [9, 90, 500, 90, 9], "assigned": [0, 0, 0, 9, 9],
             "cutoff": 2.5} for e in (0, 15)]},
        "fanout_by_position": {"x": list(range(POINTS)), "layers": per_layer(layers), "mean": values(POINTS)},
        "fanout_by_loss": {"x": steps, "layers": per_layer(layers), "mean": values(POINTS)},
        "loss_by_fanout": {"x": list(range(POINTS)), "layers": per_layer(layers), "mean": values(POINTS)},
        "specialisation": {"layers": every, "ratios": {d: values(layers, EXPERTS) for d in ("code", "math")}},
        "domain_shares": {"layers": every, "shares": np.full((layers, 2, EXPERTS), 0.5).tolist()},
        "routing_consistency": {"steps": [4000, 8000, 12000, 16000],
                                "weighted_jaccard": np.where(np.eye(4) > 0, 1, 0.9 * matrix).tolist()},
        "routing_divergence": {"steps": [4, 8, 12, 16], "joint_jsd": np.where(np.eye(4) > 0, 0, matrix).tolist()},
        "load_balance": {"layers": every, "spread": [1 + value for value in values(layers)]},
        "objective": {"rule": 1.0, "choice": 0.9, "population": 1.1, "balanced": 0.8, "load": 0.71,
                      "shares": {"free": 0.91, "fixed": 1.25}},
        "load_at_scale": {
            "by_tokens": {"resampled": [3, 2], "closed_form": [3, 2]},
            "by_devices": {"resampled": [1, 2, 3], "closed_form": [1, 2, 3]},
        },
        "passage_intensity": {}, "passage_fanout": {}, "passage_routing": {}, "rules_overview": {},
    }  # fmt: skip
    found = {"methods": [tag | entries[name] for tag in tags]}
    words = ["Every ", "token", " of", " a text"] * 10
    shapes = {"passage_intensity": (40,), "passage_fanout": (layers, 40), "passage_routing": (layers, 40, EXPERTS)}
    rules = [{"method": name, "kind": kind, "cutoff": values(3, 6), "taken": [[True, False] * 3] * 3}
             for name, kind in zip(["TC", "EC", "EC", "ET"], KINDS[:3] + KINDS[5:6], strict=True)]  # fmt: skip
    extra: dict[str, dict[str, Any]] = {
        "token_multiple": {"reference": "TC"},
        "batch_size_scaling": {"methods": [
            {**tags[0], "pool": pool, "train": 3.0, "validation": 3.1, "core": 0.1} for pool in (64, 512)]
            + found["methods"]},
        "warmup": {"warmup": 250, "layer": layers, "other_layer": 1, "target": 0.2},
        "cutoffs_and_biases": {"layer": 1},
        "specialisation": {"domains": DOMAINS}, "domain_shares": {"domains": DOMAINS},
        "load_at_scale": {"tokens_per_expert": [64, 1024], "experts": 4096, "devices": [8, 64, 4096], "at": 1024,
                          "experts_share": 0.2, "reference": "d20"},
        "rules_overview": {**tags[0], "layer": 1, "expert": 0, "scores": values(3, 6), "rules": rules},
    }  # fmt: skip
    if name in shapes:
        whole = CHANCE.integers(0, 2 if name == "passage_routing" else 12, shapes[name]).tolist()
        passages = [{"name": "GSM8K", "tokens": words, "values": whole}]
        return {**tags[0], "layers": every, "experts": EXPERTS, "passages": passages}
    return found | extra.get(name, {})


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
    train = [
        {
            "step": step,
            "steps": 1,
            "cross_entropy": 3.0,
            "loss": 3.0,
            "tokens_per_second": 100.0,
            "grad_norm": 1.0,
            "learning_rate": {"matrix": 0.1 / step, "head": 0.2 / step},
            "layers": {str(layer): {"load_spread": 1.5} | {n: values(EXPERTS) for n in per_expert} for layer in every},
        }
        for step in range(1, POINTS + 1)
    ]
    counts = {layer: [50, 30, 20] for layer in every}
    bits = [(100 * line["step"], 1.0) for line in train]
    return SimpleNamespace(
        train=train, validation=train[-1:], target=0.5, warmup_steps=2, fanout_counts=counts, bits_per_byte=bits
    )


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


@pytest.mark.parametrize(
    ("name", "measure"), [("routing_consistency", "weighted_jaccard"), ("routing_divergence", "joint_jsd")]
)
def test_a_checkpoint_and_itself_have_the_colour_of_their_value(name: str, measure: str) -> None:
    """The diagonal was clear, as if a checkpoint were least similar to itself."""
    data = data_of(name, 8, 1)
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
